"""The reconciler: observe, plan, act. Each place has its own worker, so that a tier that is down delays only itself.

Invariant: the spool and the tiers hold the only truth; the daemon keeps no database that could disagree with them.
A worker observes its place, takes the plan's first action for that place, performs it, and observes again. Events only
shorten the wait between observations. Every failure ends in a backoff of the place's worker and shows in `status`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from tierd.core.config import Config
from tierd.core.event_kinds import Event
from tierd.core.ids import PartId
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL
from tierd.core.planning.plan import ForeignRunBacklog
from tierd.core.planning.unflushed_parts import UnflushedPart
from tierd.core.retention.policy import parse_duration
from tierd.daemon import daemon_timings
from tierd.daemon.component_status import WatchStatus
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.reconciling.client_requests import ClientRequests, SpoolSpace
from tierd.daemon.reconciling.flusher import Backlog, Flusher, RunRecords
from tierd.daemon.reconciling.pruner import Pruner
from tierd.daemon.reconciling.reconciler_context import LiveInventory, RunMode
from tierd.daemon.reconciling.repairs import QuarantineReview, Repairs
from tierd.daemon.reconciling.replica_monitor import ReplicaMonitor
from tierd.daemon.reconciling.tier_lags import TierLags
from tierd.daemon.reconciling.tier_worker import TierWorker
from tierd.daemon.reconciling.worker_loop import WORKER, NextAction, WorkerLoop
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.scrub.scrubber import Scrubber
from tierd.daemon.tiers.node_records import NodeIdentity
from tierd.daemon.tiers.tier_observations import Backfill
from tierd.daemon.tiers.tier_operations import TierOperations
from tierd.daemon.tiers.tier_pauses import SilenceMonitor, TierPause
from tierd.daemon.transfer.tier_flushes import TierFlushes
from tierd.events.alerts import ANSWER, BACKLOG, READ
from tierd.events.journal import Journal
from tierd.events.save_events import SaveEvents
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")


class Reconciler:
    """Bring the spool and the tiers into the state that the configuration demands, and keep them there.

    Attributes:
        config: the configuration that holds now.
        spool: the local tier.
        stores: tier name -> open store, in order of preference.
        tiers: the tiers, as last observed.
        flushes: sends parts to the tiers.
        workers: by place, the state of its worker.
        scrubber: verifies copies again.
        replicas: compares what should be the same on all ranks.
        silence: for how long each tier gives no sign of life.
        backlog: what is left to flush and to prune.
        lags: judges whether the tiers are behind with a run.
        repairs: repairs, and fetches for clients.
        requests: the requests of clients.
        room: frees space in the spool.
        pause: whether the tiers are paused.
        journal: the events, alerts and counters.
        save_events: reports what becomes of saves and restores.
        watches: by run, what its watch last saw.
        timings: the durations that nobody configures.

    Args:
        spool: already locked for this daemon.
        timings: the durations that nobody configures; those `given` if None.
    """

    def __init__(
        self,
        config: Config,
        spool: Spool,
        stores: Mapping[str, Store],
        on_event: Callable[[Event], None] | None = None,
        timings: daemon_timings.DaemonTimings | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self.spool = spool
        self.timings = timings or daemon_timings.given()
        self.journal = Journal(on_event)
        self.pause = TierPause(spool)
        self.requests = ClientRequests()
        self._repairer = Repairer(spool, stores, self.journal, MemoryBudget())
        self._phase = RunMode(self.pause)
        self._live = LiveInventory(spool, self.requests, self._repairer, self._phase, self._spool_seen, self.timings)
        self.replicas = ReplicaMonitor(self._live, self.journal, lambda: self.tiers, self.timings.parts_arrive_s)
        self.room = SpoolSpace(
            self._live, lambda copy, reasons: self._pruner.release(copy, reasons), self.wake, self.timings.room_s
        )
        self.save_events = SaveEvents(self.journal)
        self.watches: dict[str, WatchStatus] = {}
        self._moved = asyncio.Condition()  # notified after every observation and every action
        self._random = jitter or random.Random()  # noqa: S311
        self._next_config: tuple[Config, Mapping[str, Store], asyncio.Event] | None = None
        self._identity = NodeIdentity(spool.root, self.timings, self._shares_id)
        self._configure(config, stores)

    def _shares_id(self, why: str) -> None:
        self.journal.warnings["node", "id"] = why

    def _configure(self, config: Config, stores: Mapping[str, Store]) -> None:
        """Switch to a configuration; no worker runs meanwhile. Restores under way continue with the old stores."""
        self.config, self.stores = config, stores
        self._repairer.use_stores(stores)
        self.tiers = TierOperations(config, stores, self._identity, self.timings)
        self.flushes = TierFlushes(config, self.spool, self.tiers, self.pause)
        self.silence = SilenceMonitor(stores, self.journal, self.timings)
        self._backfill = Backfill(config, stores, self.tiers.observed, self.timings)
        self._live.configure(config, self.tiers, self._backfill)
        self.scrubber = Scrubber(
            config,
            self._repairer,
            inventory=self.inventory,
            pause=self.pause,
            held=self.requests.held_checkpoints,
            wake=self.wake,
            timings=self.timings,
            jitter=self._random,
        )
        self.workers = {name: TierWorker(name, self.timings) for name in (SPOOL, *stores)}
        live, tiers, flushes, workers, scrubber = self._live, self.tiers, self.flushes, self.workers, self.scrubber
        journal, save_events, wake = self.journal, self.save_events, self.wake
        records = RunRecords(live, tiers, save_events)
        self.backlog = backlog = Backlog(live, tiers, flushes, workers)
        self.lags = TierLags(live, backlog, journal.saves)
        self.repairs = repairs = Repairs(live, workers, self._repairer, save_events)
        self._flusher = Flusher(
            live, tiers, flushes, workers, scrubber, journal, save_events, backlog, records, repairs
        )
        review = QuarantineReview(tiers, stores, workers, journal)
        self._pruner = pruner = Pruner(
            live, tiers, stores, workers, scrubber, journal, self.observe, wake, review, records.remember
        )
        agenda = NextAction(live, tiers, flushes, workers, journal, backlog, records, pruner, self.observe)
        acts = self._flusher, pruner, repairs
        self._loop = WorkerLoop(
            live, tiers, workers, journal, save_events, agenda, backlog, *acts, wake, self._moved, self._random
        )

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._loop.run(worker)) for worker in self.workers.values()]
                side_tasks = [
                    group.create_task(service.run()) for service in (self.scrubber, self.silence, self.replicas)
                ]
                await self._phase.halted.wait()
                for task in side_tasks:
                    task.cancel()
                await asyncio.wait(workers, timeout=self.timings.in_hand_s)
                for task in workers:
                    task.cancel()  # safe: the next try does not send chunks again that are on the tier
            assert self._next_config is not None
            config, stores, switched = self._next_config
            for name in self.workers.keys() - {SPOOL, *stores}:
                for kind in (WORKER, BACKLOG, ANSWER, READ):  # end the alerts of a tier that was removed
                    self.journal.record_success((kind, name))
            self._configure(config, stores)
            self._phase.halted.clear()
            switched.set()

    async def reconfigure(self, config: Config, stores: Mapping[str, Store]) -> None:
        """Switch to another configuration of the same spool; return when the switch is complete.

        Actions in progress get `in_hand_s` to end, then they are cancelled. Hand-offs and restores under way are not
        disturbed.

        Args:
            stores: tier name -> open store. The old stores are used until every request under way has ended.
        """
        switched = asyncio.Event()
        self._next_config = config, stores, switched
        self._phase.halted.set()
        self.retry_now()
        await switched.wait()
        async with self._moved:
            self._moved.notify_all()  # callers that wait for a tier check whether it still exists

    def wake(self) -> None:
        """Make every worker observe its place again soon, because something may have changed."""
        for worker in self.workers.values():
            worker.wake.set()

    def retry_now(self) -> None:
        """End every backoff and observe again; flushes make no pauses for a minute."""
        self._phase.hurry()
        for worker in self.workers.values():
            worker.retry_now()
        self.wake()

    def send_newest_first(self) -> bool:
        """Send the newest checkpoints first for ten minutes, because the node ends; return whether this is news.

        A flush of an older checkpoint gives way as soon as a newer one is in the spool.
        """
        is_new = self._phase.note_node_ending()
        for worker in self.workers.values():
            worker.plan_ahead((), 0.0)
        self._flusher.yield_to_newer()
        self.retry_now()
        return is_new

    async def drain(self, timeout: float) -> tuple[UnflushedPart, ...]:
        """Continue to flush, newest parts first, for at most `timeout` seconds; begin no other action any more.

        A paused daemon returns at once, because pending parts wait for the next daemon.

        Returns:
            The parts that some tier still lacks.
        """
        self._phase.draining = self.scrubber.resting = True
        await self._live.observe()
        self.retry_now()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.until(lambda: self.pause.paused or not self.backlog.parts())
        remaining = self.backlog.remaining()
        if remaining:
            log.warning("%s: %s", "paused" if self.pause.paused else "drain time is up", self.backlog.describe())
        return remaining

    def note_commit(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        """Report that a part was committed from a trainer's memory, or that the commit failed."""
        self.save_events.record_handoff(part, outcome)
        self.wake()

    @property
    def is_ready(self) -> bool:
        """Whether the spool was observed, and the daemon is not ending."""
        return self._live.was_observed and not self._phase.draining

    def inventory(self) -> Inventory:
        """Return the latest observation of all places, with holds, writers and busy parts."""
        return self._live.inventory()

    @property
    def is_backfilled(self) -> bool:
        """Whether tiers with `backfill` were sent all that this node sends there of other nodes' runs."""
        return self._backfill.is_complete

    def report_inventory(self) -> Inventory:
        """Return the inventory with the checkpoints of launches that name no tier, for a report."""
        return self._live.report_inventory()

    def unsent(self) -> list[ForeignRunBacklog]:
        """Return what a tier with `backfill` lacks and another node was to send there."""
        return self._backfill.unsent()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. It is checked after every observation and every action."""
        async with self._moved:
            await self._moved.wait_for(condition)

    # -- observing --------------------------------------------------------------------------------------------------

    async def observe(self, name: str) -> None:
        """Observe one place afresh; a tier that does not answer becomes unknown, and its error is raised."""
        tiers = self.tiers
        await self._live.observe()
        if name != SPOOL:
            before = tiers.observed.places[name]
            backfill = self._backfill
            if await backfill.list_runs(self._live.runs()):
                self.wake()  # every tier is observed for them
            runs = self._live.runs() | self.requests.requested_runs | backfill.runs
            await tiers.observed.observe(name, runs, self._live.place.ranks)
            if tiers is not self.tiers:  # the configuration changed meanwhile
                return
            self.save_events.report_durable(name, self._live.place, tiers.observed.places)
            self.save_events.report_rival_launches(self.inventory())
            self.save_events.log_unreadable_launches(name, self.inventory())
            self.replicas.wake()
            if tiers.observed.places[name] != before:
                self._live.changed_at = time.monotonic()
                self.workers[SPOOL].wake.set()  # because a tier's contents decide which local copies may be deleted
                if backfill.runs:
                    self.wake()  # because another tier may lack what this one shows

    def _spool_seen(self, changed: bool) -> None:
        """Report what an observation of the spool shows, and wake the workers if parts came or went."""
        place = self._live.place
        self.requests.lose_interest(self._live.runs(), parse_duration(self.config.finished))
        self.save_events.report_new_parts(place)
        self.save_events.report_rival_launches(self.inventory())
        self.save_events.show_absent_copies(self._live.odd_places)
        self.replicas.wake()
        for name in self.tiers.observed.places:
            self.save_events.report_durable(name, place, self.tiers.observed.places)
        if changed:
            self._flusher.yield_to_newer()
            self.wake()
