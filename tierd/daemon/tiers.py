"""The tiers as the daemon deals with them: what was last seen on each, and what is done to one.

Law: what a look did not answer is unknown, not empty; whoever looked later saw the newer truth. Tiers share nothing
that takes time or memory, so that one that is slow delays only itself.
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
from tierd.core.head import Head
from tierd.core.ids import CheckpointId, PartId, pruning_prefix
from tierd.core.launches import disowning
from tierd.core.manifest import Manifest
from tierd.core.plan import lender
from tierd.core.policies import policy_for
from tierd.core.sharing import worn
from tierd.core.world import Facts, Place, World
from tierd.daemon.budget import FLUSHES, Budget
from tierd.daemon.copies import read_manifest
from tierd.daemon.flush import Flushed, Twin, Way, flush
from tierd.daemon.heads import rolled_back, unwritten, write
from tierd.daemon.observe import TierEye
from tierd.daemon.pace import Pace
from tierd.daemon.pause import Pause
from tierd.daemon.prune import holds, prune
from tierd.daemon.relay import relay
from tierd.daemon.run_policies import record, unrecorded
from tierd.daemon.turns import announced, announcing, node, sweep
from tierd.spool import Spool
from tierd.stores.base import Store, asked_s, clear
from tierd.stores.counted import CountedStore
from tierd.stores.deletions import DeletionGuard

log = logging.getLogger("tierd.daemon")

Change: TypeAlias = Callable[[Place], Place]

_ANSWER = 5.0  # seconds that one tier waits for another's manifest, which it could do without
_ANSWERS = 120.0  # seconds that a look waits for the next answer, above all retries of its calls
_TOGETHER = 5.0  # seconds at most that a look waits for others to share it
_QUICK, _PATIENT = 1.0, 10.0  # a look that took longer than the first, in seconds, is good for so many times as long


class Tiers:
    """Every tier of a configuration, by name.

    Attributes:
        places: what was last seen on each; None where it did not answer.
        pace: how fast each takes what is put there.
        mute: tiers that do not answer, each with when it first did not since it last did, monotonic seconds. Time in
            which nobody asked, because the daemon was at rest or its machine slept, does not count.
    """

    def __init__(self, config: Config, spool: Spool, stores: Mapping[str, Store], pause: Pause) -> None:
        self._guards = {name: DeletionGuard(store) for name, store in stores.items()}
        self._spool, self._stores = spool, {name: CountedStore(guard) for name, guard in self._guards.items()}
        self.places: dict[str, Place | None] = dict.fromkeys(stores)
        self.pace = Pace()
        self.mute: dict[str, float] = {}
        self.who = node(spool.root)  # this node among those that share a tier, 8 hex digits
        self._eyes = {name: TierEye(store, prunes=True) for name, store in self._stores.items()}
        self._ways = {
            name: Way(store, name, self.who, config.named(name).verify == "read", self._share(), self.pace, pause.wait)
            for name, store in self._stores.items()
        }
        self._config = config
        self._untidy = set(stores)  # where turns of this node, or of a daemon before, may have been cut off
        self._clock = itertools.count()
        self._seen = dict.fromkeys(stores, -1)  # tier -> the beginning of the look that `places` shows
        self._done: dict[str, list[tuple[int, Change]]] = {name: [] for name in stores}  # since that, and when
        self._next: dict[str, asyncio.Task[None]] = {}  # the look that has not begun yet, and what was asked of it
        self._asked: dict[str, tuple[set[str], dict[str, frozenset[int]]]] = {}
        self._looking: Counter[str] = Counter()
        self._took = dict.fromkeys(stores, 0.0)  # seconds that the last look took
        self._since = dict.fromkeys(stores, -math.inf)  # when it began, monotonic seconds

    def _share(self) -> Budget:
        # Each has its own: what waits for a slow tier must not keep another's chunks out of memory.
        return Budget(FLUSHES // len(self._stores))

    def requests(self, tier: str) -> int:
        """How many requests of a tier looks, flushes and prunes have made; not what scrub and restores have."""
        return self._stores[tier].requests if tier in self._stores else 0

    def refusal(self, tier: str) -> str:
        """Why a tier lets nothing be deleted, as it said last; empty where it is not known to."""
        return self._guards[tier].refused if tier in self._guards else ""

    def asked_s(self, tier: str) -> float:
        """For how many seconds more a tier is left alone, because it asked for that."""
        return asked_s(self._stores[tier]) if tier in self._stores else 0.0

    @property
    def append_only(self) -> frozenset[str]:
        """The tiers that are not asked to delete anything for now, because they refuse it."""
        return frozenset(name for name, guard in self._guards.items() if guard.rests)

    def has(self, part: PartId, tier: str) -> bool:
        """Whether the latest look saw a usable manifest of `part` on `tier`, that is, a verified copy."""
        place = self.places[tier]
        return bool(place and place.has(part))

    async def look(self, tier: str, runs: set[str], mine: Mapping[str, Collection[int]]) -> None:
        """Look at a tier afresh; one that does not answer becomes unknown, and the error is raised.

        While a look is under way, those that are asked for wait a little and share the next: it begins after each of
        them was asked, and so shows whatever was there then.

        Args:
            mine: by run, the ranks that the spool has parts of.
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
                place = await self._eyes[tier].look(runs, mine, told=lambda: limit.reschedule(loop.time() + _ANSWERS))
            if self._saw(tier, begun, place):
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
        """For how many seconds more the last look is good enough to send parts by, and nothing else: none, unless
        looking at that tier takes long."""
        took = self._took[tier]
        if self.places[tier] is None or took < _QUICK:
            return 0.0
        return max(0.0, self._since[tier] + _PATIENT * took - time.monotonic())

    def put(self, tier: str, part: PartId, facts: Facts) -> None:
        """A part was just flushed: it is there, whatever looks show that began before. It is no look: of all else, one
        that is under way tells more."""
        self._did(tier, lambda place: place.adding(part, facts))

    def _did(self, tier: str, change: Change) -> None:
        self._done[tier].append((next(self._clock), change))
        if place := self.places[tier]:
            self.places[tier] = change(place)

    def _saw(self, tier: str, begun: int, place: Place | None) -> bool:
        # A lane and an asker may look at once: what began later saw the newer truth, whichever ends first.
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

    async def record(self, tier: str, world: World, config: Config, runs: Iterable[str]) -> None:
        """Put on a tier what this node is to record of the policies of `runs`."""
        place = self.places[tier]
        fresh = [one for run in runs if place for one in unrecorded(world, config, tier, place, run)]
        try:
            for one in fresh:
                await record(self._stores[tier], tier, one)
        except StoreRefused:
            if not self.refusal(tier):
                raise
            return  # what lies there can be neither deleted nor replaced, and by no policy is anything pruned there
        if fresh:
            self._did(tier, lambda place: place.with_policies(fresh))

    async def write_heads(self, tier: str, world: World, runs: Iterable[str]) -> None:
        """Put on a tier what this node is to say there of the launches of `runs`."""
        for run in runs:
            place = self.places[tier]
            if place and (head := unwritten(world, place, run)):
                said = [one.launches for one in place.heads.get(run, ()) if one.by == head.by]
                if self.refusal(tier) and said == [head.launches]:
                    continue  # other nodes' heads are still there because nothing can be deleted
                await write(self._stores[tier], head, place.heads.get(run, ()))
                self._did(tier, partial(_with_head, head))

    async def rolled_back(self, tier: str, run: str, spool: Place) -> str | None:
        """Why the history of `run` on a tier is older than what the spool remembers of it, if it is."""
        place, url = self.places[tier], self._config.named(tier).url
        if place is None:
            return None
        seen = next((head.tiers.get(url) for head in spool.heads.get(run, ())), None)
        return await rolled_back(self._stores[tier], run, seen, place.heads.get(run, ()))

    async def tidy(self, tier: str, runs: Iterable[str]) -> None:
        """Remove what turns of this node that were cut off have left, after a start or a failure; what was being
        deleted is part of the place as it was last seen."""
        place, guard = self.places[tier], self._guards[tier]
        if guard.refused:  # intents whose flush is over may stand, since they could not be deleted
            self._untidy.add(tier)
        if tier not in self._untidy or place is None or guard.rests:
            return
        store, tidy, found = self._stores[tier], True, frozenset[CheckpointId]()
        for run in runs:
            done, _, cut = await sweep(store, run, self.who)
            # Where a manifest is there, the plan decides anew.
            await clear(store, [mark for one, marks in cut.items() if one in place.checkpoints for mark in marks])
            self._eyes[tier].manifests.cut[run] = gone = cut.keys() - place.checkpoints.keys()
            tidy, found = tidy and done, found | gone
        self._did(tier, lambda place: replace(place, cut=place.cut | found))
        if tidy:
            self._untidy.discard(tier)

    def failed(self, tier: str) -> None:
        """Something that was done to a tier may have been cut off."""
        self._untidy.add(tier)

    async def flush(self, part: PartId, tier: str) -> Flushed:
        """`flush.flush` a part to a tier, going by what others have of it.

        Raises:
            StoreRefused: what lies there could not be read with what was put, or what was put with what lies there.
        """
        self._check_readable(part, tier)
        twin, (whose, worn_out) = await self._twin(part, tier), await self._lender(part, tier)
        return await flush(self._spool, part, self._ways[tier], twin=twin, lender=whose, worn_out=worn_out)

    async def hear(self, tier: str, run: str) -> None:
        """Ask a tier what other nodes send of a run."""
        found = await announced(self._stores[tier], run, self.who)
        if place := self.places[tier]:
            self.places[tier] = replace(place, announced=found)

    async def flush_aloud(self, part: PartId, tier: str) -> Flushed:
        """`flush` a part, and let other nodes see meanwhile whose checkpoint it is."""
        async with announcing(self._stores[tier], part.checkpoint, self.who):
            return await self.flush(part, tier)

    async def relay(self, part: PartId, tier: str) -> Flushed:
        """`relay.relay` a part to a tier from the others. Raises StoreRefused as `flush`."""
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
        """The manifest on this tier whose chunks need not be sent again where they are equal, and the checkpoints whose
        chunks must be, because enough others depend on them."""
        place = self.places[tier]
        whose = lender(place, part) if place else None
        if place is None or whose is None:
            return None, frozenset()
        try:
            return await read_manifest(self._stores[tier], whose), worn(place, part)
        except (ObjectNotFound, ManifestError):
            return None, frozenset()  # pruned or damaged since the look

    async def _twin(self, part: PartId, tier: str) -> Twin | None:
        """Another tier that, as last seen, holds the part: a chunk is the same bytes on every tier."""
        for name, store in self._stores.items():
            if name != tier and self.has(part, name):
                try:
                    async with asyncio.timeout(_ANSWER):
                        return Twin(store, await read_manifest(store, part))
                except TimeoutError:
                    self.places[name] = None  # it is not asked for every part; its own lane finds out
                except TierdError:
                    continue
        return None

    async def prune(self, checkpoints: Collection[CheckpointId], tier: str) -> set[CheckpointId]:
        """`prune.prune` checkpoints of one run from a tier; nothing goes while it is not known what others name.

        Raises:
            DeleteRefused: the tier lets nothing be deleted; no mark stands there.
        """
        eye = self._eyes[tier]
        for run in {one.run for one in checkpoints}:  # a mark that could not go would hold up flushes
            await self._guards[tier].check(f"{pruning_prefix(run)}none")
        try:
            gone, bare, _ = await prune(self._stores[tier], checkpoints, self.who, eye.manifests, self.places[tier])
        except (ManifestError, FormatTooNew) as error:  # of another: no reason to keep flushes waiting
            names = ", ".join(str(one) for one in sorted(checkpoints)[:3]) + (", …" if len(checkpoints) > 3 else "")
            log.warning("%s: not pruned yet: %s: %s", tier, names, error)
            return set()
        for one in {*checkpoints, *bare}:
            eye.forget(one)  # also where others name what is there: that is known now
        for one in {*gone, *bare}:
            self._did(tier, partial(_without, one))
        return gone

    async def are_past(self, checkpoint: CheckpointId, world: World) -> bool:
        """Whether each tier that is not silent really has as many newer checkpoints as its retention counts on.

        To be asked before a copy goes that no tier has. Manifests that nobody has read are read now, because one that
        cannot be used does not count.
        """
        for name, place in self.places.items():
            if name in world.silent:
                continue
            keep = policy_for(world, self._config, checkpoint.run, name).keep_last
            copies = place.copies(checkpoint.run) if place else ()
            newer = sorted(seen.id for seen in copies if seen.usable and seen.id > checkpoint)
            if len(newer) < keep:
                return False
            # The newest, and the next ones: these are on its own way where the newest are on another.
            for one in sorted({*newer[:keep], *newer[-keep:]}):
                if not await self._eyes[name].manifests.are_usable(one):
                    self.doubt(name)
                    return False
        return True

    async def lacking(self, local: Mapping[PartId, Manifest | None]) -> list[tuple[str, PartId]] | None:
        """Look once more before the spool's copies go: None if a tier holds all of these parts, or no tier was seen to
        have them; else the tiers and parts of which some that the manifest names is lost.

        Args:
            local: each part's manifest in the spool, None where it cannot be read.
        """
        seen = [name for name in self.places if all(self.has(part, name) for part in local)]
        lost: list[tuple[str, PartId]] = []
        for name in seen:
            found = [await holds(self._stores[name], part, manifest) for part, manifest in local.items()]
            if all(found):
                return None
            lost += [(name, part) for part, held in zip(local, found, strict=True) if held is False]
        return lost if seen else None

    def doubt(self, tier: str) -> None:
        """What was last seen on a tier is not so any more."""
        self.places[tier] = None


def _with_head(head: Head, place: Place) -> Place:
    return place.with_heads(head.run, (head,))


def _without(checkpoint: CheckpointId, place: Place) -> Place:
    return place.without(checkpoint)


def _seen_to(look: asyncio.Task[None]) -> None:
    """Whoever asked for a look may have gone away before it failed."""
    if not look.cancelled():
        look.exception()
