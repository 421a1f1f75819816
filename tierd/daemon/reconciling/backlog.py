"""The backlog: the parts that tiers still lack, and the copies that they still have to delete."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tierd.core.errors import StoreRefused
from tierd.core.ids import PartId
from tierd.core.planning.flush_candidates import pending
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.planning.plan import flushes
from tierd.core.planning.unflushed import Remaining, TierTrouble, UnflushedParts, describe, remaining
from tierd.daemon.reconciling.setup import ReconcilerContext


class Backlog:
    """What is left to flush and to prune under one configuration, as last observed."""

    def __init__(self, setup: ReconcilerContext) -> None:
        self._setup = setup
        # Caches, each with its inventory.
        self._planned: tuple[Inventory | None, frozenset[tuple[PartId, str]]] = None, frozenset()
        self._given_up: tuple[Inventory | None, dict[str, Counter[str]]] = None, {}

    def parts(self) -> set[PartId]:
        """Return the parts that some tier lacks and wants and that this daemon sends to it.

        While a tier does not answer, these are all parts that this daemon would send to it if it were empty.
        """
        return {entry.part for entry in self.remaining()} | set(self._setup.live.busy)

    def remaining(self) -> tuple[Remaining, ...]:
        """Return the parts of `parts`, newest first, each with the tiers that have it and the tiers that lack it."""
        inventory = self._setup.live.inventory()
        unsent = set(self.flushes(inventory))
        if silent := {name for name, place in inventory.tiers.items() if place is None}:
            # Assume that a tier that does not answer is empty, because its contents are unknown.
            empty = replace(inventory, tiers={name: place or Place() for name, place in inventory.tiers.items()})
            sent = flushes(empty, self._setup.config, {}, 0.0)
            unsent |= {(flush.part, flush.tier) for flush in sent if flush.tier in silent}
        return remaining(inventory, unsent)

    def summary(self) -> UnflushedParts:
        """Return the parts that are left to flush, and for each tier whether it accepts them."""
        tiers = {}
        for name, place in self._setup.tiers.observed.places.items():
            error = self._setup.workers[name].trouble
            why, refused = (str(error), isinstance(error, StoreRefused)) if error else (None, False)
            tiers[name] = TierTrouble(reached=place is not None, error=why, refused=refused)
        moved = Counter[str]()
        for name, _, at in self._setup.tiers.flushes.moving():
            moved[name] += at.done
        until = self._setup.pause.until
        undone = tuple(f"{entry.tier}: {entry}" for entry in self._setup.backfill.undone())
        return UnflushedParts(
            left=self.remaining(), tiers=tiers, paused=until, moved_bytes=dict(moved), left_to_nodes=undone
        )

    def describe(self) -> str:
        """Describe `remaining` in one sentence."""
        silent = [name for name, place in self._setup.tiers.observed.places.items() if place is None]
        return describe(self.remaining(), silent)

    def flushes(self, inventory: Inventory) -> frozenset[tuple[PartId, str]]:
        """Return the parts that the plan would send, each with its tier; cached until the inventory changes."""
        if inventory != self._planned[0]:
            sent = self._setup.planner.flushes(inventory, self._setup.config)
            self._planned = inventory, frozenset((flush.part, flush.tier) for flush in sent)
        return self._planned[1]

    def is_retired(self, part: PartId, tier: str) -> bool:
        """Whether the tier, as last observed, lacks a part and will not get it because no place has or wants it."""
        live = self._setup.live
        if self._setup.tiers.observed.places[tier] is None or live.busy[part]:
            return False
        if live.place.lists(part) and not live.place.has(part):
            return False  # it is first repaired or quarantined
        return (part, tier) not in self.flushes(live.inventory())

    def prunes(self, tier: str) -> Counter[str]:
        """By run, how many copies retention has given up that are still on the tier."""
        inventory = self._setup.live.inventory()
        if inventory != self._given_up[0]:
            setup = self._setup
            retired = {name: setup.planner.retired(inventory, setup.config, name) for name in setup.stores}
            counts = {name: Counter(prune.checkpoint.run for prune in prunes) for name, prunes in retired.items()}
            self._given_up = inventory, counts
        return self._given_up[1].get(tier, Counter())

    def of(self, tier: str) -> dict[PartId, int]:
        """Return the parts that this daemon can send and that the tier lacks and wants, each with its size in bytes."""
        live, place = self._setup.live, self._setup.tiers.observed.places[tier]
        inventory = live.inventory()
        parts = {part for run in live.runs() for part in pending(live.place, place or Place(), run)}
        if place is not None:
            sent = {part for part, name in self.flushes(inventory) if name == tier}
            parts = (parts & live.busy.keys()) | sent
        return {part: inventory.size_bytes(part) for part in parts}
