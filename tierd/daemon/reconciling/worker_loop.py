"""The loop of one tier worker: choose the next action for its place, perform it, wait, and observe again.

A place is observed as freshly as the action demands. Invariant: a loop never ends by an error. Every failure ends in a
backoff of the place's worker and shows in `status`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from tierd.core.errors import StoreFull, StoreRefused, TierdError, is_exhausted
from tierd.core.planning.background_schedule import ARRIVAL_TIMEOUT_S, is_arriving, listing_pause_s
from tierd.core.planning.flush_order import is_contended
from tierd.core.planning.place import SPOOL, Action, Discard, Flush, Prune, RepairCopy
from tierd.core.planning.prune_batches import PruneBacklog
from tierd.core.retention.policy import parse_duration
from tierd.daemon.reconciling.flusher import Backlog, Flusher, RunRecords
from tierd.daemon.reconciling.pruner import Pruner
from tierd.daemon.reconciling.reconciler_context import LiveInventory
from tierd.daemon.reconciling.repairs import Repairs
from tierd.daemon.reconciling.tier_worker import TierWorker, action_subject, action_verb, describe_action
from tierd.daemon.tiers.tier_operations import TierOperations
from tierd.daemon.transfer.tier_flushes import TierFlushes
from tierd.events.journal import Journal
from tierd.events.save_events import SaveEvents

log = logging.getLogger("tierd.daemon")

WORKER = "worker"  # names a tier worker as the subject of alerts


@dataclass(eq=False)
class NextAction:
    """Choose each worker's next action, and when it observes its place again."""

    live: LiveInventory
    tiers: TierOperations
    flushes: TierFlushes
    workers: Mapping[str, TierWorker]
    journal: Journal
    backlog: Backlog
    records: RunRecords
    pruner: Pruner
    observe: Callable[[str], Awaitable[None]]
    _prunes_left: dict[str, PruneBacklog] = field(default_factory=lambda: defaultdict(PruneBacklog))  # by tier

    async def next_action(self, worker: TierWorker) -> Action | None:
        """Observe, and return the worker's next action.

        Where other nodes may send parts of another checkpoint than this node's newest, their choice counts. The reason
        is that a checkpoint is useful only when all its parts are on the tier.
        """
        action = await self._observe_and_plan(worker)
        if isinstance(action, Flush) and is_contended(self.live.inventory(), worker.name, action.part):
            await self.flushes.observe_announcements(worker.name, action.part.checkpoint.run)
            return self._next(worker)
        return action

    async def _observe_and_plan(self, worker: TierWorker) -> Action | None:
        """Observe, and return the worker's next action, without asking what other nodes send.

        Where an observation takes long, an earlier one suffices to send parts; every other action needs a fresh one.
        A sparing observation of the spool suffices to send parts, too, and to find that there is nothing to do.
        """
        tiers = self.tiers
        if worker.name != SPOOL:
            slow, after_flush = tiers.observed.send_validity_s(worker.name), worker.has_flushed
            worker.has_flushed = False
            # After a failure observe afresh, because the object may have arrived there or may be a known defect by now.
            age_s = tiers.observed.age_s(worker.name)
            recent = worker.last_error is None and age_s < parse_duration(self.live.config.rescan)
            if slow or recent:
                await self.live.observe(sparing=True)
                action = self._next(worker)
                suffices = slow and isinstance(action, Flush) and self._was_observed_for(action, worker.name)
                if isinstance(action, Flush) and (suffices or self._is_safe_to_send(action, worker.name)):
                    return action
                if action is None and (slow or after_flush):
                    return None
        elif worker.last_error is None:
            await self.live.observe(sparing=True)
            if self._next(worker) is None:
                return None
        await self.observe(worker.name)
        if worker.name != SPOOL:
            await self.records.bring_up_to_date(worker.name)
        return self._next(worker)

    def _was_observed_for(self, flush: Flush, tier: str) -> bool:
        """Whether a relay's run was observed on the tier, where another node may have the run in its care."""
        return not flush.relayed or self.tiers.observed.has_observed_run(tier, flush.part.checkpoint.run)

    def _is_safe_to_send(self, flush: Flush, tier: str) -> bool:
        """Whether an observation younger than `rescan` suffices to send a part.

        It does if this node has all parts of the checkpoint, so that no other node sends any, and if the observation
        covered the run.
        """
        copy = self.live.place.checkpoints.get(flush.part.checkpoint)
        return (
            copy is not None and copy.complete and self.tiers.observed.has_observed_run(tier, flush.part.checkpoint.run)
        )

    def _next(self, worker: TierWorker) -> Action | None:
        live, phase = self.live, self.live.run_mode
        if phase.halted.is_set() or (phase.pause.paused and worker.name != SPOOL):
            return None
        planned = worker.planned()
        if planned and live.place.has(planned.part) and not self.tiers.observed.has(planned.part, worker.name):
            return planned
        began = time.thread_time()
        backoff = {name: tier_worker.retry_at for name, tier_worker in self.workers.items()}
        actions = live.planner.plan(live.inventory(), live.config, backoff, worker.now(), worker.name)
        if worker.name != SPOOL:
            waiting = len(live.retired(worker.name))
            grows = self._prunes_left[worker.name].record(waiting, worker.now())
            self.journal.record_backlog(worker.name, waiting, grows)
        candidates = [
            action
            for action in actions
            if not self._is_deferred(worker, action) and (isinstance(action, Flush) or not phase.draining)
        ]
        # Prune after each sent part, because where saves outrun flushes there is always another part to send.
        prunes = [action for action in candidates if isinstance(action, Prune)] if worker.sent else []
        own_flushes = [
            flush
            for flush in candidates
            if isinstance(flush, Flush) and not flush.relayed and self._is_safe_to_send(flush, worker.name)
        ]
        worker.plan_ahead(own_flushes[1:] if len(own_flushes) == len(candidates) else (), time.thread_time() - began)
        return next(iter(prunes or candidates), None)

    def _is_deferred(self, worker: TierWorker, action: Action) -> bool:
        """Whether an action is deferred: its subject was put off, or a copy that it needs cannot be read for now."""
        return worker.is_deferred(action_subject(action)) or (
            isinstance(action, Prune) and self.pruner.waits_for_copy(action)
        )

    def rescan_s(self, worker: TierWorker, cost: int) -> float:
        """Return the seconds until the worker observes its place again without being woken.

        The interval grows with the duration of an observation and, while the daemon is at rest, with the number of
        requests that it cost.
        """
        rescan = parse_duration(self.live.config.rescan)
        if worker.name == SPOOL:
            return rescan
        rescan = max(rescan, self.tiers.observed.send_validity_s(worker.name))
        return listing_pause_s(rescan, cost, len(self.tiers.observed.places)) if self._is_idle(worker) else rescan

    def _is_idle(self, worker: TierWorker) -> bool:
        """Whether nobody trains or restores here, and nothing is left to do or expected to arrive."""
        live, tiers, requests = self.live, self.tiers, self.live.requests
        place = tiers.observed.places[worker.name]
        if (
            requests.attended()
            or requests.held_checkpoints
            or requests.needed_checkpoints
            or place is None
            or self.backlog.parts()
        ):
            return False
        if tiers.has_leftovers(worker.name):  # they become old enough for removal soon
            return False
        settled = time.monotonic() - live.changed_at >= ARRIVAL_TIMEOUT_S
        return settled or not is_arriving(live.place, place)


