"""The parts of one `Checkpointer`: how the ranks of a launch begin together, and how `close` ends them.

Invariants:

- A rank that cannot begin notifies the others first, because they wait for it.
- `close` waits for the saves, then for the tiers if that was asked for, and releases the parts even if that fails.
- The first close raises if the last state that the job asked to be saved is in no place.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from tierd.client import client_timings
from tierd.client.daemon_attachment import Attachment
from tierd.client.ranks.attempts import ConcurrentLaunchWarning, report_failure
from tierd.client.ranks.launch import Launch
from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.state_restorer import StateRestorer
from tierd.client.save_schedule import SaveSchedule
from tierd.client.saving.dcp_arena_staging import ArenaStaging
from tierd.client.saving.save_jobs import Stats
from tierd.client.saving.save_pipeline import SavePipeline
from tierd.client.saving.savers import DirectorySaver, SaveRecords, StateSaver
from tierd.client.saving.slots import device_of, estimate
from tierd.client.saving.snapshot_handoff import HandoffClient
from tierd.client.saving.step_gate import OptimizerStepGate
from tierd.client.unflushed_saves import UnflushedSaves, check_no_save_failed, check_wait, describe_lost_saves
from tierd.client.user_messages import SpaceCheck
from tierd.core.errors import ConfigError, SaveFailed, TierdError
from tierd.core.ids import PartId, check_attempt, check_run
from tierd.core.planning.place import SPOOL
from tierd.core.retention.policy import RetentionPolicy, check_policy
from tierd.core.save_rules import When
from tierd.spool.run_records import record_policy, set_local_only
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors
from tierd.state.replicas import ReplicaGroup

if TYPE_CHECKING:
    from torch.optim import Optimizer

_BUSY = ("wait", "skip", "fail")
_MAX_SLOTS = 16


class CheckpointerParts:
    """The parts of one `Checkpointer`, whose arguments and errors these are.

    Attributes:
        beside: the launches that save the same run.
        gate: holds an optimizer's step back until its tensors are copied.
        handoff: hands snapshots over to the daemon; None without tiers.
        staging: the memory in which other libraries put their tensors.
        records: the saves of this launch, and their results.
        closed: whether the parts were released. Any save or restore is refused then.
    """

    def __init__(
        self,
        spool: str | os.PathLike[str],
        run: str,
        rank: int | None,
        world_size: int | None,
        attempt: str | None,
        to: Sequence[str] | None,
        slots: int,
        when_busy: str,
        when: When | None,
        retention: RetentionPolicy | None,
        rank_timeout: float,
        start_timeout: float,
        replicated: Collection[str],
        prefer_equal_replicas: bool,
        *,
        stats: Stats,
    ) -> None:
        self.closed = False
        self._pid = os.getpid()
        self._stats = stats
        failure: Exception | None = None
        try:
            self.spool = Spool(spool)
        except Exception as error:  # raised later, because the other ranks must be notified first
            failure = error
        room = None if failure or attempt is not None else self.spool.control
        with ExitStack() as undo:
            # Attach at most once, and before the ranks talk, because some ranks talk through their daemons.
            attach = functools.cache(functools.partial(self._attach, to, run, retention, undo))
            silent_s, first_s = _seconds("rank_timeout", rank_timeout), _seconds("start_timeout", start_timeout)
            self.ranks = Ranks(rank, world_size, room, run, silent_s, lambda *launch: attach().board(*launch), first_s)
            with self.ranks.attending():
                try:
                    if failure is not None:
                        raise failure
                    if type(slots) is not int or not 1 <= slots <= _MAX_SLOTS:
                        raise ConfigError(f"slots={slots!r}: a number from 1 to {_MAX_SLOTS}")
                    if when_busy not in _BUSY:
                        raise ConfigError(f"when_busy={when_busy!r}: one of {', '.join(_BUSY)}")
                    check_run(run)
                    self._replicated = _entry_names(replicated)
                    self._prefers_equal_replicas = bool(prefer_equal_replicas)
                    given_attempt = check_attempt(attempt) if attempt is not None else None
                    self.schedule = SaveSchedule(when, self.ranks)
                    attach()
                except Exception as error:
                    report_failure(self.ranks, run, error)
                    raise
                self.beside = ConcurrentLaunchWarning(
                    self.spool, asks=self.daemon.has_tiers, ask_s=client_timings.current_timings().launches_s
                )
                list_attempts = functools.partial(self.daemon.attempts, run)
                options = {
                    "when": repr(when),
                    "to": self.daemon.to_text,
                    "retention": repr(retention),
                    "replicated": repr(sorted(self._replicated)),
                    "prefer_equal_replicas": repr(self._prefers_equal_replicas),
                }
                self.launch = Launch(self.spool, run, self.ranks, given_attempt, list_attempts, options, self._saving)
                self._make_savers(slots, when_busy)
                if self.schedule.preemption is not None:
                    self.schedule.preemption.begin()
            undo.pop_all()

    def _attach(
        self, to: Sequence[str] | None, run: str, retention: RetentionPolicy | None, undo: ExitStack
    ) -> Attachment:
        check_run(run)
        with spool_errors(f"spool {self.spool.root}", self.spool.root):
            self.spool.check_run_directory(run)  # because a restore observes what lies inside
        # Set before a daemon starts, because that daemon would otherwise prune without this policy.
        if retention is not None:
            with spool_errors(f"spool {self.spool.root}", self.spool.root):
                record_policy(self.spool.control, run, check_policy(retention))
        self.daemon = Attachment(self.spool, to, run, client_timings.current_timings())
        undo.callback(self.daemon.close)
        return self.daemon

    def _saving(self, part: PartId) -> None:
        if not self.daemon.has_tiers:  # before it is there, because a daemon of an earlier launch may live
            with suppress(TierdError, OSError):  # a spool that does not take the record fails the save, which says so
                set_local_only(self.spool.control, part.checkpoint.run, part.checkpoint.attempt)
        self.beside.saving(part)

    def _make_savers(self, slots: int, when_busy: str) -> None:
        self.gate = OptimizerStepGate(self._stats)
        self.handoff = HandoffClient(self.spool, client_timings.current_timings()) if self.daemon.has_tiers else None
        self.records = SaveRecords(self.launch, self.schedule, self.daemon, self.handoff, self._stats)
        self.pipeline = SavePipeline(
            self.spool, slots, self._stats, self.handoff, self.records.record_end, self.daemon.make_room
        )
        self.staging = ArenaStaging(self.pipeline, self.gate)
        launch = self.launch
        group = ReplicaGroup(launch.rank, launch.world, launch.nodes, self._replicated)
        space = SpaceCheck(self.spool, lambda: self.daemon.keep_last, self.pipeline.behind)
        space.is_checked = not self.daemon.has_tiers  # without tiers nothing is pruned, so no expected number is right
        self.state_saver = StateSaver(
            self.spool,
            self.launch,
            self.schedule,
            self.records,
            self.gate,
            self.pipeline,
            space,
            self._stats,
            when_busy,
            group,
        )
        self.directory_saver = DirectorySaver(self.spool, self.launch, self.schedule, self.records, self.daemon)
        self.state_restorer = StateRestorer(
            self.spool,
            self.ranks,
            self.launch,
            self.schedule,
            self.daemon,
            self.handoff,
            self.gate,
            self.pipeline,
            space,
            lambda: self.state_saver.group,
            prefers_equal_replicas=self._prefers_equal_replicas,
        )

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child, which has none of the parts' threads."""
        return os.getpid() != self._pid

    def check_open(self) -> None:
        if self.closed:
            raise ConfigError("this Checkpointer is closed")
        if self.forked:
            raise ConfigError("this process was forked from the one that made the Checkpointer: make one of its own")
        self.ranks.check_group()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Attach optimizers to the gate, and begin to prepare the memory of the first save, as far as they show it."""
        attached = self.gate.attach(optimizers)
        parameters = [group["params"] for optimizer in attached for group in optimizer.param_groups]
        state = {"optimizers": attached, "parameters": parameters}
        # The ranks of a node may divide what they all hold, and no optimizer shows that.
        size_bytes = estimate(state) // len(self.state_saver.group.node)
        self.pipeline.prefault_ahead(size_bytes, device_of(state))

    def release(self, patience_s: float) -> None:
        """End the threads and close the links.

        Every call closes links, because a wait for a tier after the first close opens some of them again. `patience_s`
        is for events that are still being sent to the daemon.
        """
        if not self.closed:
            self.closed = True
            if self.schedule.preemption is not None:
                self.schedule.preemption.close()
            self.pipeline.close()
            self.staging.close()
        self.state_restorer.release_directory()
        self.ranks.close()
        self.beside.close()
        self.daemon.close(patience_s)


def _entry_names(replicated: Collection[str]) -> frozenset[str]:
    if isinstance(replicated, str) or not all(type(name) is str for name in replicated):
        raise ConfigError(f"replicated={replicated!r}: names of entries of the state, such as ('model', 'optimizer')")
    return frozenset(replicated)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        raise ConfigError(f"{name}={value!r}: seconds, at least 1")
    return float(value)


log = logging.getLogger("tierd")

_PATIENCE_S = 2.0  # how long `close` waits for events that are still being sent to the daemon
_WAKING_S = 1.0  # how long `close` waits for a daemon that was silent, and may just have been let go on


class Shutdown:
    """The end of one `Checkpointer`; arguments and errors are those of `Checkpointer.close`."""

    def __init__(self, parts: CheckpointerParts) -> None:
        self._parts = parts
        self._verified: set[str] = set()  # tiers that `close` has waited for with success

    def close(self, wait: str | None, timeout: float | None, deadline: str | float | None) -> None:
        parts = self._parts
        check_wait(wait, timeout, tiers=parts.daemon.has_tiers)
        if parts.forked or (parts.closed and (wait in (None, SPOOL) or wait in self._verified)):
            return
        end_s = parts.schedule.end_s(deadline)
        nowhere = ""
        if not parts.closed:
            parts.gate.detach()
            self._drain(end_s)
            parts.records.compare_parts()
            nowhere = describe_lost_saves(parts.spool, parts.records.lost_parts) or parts.records.mismatched
        if end_s is not None:
            left_s = max(0.0, end_s - time.monotonic())
            timeout = left_s if timeout is None else min(timeout, left_s)
        patience_s = _PATIENCE_S
        try:
            self._wait(wait, timeout, node_ends=end_s is not None)
        except (TierdError, TimeoutError) as error:
            patience_s = 0.0 if isinstance(error, TimeoutError) else patience_s
            if nowhere:
                log.error("closed: %s", nowhere)
            raise
        finally:
            parts.release(patience_s)
        if nowhere:
            raise SaveFailed(nowhere)

    def _drain(self, end_s: float | None) -> None:
        """Wait for every save, and log once if that takes longer than until `end_s`."""
        pipeline = self._parts.pipeline
        if end_s is not None and not pipeline.drain(max(0.0, end_s - time.monotonic())):
            log.error(
                "closing: the newest save is not durable in the spool at the deadline, and is lost if the node ends "
                "now; `tierd advise --notice` computes what fits"
            )
        pipeline.drain()

    def _wait(self, wait: str | None, timeout: float | None, *, node_ends: bool) -> None:
        parts = self._parts
        if parts.records.saved and parts.daemon.has_tiers:
            parts.daemon.renew(_WAKING_S)  # a daemon that woke after the last save may not know this launch's tiers
            closing = UnflushedSaves(
                parts.spool,
                parts.records.has_saved,
                parts.daemon.renew,
                lambda: parts.daemon.silence_reason,
                node_ends=node_ends,
                timings=client_timings.current_timings(),
            )
            if wait not in (None, SPOOL):
                closing.wait_for(wait, timeout)
            else:
                closing.report(patient=wait is None, timeout_s=timeout)
        if wait not in (None, SPOOL):
            check_no_save_failed(wait, parts.records.failed)
            self._verified.add(wait)
