"""The loop of one tier worker: take the next action for its place, perform it, wait, and observe again.

Invariant: a loop never ends by an error. Every failure ends in a backoff of the place's worker and shows in `status`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random

from tierd.core.errors import StoreFull, StoreRefused, TierdError, is_exhausted
from tierd.core.planning.actions import Action, Discard, Flush, Prune, RepairCopy
from tierd.core.planning.place import SPOOL
from tierd.daemon.reconciling.agenda import NextAction
from tierd.daemon.reconciling.backlog import Backlog
from tierd.daemon.reconciling.flusher import Flusher
from tierd.daemon.reconciling.pruner import Pruner
from tierd.daemon.reconciling.repairs import Repairs
from tierd.daemon.reconciling.setup import ReconcilerContext
from tierd.daemon.reconciling.wording import describe, subject, verb
from tierd.daemon.tier_worker import TierWorker

log = logging.getLogger("tierd.daemon")

WORKER = "worker"  # names a tier worker as the subject of alerts


class WorkerLoop:
    """Runs the tier workers of one configuration.

    Args:
        setup: what the reconciler's parts share.
        agenda: says what is done next in a place.
        backlog: what is left to flush and to prune.
        acts: carry out the actions.
        moved: notified after every observation and every action.
        jitter: the source of random delays.
    """

    def __init__(
        self,
        setup: ReconcilerContext,
        agenda: NextAction,
        backlog: Backlog,
        acts: tuple[Flusher, Pruner, Repairs],
        moved: asyncio.Condition,
        jitter: random.Random,
    ) -> None:
        self._setup, self._agenda, self._backlog = setup, agenda, backlog
        self._flusher, self._pruner, self._repairs = acts
        self._moved, self._random = moved, jitter

    async def run(self, worker: TierWorker) -> None:
        """Work on one place until the reconciler is halted."""
        while not self._setup.phase.halted.is_set():
            worker.wake.clear()
            action = None
            before = self._setup.tiers.requests(worker.name)
            try:
                action = await self._agenda.next_action(worker)
                if action is not None:
                    worker.doing = describe(action)
                    worker.sent = isinstance(action, Flush)  # first, so a failing prune blocks no flush
                    await self.act(action)
                    self._setup.wake()
                    worker.has_flushed = worker.sent
                elif self._setup.backfill.runs:
                    inventory = self._setup.live.inventory()
                    flushes = {part.checkpoint.run for part, _ in self._backlog.flushes(inventory)}
                    self._setup.backfill.settle(flushes, inventory)
                worker.succeeded(subject(action))
                self._report_success(worker, action)
            except Exception as error:  # a worker never ends: it logs unknown errors with a traceback, and retries
                self._failed(worker, action, error)
            finally:
                worker.doing = None
                self._setup.save_events.append_only(worker.name, self._setup.tiers.refusal(worker.name))
            async with self._moved:
                self._moved.notify_all()
            if not self._setup.phase.halted.is_set() and (action is None or worker.last_error):
                cost = self._setup.tiers.requests(worker.name) - before
                await worker.rest(
                    min(self._agenda.rescan_s(worker, cost), worker.off_for, self._setup.pause.left or math.inf)
                )
                if worker.name == SPOOL and not self._setup.phase.draining:
                    await asyncio.sleep(worker.pause_s)  # plan once for related events such as a save and its flush

    def _failed(self, worker: TierWorker, action: Action | None, error: Exception) -> None:
        self._setup.journal.counters["errors"] += 1
        if worker.name in self._setup.stores:
            self._setup.tiers.failed(worker.name)
        if isinstance(error, StoreFull):
            self._setup.live.full.add(worker.name)
        delay = worker.failed(error, self._random, long=isinstance(error, StoreRefused), what=subject(action))
        doing = describe(action) if action else "observing"
        is_expected = isinstance(error, TierdError | OSError) or is_exhausted(error)
        log.warning("%s: %s failed; next try in %.0f s: %s", worker.name, doing, delay, error, exc_info=not is_expected)
        self._setup.journal.failed((WORKER, worker.name), verb(action), worker.name, subject(action), str(error))

    def _report_success(self, worker: TierWorker, action: Action | None) -> None:
        topic = (WORKER, worker.name)
        self._setup.journal.worked(topic, subject(None), others=False)
        if action is not None:
            self._setup.journal.worked(topic, subject(action))
        elif not (self._setup.pause.paused or self._setup.phase.draining or worker.retries_later):
            self._setup.journal.worked(topic)  # no failed action is left to retry

    async def act(self, action: Action) -> None:
        """Carry out one action."""
        match action:
            case Flush(part, tier, relayed):
                await self._flusher.flush(part, tier, relayed=relayed)
            case Prune():
                await self._pruner.prune(action)
            case RepairCopy(part, tier):
                await self._repairs.repair(part, tier)
            case Discard(name):
                try:
                    if await self._repairs.unquarantine(name):
                        return
                    await asyncio.to_thread(self._setup.spool.discard, name)
                except (OSError, TierdError):  # what can be deleted goes first
                    self._setup.workers[SPOOL].put_off_stuck(name)
                    raise
                log.info("local: discarded %s", name)
