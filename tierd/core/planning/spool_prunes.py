"""Which local copies the spool deletes: those that retention gives up, those of finished runs, old quarantined parts,
and more of each while its disk is nearly full."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from tierd.core.config import Config
from tierd.core.planning.actions import Discard, Prune
from tierd.core.planning.demand import Demand
from tierd.core.planning.eviction import retired
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL
from tierd.core.planning.verdicts import judge_spool


def spool_prunes(demand: Demand, config: Config) -> Iterator[Prune]:
    """The copies of a run that retention gives up in the spool, and on a nearly full disk more that a tier has."""
    inventory = demand.inventory
    busy = {part.checkpoint for part in inventory.busy} | inventory.held
    low = is_low(inventory, config)
    verdicts = judge_spool(demand, drops=not low)
    retired_ids = retired(demand) if low else frozenset()
    counted = {
        v.id
        for v in verdicts
        if low and (v.id in retired_ids or inventory.on_a_tier(inventory.spool.checkpoints[v.id]))
    }
    trained = demand.run not in inventory.trainerless  # without a trainer no restore is imminent, and a tier has a copy
    spared = inventory.pins | {max(counted, default=None)} if trained else inventory.local_pins
    for verdict in reversed(verdicts):
        if verdict.id in busy:
            continue
        if not verdict.keep:
            yield Prune(verdict.id, SPOOL, verdict.reasons)
        elif verdict.id in counted and verdict.id not in spared:
            yield Prune(verdict.id, SPOOL, (f"under {config.min_free_percent:g} % of the spool's disk is free",))


def departure(inventory: Inventory, run: str) -> Iterator[Prune | Discard]:
    """The deletion of a finished run from the spool: its pins, which a tier has too, then its copies, the newest last,
    then the record that the run was saved here."""
    for pin in sorted(inventory.spool.pins):
        if pin.run == run:
            yield Discard(f"pins/{run}/{pin.name}")
    busy = {part.checkpoint for part in inventory.busy} | inventory.held
    for checkpoint in sorted(copy.id for copy in inventory.spool.copies(run)):
        if checkpoint not in busy:
            yield Prune(checkpoint, SPOOL, ("the run is finished, and tiers have what they want of it",))
    if run in inventory.spool.launches and not any(inventory.spool.copies(run)):
        yield Discard(f"saved/{run}/{inventory.spool.launches[run].attempt}")


def aged_quarantine(demand: Demand, config: Config) -> Iterator[Discard]:
    """The quarantined parts of a run that nobody needs any more."""
    inventory, run = demand.inventory, demand.run
    # Kept for a person to examine until `keep_last` newer verified checkpoints exist.
    quarantined = [part for part in inventory.spool.quarantined if part.checkpoint.run == run]
    if not quarantined:
        return
    verified = sorted(copy.id for copy in inventory.spool.copies(run) if inventory.on_a_tier(copy))
    low = is_low(inventory, config)
    for part in sorted(quarantined):
        newer = len(verified) - bisect_right(verified, part.checkpoint)
        if newer >= demand.policy(SPOOL).keep_last or low:
            yield Discard(f"quarantine/{part.path}")


def is_low(inventory: Inventory, config: Config) -> bool:
    """Whether less of the spool's disk is free than the configuration demands."""
    return inventory.free * 100 < config.min_free_percent
