"""The tiers as the daemon uses them: the last observation of each, and the operations on it.

Invariant: a place that did not answer is unknown, not empty, and of two observations the one that began later counts.
Tiers share the encoding of chunks, and nothing else that one tier could block. So a slow tier delays only itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from tierd.core.config import Config
from tierd.core.errors import (
    FormatTooNew,
    ManifestError,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TierdError,
    WrongKey,
)
from tierd.core.ids import CheckpointId, PartId, pruning_prefix
from tierd.core.manifest import Manifest
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.planning.sharing import lender, worn
from tierd.core.retention.policies import policy_for
from tierd.core.timeline.head import Head
from tierd.core.timeline.launches import disowning
from tierd.daemon.pause import TierPause
from tierd.daemon.rank_notes import sweep_meetings
from tierd.daemon.tiers.doomed import Confirm
from tierd.daemon.tiers.heads import rolled_back, unwritten, write
from tierd.daemon.tiers.holders import lacking
from tierd.daemon.tiers.intents import announced, announcing, node, sweep
from tierd.daemon.tiers.observe import TierObserver
from tierd.daemon.tiers.prune import prune
from tierd.daemon.tiers.run_policies import record, unrecorded
from tierd.daemon.transfer.chunk_source import Twin
from tierd.daemon.transfer.flush import Flushed, Route, flush
from tierd.daemon.transfer.flush_pacing import Spread
from tierd.daemon.transfer.memory_budget import FLUSHES, Budget
from tierd.daemon.transfer.relay import relay
from tierd.daemon.transfer.replicas import read_manifest
from tierd.daemon.transfer.shared_encoding import Encoding
from tierd.daemon.transfer.throughput import Throughput
from tierd.spool.spool import Spool
from tierd.stores.base import Store, asked_s, clear
from tierd.stores.deletions import DeletionGuard
from tierd.stores.request_counts import CountedStore

log = logging.getLogger("tierd.daemon")

Change: TypeAlias = Callable[[Place], Place]

_ANSWER = 5.0  # seconds that a flush waits for another tier's manifest, which only saves work
_ANSWERS = 120.0  # seconds that an observation waits for the next answer, all retries included
_TOGETHER = 5.0  # seconds at most that an observation waits for callers to share it
# An observation that took longer than `_QUICK` seconds is valid for `_PATIENT` times its duration.
_QUICK, _PATIENT = 1.0, 10.0


class Tiers:
    """Every tier of a configuration, by name.

    Attributes:
        places: tier -> its inventory as last observed; None if the tier did not answer.
        throughput: how fast each tier accepts objects.
        mute: tiers that do not answer -> monotonic seconds of the first failure since the last answer. Time in which
            nothing was asked, because the daemon was at rest or the machine slept, does not count.
        who: the identity of this node among the nodes that share a tier, 8 hex digits.
    """

    def __init__(self, config: Config, spool: Spool, stores: Mapping[str, Store], pause: TierPause) -> None:
        self._guards = {name: DeletionGuard(store) for name, store in stores.items()}
        self._spool, self._stores = spool, {name: CountedStore(guard) for name, guard in self._guards.items()}
        self.places: dict[str, Place | None] = dict.fromkeys(stores)
        self.throughput = Throughput()
        encoding = Encoding(self.throughput)
        self.mute: dict[str, float] = {}
        self.who = node(spool.root)
        self._observers = {name: TierObserver(store, prunes=True) for name, store in self._stores.items()}
        self._ways = {
            name: Route(store, name, self.who, config.named(name).verify == "read", self._share(), encoding, pause.wait)
            for name, store in self._stores.items()
        }
        self._config = config
        self._untidy = set(stores)  # tiers where an operation of this node or of its earlier daemon may be cut off
        self._clock = itertools.count()
        self._seen = dict.fromkeys(stores, -1)  # tier -> start of the observation that `places` shows
        # Changes since then, each with its time.
        self._done: dict[str, list[tuple[int, Change]]] = {name: [] for name in stores}
        # The observation that has not begun yet; `_asked` has its runs and ranks.
        self._next: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, tuple[set[str], dict[str, frozenset[int]]]] = {}
        self._looking: Counter[str] = Counter()
        # Runs that the last observation covered.
        self._shown: dict[str, frozenset[str]] = dict.fromkeys(stores, frozenset())
        self._took = dict.fromkeys(stores, 0.0)  # seconds that the last observation took
        self._since = dict.fromkeys(stores, -math.inf)  # when it began, monotonic seconds

    def _share(self) -> Budget:
        # One budget for each tier, because chunks that wait for a slow tier must not take the memory of another's.
        return Budget(FLUSHES // len(self._stores))

    def requests(self, tier: str) -> int:
        """How many requests observations, flushes and prunes have made to a tier; scrubs and restores do not count."""
        return self._stores[tier].requests if tier in self._stores else 0

    def requests_by_kind(self, tier: str) -> dict[str, int]:
        """As `requests`, by kind: `put`, `get`, `list`, `delete`."""
        return dict(self._stores[tier].kinds) if tier in self._stores else {}

    def refusal(self, tier: str) -> str:
        """The reason that a tier gave last for refusing deletions; empty if it is not known to refuse them."""
        return self._guards[tier].refused if tier in self._guards else ""

    def asked_s(self, tier: str) -> float:
        """For how many seconds more a tier gets no requests, because the tier asked for a pause."""
        return asked_s(self._stores[tier]) if tier in self._stores else 0.0

    @property
    def append_only(self) -> frozenset[str]:
        """The tiers that get no deletions for now, because they refuse them."""
        return frozenset(name for name, guard in self._guards.items() if guard.rests)

    def has(self, part: PartId, tier: str) -> bool:
        """Whether the latest observation found a usable manifest of `part` on `tier`, which means a verified copy."""
        place = self.places[tier]
        return bool(place and place.has(part))

    async def look(self, tier: str, runs: set[str], mine: Mapping[str, Collection[int]]) -> None:
        """Observe a tier afresh.

        Callers that ask during an observation wait a little and share the next one. That one begins after each of them
        asked, so it shows all that was there when they asked.

        Args:
            tier: the tier's name.
            runs: the runs to observe.
            mine: run -> the ranks of which the spool has parts.

        Raises:
            StoreUnavailable, StoreRefused: the tier did not answer; it is unknown now.
        """
        waiting = self._next.get(tier)
        if waiting is None:
            waiting = self._next[tier] = asyncio.ensure_future(self._look(tier))
            waiting.add_done_callback(_seen_to)
            self._asked[tier] = set(), {}
        asked, ranks = self._asked[tier]
        asked |= runs
        for run, own in mine.items():
            ranks[run] = frozenset(own) | ranks.get(run, frozenset())
        await asyncio.shield(waiting)

    async def _look(self, tier: str) -> None:
        if self._looking[tier]:
            await asyncio.sleep(min(self._took[tier] / 10, _TOGETHER))
        del self._next[tier]
        runs, mine = self._asked.pop(tier)
        begun, at = next(self._clock), time.monotonic()
        self._looking[tier] += 1
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_ANSWERS) as limit:
                place = await self._observers[tier].look(
                    runs, mine, told=lambda: limit.reschedule(loop.time() + _ANSWERS)
                )
            if self._saw(tier, begun, place):
                self._shown[tier] = frozenset(runs)
                self._took[tier], self._since[tier] = time.monotonic() - at, at
        except TimeoutError as error:
            self._saw(tier, begun, None)
            raise StoreUnavailable(f"{tier}: did not answer within {_ANSWERS:.0f} s") from error
        except TierdError:
            self._saw(tier, begun, None)
            raise
        finally:
            self._looking[tier] -= 1

    def good_for(self, tier: str) -> float:
        """For how many seconds more the last observation suffices to send parts, and for nothing else.

        Zero unless an observation of that tier takes long.
        """
        took = self._took[tier]
        if self.places[tier] is None or took < _QUICK:
            return 0.0
        return max(0.0, self._since[tier] + _PATIENT * took - time.monotonic())

    def age_s(self, tier: str) -> float:
        """How long ago the last observation of a tier began, in seconds; infinite if the tier is unknown."""
        return math.inf if self.places[tier] is None else time.monotonic() - self._since[tier]

    def knows(self, tier: str, run: str) -> bool:
        """Whether the last observation of a tier covered a run."""
        return run in self._shown[tier]

    def put(self, tier: str, part: PartId, facts: ManifestFacts) -> None:
        """Record that a part was just flushed, which observations that began earlier do not show.

        This does not count as an observation, because one under way is newer for everything else.
        """
        self._did(tier, lambda place: place.adding(part, facts))

    def _did(self, tier: str, change: Change) -> None:
        self._done[tier].append((next(self._clock), change))
        if place := self.places[tier]:
            self.places[tier] = change(place)

    def _saw(self, tier: str, begun: int, place: Place | None) -> bool:
        # A worker and a request may observe at once: the observation that began later is newer, whichever ends first.
        if begun < self._seen[tier]:
            return False
        self._done[tier] = [one for one in self._done[tier] if one[0] > begun]
        for _, change in self._done[tier]:
            place = place and change(place)
        self._seen[tier], self.places[tier] = begun, place
        if place is None:
            self.mute.setdefault(tier, time.monotonic())
        else:
            self.mute.pop(tier, None)
        return True

    async def record(self, tier: str, inventory: Inventory, config: Config, runs: Iterable[str]) -> None:
        """Write this node's records of the policies of `runs` to a tier."""
        place = self.places[tier]
        fresh = [one for run in runs if place for one in unrecorded(inventory, config, tier, place, run)]
        try:
            for one in fresh:
                await record(self._stores[tier], tier, one)
        except StoreRefused:
            if not self.refusal(tier):
                raise
            return  # a policy is useless there, because the tier deletes and replaces nothing
        if fresh:
            self._did(tier, lambda place: place.with_policies(fresh))

    async def write_heads(self, tier: str, inventory: Inventory, runs: Iterable[str]) -> None:
        """Write this node's heads of `runs` to a tier."""
        for run in runs:
            place = self.places[tier]
            if place and (head := unwritten(inventory, place, run)):
                said = [one.launches for one in place.heads.get(run, ()) if one.by == head.by]
                if self.refusal(tier) and said == [head.launches]:
                    continue  # already said; `unwritten` repeats it because merged heads of others cannot be deleted
                await write(self._stores[tier], head, place.heads.get(run, ()))
                self._did(tier, partial(_with_head, head))

    async def rolled_back(self, tier: str, run: str, spool: Place) -> str | None:
        """Why the history of `run` on a tier is older than the spool remembers; None if it is not."""
        place, url = self.places[tier], self._config.named(tier).url
        if place is None:
            return None
        seen = next((head.tiers.get(url) for head in spool.heads.get(run, ())), None)
        return await rolled_back(self._stores[tier], run, seen, place.heads.get(run, ()))

    async def tidy(self, tier: str, runs: Iterable[str]) -> None:
        """Remove intents and marks that interrupted operations of this node have left, after a start or a failure.

        Checkpoints whose deletion was cut off are added to the inventory of the tier.
        """
        place, guard = self.places[tier], self._guards[tier]
        if guard.has_left:  # intents of finished flushes, for example
            self._untidy.add(tier)
        if tier not in self._untidy or place is None or guard.rests:
            return
        store, tidy, found = self._stores[tier], True, frozenset[CheckpointId]()
        guard.has_left = False
        for run in runs:
            done, _, cut = await sweep(store, run, self.who)
            await sweep_meetings(store, run)
            # A checkpoint whose manifest is still there is left to the plan, so its mark is removed.
            await clear(store, [mark for one, marks in cut.items() if one in place.checkpoints for mark in marks])
            self._observers[tier].manifests.cut[run] = gone = cut.keys() - place.checkpoints.keys()
            tidy, found = tidy and done, found | gone
        self._did(tier, lambda place: replace(place, cut=place.cut | found))
        if tidy and not guard.has_left:
            self._untidy.discard(tier)

    def has_leftovers(self, tier: str) -> bool:
        """Whether this node has objects to remove from a tier that are too young to be removed yet."""
        guard = self._guards[tier]
        return (tier in self._untidy or guard.has_left) and not guard.refused

    def failed(self, tier: str) -> None:
        """Note that an operation on a tier may have been cut off, so that `tidy` sweeps it."""
        self._untidy.add(tier)

    async def flush(self, part: PartId, tier: str, spread: Spread | None = None) -> Flushed:
        """Flush a part to a tier as `flush.flush` does, using the copies on other tiers and the chunks already there.

        Raises:
            StoreRefused: the part does not fit to the objects on the tier: this node cannot read those, or their
                readers could not read the part.
        """
        self._check_readable(part, tier)
        twin, (whose, worn_out) = await self._twin(part, tier), await self._lender(part, tier)
        return await flush(
            self._spool, part, self._ways[tier], twin=twin, lender=whose, worn_out=worn_out, spread=spread
        )

    async def hear(self, tier: str, run: str) -> None:
        """Ask a tier which checkpoints of a run other nodes announce that they send."""
        found = await announced(self._stores[tier], run, self.who)
        if place := self.places[tier]:
            self.places[tier] = replace(place, announced=found)

    async def flush_aloud(self, part: PartId, tier: str, spread: Spread | None = None) -> Flushed:
        """Flush a part, and announce its checkpoint to other nodes meanwhile."""
        async with announcing(self._stores[tier], part.checkpoint, self.who):
            return await self.flush(part, tier, spread)

    async def relay(self, part: PartId, tier: str, _: Spread | None = None) -> Flushed:
        """Copy a part to a tier from the other tiers, as `relay.relay` does.

        Raises:
            StoreRefused: as for `flush`.
        """
        self._check_readable(part, tier)
        others = {name: store for name, store in self._stores.items() if name != tier and self.has(part, name)}
        whose, worn_out = await self._lender(part, tier)
        return await relay(others, part, self._ways[tier], lender=whose, worn_out=worn_out)

    def _check_readable(self, part: PartId, tier: str) -> None:
        place = self.places[tier]
        for other, why in place.defects() if place else ():
            alien = isinstance(why, WrongKey) and other.checkpoint.run == part.checkpoint.run
            if alien or (isinstance(why, FormatTooNew) and other == part):
                raise StoreRefused(
                    f"{tier}: {part} is not put beside what cannot be read here: {why}; "
                    f"{disowning(other.checkpoint.run, other.checkpoint.attempt)}"
                )

    async def _lender(self, part: PartId, tier: str) -> tuple[Manifest | None, frozenset[CheckpointId]]:
        """Find the base checkpoint of a flush on this tier.

        Returns:
            The manifest whose equal chunks need not be sent again, and the checkpoints whose chunks must be sent again
                because enough others depend on them.
        """
        place = self.places[tier]
        whose = lender(place, part) if place else None
        if place is None or whose is None:
            return None, frozenset()
        try:
            return await read_manifest(self._stores[tier], whose), worn(place, part)
        except (ObjectNotFound, ManifestError):
            return None, frozenset()  # pruned or damaged since the observation

    async def _twin(self, part: PartId, tier: str) -> Twin | None:
        """Find another tier that, as last observed, holds the part, because a chunk is the same on every tier."""
        for name, store in self._stores.items():
            if name != tier and self.has(part, name):
                try:
                    async with asyncio.timeout(_ANSWER):
                        return Twin(store, await read_manifest(store, part))
                except TimeoutError:
                    self.places[name] = None  # so that not every part waits for it; its own worker observes it again
                except TierdError:
                    continue
        return None

    async def prune(
        self, checkpoints: Collection[CheckpointId], tier: str, confirm: Confirm | None = None
    ) -> set[CheckpointId]:
        """Prune checkpoints of one run from a tier as `prune.prune` does.

        Invariant: nothing is deleted while it is unknown which chunks the surviving manifests name.

        Args:
            checkpoints: the checkpoints to delete.
            tier: the tier's name.
            confirm: as in `prune.prune`.

        Returns:
            The checkpoints of which anything was deleted.

        Raises:
            DeleteRefused: the tier refuses deletions; no mark is left there.
        """
        eye = self._observers[tier]
        # Before any mark is put, because a mark that cannot be deleted would block flushes.
        for run in {one.run for one in checkpoints}:
            await self._guards[tier].check(f"{pruning_prefix(run)}none")
        try:
            gone, bare, _ = await prune(
                self._stores[tier], checkpoints, self.who, eye.manifests, self.places[tier], confirm
            )
        except (ManifestError, FormatTooNew) as error:  # of a surviving manifest: flushes need not wait for it
            names = ", ".join(str(one) for one in sorted(checkpoints)[:3]) + (", …" if len(checkpoints) > 3 else "")
            log.warning("%s: not pruned yet: %s: %s", tier, names, error)
            return set()
        for one in {*checkpoints, *bare}:
            eye.forget(one)  # also where only shared chunks are left, which is known now
        for one in {*gone, *bare}:
            self._did(tier, partial(_without, one))
        return gone

    async def are_past(self, checkpoint: CheckpointId, inventory: Inventory) -> bool:
        """Whether each tier that is not silent has as many usable newer checkpoints as its retention counts on.

        To be asked before a copy is deleted that no tier has. Manifests that were not read yet are read now, because an
        unusable one does not count.
        """
        for name, place in self.places.items():
            if name in inventory.silent:
                continue
            keep = policy_for(inventory, self._config, checkpoint.run, name).keep_last
            copies = place.copies(checkpoint.run) if place else ()
            newer = sorted(seen.id for seen in copies if seen.usable and seen.id > checkpoint)
            if len(newer) < keep:
                return False
            # Check the newest, and those next to `checkpoint`, because the newest may be on another branch.
            for one in sorted({*newer[:keep], *newer[-keep:]}):
                if not await self._observers[name].manifests.are_usable(one):
                    self.doubt(name)
                    return False
        return True

    async def lacking(self, local: Mapping[PartId, Manifest | None]) -> list[tuple[str, PartId]] | None:
        """Check the tiers once more before the spool's copies are deleted.

        Args:
            local: each part's manifest in the spool, None where it cannot be read.

        Returns:
            None if a tier holds all of these parts, or if no tier was seen to have them. Otherwise the tiers and parts
                that lack a chunk that their manifest names.

        Raises:
            TierdError, OSError: a tier failed, and no other holds them.
        """
        seen = [name for name in self.places if all(self.has(part, name) for part in local)]
        return await lacking({name: self._stores[name] for name in seen}, local)

    def doubt(self, tier: str) -> None:
        """Discard the last observation of a tier, because it proved wrong."""
        self.places[tier] = None


def _with_head(head: Head, place: Place) -> Place:
    return place.with_heads(head.run, (head,))


def _without(checkpoint: CheckpointId, place: Place) -> Place:
    return place.without(checkpoint)


def _seen_to(look: asyncio.Task[None]) -> None:
    """Retrieve the exception of an observation, because its callers may be gone before it fails."""
    if not look.cancelled():
        look.exception()
