"""What a worker does next: observe its place as freshly as its action demands, plan, and choose the first action."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from tierd.core.planning.actions import Action, Flush, Prune
from tierd.core.planning.flush_candidates import is_contended
from tierd.core.planning.idle import SETTLED_S, is_on_the_way, pause_s
from tierd.core.planning.place import SPOOL
from tierd.core.planning.pruning import PruneBacklog
from tierd.core.retention.policy import seconds
from tierd.daemon.reconciling.backlog import Backlog
from tierd.daemon.reconciling.pruner import Pruner
from tierd.daemon.reconciling.records import RunRecords
from tierd.daemon.reconciling.setup import ReconcilerContext
from tierd.daemon.reconciling.wording import subject
from tierd.daemon.tier_worker import TierWorker


class NextAction:
    """Choose each worker's next action, and when it observes its place again.

    Args:
        setup: what the parts of the reconciler share.
        backlog: what is left to flush.
        records: brings a tier's records up to date after an observation.
        pruner: tells which prunes wait.
        observe: observes one place afresh.
    """

    def __init__(
        self,
        setup: ReconcilerContext,
        backlog: Backlog,
        records: RunRecords,
        pruner: Pruner,
        observe: Callable[[str], Awaitable[None]],
    ) -> None:
        self._setup, self._backlog, self._records, self._pruner, self._observe = (
            setup,
            backlog,
            records,
            pruner,
            observe,
        )
        self._prunes_left = {name: PruneBacklog() for name in setup.stores}

    async def next_action(self, worker: TierWorker) -> Action | None:
        """Observe, and return the worker's next action.

        Where other nodes may send parts of another checkpoint than this node's newest, their choice counts. The reason
        is that a checkpoint is useful only when all its parts are on the tier.
        """
        action = await self._observe_and_plan(worker)
        if isinstance(action, Flush) and is_contended(self._setup.live.inventory(), worker.name, action.part):
            await self._setup.tiers.flushes.hear(worker.name, action.part.checkpoint.run)
            return self._next(worker)
        return action

    async def _observe_and_plan(self, worker: TierWorker) -> Action | None:
        """Observe, and return the worker's next action, without asking what other nodes send.

        Where an observation takes long, an earlier one suffices to send parts; every other action needs a fresh one.
        A sparing observation of the spool suffices to send parts, too, and to find that there is nothing to do.
        """
        tiers = self._setup.tiers
        if worker.name != SPOOL:
            slow, after_flush = tiers.observed.good_for(worker.name), worker.has_flushed
            worker.has_flushed = False
            # After a failure observe afresh, because the object may have arrived there or may be a known defect by now.
            age_s = tiers.observed.age_s(worker.name)
            recent = worker.last_error is None and age_s < seconds(self._setup.config.rescan)
            if slow or recent:
                await self._setup.live.observe(sparing=True)
                action = self._next(worker)
                suffices = slow and isinstance(action, Flush) and self._was_observed_for(action, worker.name)
                if isinstance(action, Flush) and (suffices or self._is_safe_to_send(action, worker.name)):
                    return action
                if action is None and (slow or after_flush):
                    return None
        elif worker.last_error is None:
            await self._setup.live.observe(sparing=True)
            if self._next(worker) is None:
                return None
        await self._observe(worker.name)
        if worker.name != SPOOL:
            await self._records.bring_up_to_date(worker.name)
        return self._next(worker)

    def _was_observed_for(self, flush: Flush, tier: str) -> bool:
        """Whether a relay's run was observed on the tier, where another node may have the run in its care."""
        return not flush.relayed or self._setup.tiers.observed.knows(tier, flush.part.checkpoint.run)

    def _is_safe_to_send(self, flush: Flush, tier: str) -> bool:
        """Whether an observation younger than `rescan` suffices to send a part.

        It does if this node has all parts of the checkpoint, so that no other node sends any, and if the observation
        covered the run.
        """
        copy = self._setup.live.place.checkpoints.get(flush.part.checkpoint)
        return copy is not None and copy.complete and self._setup.tiers.observed.knows(tier, flush.part.checkpoint.run)

    def _next(self, worker: TierWorker) -> Action | None:
        setup, live, phase = self._setup, self._setup.live, self._setup.phase
        if phase.halted.is_set() or (setup.pause.paused and worker.name != SPOOL):
            return None
        planned = worker.planned()
        if planned and live.place.has(planned.part) and not setup.tiers.observed.has(planned.part, worker.name):
            return planned
        began = time.thread_time()
        backoff = {name: tier_worker.retry_at for name, tier_worker in setup.workers.items()}
        actions = setup.planner.plan(live.inventory(), setup.config, backoff, worker.now(), worker.name)
        if worker.name != SPOOL:
            waiting = len(setup.planner.retired(live.inventory(), setup.config, worker.name))
            grows = self._prunes_left[worker.name].count(waiting, worker.now())
            setup.journal.waiting(worker.name, waiting, grows)
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
        return worker.is_off(subject(action)) or (isinstance(action, Prune) and self._pruner.rests(action))

    def rescan_s(self, worker: TierWorker, cost: int) -> float:
        """Return the seconds until the worker observes its place again without being woken.

        The interval grows with the duration of an observation and, while the daemon is at rest, with the number of
        requests that it cost.
        """
        rescan = seconds(self._setup.config.rescan)
        if worker.name == SPOOL:
            return rescan
        rescan = max(rescan, self._setup.tiers.observed.good_for(worker.name))
        return pause_s(rescan, cost, len(self._setup.stores)) if self._is_idle(worker) else rescan

    def _is_idle(self, worker: TierWorker) -> bool:
        """Whether nobody trains or restores here, and nothing is left to do or expected to arrive."""
        live, tiers, requests = self._setup.live, self._setup.tiers, self._setup.requests
        place = tiers.observed.places[worker.name]
        if requests.attended() or requests.held or requests.needed or place is None or self._backlog.parts():
            return False
        if tiers.has_leftovers(worker.name):  # they become old enough for removal soon
            return False
        settled = time.monotonic() - live.changed_at >= SETTLED_S
        return settled or not is_on_the_way(live.place, place)
