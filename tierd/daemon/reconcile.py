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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tierd.core.config import Config
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
from tierd.core.event_kinds import Event, metrics_of
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.planning.demand import Demand
from tierd.core.planning.idle import SETTLED_S, is_on_the_way, pause_s
from tierd.core.planning.inventory import SPOOL, Inventory, Place, Sent, differing
from tierd.core.planning.order import leads
from tierd.core.planning.plan import (
    Action,
    Discard,
    Flush,
    Planner,
    Prune,
    RepairCopy,
    complete_here,
    evictable,
    flushes,
    is_contended,
    lost_to,
    pending,
    superseded,
)
from tierd.core.planning.pruning import PruneBacklog, together
from tierd.core.planning.unflushed import Remaining, TierTrouble, Unflushed, describe, remaining
from tierd.core.retention.policy import seconds
from tierd.daemon.pause import TierPause
from tierd.daemon.presence import Presence
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.scrub.scrubber import Scrubber
from tierd.daemon.spool_observer import SpoolObserver
from tierd.daemon.spool_space import SpoolSpace
from tierd.daemon.tier_worker import TierWorker
from tierd.daemon.tiers.heads import remembering
from tierd.daemon.tiers.prune import quarantine
from tierd.daemon.tiers.tiers import Tiers
from tierd.daemon.transfer.download import Wanted
from tierd.daemon.transfer.flush_pacing import Cadence, Spread
from tierd.daemon.transfer.memory_budget import Budget
from tierd.events.journal import Journal
from tierd.events.notices import SaveEvents
from tierd.spool.commit import CommittedPart
from tierd.spool.records import remember
from tierd.spool.spool import Spool
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")


_STUCK = 60.0  # seconds until an object that could not be sent, repaired or deleted is tried again
_REFUSED = 3600.0  # seconds until a quarantine is tried again on a tier that refuses deletions
_AGAIN = 1.0  # seconds until a local copy that no tier was found to hold is checked again; tiers are observed meanwhile
_IN_HAND = 10.0  # seconds that workers have to end their current actions when the configuration changes
_ABANDONED = 5.0  # seconds for which a stage must be unlocked before it counts as left over
_HURRY = 60.0  # seconds after `retry_now` for which no flush pauses
_LANE = "lane"  # names a tier worker as the subject of alerts
_RECENT = 600.0  # seconds for which a run counts as attended after its trainer left, because a crashed one restarts
_TAKEN_UP = 3600.0  # seconds for which an interrupted fetch of a whole part may be continued


