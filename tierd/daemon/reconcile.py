"""Observe, plan, act. One lane for the spool and one for each tier, so that a tier that is down delays only itself.

Law: truth is what lies in the spool and on the tiers. A lane looks, takes the plan's first action for its place, does
it, and looks again; events only shorten the wait. Every failure ends in a backoff of its lane and in `status`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from tierd.commit import Written
from tierd.core.config import Config
from tierd.core.demand import Demand
from tierd.core.errors import (
    CorruptChunk,
    DeleteRefused,
    ManifestError,
    ObjectNotFound,
    SpoolUnusable,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    TierdError,
    is_exhausted,
)
from tierd.core.events import Event
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.order import leads
from tierd.core.plan import (
    Action,
    Discard,
    Flush,
    Mend,
    Prune,
    complete_here,
    evictable,
    flushes,
    is_contended,
    lost_to,
    pending,
    plan,
    superseded,
)
from tierd.core.pruning import PruneBacklog, together
from tierd.core.remaining import Backlog, Remaining, TierTrouble, describe, remaining
from tierd.core.rest import SETTLED_S, is_on_the_way, pause_s
from tierd.core.retention import seconds
from tierd.core.world import SPOOL, Place, Sent, World
from tierd.daemon.budget import Budget
from tierd.daemon.download import Wanted
from tierd.daemon.heads import remembering
from tierd.daemon.journal import Journal
from tierd.daemon.lane import Lane
from tierd.daemon.notices import Notices
from tierd.daemon.observe import SpoolEye
from tierd.daemon.pause import Pause
from tierd.daemon.presence import Presence
from tierd.daemon.prune import quarantine
from tierd.daemon.repair import Repairer
from tierd.daemon.room import Room
from tierd.daemon.scrub import Scrubber
from tierd.daemon.tiers import Tiers
from tierd.records import remember
from tierd.spool import Spool
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")


_STUCK = 60.0  # seconds that rests what could not be sent, mended or deleted, while others go on
_REFUSED = 3600.0  # seconds that rests what cannot be set aside because nothing can be deleted there
_AGAIN = 1.0  # seconds that a local copy rests which no tier was found to hold: they look again meanwhile
_IN_HAND = 10.0  # seconds that what lanes have in hand has to end when the configuration changes
_ABANDONED = 5.0  # seconds that a stage is seen unlocked before it counts as left over
_LANE = "lane"  # the thing that fails or works, for alerts
_RECENT = 600.0  # seconds that a run counts as having a trainer after it left: one that crashed comes back
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
        self.spool = spool
        self.journal = Journal(told)
        self.budget = Budget()
        self._repairer = Repairer(spool, stores, self.journal, self.budget)
        self.fetching = self._repairer.fetching
        self.pause = Pause(spool)
        self.held: Counter[CheckpointId] = Counter()
        self.needed: Counter[CheckpointId] = Counter()
        self.writers: Callable[[], frozenset[str]] = frozenset  # `PartId.lane` of whoever will write again
        self.attended: Callable[[], bool] = lambda: True  # whether a trainer is attached
        self.interest: set[str] = set()  # runs that a trainer asked for, beside those in the spool
        self.asking: Counter[str] = Counter()  # of those, what is being answered: a tier may take long
        self.presence = Presence()
        self.room = Room(
            spool,
            self.world,
            self._look_at_spool,
            self._release,
            self.wake,
            lambda world: evictable(world, self.config),
        )
        self.moved = asyncio.Condition()  # notified after every look and every action
        self._spool_eye = SpoolEye(spool)
        self.notices = Notices(self.journal)
        self._place = Place()
        self._free = 1.0
        self._leftovers: tuple[str, ...] = ()
        self._busy: Counter[PartId] = Counter()
        self._unlocked: dict[str, float] = {}
        self._looking = asyncio.Lock()
        self._draining = False
        self._changed = time.monotonic()  # when anything on a tier last did
        self._random = random.Random()  # noqa: S311  # jitter
        self._halted = asyncio.Event()  # lanes begin nothing more, because the configuration changes
        self._next_config: tuple[Config, Mapping[str, Store], asyncio.Event] | None = None
        self._configure(config, stores)

    def _configure(self, config: Config, stores: Mapping[str, Store]) -> None:
        """Take up a configuration; no lane works meanwhile. Restores that are under way go on with the old stores."""
        self.config = config
        self.stores = stores
        self._repairer.use(stores)
        self.tiers = Tiers(config, self.spool, stores, self.pause)
        self.scrubber = Scrubber(
            config,
            self.spool,
            stores,
            self._repairer,
            self.journal,
            self.budget,
            world=self.world,
            pause=self.pause,
            held=self.held,
            wake=self.wake,
        )
        self.lanes = {name: Lane(name) for name in (SPOOL, *stores)}
        self._backlogs = {name: PruneBacklog() for name in stores}
        self._full: set[str] = set()  # tiers that took no more, and from which nothing was deleted since
        self._sent: dict[str, Sent] = {}  # by tier
        # By the world that they were worked out for; the configuration may make something else of the same one.
        self._planned: tuple[World | None, frozenset[tuple[PartId, str]]] = None, frozenset()
        self._given_up: tuple[World | None, Counter[str]] = None, Counter()

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            async with asyncio.TaskGroup() as group:
                lanes = [group.create_task(self._run_lane(lane)) for lane in self.lanes.values()]
                scrubbing = group.create_task(self.scrubber.run())
                await self._halted.wait()
                scrubbing.cancel()
                await asyncio.wait(lanes, timeout=_IN_HAND)
                for task in lanes:
                    task.cancel()  # what was cut off is gone on with: chunks that lie there are not sent again
            assert self._next_config is not None
            config, stores, done = self._next_config
            for name in self.lanes.keys() - {SPOOL, *stores}:
                self.journal.worked((_LANE, name))  # nobody waits for a tier that was taken out
            self._configure(config, stores)
            self._halted.clear()
            done.set()

    async def reconfigure(self, config: Config, stores: Mapping[str, Store]) -> None:
        """Go on by another configuration of the same spool; returns when it holds. What lanes have in hand has a few
        seconds to end. Takes and restores that are under way are not disturbed.

        Args:
            stores: tier name -> open store. The old ones are used until every request that is under way has ended.
        """
        done = asyncio.Event()
        self._next_config = config, stores, done
        self._halted.set()
        self.retry_now()
        await done.wait()
        async with self.moved:
            self.moved.notify_all()  # whoever waits for a tier sees whether it is still there

    def wake(self) -> None:
        """Look again soon: something may have changed."""
        for lane in self.lanes.values():
            lane.wake.set()

    def retry_now(self) -> None:
        """End every backoff, and look again."""
        for lane in self.lanes.values():
            lane.retry_now()
        self.wake()

    async def drain(self, timeout: float) -> tuple[Remaining, ...]:
        """Let flushes go on, newest first, for at most `timeout` seconds; nothing else is begun any more. Paused,
        it returns at once: what is pending waits for the next daemon. Returns the parts that some tier still lacks."""
        self._draining = self.scrubber.resting = True
        await self._look_at_spool()
        self.retry_now()
        try:
            async with asyncio.timeout(timeout), self.moved:
                await self.moved.wait_for(lambda: self.pause.paused or not self.pending())
        except TimeoutError:
            pass
        left = self.remaining()
        if left:
            why = "paused" if self.pause.paused else "drain time is up"
            log.warning("%s: %s", why, self.describe_remaining())
        return left

    def taken(self, part: PartId, outcome: Written | Exception) -> None:
        """A part was committed from a trainer's memory, or could not be."""
        self.notices.taken(part, outcome)
        self.wake()

    def world(self) -> World:
        """The latest look at everything."""
        touched, writers, finished_s = self._spool_eye.touched, self.writers(), seconds(self.config.finished)
        return World(
            self._place,
            dict(self.tiers.places),
            self._free,
            self._leftovers,
            frozenset(self.held),
            frozenset(self.needed),
            frozenset(self._busy),
            self.presence.quiet(touched, writers, min(_RECENT, finished_s)),
            self.presence.quiet(touched, writers, finished_s),
            silent=frozenset(
                name for name, place in self.tiers.places.items() if place is None and self._is_silent(name)
            ),
            full=frozenset(self._full),
            append_only=self.tiers.append_only,
            sent=dict(self._sent),
            who=self.tiers.who,
        )

    def _is_silent(self, tier: str) -> bool:
        return time.monotonic() - self.tiers.mute.get(tier, math.inf) > seconds(self.config.hold_for)

    def pending(self) -> set[PartId]:
        """Parts that some tier lacks and wants and that this daemon sends it; all of the spool's while a tier does not
        answer."""
        return {one.part for one in self.remaining()} | set(self._busy)

    def remaining(self) -> tuple[Remaining, ...]:
        """The same parts, newest first, each with the tiers that have it and those that lack it."""
        world = self.world()
        wanted = set(self._flushes(world))
        if silent := {name for name, place in world.tiers.items() if place is None}:
            # What a tier that does not answer would be sent from the other places, if it held nothing.
            empty = replace(world, tiers={name: place or Place() for name, place in world.tiers.items()})
            sent = flushes(empty, self.config, {}, 0.0)
            wanted |= {(flush.part, flush.tier) for flush in sent if flush.tier in silent}
        return remaining(world, wanted)

    def backlog_now(self) -> Backlog:
        """What is left, and whether each tier takes it."""
        tiers = {}
        for name, place in self.tiers.places.items():
            error = self.lanes[name].trouble
            why, refused = (str(error), isinstance(error, StoreRefused)) if error else (None, False)
            tiers[name] = TierTrouble(reached=place is not None, error=why, refused=refused)
        return Backlog(left=self.remaining(), tiers=tiers, paused=self.pause.until)

    def describe_remaining(self) -> str:
        """`remaining` in one sentence."""
        silent = [name for name, place in self.tiers.places.items() if place is None]
        return describe(self.remaining(), silent)

    def _flushes(self, world: World) -> frozenset[tuple[PartId, str]]:
        """The parts that the plan would send, and where to; worked out once for whatever many ask, until something else
        is seen."""
        if world != self._planned[0]:
            sent = flushes(world, self.config, {}, 0.0)
            self._planned = world, frozenset((flush.part, flush.tier) for flush in sent)
        return self._planned[1]

    async def _run_lane(self, lane: Lane) -> None:
        while not self._halted.is_set():
            lane.wake.clear()
            action = None
            before = self.tiers.requests(lane.name)
            try:
                action = await self._look_and_plan(lane)
                if action is not None:
                    lane.doing = _describe(action)
                    lane.sent = isinstance(action, Flush)  # before it may fail, to hold up no flush
                    await self._act(action)
                    self.wake()
                lane.succeeded()
                self._worked(lane, action)
            except Exception as error:  # a lane never ends: what is not known either is logged whole, and tried again
                self._failed(lane, action, error)
            finally:
                lane.doing = None
                self.notices.append_only(lane.name, self.tiers.refusal(lane.name))
            async with self.moved:
                self.moved.notify_all()
            if not self._halted.is_set() and (action is None or lane.last_error):
                cost = self.tiers.requests(lane.name) - before
                await lane.rest(min(self._rescan(lane, cost), lane.off_for, self.pause.left or math.inf))

    async def _look_and_plan(self, lane: Lane) -> Action | None:
        """The lane's next action. Where other nodes may send parts of another checkpoint than the one that is the
        newest here, theirs counts, because only all parts together are of use."""
        action = await self._look_and_plan_alone(lane)
        if isinstance(action, Flush) and is_contended(self.world(), lane.name, action.part):
            await self.tiers.hear(lane.name, action.part.checkpoint.run)
            return self._next(lane)
        return action

    async def _look_and_plan_alone(self, lane: Lane) -> Action | None:
        """The lane's next action. Where looking takes long, an earlier look is good enough to send parts by, and
        whatever else is to be done is decided by a fresh one."""
        if lane.name != SPOOL and self.tiers.good_for(lane.name):
            await self._look_at_spool()
            action = self._next(lane)
            if action is None or isinstance(action, Flush):
                return action
        await self.look(lane.name)
        if lane.name != SPOOL:
            await self._own_word(lane.name)
        return self._next(lane)

    async def _own_word(self, tier: str) -> None:
        """Tidy up after this node on a tier, and record there what it wants kept, of the runs that it saves. Of a run
        that was only restored here nothing is deleted."""
        saved = sorted((self._runs() - self._place.restored) | self._place.launches.keys())
        await self.tiers.tidy(tier, saved)
        for run in saved:  # before this node's own heads follow what lies there
            self.notices.rolled_back(tier, run, await self.tiers.rolled_back(tier, run, self._place))
        if not self.pause.paused:
            await self._write_heads(tier, saved)
            await self._remember(saved)
            if not self._draining:
                await self.tiers.record(tier, self.world(), self.config, saved)

    async def _write_heads(self, tier: str, runs: Iterable[str]) -> None:
        """Say on a tier what there is of the launches of `runs`, or after the next look: a full tier takes nothing, and
        this must not hold up the prunes that empty it."""
        with suppress(StoreUnavailable, StoreRefused):
            await self.tiers.write_heads(tier, self.world(), runs)

    async def _remember(self, runs: Iterable[str]) -> None:
        """Keep in the spool what any place shows of the launches of `runs`."""
        world, urls = self.world(), {tier.name: tier.url for tier in self.config.tier}
        for head in [head for run in runs if (head := remembering(world, run, urls))]:
            try:
                await asyncio.to_thread(remember, self.spool.control, head)
            except (
                OSError,
                SpoolUnusable,
            ) as error:  # a full disk is emptied by the flushes that this must not hold up
                log.warning("local: %s: where its launches came from is not remembered yet: %s", head.run, error)
                return
            self._place = self._place.with_heads(head.run, (head,))

    def _rescan(self, lane: Lane, cost: int) -> float:
        """Seconds until the lane looks again though nothing wakes it: the longer, the longer a look takes, and at rest
        the more requests it cost."""
        rescan = seconds(self.config.rescan)
        if lane.name == SPOOL:
            return rescan
        rescan = max(rescan, self.tiers.good_for(lane.name))
        return pause_s(rescan, cost, len(self.stores)) if self._is_at_rest(lane) else rescan

    def _is_at_rest(self, lane: Lane) -> bool:
        """Whether nobody trains or restores here, and nothing is left to do or expected to come."""
        place = self.tiers.places[lane.name]
        if self.attended() or self.held or self.needed or place is None or self.pending():
            return False
        settled = time.monotonic() - self._changed >= SETTLED_S
        return settled or not is_on_the_way(self._place, place)

    def _next(self, lane: Lane) -> Action | None:
        if self._halted.is_set() or (self.pause.paused and lane.name != SPOOL):
            return None
        backoff = {name: other.retry_at for name, other in self.lanes.items()}
        actions = plan(self.world(), self.config, backoff, lane.now())
        if lane.name != SPOOL:
            waiting = sum(isinstance(one, Prune) and one.tier == lane.name for one in actions)
            self.journal.waiting(lane.name, waiting, self._backlogs[lane.name].count(waiting, lane.now()))
        own = [
            action
            for action in actions
            if action.tier == lane.name
            and not lane.is_off(_subject(action))
            and (isinstance(action, Flush) or not self._draining)
        ]
        # Where saves outrun flushes there is always something to send: after each part, what is to go has its turn.
        prunes = [action for action in own if isinstance(action, Prune)] if lane.sent else []
        return next(iter(prunes or own), None)

    def _failed(self, lane: Lane, action: Action | None, error: Exception) -> None:
        self.journal.counters["errors"] += 1
        if lane.name in self.stores:
            self.tiers.failed(lane.name)
        if isinstance(error, StoreFull):
            self._full.add(lane.name)
        delay = lane.failed(error, self._random, long=isinstance(error, StoreRefused))
        doing = _describe(action) if action else "looking"
        known = isinstance(error, TierdError | OSError) or is_exhausted(error)
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
        tiers = self.tiers
        await self._look_at_spool()
        if name != SPOOL:
            before = tiers.places[name]
            await tiers.look(name, self._runs() | self.interest, self._place.ranks)
            if tiers is not self.tiers:  # the configuration has changed meanwhile
                return
            self._tell_durable(name)
            self.notices.launches(self.world())
            self.notices.unvouched(name, self.world())
            if tiers.places[name] != before:
                self._changed = time.monotonic()
                self.lanes[SPOOL].wake.set()  # because what a tier holds decides what the spool may give up

    def _runs(self) -> set[str]:
        return {checkpoint.run for checkpoint in self._place.checkpoints} | self._place.launches.keys()

    async def _look_at_spool(self) -> None:
        async with self._looking:
            before = set(self._place.parts())
            place = await asyncio.to_thread(self._spool_eye.look)
            free, total = self.spool.free()
            self._free = free / total if total else 1.0
            self._leftovers = self._aged(await asyncio.to_thread(self.spool.leftovers))
            self._place = place  # last: all that was asked was answered
            self._lose_interest()
            self.notices.came(place)
            self.notices.launches(self.world())
            for name in self.tiers.places:
                self._tell_durable(name)
            if set(self._place.parts()) != before:
                self.wake()

    def _lose_interest(self) -> None:
        """Runs that the spool has nothing of, and that nobody asked for lately, are not looked at any more."""
        unheld = dict.fromkeys(self.interest - self._runs() - self.asking.keys())
        self.interest -= self.presence.quiet(unheld, self.writers(), seconds(self.config.finished))

    def _tell_durable(self, tier: str) -> None:
        self.notices.durable(tier, self._place, self.tiers.places)

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
            case Flush(part, tier, relayed):
                await self._flush(part, tier, relayed=relayed)
            case Prune():
                await self._prune(action)
            case Mend(part, tier):
                await self._mend(part, tier)
            case Discard(name):
                await asyncio.to_thread(self.spool.discard, name)
                log.info("local: discarded %s", name)

    async def _flush(self, part: PartId, tier: str, *, relayed: bool = False) -> None:
        self._busy[part] += 1
        begun, place = time.monotonic(), self.tiers.places[tier]
        aloud = is_contended(self.world(), tier, part)
        send = self.tiers.relay if relayed else self.tiers.flush_aloud if aloud else self.tiers.flush
        leading = place is None or leads(part.checkpoint, self._place, place)  # newer ones come while it is sent
        if relayed:
            self.notices.relayed(tier, part)
        try:
            done = await send(part, tier)
        except ObjectNotFound:
            if relayed:
                self.lanes[tier].put_off(part, _STUCK)  # until the other tiers were looked at again
            return  # removed from the spool since the look
        except (CorruptChunk, ManifestError) as error:
            if relayed:
                self._cannot_relay(part, tier, error)
                return
            self.journal.counters["corruptions"] += 1
            self.journal.tell("corrupt", SPOOL, part, str(error))
            await self._mend(part, SPOOL, counted=True)
            return
        except (OSError, StoreRefused):  # this part's disk, or what no tier takes: others go first meanwhile
            self.lanes[tier].put_off_stuck(part, _STUCK)
            raise
        finally:
            self._busy -= Counter([part])
        self.scrubber.verified(tier, part)
        self.journal.counters["flushed"] += 1
        self.journal.counters["flushed_raw_bytes"] += done.raw
        self.journal.counters["flushed_sent_bytes"] += done.sent
        self.journal.counters["flushed_shared_bytes"] += done.shared
        self._note_sent(tier, part.checkpoint, leads=leading)
        self.tiers.put(tier, part, done.facts)
        how = ", from another tier" if relayed else ""
        told = f"verified, {done.raw} bytes as {done.stored}, {done.sent} of them sent{how}"
        sizes = {"raw_bytes": done.raw, "stored_bytes": done.stored, "sent_bytes": done.sent}
        self.journal.tell("flushed", tier, part, told, **sizes, seconds=round(time.monotonic() - begun, 3))
        self._tell_durable(tier)
        await self._write_heads(tier, [part.checkpoint.run])

    def _note_sent(self, tier: str, checkpoint: CheckpointId, *, leads: bool) -> None:
        self._full.discard(tier)
        last = self._sent.get(tier)
        if last is None or last.last != checkpoint:
            self._sent[tier] = Sent(checkpoint, 0 if leads or last is None else last.others + 1)

    def _cannot_relay(self, part: PartId, tier: str, error: TierdError) -> None:
        """No other tier has all of the part right: scrubbing finds out whose copy is wrong, and repairs it."""
        self.lanes[tier].put_off(part, _STUCK)
        log.warning("%s: %s cannot be copied from another tier yet: %s", tier, part, error)
        for name in self.stores:
            if name != tier and self.tiers.has(part, name):
                self.scrubber.suspect(name, part)

    async def _prune(self, action: Prune) -> None:
        checkpoint, tier = action.checkpoint, action.tier
        if tier != SPOOL:
            await self._prune_together(action)
        else:
            low = self._free * 100 < self.config.min_free_percent  # then space is worth more than speed
            if not await self._release(checkpoint, action.reasons, reuse=not low):
                self.lanes[tier].put_off(checkpoint, _AGAIN)
                self.wake()

    async def _prune_together(self, first: Prune) -> None:
        """Delete from a tier, in one pass, a checkpoint and others of its run that retention gives up there."""
        lane, place = self.lanes[first.tier], self.tiers.places[first.tier]
        others = [one for one in plan(self.world(), self.config, {}, 0.0) if not lane.is_off(_subject(one))]
        prunes = together(first, others, place)
        before = self.world()
        try:
            gone = await self.tiers.prune([one.checkpoint for one in prunes], first.tier)
        except DeleteRefused:  # told once, as a notice; the plan does without
            gone = set()
        for one in prunes:
            if one.checkpoint in gone:
                self._full.discard(first.tier)
                self._tell_pruned(one.checkpoint, first.tier, one.reasons, before)
            else:
                lane.put_off(one.checkpoint, _STUCK)

    async def _release(self, checkpoint: CheckpointId, reasons: tuple[str, ...], *, reuse: bool = False) -> bool:
        """Delete the spool's copy of a checkpoint, if the tiers, asked once more, allow it; whether it went.

        Args:
            reuse: let whoever writes next have the blocks of its largest file.
        """
        before = self.world()
        parts = await self._covered(checkpoint)
        if parts is None or checkpoint in self.held or any(part.checkpoint == checkpoint for part in self._busy):
            return False  # or taken up while the tiers were asked; the next plan decides
        there = [part for part in parts if self.spool.has(part)]
        writers = self.writers() if reuse else frozenset[str]()
        await asyncio.to_thread(self.spool.remove, parts, writers)
        self._place = self._place.without_parts(parts)  # others of it, committed meanwhile, stay in sight
        if not reuse or writers - self.writers():  # who left meanwhile looked for it too early
            await asyncio.to_thread(self.spool.drop_recycled, self.writers() if reuse else ())
        if there:
            self._tell_pruned(checkpoint, SPOOL, reasons, before)
        return True

    def _tell_pruned(self, checkpoint: CheckpointId, tier: str, reasons: tuple[str, ...], before: World) -> None:
        """Tell of a copy that was deleted, and of a last copy that some tier wanted. `before`: the world in which its
        deletion was decided."""
        self.journal.counters["pruned"] += 1
        self.journal.tell("pruned", tier, checkpoint, "; ".join(reasons))
        seen = before.places[tier].checkpoints.get(checkpoint) if tier in before.places else None
        if not seen or not (before.silent or before.full):
            return
        if names := lost_to(self.world(), before, self.config, tier, seen):
            why = f"its last copy was deleted, and {', '.join(names)} wanted it: {'; '.join(reasons)}"
            self.journal.tell("given up", tier, checkpoint, why)

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
        if on_one:
            return parts
        world = self.world()
        if checkpoint in superseded(Demand(world, self.config, checkpoint.run)):
            others = [seen for seen in complete_here(world, checkpoint.run) if seen.id != checkpoint]
            return parts if await self._all_right(part for seen in others for part in seen.parts()) else None
        return parts if await self.tiers.are_past(checkpoint, self.world()) else None

    async def _all_right(self, parts: Iterable[PartId]) -> bool:
        """Whether the spool's copies of all these parts are right: nothing goes because of one that is rotten."""
        for part in parts:
            if not await self.scrubber.is_right(part):
                return False
        return True

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
            # Others of this lane go first meanwhile.
            if isinstance(error, DeleteRefused):
                self.lanes[tier].put_off(part, _REFUSED)
            else:
                self.lanes[tier].put_off_stuck(part, _STUCK)
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
        return (part, tier) not in self._flushes(self.world())

    def pending_prunes(self, tier: str) -> int:
        """How many copies retention has given up that are still on the tier, as last seen."""
        world = self.world()
        if world != self._given_up[0]:
            found = Counter(one.tier for one in plan(world, self.config, {}, 0.0) if isinstance(one, Prune))
            self._given_up = world, found
        return self._given_up[1][tier]

    def backlog(self, tier: str) -> tuple[int, int]:
        """`(parts, bytes)` that this daemon can send and the tier, as last seen, lacks and wants."""
        world, place = self.world(), self.tiers.places[tier]
        found = {part for run in self._runs() for part in pending(self._place, place or Place(), run)}
        if place is not None:
            sent = {part for part, name in self._flushes(world) if name == tier}
            found = (found & self._busy.keys()) | sent
        return len(found), sum(world.size_bytes(part) for part in found)


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
