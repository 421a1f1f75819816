"""The parts of one `Checkpointer`: how the ranks of a launch begin together, and how the parts are released.

Invariant: a rank that cannot begin notifies the others first, because they wait for it.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from tierd.client import timings
from tierd.client.attachment import Attachment
from tierd.client.disk_space import SpaceCheck
from tierd.client.ranks.attempts import report_failure
from tierd.client.ranks.launch import Launch
from tierd.client.ranks.other_launches import ConcurrentLaunchWarning
from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.state_restorer import StateRestorer
from tierd.client.saving.arena_staging import Staging
from tierd.client.saving.directory_saver import DirectorySaver
from tierd.client.saving.handoff import HandoffClient
from tierd.client.saving.pipeline import Pipeline
from tierd.client.saving.save import Stats
from tierd.client.saving.save_records import SaveRecords
from tierd.client.saving.state_saver import StateSaver
from tierd.client.saving.step_gate import OptimizerStepGate
from tierd.client.schedule import Schedule
from tierd.core.errors import ConfigError, TierdError
from tierd.core.ids import PartId, check_attempt, check_run
from tierd.core.retention.policy import RetentionPolicy, checked
from tierd.core.save_policy import When
from tierd.spool.conditions import translated
from tierd.spool.records import set_local_only, set_policy
from tierd.spool.spool import Spool

_BUSY = ("wait", "skip", "fail")
_MAX_SLOTS = 16


class CheckpointerParts:
    """The parts of one `Checkpointer`. The arguments and errors are those of `Checkpointer`.

    Args:
        stats: the counters that the parts change.

    Attributes:
        spool: the local tier.
        ranks: the ranks of this launch.
        daemon: the registration with the node's daemon.
        schedule: decides when a checkpoint is due.
        beside: the launches that save the same run.
        launch: this launch: its attempt, and what it resumed from.
        gate: holds an optimizer's step back until its tensors are copied.
        handoff: hands snapshots over to the daemon; None without tiers.
        pipeline: the slots, and the thread that makes snapshots durable.
        staging: the memory in which other libraries put their tensors.
        records: the saves of this launch, and their results.
        state_saver, directory_saver: save a state, and the files that another library writes.
        state_restorer: restores a state.
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
        *,
        stats: Stats,
    ) -> None:
        self.closed = False
        self._pid = os.getpid()
        self._when_busy, self._stats = when_busy, stats
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
                self._begin(failure, run, attempt, slots, when, retention, attach)
            undo.pop_all()

    def _attach(
        self, to: Sequence[str] | None, run: str, retention: RetentionPolicy | None, undo: ExitStack
    ) -> Attachment:
        check_run(run)
        with translated(f"spool {self.spool.root}", self.spool.root):
            self.spool.check_way(run)  # because a restore observes what lies inside
        # Set before a daemon starts, because that daemon would otherwise prune without this policy.
        if retention is not None:
            with translated(f"spool {self.spool.root}", self.spool.root):
                set_policy(self.spool.control, run, checked(retention))
        self.daemon = Attachment(self.spool, to, run, timings.given())
        undo.callback(self.daemon.close)
        return self.daemon

    def _begin(
        self,
        failure: Exception | None,
        run: str,
        attempt: str | None,
        slots: int,
        when: When | None,
        retention: RetentionPolicy | None,
        attach: Callable[[], Attachment],
    ) -> None:
        """Agree with the other ranks on this launch. A rank that fails notifies them, because they wait for it."""
        try:
            if failure is not None:
                raise failure
            if type(slots) is not int or not 1 <= slots <= _MAX_SLOTS:
                raise ConfigError(f"slots={slots!r}: a number from 1 to {_MAX_SLOTS}")
            if self._when_busy not in _BUSY:
                raise ConfigError(f"when_busy={self._when_busy!r}: one of {', '.join(_BUSY)}")
            check_run(run)
            given_attempt = check_attempt(attempt) if attempt is not None else None
            self.schedule = Schedule(when, self.ranks)
            attach()
        except Exception as error:
            report_failure(self.ranks, run, error)
            raise
        self.beside = ConcurrentLaunchWarning(self.spool, asks=self.daemon.tiers, ask_s=timings.given().launches_s)
        list_attempts = functools.partial(self.daemon.attempts, run)
        options = {"when": repr(when), "to": self.daemon.to, "retention": repr(retention)}
        self.launch = Launch(self.spool, run, self.ranks, given_attempt, list_attempts, options, self._saving)
        self._make_savers(slots)
        if self.schedule.preemption is not None:
            self.schedule.preemption.begin()

    def _saving(self, part: PartId) -> None:
        """Prepare for a part that is about to be written."""
        if not self.daemon.tiers:  # before it is there, because a daemon of an earlier launch may live
            with suppress(TierdError, OSError):  # a spool that does not take the record fails the save, which says so
                set_local_only(self.spool.control, part.checkpoint.run, part.checkpoint.attempt)
        self.beside.saving(part)

    def _make_savers(self, slots: int) -> None:
        """Make the parts that save and restore."""
        self.gate = OptimizerStepGate(self._stats)
        self.handoff = HandoffClient(self.spool, timings.given()) if self.daemon.tiers else None
        self.records = SaveRecords(self.launch, self.schedule, self.daemon, self.handoff, self._stats)
        self.pipeline = Pipeline(
            self.spool, slots, self._stats, self.handoff, self.records.ended, self.daemon.make_room
        )
        self.staging = Staging(self.pipeline, self.gate)
        space = SpaceCheck(self.spool, lambda: self.daemon.keep_last, self.pipeline.behind)
        space.done = not self.daemon.tiers  # without tiers nothing is pruned, so no expected number is right
        self.state_saver = StateSaver(
            self.spool,
            self.launch,
            self.schedule,
            self.records,
            self.gate,
            self.pipeline,
            space,
            self._stats,
            self._when_busy,
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
        )

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that made the parts: it has none of their threads."""
        return os.getpid() != self._pid

    def check_open(self) -> None:
        """Raise `ConfigError` if the `Checkpointer` is closed, or is not this process's own."""
        if self.closed:
            raise ConfigError("this Checkpointer is closed")
        if self.forked:
            raise ConfigError("this process was forked from the one that made the Checkpointer: make one of its own")
        self.ranks.check_group()

    def release(self, patience_s: float) -> None:
        """End the threads and close the links.

        Every call closes links, because a wait for a tier after the first close opens some of them again.

        Args:
            patience_s: how long to wait for events that are still being sent to the daemon.
        """
        if not self.closed:
            self.closed = True
            if self.schedule.preemption is not None:
                self.schedule.preemption.close()
            self.pipeline.close()
            self.staging.close()
        self.state_restorer.let_go()
        self.ranks.close()
        self.beside.close()
        self.daemon.close(patience_s)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        raise ConfigError(f"{name}={value!r}: seconds, at least 1")
    return float(value)
