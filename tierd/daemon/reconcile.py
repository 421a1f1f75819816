"""The reconciler: observe, plan, act. Each place has its own worker, so that a tier that is down delays only itself.

Invariant: the spool and the tiers hold the only truth; the daemon keeps no database that could disagree with them.
A worker observes its place, takes the plan's first action for that place, performs it, and observes again. Events only
shorten the wait between observations. Every failure ends in a backoff of the place's worker and shows in `status`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping

from tierd.core.config import Config
from tierd.core.errors import (
    CorruptChunk,
    DeleteRefused,
    ObjectNotFound,
    StoreFull,
    StoreRefused,
    TierdError,
    is_exhausted,
)
from tierd.core.event_kinds import Event
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.actions import Action, Discard, Flush, Prune, RepairCopy
from tierd.core.planning.copies import differing
from tierd.core.planning.eviction import evictable
from tierd.core.planning.flush_candidates import is_contended
from tierd.core.planning.idle import SETTLED_S, is_on_the_way, pause_s
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Place
from tierd.core.planning.plan import Planner
from tierd.core.planning.pruning import PruneBacklog
from tierd.core.planning.unflushed import Remaining
from tierd.core.retention.policy import seconds
from tierd.daemon.pause import TierPause
from tierd.daemon.reconciling.backlog import Backlog
from tierd.daemon.reconciling.flusher import Flusher
from tierd.daemon.reconciling.live_inventory import LiveInventory
from tierd.daemon.reconciling.pruner import Pruner
from tierd.daemon.reconciling.records import RunRecords
from tierd.daemon.reconciling.requests import ClientRequests
from tierd.daemon.reconciling.setup import Setup
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.scrub.scrubber import Scrubber
from tierd.daemon.spool_space import SpoolSpace
from tierd.daemon.tier_worker import TierWorker
from tierd.daemon.tiers.tiers import Tiers
from tierd.daemon.transfer.download import Progress, Wanted
from tierd.daemon.transfer.memory_budget import Budget
from tierd.events.journal import Journal
from tierd.events.notices import SaveEvents
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")


_REFUSED = 3600.0  # seconds until a quarantine is tried again on a tier that refuses deletions
_IN_HAND = 10.0  # seconds that workers have to end their current actions when the configuration changes
_HURRY = 60.0  # seconds after `retry_now` for which no flush pauses
_LANE = "lane"  # names a tier worker as the subject of alerts


class Reconciler:
    """Bring the spool and the tiers into the state that the configuration demands, and keep them there.

    Attributes:
        config: the configuration that holds now.
        spool: the local tier.
        stores: tier name -> open store, in order of preference.
        tiers: the tiers, as last observed.
        workers: by place, the state of its worker.
        scrubber: verifies copies again.
        backlog: what is left to flush and to prune.
        requests: the requests of clients.
        room: frees space in the spool.
        pause: whether the tiers are paused.
        journal: the events, alerts and counters.

    Args:
        config: the desired policies, tiers and limits.
        spool: the local tier, already locked for this daemon.
        stores: tier name -> open store, in order of preference.
        told: callback that gets every event as it happens.
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
        self.pause = TierPause(spool)
        self.requests = ClientRequests()
        self._budget = Budget()
        self._repairer = Repairer(spool, stores, self.journal, self._budget)
        self._live = LiveInventory(spool, self.requests, self._repairer, self._spool_seen)
        self.room = SpoolSpace(
            spool,
            self.inventory,
            self._live.look,
            lambda checkpoint, reasons: self._pruner.release(checkpoint, reasons),
            self.wake,
            lambda inventory: evictable(inventory, self.config),
        )
        self._save_events = SaveEvents(self.journal)
        self._moved = asyncio.Condition()  # notified after every observation and every action
        self._draining = False
        self._hurried = -math.inf  # when `retry_now` was last called, monotonic seconds
        self._changed = time.monotonic()  # when a tier's inventory last changed, monotonic seconds
        self._planner = Planner()
        self._random = random.Random()  # noqa: S311  # jitter
        self._halted = asyncio.Event()  # workers begin no further action, because the configuration changes
        self._next_config: tuple[Config, Mapping[str, Store], asyncio.Event] | None = None
        self._configure(config, stores)

    def _configure(self, config: Config, stores: Mapping[str, Store]) -> None:
        """Switch to a configuration; no worker runs meanwhile. Restores under way continue with the old stores."""
        self.config = config
        self.stores = stores
        self._repairer.use(stores)
        self.tiers = Tiers(config, self.spool, stores, self.pause)
        self._live.use(config, self.tiers)
        self.scrubber = Scrubber(
            config,
            self.spool,
            stores,
            self._repairer,
            self.journal,
            self._budget,
            inventory=self.inventory,
            pause=self.pause,
            held=self.requests.held,
            wake=self.wake,
        )
        self.workers = {name: TierWorker(name) for name in (SPOOL, *stores)}
        self._prunes_left = {name: PruneBacklog() for name in stores}
        setup = Setup(
            config=config,
            spool=self.spool,
            stores=stores,
            tiers=self.tiers,
            scrubber=self.scrubber,
            workers=self.workers,
            live=self._live,
            requests=self.requests,
            planner=self._planner,
            journal=self.journal,
            save_events=self._save_events,
            pause=self.pause,
            wake=self.wake,
        )
        self.backlog = Backlog(setup)
        self._records = RunRecords(setup, lambda: self._draining)
        self._flusher = Flusher(setup, self.backlog, self._records, self._hurries, self._repair_in_spool)
        self._pruner = Pruner(setup)

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._run_worker(worker)) for worker in self.workers.values()]
                scrubbing = group.create_task(self.scrubber.run())
                await self._halted.wait()
                scrubbing.cancel()
                await asyncio.wait(workers, timeout=_IN_HAND)
                for task in workers:
                    task.cancel()  # safe: the next try does not send chunks again that are on the tier
            assert self._next_config is not None
            config, stores, done = self._next_config
            for name in self.workers.keys() - {SPOOL, *stores}:
                self.journal.worked((_LANE, name))  # end the alert of a tier that was removed
            self._configure(config, stores)
            self._halted.clear()
            done.set()

    async def reconfigure(self, config: Config, stores: Mapping[str, Store]) -> None:
        """Switch to another configuration of the same spool; return when the switch is complete.

        Actions in progress get `_IN_HAND` seconds to end, then they are cancelled. Hand-offs and restores under way are
        not disturbed.

        Args:
            config: the new configuration.
            stores: tier name -> open store. The old stores are used until every request under way has ended.
        """
        done = asyncio.Event()
        self._next_config = config, stores, done
        self._halted.set()
        self.retry_now()
        await done.wait()
        async with self._moved:
            self._moved.notify_all()  # callers that wait for a tier check whether it still exists

    def wake(self) -> None:
        """Make every worker observe its place again soon, because something may have changed."""
        for worker in self.workers.values():
            worker.wake.set()

    def retry_now(self) -> None:
        """End every backoff and observe again; flushes make no pauses for the next `_HURRY` seconds."""
        self._hurried = time.monotonic()
        for worker in self.workers.values():
            worker.retry_now()
        self.wake()

    async def drain(self, timeout: float) -> tuple[Remaining, ...]:
        """Continue to flush, newest parts first, for at most `timeout` seconds; begin no other action any more.

        A paused daemon returns at once, because pending parts wait for the next daemon.

        Returns:
            The parts that some tier still lacks.
        """
        self._draining = self.scrubber.resting = True
        await self._live.look()
        self.retry_now()
        try:
            async with asyncio.timeout(timeout):
                await self.until(lambda: self.pause.paused or not self.backlog.parts())
        except TimeoutError:
            pass
        left = self.backlog.remaining()
        if left:
            why = "paused" if self.pause.paused else "drain time is up"
            log.warning("%s: %s", why, self.backlog.describe())
        return left

    def taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        """Report that a part was committed from a trainer's memory, or that the commit failed."""
        self._save_events.taken(part, outcome)
        self.wake()

    def given_up(self, part: PartId, why: str) -> None:
        """Report that a trainer gave up a save."""
        self._save_events.given_up(part, why)

    def inventory(self) -> Inventory:
        """Return the latest observation of all places, with holds, writers and busy parts."""
        return self._live.inventory()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. It is checked after every observation and every action."""
        async with self._moved:
            await self._moved.wait_for(condition)

    async def _run_worker(self, worker: TierWorker) -> None:
        while not self._halted.is_set():
            worker.wake.clear()
            action = None
            before = self.tiers.requests(worker.name)
            try:
                action = await self._look_and_plan(worker)
                if action is not None:
                    worker.doing = _describe(action)
                    worker.sent = isinstance(action, Flush)  # first, so a failing prune blocks no flush
                    await self._act(action)
                    self.wake()
                    worker.has_flushed = worker.sent
                worker.succeeded()
                self._worked(worker, action)
            except Exception as error:  # a worker never ends: it logs unknown errors with a traceback, and retries
                self._failed(worker, action, error)
            finally:
                worker.doing = None
                self._save_events.append_only(worker.name, self.tiers.refusal(worker.name))
            async with self._moved:
                self._moved.notify_all()
            if not self._halted.is_set() and (action is None or worker.last_error):
                cost = self.tiers.requests(worker.name) - before
                await worker.rest(min(self._rescan(worker, cost), worker.off_for, self.pause.left or math.inf))
                if worker.name == SPOOL and not self._draining:
                    await asyncio.sleep(worker.pause_s)  # plan once for related events such as a save and its flush

    async def _look_and_plan(self, worker: TierWorker) -> Action | None:
        """Observe, and return the worker's next action.

        Where other nodes may send parts of another checkpoint than this node's newest, their choice counts. The reason
        is that a checkpoint is useful only when all its parts are on the tier.
        """
        action = await self._look_and_plan_alone(worker)
        if isinstance(action, Flush) and is_contended(self.inventory(), worker.name, action.part):
            await self.tiers.hear(worker.name, action.part.checkpoint.run)
            return self._next(worker)
        return action

    async def _look_and_plan_alone(self, worker: TierWorker) -> Action | None:
        """Observe, and return the worker's next action, without asking what other nodes send.

        Where an observation takes long, an earlier one suffices to send parts; every other action needs a fresh one.
        """
        if worker.name != SPOOL:
            slow, after_flush = self.tiers.good_for(worker.name), worker.has_flushed
            worker.has_flushed = False
            # After a failure observe afresh, because the object may have arrived there or may be a known defect by now.
            recent = worker.last_error is None and self.tiers.age_s(worker.name) < seconds(self.config.rescan)
            if slow or recent:
                await self._live.look()
                action = self._next(worker)
                if isinstance(action, Flush) and (slow or self._is_ours(action, worker.name)):
                    return action
                if action is None and (slow or after_flush):
                    return None
        await self.look(worker.name)
        if worker.name != SPOOL:
            await self._records.bring_up_to_date(worker.name)
        return self._next(worker)

    def _is_ours(self, flush: Flush, tier: str) -> bool:
        """Whether an observation younger than `rescan` suffices to send a part.

        It does if this node has all parts of the checkpoint, so that no other node sends any, and if the observation
        covered the run.
        """
        seen = self._live.place.checkpoints.get(flush.part.checkpoint)
        return seen is not None and seen.complete and self.tiers.knows(tier, flush.part.checkpoint.run)

    def _rescan(self, worker: TierWorker, cost: int) -> float:
        """Seconds until the worker observes its place again without being woken.

        The interval grows with the duration of an observation and, while the daemon is at rest, with the number of
        requests that it cost.
        """
        rescan = seconds(self.config.rescan)
        if worker.name == SPOOL:
            return rescan
        rescan = max(rescan, self.tiers.good_for(worker.name))
        return pause_s(rescan, cost, len(self.stores)) if self._is_at_rest(worker) else rescan

    def _is_at_rest(self, worker: TierWorker) -> bool:
        """Whether nobody trains or restores here, and nothing is left to do or expected to arrive."""
        place, requests = self.tiers.places[worker.name], self.requests
        if requests.attended() or requests.held or requests.needed or place is None or self.backlog.parts():
            return False
        if self.tiers.has_leftovers(worker.name):  # they become old enough for removal soon
            return False
        settled = time.monotonic() - self._changed >= SETTLED_S
        return settled or not is_on_the_way(self._live.place, place)

    def _next(self, worker: TierWorker) -> Action | None:
        if self._halted.is_set() or (self.pause.paused and worker.name != SPOOL):
            return None
        place = self._live.place
        if (flush := worker.planned()) and place.has(flush.part) and not self.tiers.has(flush.part, worker.name):
            return flush
        began = time.thread_time()
        backoff = {name: other.retry_at for name, other in self.workers.items()}
        actions = self._planner.plan(self.inventory(), self.config, backoff, worker.now(), worker.name)
        if worker.name != SPOOL:
            waiting = sum(isinstance(one, Prune) for one in actions)
            self.journal.waiting(worker.name, waiting, self._prunes_left[worker.name].count(waiting, worker.now()))
        own = [
            action
            for action in actions
            if not self._rests(worker, action) and (isinstance(action, Flush) or not self._draining)
        ]
        # Prune after each sent part, because where saves outrun flushes there is always another part to send.
        prunes = [action for action in own if isinstance(action, Prune)] if worker.sent else []
        ours = [one for one in own if isinstance(one, Flush) and not one.relayed and self._is_ours(one, worker.name)]
        worker.plan_ahead(ours[1:] if len(ours) == len(own) else (), time.thread_time() - began)
        return next(iter(prunes or own), None)

    def _rests(self, worker: TierWorker, action: Action) -> bool:
        """Whether an action is deferred: its subject was put off, or a copy that it needs cannot be read for now."""
        return worker.is_off(_subject(action)) or (isinstance(action, Prune) and self._pruner.rests(action))

    def _failed(self, worker: TierWorker, action: Action | None, error: Exception) -> None:
        self.journal.counters["errors"] += 1
        if worker.name in self.stores:
            self.tiers.failed(worker.name)
        if isinstance(error, StoreFull):
            self._live.full.add(worker.name)
        delay = worker.failed(error, self._random, long=isinstance(error, StoreRefused))
        doing = _describe(action) if action else "looking"
        known = isinstance(error, TierdError | OSError) or is_exhausted(error)
        log.warning("%s: %s failed, again in %.0f s: %s", worker.name, doing, delay, error, exc_info=not known)
        self.journal.failed((_LANE, worker.name), _doing(action), worker.name, _subject(action), str(error))

    def _worked(self, worker: TierWorker, action: Action | None) -> None:
        thing = (_LANE, worker.name)
        self.journal.worked(thing, _subject(None), others=False)
        if action is not None:
            self.journal.worked(thing, _subject(action))
        elif not self.pause.paused and not self._draining and worker.off_for == math.inf:
            self.journal.worked(thing)  # no failed action is left to retry

    # -- observing --------------------------------------------------------------------------------------------------

    async def look(self, name: str) -> None:
        """Observe one place afresh; a tier that does not answer becomes unknown, and its error is raised."""
        tiers = self.tiers
        await self._live.look()
        if name != SPOOL:
            before = tiers.places[name]
            await tiers.look(name, self._live.runs() | self.requests.interest, self._live.place.ranks)
            if tiers is not self.tiers:  # the configuration changed meanwhile
                return
            self._save_events.durable(name, self._live.place, tiers.places)
            self._save_events.launches(self.inventory())
            self._save_events.unvouched(name, self.inventory())
            if tiers.places[name] != before:
                self._changed = time.monotonic()
                self.workers[SPOOL].wake.set()  # because a tier's contents decide which local copies may be deleted

    def _spool_seen(self, before: Place) -> None:
        """Report what an observation of the spool shows, and wake the workers if parts came or went."""
        place = self._live.place
        self.requests.lose_interest(self._live.runs(), seconds(self.config.finished))
        self._save_events.came(place)
        self._save_events.launches(self.inventory())
        for name in self.tiers.places:
            self._save_events.durable(name, place, self.tiers.places)
        differ = differing(before.checkpoints, place.checkpoints)
        if changed := [one for one in differ if _parts_of(place, one) != _parts_of(before, one)]:
            self._live.cadence.saw({part for one in changed for part in _new_parts(before, place, one)})
            self._live.cadence.keep(self._live.runs())
            self.wake()

    # -- acting -----------------------------------------------------------------------------------------------------

    async def _act(self, action: Action) -> None:
        match action:
            case Flush(part, tier, relayed):
                await self._flusher.flush(part, tier, relayed=relayed)
            case Prune():
                await self._pruner.prune(action)
            case RepairCopy(part, tier):
                await self._repair(part, tier)
            case Discard(name):
                await asyncio.to_thread(self.spool.discard, name)
                log.info("local: discarded %s", name)

    def _hurries(self) -> bool:
        """Whether flushes make no pauses."""
        return self._draining or self._halted.is_set() or time.monotonic() - self._hurried < _HURRY

    async def _repair_in_spool(self, part: PartId) -> None:
        """Repair the spool's copy of a part whose corruption was counted."""
        await self._repair(part, SPOOL, counted=True)

    async def _repair(self, part: PartId, tier: str, *, counted: bool = False) -> None:
        try:
            if tier == SPOOL:
                await self.fetch(part, counted=counted)
            else:
                await self._repairer.rebuild(tier, part, "its manifest is corrupt")
        except (CorruptChunk, ObjectNotFound):
            pass  # reported and quarantined by `fetch`; or deleted meanwhile
        except TierdError as error:
            # Put the part off so that the worker acts on others first.
            if isinstance(error, DeleteRefused):
                self.workers[tier].put_off(part, _REFUSED)
            else:
                self.workers[tier].put_off_stuck(part)
            if tier == SPOOL:
                raise
            log.warning("%s: %s cannot be mended yet: %s", tier, part, error)  # the other tier's worker backs off

    async def fetch(self, part: PartId, *, counted: bool = False, wanted: Wanted | None = None) -> tuple[str, ...]:
        """Repair the spool's copy of `part`, or fetch some of it, as `Repairer.heal` does; then observe the spool."""
        self._save_events.fetched(part)
        try:
            return await self._repairer.heal(part, counted=counted, wanted=wanted)
        finally:
            self._live.doubt(part.checkpoint)  # its manifest may have been replaced
            self.wake()

    def progress(self, part: PartId) -> Progress | None:
        """Return the progress of a part's fetch or repair; None if there is none."""
        return self._repairer.fetching.get(part)

    def hold(self, part: PartId) -> None:
        """Keep all parts of the part's checkpoint in the spool until `release`, for a restore from the part."""
        self.requests.held[part.checkpoint] += 1
        self._repairer.hold(part)

    def release(self, part: PartId) -> None:
        self.requests.held -= Counter([part.checkpoint])
        self._repairer.release(part)


def _parts_of(place: Place, one: CheckpointId) -> Mapping[int, frozenset[int]] | None:
    seen = place.checkpoints.get(one)
    return seen.ranks if seen else None


def _new_parts(before: Place, place: Place, one: CheckpointId) -> set[PartId]:
    was, now = before.checkpoints.get(one), place.checkpoints.get(one)
    return (set(now.parts()) if now else set()) - (set(was.parts()) if was else set())


def _describe(action: Action) -> str:
    match action:
        case Flush(part):
            return f"flushing {part}"
        case Prune(checkpoint):
            return f"pruning {checkpoint}"
        case RepairCopy(part):
            return f"mending {part}"
        case Discard(name):
            return f"discarding {name}"


def _doing(action: Action | None) -> str:
    return type(action).__name__.lower() if action else "look"


def _subject(action: Action | None) -> PartId | CheckpointId | str:
    match action:
        case Flush(part) | RepairCopy(part):
            return part
        case Prune(checkpoint):
            return checkpoint
        case Discard(name):
            return name
        case None:
            return "looking"