class Reconciler:
    """Bring the spool and the tiers into the state that the configuration demands, and keep them there.

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
        self.budget = Budget()
        self._repairer = Repairer(spool, stores, self.journal, self.budget)
        self.fetching = self._repairer.fetching
        self.pause = TierPause(spool)
        self.held: Counter[CheckpointId] = Counter()
        self.needed: Counter[CheckpointId] = Counter()
        self.writers: Callable[[], frozenset[str]] = frozenset  # `PartId.writer` of each rank that will write again
        self.attended: Callable[[], bool] = lambda: True  # whether a trainer is attached
        self.interest: set[str] = set()  # runs that a trainer asked for, in addition to those in the spool
        self.asking: Counter[str] = Counter()  # requests per run that are being answered, because a tier may take long
        self.presence = Presence()
        self.cadence = Cadence()
        self.awaited: Counter[PartId] = Counter()  # parts whose flush a caller awaits
        self.room = SpoolSpace(
            spool,
            self.inventory,
            self._look_at_spool,
            self._release,
            self.wake,
            lambda world: evictable(world, self.config),
        )
        self.moved = asyncio.Condition()  # notified after every observation and every action
        self._spool_observer = SpoolObserver(spool)
        self.save_events = SaveEvents(self.journal)
        self._place = Place()
        self._free = 1.0
        self._leftovers: tuple[str, ...] = ()
        self._busy: Counter[PartId] = Counter()
        self._unlocked: dict[str, float] = {}
        self._looking = asyncio.Lock()
        self._looks_begun = self._looks_ended = 0  # observations of the spool
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
        self.scrubber = Scrubber(
            config,
            self.spool,
            stores,
            self._repairer,
            self.journal,
            self.budget,
            inventory=self.inventory,
            pause=self.pause,
            held=self.held,
            wake=self.wake,
        )
        self.workers = {name: TierWorker(name) for name in (SPOOL, *stores)}
        self._backlogs = {name: PruneBacklog() for name in stores}
        self._rest_on: dict[CheckpointId, PartId] = {}  # checkpoint whose prune waits -> copy to verify first
        self._full: set[str] = set()  # tiers that were full, and from which nothing was deleted since
        self._sent: dict[str, Sent] = {}  # by tier
        # Caches, each with its inventory. They are reset here because they depend on the configuration.
        self._planned: tuple[Inventory | None, frozenset[tuple[PartId, str]]] = None, frozenset()
        self._given_up: tuple[Inventory | None, dict[str, Counter[str]]] = None, {}

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
        async with self.moved:
            self.moved.notify_all()  # callers that wait for a tier check whether it still exists

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

    def taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        """Report that a part was committed from a trainer's memory, or that the commit failed."""
        self.save_events.taken(part, outcome)
        self.wake()

    def inventory(self) -> Inventory:
        """Return the inventory: the latest observation of all places, with holds, writers and busy parts."""
        touched, writers, finished_s = self._spool_observer.touched, self.writers(), seconds(self.config.finished)
        return Inventory(
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
        """Return the parts that some tier lacks and wants and that this daemon sends to it.

        While a tier does not answer, these are all parts that this daemon would send to it if it were empty.
        """
        return {one.part for one in self.remaining()} | set(self._busy)

    def remaining(self) -> tuple[Remaining, ...]:
        """Return the parts of `pending`, newest first, each with the tiers that have it and the tiers that lack it."""
        inventory = self.inventory()
        wanted = set(self._flushes(inventory))
        if silent := {name for name, place in inventory.tiers.items() if place is None}:
            # Assume that a tier that does not answer is empty, because its contents are unknown.
            empty = replace(inventory, tiers={name: place or Place() for name, place in inventory.tiers.items()})
            sent = flushes(empty, self.config, {}, 0.0)
            wanted |= {(flush.part, flush.tier) for flush in sent if flush.tier in silent}
        return remaining(inventory, wanted)

    def backlog_now(self) -> Unflushed:
        """Return the parts that are left to flush, and for each tier whether it accepts them."""
        tiers = {}
        for name, place in self.tiers.places.items():
            error = self.workers[name].trouble
            why, refused = (str(error), isinstance(error, StoreRefused)) if error else (None, False)
            tiers[name] = TierTrouble(reached=place is not None, error=why, refused=refused)
        return Unflushed(left=self.remaining(), tiers=tiers, paused=self.pause.until)

    @property
    def is_ready(self) -> bool:
        """Whether the spool was observed, and the daemon is not ending."""
        return self._looks_ended > 0 and not self._draining

    def describe_remaining(self) -> str:
        """Describe `remaining` in one sentence."""
        silent = [name for name, place in self.tiers.places.items() if place is None]
        return describe(self.remaining(), silent)

    def _flushes(self, inventory: Inventory) -> frozenset[tuple[PartId, str]]:
        """Return the parts that the plan would send, each with its tier; cached until the inventory changes."""
        if inventory != self._planned[0]:
            sent = self._planner.flushes(inventory, self.config)
            self._planned = inventory, frozenset((flush.part, flush.tier) for flush in sent)
        return self._planned[1]

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
                self.save_events.append_only(worker.name, self.tiers.refusal(worker.name))
            async with self.moved:
                self.moved.notify_all()
            if not self._halted.is_set() and (action is None or worker.last_error):
                cost = self.tiers.requests(worker.name) - before
                await worker.rest(min(self._rescan(worker, cost), worker.off_for, self.pause.left or math.inf))
                if (
                    worker.name == SPOOL and not self._draining
                ):  # plan once for related events such as a save and its flush
                    await asyncio.sleep(worker.pause_s)

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
                await self._look_at_spool()
                action = self._next(worker)
                if isinstance(action, Flush) and (slow or self._is_ours(action, worker.name)):
                    return action
                if action is None and (slow or after_flush):
                    return None
        await self.look(worker.name)
        if worker.name != SPOOL:
            await self._own_word(worker.name)
        return self._next(worker)

    def _is_ours(self, flush: Flush, tier: str) -> bool:
        """Whether an observation younger than `rescan` suffices to send a part.

        It does if this node has all parts of the checkpoint, so that no other node sends any, and if the observation
        covered the run.
        """
        seen = self._place.checkpoints.get(flush.part.checkpoint)
        return seen is not None and seen.complete and self.tiers.knows(tier, flush.part.checkpoint.run)

    async def _own_word(self, tier: str) -> None:
        """Remove this node's leftovers from a tier, and record there the policies and heads of the runs that it saves.

        Of a run that was only restored here, this daemon deletes nothing.
        """
        saved = sorted((self._runs() - self._place.restored) | self._place.launches.keys())
        await self.tiers.tidy(tier, saved)
        for run in saved:  # before this node's own heads adopt the tier's state
            self.save_events.rolled_back(tier, run, await self.tiers.rolled_back(tier, run, self._place))
        if not self.pause.paused:
            await self._write_heads(tier, saved)
            await self._remember(saved)
            if not self._draining:
                await self.tiers.record(tier, self.inventory(), self.config, saved)

    async def _write_heads(self, tier: str, runs: Iterable[str]) -> None:
        """Write the heads of `runs` to a tier, or leave it to the next observation if the tier refuses.

        The error is suppressed because a full tier accepts no objects, and this failure must not delay the prunes that
        empty it.
        """
        with suppress(StoreUnavailable, StoreRefused):
            await self.tiers.write_heads(tier, self.inventory(), runs)

    async def _remember(self, runs: Iterable[str]) -> None:
        """Record in the spool the launches of `runs` that any place shows."""
        inventory, urls = self.inventory(), {tier.name: tier.url for tier in self.config.tier}
        for head in [head for run in runs if (head := remembering(inventory, run, urls))]:
            try:
                await asyncio.to_thread(remember, self.spool.control, head)
            except (
                OSError,
                SpoolUnusable,
            ) as error:  # not raised: it would delay the flushes that empty a full disk
                log.warning("local: %s: where its launches came from is not remembered yet: %s", head.run, error)
                return
            self._place = self._place.with_heads(head.run, (head,))

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
        place = self.tiers.places[worker.name]
        if self.attended() or self.held or self.needed or place is None or self.pending():
            return False
        if self.tiers.has_leftovers(worker.name):  # they become old enough for removal soon
            return False
        settled = time.monotonic() - self._changed >= SETTLED_S
        return settled or not is_on_the_way(self._place, place)

    def _next(self, worker: TierWorker) -> Action | None:
        if self._halted.is_set() or (self.pause.paused and worker.name != SPOOL):
            return None
        if (flush := worker.planned()) and self._place.has(flush.part) and not self.tiers.has(flush.part, worker.name):
            return flush
        began = time.thread_time()
        backoff = {name: other.retry_at for name, other in self.workers.items()}
        actions = self._planner.plan(self.inventory(), self.config, backoff, worker.now(), worker.name)
        if worker.name != SPOOL:
            waiting = sum(isinstance(one, Prune) for one in actions)
            self.journal.waiting(worker.name, waiting, self._backlogs[worker.name].count(waiting, worker.now()))
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
        on = self._rest_on.get(action.checkpoint) if worker.name == SPOOL and isinstance(action, Prune) else None
        return worker.is_off(_subject(action)) or (on is not None and self.scrubber.rests_s(on) > 0)

    def _failed(self, worker: TierWorker, action: Action | None, error: Exception) -> None:
        self.journal.counters["errors"] += 1
        if worker.name in self.stores:
            self.tiers.failed(worker.name)
        if isinstance(error, StoreFull):
            self._full.add(worker.name)
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
        await self._look_at_spool()
        if name != SPOOL:
            before = tiers.places[name]
            await tiers.look(name, self._runs() | self.interest, self._place.ranks)
            if tiers is not self.tiers:  # the configuration changed meanwhile
                return
            self._tell_durable(name)
            self.save_events.launches(self.inventory())
            self.save_events.unvouched(name, self.inventory())
            if tiers.places[name] != before:
                self._changed = time.monotonic()
                self.workers[SPOOL].wake.set()  # because a tier's contents decide which local copies may be deleted

    def _runs(self) -> set[str]:
        return self._place.runs.keys() | self._place.launches.keys()

    async def _look_at_spool(self) -> None:
        """Observe the spool afresh; callers that ask during an observation share the next one."""
        asked = self._looks_begun
        async with self._looking:
            if self._looks_ended > asked:
                return
            self._looks_begun += 1
            begun, before = self._looks_begun, self._place
            place = await asyncio.to_thread(self._spool_observer.look)
            free, total = self.spool.free()
            self._free = free / total if total else 1.0
            self._leftovers = self._aged(await asyncio.to_thread(self.spool.leftovers, self._spool_observer.childless))
            self._place = place  # assigned last, because every call before it may fail
            self._looks_ended = begun
            self._lose_interest()
            self.save_events.came(place)
            self.save_events.launches(self.inventory())
            for name in self.tiers.places:
                self._tell_durable(name)
            differ = differing(before.checkpoints, place.checkpoints)
            if changed := [one for one in differ if _parts_of(place, one) != _parts_of(before, one)]:
                self.cadence.saw({part for one in changed for part in _new_parts(before, place, one)})
                self.cadence.keep(self._runs())
                self.wake()

    def _lose_interest(self) -> None:
        """Stop observing runs of which the spool has nothing and for which nobody asked lately."""
        unheld = dict.fromkeys(self.interest - self._runs() - self.asking.keys())
        self.interest -= self.presence.quiet(unheld, self.writers(), seconds(self.config.finished))

    def _tell_durable(self, tier: str) -> None:
        self.save_events.durable(tier, self._place, self.tiers.places)

    def _aged(self, names: list[str]) -> tuple[str, ...]:
        # A stage is unlocked for a moment after its creation, so it is left over only if it stays unlocked.
        now = time.monotonic()
        self._unlocked = {name: self._unlocked.get(name, now) for name in names}
        return tuple(name for name, since in self._unlocked.items() if now - since >= self._patience(name))

    def _patience(self, name: str) -> float:
        # An interrupted fetch is kept so that it can be continued, unless the disk needs its bytes.
        low = self._free * 100 < self.config.min_free_percent
        done = name.startswith("fetch/") and any(
            name == f"fetch/{self.spool.fetching(part).name}" for part in self._place.parts()
        )
        loose = name.removeprefix("fetch/") in self._repairer.loose
        return _TAKEN_UP if name.startswith("fetch/") and not low and not done and not loose else _ABANDONED

    # -- acting -----------------------------------------------------------------------------------------------------

    async def _act(self, action: Action) -> None:
        match action:
            case Flush(part, tier, relayed):
                await self._flush(part, tier, relayed=relayed)
            case Prune():
                await self._prune(action)
            case RepairCopy(part, tier):
                await self._mend(part, tier)
            case Discard(name):
                await asyncio.to_thread(self.spool.discard, name)
                log.info("local: discarded %s", name)

    async def _flush(self, part: PartId, tier: str, *, relayed: bool = False) -> None:
        self._busy[part] += 1
        begun, place = time.monotonic(), self.tiers.places[tier]
        aloud = is_contended(self.inventory(), tier, part)
        send = self.tiers.relay if relayed else self.tiers.flush_aloud if aloud else self.tiers.flush
        # Before the flush, because newer checkpoints appear while the part is sent.
        leading = place is None or leads(part.checkpoint, self._place, place)
        if relayed:
            self.save_events.relayed(tier, part)
        try:
            done = await send(part, tier, self._spread(part, tier))
        except ObjectNotFound:
            if relayed:
                self.workers[tier].put_off(part, _STUCK)  # until the other tiers were observed again
            return  # removed from the spool since the observation
        except (CorruptChunk, ManifestError) as error:
            if relayed:
                self._cannot_relay(part, tier, error)
                return
            self.journal.counters["corruptions"] += 1
            self.journal.tell("corrupt", SPOOL, part, str(error))
            await self._mend(part, SPOOL, counted=True)
            return
        except (OSError, StoreRefused):  # this part's disk fails or the tier refuses it: send others first
            self.workers[tier].put_off_stuck(part, _STUCK)
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
        more: dict[str, Any] = {**sizes, "metrics": metrics_of(done.facts.metrics)}
        self.journal.tell("flushed", tier, part, told, **more, seconds=round(time.monotonic() - begun, 3))
        self._tell_durable(tier)
        await self._write_heads(tier, [part.checkpoint.run])

    def _spread(self, part: PartId, tier: str) -> Spread:
        """Return the pauses of a flush: none if the tier lacks other parts too, because the tier would fall behind."""

        def hurries() -> bool:
            newer = any(seen.id > part.checkpoint for seen in self._place.copies(part.checkpoint.run))
            asked = self.awaited[part] or part.checkpoint in self.needed or time.monotonic() - self._hurried < _HURRY
            ends = self._draining or self._halted.is_set() or not self.attended()
            return newer or bool(asked) or ends or self._free * 100 < self.config.min_free_percent

        lacking = sum(name == tier for _, name in self._flushes(self.inventory()))
        return Spread(self.cadence.spread_s(part.checkpoint.run) if lacking <= 1 else 0.0, hurries)

    def _note_sent(self, tier: str, checkpoint: CheckpointId, *, leads: bool) -> None:
        self._full.discard(tier)
        last = self._sent.get(tier)
        if last is None or last.last != checkpoint:
            self._sent[tier] = Sent(checkpoint, 0 if leads or last is None else last.others + 1)

    def _cannot_relay(self, part: PartId, tier: str, error: TierdError) -> None:
        """Put a relay off because no other tier has an intact copy of the whole part, and have those copies scrubbed.

        The scrub finds out which copies are corrupt, and repairs them.
        """
        self.workers[tier].put_off(part, _STUCK)
        log.warning("%s: %s cannot be copied from another tier yet: %s", tier, part, error)
        for name in self.stores:
            if name != tier and self.tiers.has(part, name):
                self.scrubber.suspect(name, part)

    async def _prune(self, action: Prune) -> None:
        checkpoint, tier = action.checkpoint, action.tier
        if tier != SPOOL:
            await self._prune_together(action)
        else:
            # On a full disk, free space matters more than fast writes into recycled blocks.
            low = self._free * 100 < self.config.min_free_percent
            self._rest_on.pop(checkpoint, None)
            if not await self._release(checkpoint, action.reasons, reuse=not low):
                self.workers[tier].put_off(checkpoint, _AGAIN)
                self.wake()

    async def _prune_together(self, first: Prune) -> None:
        """Delete a checkpoint from a tier in one pass with others of its run that retention gives up there."""
        worker, place = self.workers[first.tier], self.tiers.places[first.tier]
        others = self._planner.plan(self.inventory(), self.config, {}, 0.0, first.tier)
        others = tuple(one for one in others if not worker.is_off(_subject(one)))
        prunes = together(first, others, place)
        before = self.inventory()
        try:
            gone = await self.tiers.prune([one.checkpoint for one in prunes], first.tier)
        except DeleteRefused:  # reported once by `SaveEvents.append_only`; later plans omit these prunes
            gone = set()
        for one in prunes:
            if one.checkpoint in gone:
                self._full.discard(first.tier)
                self._tell_pruned(one.checkpoint, first.tier, one.reasons, before)
            else:
                worker.put_off(one.checkpoint, _STUCK)

    async def _release(self, checkpoint: CheckpointId, reasons: tuple[str, ...], *, reuse: bool = False) -> bool:
        """Delete the spool's copy of a checkpoint if the tiers, asked once more, allow it.

        Args:
            reuse: keep the blocks of the copy's largest file for the next write.

        Returns:
            Whether the copy was deleted.
        """
        before = self.inventory()
        parts = await self._covered(checkpoint)
        if parts is None or checkpoint in self.held or any(part.checkpoint == checkpoint for part in self._busy):
            return False  # held or flushed since the tiers were asked; the next plan decides
        there = [part for part in parts if self.spool.has(part)]
        writers = self.writers() if reuse else frozenset[str]()
        await asyncio.to_thread(self.spool.remove, parts, writers)
        self._place = self._place.without_parts(parts)  # parts committed meanwhile remain in the inventory
        if not reuse or writers - self.writers():  # a writer that left meanwhile cleaned up before this file existed
            await asyncio.to_thread(self.spool.drop_recycled, self.writers() if reuse else ())
        if there:
            self._tell_pruned(checkpoint, SPOOL, reasons, before)
        return True

    def _tell_pruned(self, checkpoint: CheckpointId, tier: str, reasons: tuple[str, ...], before: Inventory) -> None:
        """Report a deleted copy, and report separately if it was the last copy and some tier wanted it.

        Args:
            before: the inventory on which the deletion was decided.
        """
        self.journal.counters["pruned"] += 1
        self.journal.tell("pruned", tier, checkpoint, "; ".join(reasons))
        seen = before.places[tier].checkpoints.get(checkpoint) if tier in before.places else None
        if not seen or not (before.silent or before.full):
            return
        if names := lost_to(self.inventory(), before, self.config, tier, seen):
            why = f"its last copy was deleted, and {', '.join(names)} wanted it: {'; '.join(reasons)}"
            self.journal.tell("given up", tier, checkpoint, why)

    async def _covered(self, checkpoint: CheckpointId) -> tuple[PartId, ...] | None:
        """Observe the tiers once more before a local copy is deleted, and return the parts that may be deleted.

        These are the parts for which the tiers were asked, if one tier holds them all or no tier wants them any more;
        otherwise None. Parts that another rank commits meanwhile are not among them.
        """
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
        inventory = self.inventory()
        if checkpoint in superseded(Demand(inventory, self.config, checkpoint.run)):
            others = [seen for seen in complete_here(inventory, checkpoint.run) if seen.id != checkpoint]
            newer = [part for seen in others for part in seen.parts()]
            return parts if await self._all_right(checkpoint, newer) else None
        return parts if await self.tiers.are_past(checkpoint, self.inventory()) else None

    async def _all_right(self, checkpoint: CheckpointId, parts: Iterable[PartId]) -> bool:
        """Whether the spool's copies of `parts`, the reason for which `checkpoint` may be deleted, are intact.

        Invariant: no copy is deleted because of another copy that is corrupt.
        """
        for part in parts:
            if not await self.scrubber.is_right(part):
                self._rest_on[checkpoint] = part
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
            pass  # reported and quarantined by `fetch`; or deleted meanwhile
        except TierdError as error:
            # Put the part off so that the worker acts on others first.
            if isinstance(error, DeleteRefused):
                self.workers[tier].put_off(part, _REFUSED)
            else:
                self.workers[tier].put_off_stuck(part, _STUCK)
            if tier == SPOOL:
                raise
            log.warning("%s: %s cannot be mended yet: %s", tier, part, error)  # the other tier's worker backs off

    async def fetch(self, part: PartId, *, counted: bool = False, wanted: Wanted | None = None) -> tuple[str, ...]:
        """Repair the spool's copy of `part`, or fetch some of it, as `Repairer.heal` does; then observe the spool."""
        self.save_events.fetched(part)
        try:
            return await self._repairer.heal(part, counted=counted, wanted=wanted)
        finally:
            self._spool_observer.doubt(part.checkpoint)  # its manifest may have been replaced
            self.wake()

    def hold(self, part: PartId) -> None:
        """Keep all parts of the part's checkpoint in the spool until `release`, for a restore from the part."""
        self.held[part.checkpoint] += 1
        self._repairer.hold(part)

    def release(self, part: PartId) -> None:
        self.held -= Counter([part.checkpoint])
        self._repairer.release(part)

    def is_retired(self, part: PartId, tier: str) -> bool:
        """Whether the tier, as last observed, lacks a part and will not get it because no place has or wants it."""
        if self.tiers.places[tier] is None or self._busy[part]:
            return False
        if self._place.lists(part) and not self._place.has(part):
            return False  # it is first repaired or quarantined
        return (part, tier) not in self._flushes(self.inventory())

    def pending_prunes(self, tier: str) -> Counter[str]:
        """By run, how many copies retention has given up that are still on the tier, as last observed."""
        inventory = self.inventory()
        if inventory != self._given_up[0]:
            actions = self._planner.plan(inventory, self.config, {}, 0.0)
            prunes = [one for one in actions if isinstance(one, Prune)]
            found = {name: Counter(one.checkpoint.run for one in prunes if one.tier == name) for name in self.stores}
            self._given_up = inventory, found
        return self._given_up[1].get(tier, Counter())

    def backlog(self, tier: str) -> dict[PartId, int]:
        """Return the parts that this daemon can send and that the tier, as last observed, lacks and wants, each with
        its size in bytes.
        """
        inventory, place = self.inventory(), self.tiers.places[tier]
        found = {part for run in self._runs() for part in pending(self._place, place or Place(), run)}
        if place is not None:
            sent = {part for part, name in self._flushes(inventory) if name == tier}
            found = (found & self._busy.keys()) | sent
        return {part: inventory.size_bytes(part) for part in found}


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