@dataclass(eq=False)
class WorkerLoop:
    """Runs the tier workers of one configuration."""

    live: LiveInventory
    tiers: TierOperations
    workers: Mapping[str, TierWorker]
    journal: Journal
    save_events: SaveEvents
    agenda: NextAction
    backlog: Backlog
    flusher: Flusher
    pruner: Pruner
    repairs: Repairs
    wake: Callable[[], None]
    moved: asyncio.Condition
    jitter: random.Random

    async def run(self, worker: TierWorker) -> None:
        """Work on one place until the reconciler is halted."""
        while not self.live.run_mode.halted.is_set():
            worker.wake.clear()
            action = None
            before = self.tiers.resting_requests(worker.name)
            try:
                action = await self.agenda.next_action(worker)
                if action is not None:
                    worker.doing = describe_action(action)
                    worker.sent = isinstance(action, Flush)  # first, so a failing prune blocks no flush
                    await self.act(action)
                    self.wake()
                    worker.has_flushed = worker.sent
                elif self.live.backfill.runs:
                    inventory = self.live.inventory()
                    flushes = {part.checkpoint.run for part, _ in self.backlog.flushes(inventory)}
                    self.live.backfill.forget_filled(flushes, inventory)
                worker.note_success(action_subject(action))
                self._report_success(worker, action)
            except Exception as error:  # a worker never ends: it logs unknown errors with a traceback, and retries
                self._failed(worker, action, error)
            finally:
                worker.doing = None
                self.save_events.report_append_only(worker.name, self.tiers.refusal(worker.name))
            async with self.moved:
                self.moved.notify_all()
            if not self.live.run_mode.halted.is_set() and (action is None or worker.last_error):
                cost = self.tiers.resting_requests(worker.name) - before
                pause_s = self.live.run_mode.pause.remaining_s or math.inf
                await worker.wait(min(self.agenda.rescan_s(worker, cost), worker.deferred_s, pause_s))
                if worker.name == SPOOL and not self.live.run_mode.draining:
                    await asyncio.sleep(worker.pause_s)  # plan once for related events such as a save and its flush

    def _failed(self, worker: TierWorker, action: Action | None, error: Exception) -> None:
        self.journal.counters["errors"] += 1
        if worker.name != SPOOL:
            self.tiers.note_failure(worker.name)
        if isinstance(error, StoreFull):
            self.live.full_tiers.add(worker.name)
        delay = worker.note_failure(
            error, self.jitter, long=isinstance(error, StoreRefused), subject=action_subject(action)
        )
        doing = describe_action(action) if action else "observing"
        is_expected = isinstance(error, TierdError | OSError) or is_exhausted(error)
        log.warning("%s: %s failed; next try in %.0f s: %s", worker.name, doing, delay, error, exc_info=not is_expected)
        self.journal.record_failure(
            (WORKER, worker.name), action_verb(action), worker.name, action_subject(action), str(error)
        )

    def _report_success(self, worker: TierWorker, action: Action | None) -> None:
        topic = (WORKER, worker.name)
        self.journal.record_success(topic, action_subject(None), clears_siblings=False)
        if action is not None:
            self.journal.record_success(topic, action_subject(action))
        elif not (self.live.run_mode.pause.paused or self.live.run_mode.draining or worker.retries_later):
            self.journal.record_success(topic)  # no failed action is left to retry

    async def act(self, action: Action) -> None:
        """Carry out one action."""
        match action:
            case Flush(part, tier, relayed):
                await self.flusher.flush(part, tier, relayed=relayed)
            case Prune():
                await self.pruner.prune(action)
            case RepairCopy(part, tier):
                await self.repairs.repair(part, tier)
            case Discard(name):
                try:
                    if await self.repairs.unquarantine(name):
                        return
                    await asyncio.to_thread(self.live.spool.discard, name)
                except (OSError, TierdError):  # what can be deleted goes first
                    self.workers[SPOOL].defer_stuck(name)
                    raise
                log.info("local: discarded %s", name)
