"""Observe, plan, act. One lane for the spool and one for each tier, so that a tier that is down delays only itself.

Law: truth is what lies in the spool and on the tiers. A lane looks, takes the plan's first action for its place, does
it, and looks again; events only shorten the wait. Every failure ends in a backoff of its lane and in `status`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping

from tierd.commit import Written
from tierd.core.config import Config
from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, TierdError
from tierd.core.events import Event
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.plan import Action, Discard, Flush, Mend, Prune, flushes, pending, plan
from tierd.core.retention import seconds
from tierd.core.world import SPOOL, Place, World
from tierd.daemon.budget import Budget
from tierd.daemon.download import Wanted
from tierd.daemon.journal import Journal
from tierd.daemon.lane import Lane
from tierd.daemon.notices import Notices
from tierd.daemon.observe import SpoolEye
from tierd.daemon.pause import Pause
from tierd.daemon.prune import quarantine
from tierd.daemon.repair import Repairer
from tierd.daemon.scrub import Scrubber
from tierd.daemon.tiers import Tiers
from tierd.spool import Spool
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")


_STUCK = 60.0  # seconds that rests what could not be sent, mended or deleted, while others go on
_AGAIN = 1.0  # seconds that a local copy rests which no tier was found to hold: they look again meanwhile
_ABANDONED = 5.0  # seconds that a stage is seen unlocked before it counts as left over
_LANE = "lane"  # the thing that fails or works, for alerts
_TAKEN_UP = 3600.0  # seconds that an interrupted fetch of a whole part may be gone on with


class Reconciler:
    """Keeps the tiers and the spool as the configuration wants them.

    Args:
        config: what is wanted.
        spool: the local tier, already locked for this daemon.
        stores: tier name -> open store, in order of preference.
        told: called with every event as it happens.
    """

    def __init__(
        self,
        config: Config,
        spool: Spool,
        stores: Mapping[str, Store],
        told: Callable[[Event], None] | None = None,
    ) -> None:
        self.config = config
        self.spool = spool
        self.stores = stores
        self.journal = Journal(told)
        self.budget = Budget()
        self._repairer = Repairer(spool, stores, self.journal, self.budget)
        self.fetching = self._repairer.fetching
        self.pause = Pause(spool)
        self.tiers = Tiers(config, spool, stores, self.pause)
        self.held: Counter[CheckpointId] = Counter()
        self.needed: Counter[CheckpointId] = Counter()
        self.scrubber = Scrubber(
            config,
            spool,
            stores,
            self._repairer,
            self.journal,
            self.budget,
            world=self.world,
            pause=self.pause,
            held=self.held,
            wake=self.wake,
        )
        self.writers: Callable[[], frozenset[str]] = frozenset  # `PartId.lane` of whoever will write again
        self.interest: set[str] = set()  # runs that a trainer asked for, beside those in the spool
        self.moved = asyncio.Condition()  # notified after every look and every action
        self.lanes = {name: Lane(name) for name in (SPOOL, *stores)}
        self._spool_eye = SpoolEye(spool)
        self.notices = Notices(self.journal)
        self._place = Place()
        self._free = 1.0
        self._leftovers: tuple[str, ...] = ()
        self._busy: Counter[PartId] = Counter()
        self._unlocked: dict[str, float] = {}
        self._planned: tuple[World | None, frozenset[Flush]] = None, frozenset()
        self._looking = asyncio.Lock()
        self._draining = False
        self._random = random.Random()  # noqa: S311  # jitter

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reconcile until cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self.lanes.values():
                group.create_task(self._run_lane(lane))
            group.create_task(self.scrubber.run())

    def wake(self) -> None:
        """Look again soon: something may have changed."""
        for lane in self.lanes.values():
            lane.wake.set()

    async def drain(self, timeout: float) -> None:
        """Let flushes go on, newest first, for at most `timeout` seconds; nothing else is begun any more. Paused,
        it returns at once: what is pending waits for the next daemon."""
        self._draining = self.scrubber.resting = True
        await self._look_at_spool()
        for lane in self.lanes.values():
            lane.retry_now()
        self.wake()
        try:
            async with asyncio.timeout(timeout), self.moved:
                await self.moved.wait_for(lambda: self.pause.paused or not self.pending())
        except TimeoutError:
            log.warning("drain time is up: %d parts are still only in the spool", len(self.pending()))

    def taken(self, part: PartId, outcome: Written | Exception) -> None:
        """A part was committed from a trainer's memory, or could not be."""
        self.notices.taken(part, outcome)
        self.wake()

    def world(self) -> World:
        """The latest look at everything."""
        return World(
            self._place,
            dict(self.tiers.places),
            self._free,
            self._leftovers,
            frozenset(self.held),
            frozenset(self.needed),
            frozenset(self._busy),
        )

    def pending(self) -> set[PartId]:
        """Parts in the spool that some tier still lacks and wants; all of them while a tier does not answer."""
        world = self.world()
        found = {flush.part for flush in self._flushes(world)}
        if any(place is None for place in self.tiers.places.values()):
            found |= set(self._place.parts())
        return found | set(self._busy)

    def _flushes(self, world: World) -> frozenset[Flush]:
        """What the plan would send; worked out once for whatever many ask, until something else is seen."""
        if world != self._planned[0]:
            self._planned = world, frozenset(flushes(world, self.config, {}, 0.0))
        return self._planned[1]

    async def _run_lane(self, lane: Lane) -> None:
        while True:
            lane.wake.clear()
            action = None
            try:
                action = await self._look_and_plan(lane)
                if action is not None:
                    lane.doing = _describe(action)
                    await self._act(action)
                    self.wake()
                lane.succeeded()
                self._worked(lane, action)
            except Exception as error:  # a lane never ends: what is not known either is logged whole, and tried again
                self._failed(lane, action, error)
            finally:
                lane.doing = None
            async with self.moved:
                self.moved.notify_all()
            if action is None or lane.last_error:
                await lane.rest(min(self._rescan(lane), lane.off_for, self.pause.left or math.inf))

    async def _look_and_plan(self, lane: Lane) -> Action | None:
        """The lane's next action. Where looking takes long, an earlier look is good enough to send parts by, and
        whatever else is to be done is decided by a fresh one."""
        if lane.name != SPOOL and self.tiers.good_for(lane.name):
            await self._look_at_spool()
            action = self._next(lane)
            if action is None or isinstance(action, Flush):
                return action
        await self.look(lane.name)
        if lane.name != SPOOL:
            await self.tiers.tidy(lane.name, self._runs())
        return self._next(lane)

    def _rescan(self, lane: Lane) -> float:
        """Seconds until the lane looks again though nothing wakes it: the longer, the longer a look takes."""
        return max(seconds(self.config.rescan), 0.0 if lane.name == SPOOL else self.tiers.good_for(lane.name))

    def _next(self, lane: Lane) -> Action | None:
        if self.pause.paused and lane.name != SPOOL:
            return None
        backoff = {name: other.retry_at for name, other in self.lanes.items()}
        for action in plan(self.world(), self.config, backoff, lane.now()):
            if (
                action.tier == lane.name
                and not lane.is_off(_subject(action))
                and (isinstance(action, Flush) or not self._draining)
            ):
                return action
        return None

    def _failed(self, lane: Lane, action: Action | None, error: Exception) -> None:
        self.journal.counters["errors"] += 1
        if lane.name in self.stores:
            self.tiers.failed(lane.name)
        delay = lane.failed(error, self._random, long=isinstance(error, StoreRefused))
        doing = _describe(action) if action else "looking"
        known = isinstance(error, TierdError | OSError)
        log.warning("%s: %s failed, again in %.0f s: %s", lane.name, doing, delay, error, exc_info=not known)
        self.journal.failed((_LANE, lane.name), _doing(action), lane.name, _subject(action), str(error))

    def _worked(self, lane: Lane, action: Action | None) -> None:
        thing = (_LANE, lane.name)
        self.journal.worked(thing, _subject(None), others=False)
        if action is not None:
            self.journal.worked(thing, _subject(action))
        elif not self.pause.paused and not self._draining and lane.off_for == math.inf:
            self.journal.worked(thing)  # nothing is left to do that was tried in vain

    # -- looking ----------------------------------------------------------------------------------------------------

    async def look(self, name: str) -> None:
        """Look at one place afresh; a tier that does not answer becomes unknown, and the error is raised."""
        await self._look_at_spool()
        if name != SPOOL:
            await self.tiers.look(name, self._runs() | self.interest, self._place.ranks)
            self._tell_durable(name)

    def _runs(self) -> set[str]:
        return {checkpoint.run for checkpoint in self._place.checkpoints}

    async def _look_at_spool(self) -> None:
        async with self._looking:
            before = set(self._place.parts())
            place = await asyncio.to_thread(self._spool_eye.look)
            free, total = self.spool.free()
            self._free = free / total if total else 1.0
            self._leftovers = self._aged(await asyncio.to_thread(self.spool.leftovers))
            self._place = place  # last: all that was asked was answered
            self.notices.came(place)
            for name in self.tiers.places:
                self._tell_durable(name)
            if set(self._place.parts()) != before:
                self.wake()

    def _tell_durable(self, tier: str) -> None:
        self.notices.durable(tier, self._place, self.tiers.places[tier])

    def _aged(self, names: list[str]) -> tuple[str, ...]:
        # A stage is without its lock for a moment after it is made: only what stays so is left over.
        now = time.monotonic()
        self._unlocked = {name: self._unlocked.get(name, now) for name in names}
        return tuple(name for name, since in self._unlocked.items() if now - since >= self._patience(name))

    def _patience(self, name: str) -> float:
        # An interrupted fetch is worth taking up, as long as its bytes are not in the way.
        low = self._free * 100 < self.config.min_free_percent
        done = any(name == f"fetch/{self.spool.fetching(part).name}" for part in self._place.parts())
        loose = name.removeprefix("fetch/") in self._repairer.loose
        return _TAKEN_UP if name.startswith("fetch/") and not low and not done and not loose else _ABANDONED

    # -- acting -----------------------------------------------------------------------------------------------------

    async def _act(self, action: Action) -> None:
        match action:
            case Flush(part, tier):
                await self._flush(part, tier)
            case Prune(checkpoint, tier, reasons):
                await self._prune(checkpoint, tier, reasons)
            case Mend(part, tier):
                await self._mend(part, tier)
            case Discard(name):
                await asyncio.to_thread(self.spool.discard, name)
                log.info("local: discarded %s", name)

    async def _flush(self, part: PartId, tier: str) -> None:
        self._busy[part] += 1
        begun = time.monotonic()
        try:
            done = await self.tiers.flush(part, tier)
        except ObjectNotFound:
            return  # removed from the spool since the look
        except (CorruptChunk, ManifestError) as error:
            self.journal.counters["corruptions"] += 1
            self.journal.tell("corrupt", SPOOL, part, str(error))
            await self._mend(part, SPOOL, counted=True)
            return
        except (OSError, StoreRefused):  # this part's disk, or what no tier takes: others go first meanwhile
            self.lanes[tier].put_off(part, _STUCK)
            raise
        finally:
            self._busy -= Counter([part])
        self.scrubber.verified(tier, part)
        self.journal.counters["flushed"] += 1
        self.journal.counters["flushed_raw_bytes"] += done.raw
        self.journal.counters["flushed_sent_bytes"] += done.sent
        self.journal.counters["flushed_shared_bytes"] += done.shared
        facts = self._place.facts(part)
        if facts:  # else it is gone from the spool already; the next look tells
            self.tiers.put(tier, part, dataclasses.replace(facts, stored_size=done.stored))
        told = f"verified, {done.raw} bytes as {done.stored}, {done.sent} of them sent"
        sizes = {"raw_bytes": done.raw, "stored_bytes": done.stored, "sent_bytes": done.sent}
        self.journal.tell("flushed", tier, part, told, **sizes, seconds=round(time.monotonic() - begun, 3))
        self._tell_durable(tier)

    async def _prune(self, checkpoint: CheckpointId, tier: str, reasons: tuple[str, ...]) -> None:
        if tier == SPOOL:
            parts = await self._covered(checkpoint)
            if parts is None:
                self.lanes[tier].put_off(checkpoint, _AGAIN)
                self.wake()
                return
            if checkpoint in self.held or any(part.checkpoint == checkpoint for part in self._busy):
                return  # taken up while the tiers were asked; the next plan decides
            low = self._free * 100 < self.config.min_free_percent  # then space is worth more than speed
            reuse: frozenset[str] = frozenset() if low else self.writers()
            await asyncio.to_thread(self.spool.remove, parts, reuse)
            if low or reuse - self.writers():  # who left meanwhile looked for it too early
                await asyncio.to_thread(self.spool.drop_recycled, () if low else self.writers())
        elif not await self.tiers.prune(checkpoint, tier):
            self.lanes[tier].put_off(checkpoint, _STUCK)
            return
        self.journal.counters["pruned"] += 1
        self.journal.tell("pruned", tier, checkpoint, "; ".join(reasons))

    async def _covered(self, checkpoint: CheckpointId) -> tuple[PartId, ...] | None:
        """Look once more at the tiers before a local copy goes: the parts that were asked about where one tier holds
        them all, or none wants them any more. What another rank commits meanwhile is not among them."""
        seen = self._place.checkpoints.get(checkpoint)
        parts = tuple(seen.parts()) if seen else ()
        lacking = await self.tiers.lacking({part: await asyncio.to_thread(self._readable, part) for part in parts})
        for name, part in lacking or ():
            self.journal.tell("corrupt", name, part, "chunks are missing; it will be flushed again")
            await quarantine(self.stores[name], part)
            self.tiers.doubt(name)
        if lacking is not None:
            return None
        on_one = any(all(self.tiers.has(part, name) for part in parts) for name in self.stores)
        return parts if on_one or await self.tiers.are_past(checkpoint) else None

    def _readable(self, part: PartId) -> Manifest | None:
        try:
            return self.spool.manifest(part)
        except (ObjectNotFound, ManifestError):
            return None

    async def _mend(self, part: PartId, tier: str, *, counted: bool = False) -> None:
        try:
            if tier == SPOOL:
                await self.fetch(part, counted=counted)
            else:
                await self._repairer.rebuild(tier, part, "its manifest is corrupt")
        except (CorruptChunk, ObjectNotFound):
            pass  # told and set aside by fetch; or gone meanwhile
        except TierdError as error:
            self.lanes[tier].put_off(part, _STUCK)  # others of this lane go first meanwhile
            if tier == SPOOL:
                raise
            log.warning("%s: %s cannot be mended yet: %s", tier, part, error)  # another tier's lane backs off

    async def fetch(self, part: PartId, *, counted: bool = False, wanted: Wanted | None = None) -> tuple[str, ...]:
        """Make the spool's copy of `part` whole, or bring some of it, as `Repairer.heal` does, and look again."""
        self.notices.fetched(part)
        try:
            return await self._repairer.heal(part, counted=counted, wanted=wanted)
        finally:
            self.wake()

    def hold(self, part: PartId) -> None:
        """Somebody restores from this part: nothing of it goes until `release`."""
        self.held[part.checkpoint] += 1
        self._repairer.hold(part)

    def release(self, part: PartId) -> None:
        self.held -= Counter([part.checkpoint])
        self._repairer.release(part)

    def is_retired(self, part: PartId, tier: str) -> bool:
        """Whether the tier, as last seen, lacks a part and will not be sent it: nobody has it, or nobody wants it."""
        if self.tiers.places[tier] is None or self._busy[part]:
            return False
        if self._place.lists(part) and not self._place.has(part):
            return False  # it is mended, or set aside, first
        return Flush(part, tier) not in self._flushes(self.world())

    def backlog(self, tier: str) -> tuple[int, int]:
        """`(parts, bytes)` that the spool has and the tier, as last seen, lacks and wants."""
        sent = {flush.part for flush in self._flushes(self.world())}
        place = self.tiers.places[tier] or Place()
        found = [part for run in self._runs() for part in pending(self._place, place, run)]
        wanted = [part for part in found if self.tiers.places[tier] is None or part in sent or part in self._busy]
        return len(wanted), sum(facts.size for part in wanted if (facts := self._place.facts(part)))


def _describe(action: Action) -> str:
    match action:
        case Flush(part):
            return f"flushing {part}"
        case Prune(checkpoint):
            return f"pruning {checkpoint}"
        case Mend(part):
            return f"mending {part}"
        case Discard(name):
            return f"discarding {name}"


def _doing(action: Action | None) -> str:
    return type(action).__name__.lower() if action else "look"


def _subject(action: Action | None) -> PartId | CheckpointId | str:
    match action:
        case Flush(part) | Mend(part):
            return part
        case Prune(checkpoint):
            return checkpoint
        case Discard(name):
            return name
        case None:
            return "looking"
