"""`Checkpointer`: save and restore the checkpoints of one run from inside the training process.

Invariant: training never waits for the daemon and never fails because of it. A failure after `save` has returned is
recorded in the `Save`, in the log and in `Stats`. Only a caller's mistake raises an exception.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tierd.client.attachment import Attachment
from tierd.client.closing import Closing, check_failed, check_wait
from tierd.client.disk_space import SpaceCheck
from tierd.client.ranks.launch import Launch, Source, report_failure
from tierd.client.ranks.other_launches import Beside
from tierd.client.ranks.ranks import SILENT_S, START_S, Ranks
from tierd.client.restoring.device_uploads import Uploads
from tierd.client.restoring.entries import check_written_by_save
from tierd.client.restoring.restorer import Found, Restored, Restorer
from tierd.client.saving.arena_staging import Staging
from tierd.client.saving.handoff import HandoffClient
from tierd.client.saving.interpreter_lock import short_turns
from tierd.client.saving.pipeline import Pipeline
from tierd.client.saving.save import Save, Stats, checked_metrics
from tierd.client.saving.slots import device_of, estimate
from tierd.client.saving.snapshot import Snapshot
from tierd.client.saving.step_gate import Gate
from tierd.client.schedule import Schedule
from tierd.core.errors import ConfigError, SaveSkipped, StepRefused
from tierd.core.ids import CheckpointId, PartId, check_attempt, check_run, check_step
from tierd.core.manifest import TENSORS, TREE
from tierd.core.planning.place import SPOOL
from tierd.core.retention.policy import RetentionPolicy, checked
from tierd.core.save_policy import Goal, When, check_epoch
from tierd.ipc.client import Link
from tierd.ipc.messages import MAX_TOLD, Failed, Leaked, Preempted
from tierd.spool.conditions import translated
from tierd.spool.records import set_policy
from tierd.spool.spool import Spool
from tierd.spool.stage import describe_directory
from tierd.state.capture import Capture, Capturer
from tierd.state.flatten import unflatten
from tierd.state.kinds.wrapped_names import with_names_of
from tierd.state.load import check_fit, chosen, load

if TYPE_CHECKING:
    from typing import Self

    from torch.optim import Optimizer

log = logging.getLogger("tierd")


_BUSY = ("wait", "skip", "fail")
_MAX_SLOTS = 16
_PATIENCE_S = 2.0  # how long `close` waits for events that are still being sent to the daemon


class Checkpointer:
    """Save and restore the checkpoints of one run through a spool.

    Every rank of a launch makes one `Checkpointer`. All ranks call `restore` together, because there they agree on one
    checkpoint. `save` waits for no other rank.

    Args:
        spool: a directory on a local disk. It is created if it is missing.
        run: the training job's name, the same in every launch.
        rank, world_size: this process's rank and the number of ranks. If not given, they are read from an initialised
            `torch.distributed`, else from the launcher's environment (torchrun, mpirun, srun, …: see the how-to for
            several ranks), else they are rank 0 of 1.
        attempt: this launch's name, shared by all ranks. If not given, the ranks agree on one through
            `torch.distributed`, torchrun's agent, the spool or a tier, or derive it from SLURM's environment.
        to: URLs of the tiers. A daemon for them is started unless one already holds the spool. If not given, tierd
            expects that a daemon runs or will be started (by systemd, for example). If empty, checkpoints stay in the
            spool and nothing prunes them.
        slots: how many snapshots may be in memory at a time. Each takes the size of the state.
        when_busy: what `save` does while every slot is still being persisted: `"wait"` waits for a slot, `"skip"`
            returns a `Save` that has ended with `SaveSkipped`, and `"fail"` raises `SaveSkipped`.
        when: the rule by which `due` decides, the same on every rank.
        retention: which checkpoints the run keeps on every tier, and in the spool if no configuration has a policy for
            the spool. The same on every rank. If not given, the policy of a configuration or of an earlier launch
            applies, else `keep_last=3`.
        rank_timeout: how many seconds `restore` waits for a rank that does not call `restore`, or shows no sign of life
            in it. A rank that is reading is waited for without limit. Also how long a rank whose process on this node
            has ended is waited for when the launch begins. A process group's own timeout applies if it is shorter.
        start_timeout: how many seconds to wait for a rank that has not made its `Checkpointer` yet, because it loads
            data, for example. A process group's own timeout applies if it is shorter.

    Raises:
        ConfigError: a name, rank, URL or policy cannot be used; the launcher sets a rank without the number of ranks,
            or the reverse; ranks were given different arguments, or cannot agree; or `when` depends on a clock or a
            metric, and the ranks cannot talk to each other.
        StoreUnavailable: another rank could not begin; the message names the rank and the reason.
        SpoolUnusable: the spool cannot be written to, or something of the run lies behind a symbolic link.
        DaemonUnavailable: the daemon for `to` did not start. A daemon that is there but stopped does not raise, except
            if ranks on several nodes have no other connection to each other.
    """

    def __init__(
        self,
        spool: str | os.PathLike[str],
        run: str,
        rank: int | None = None,
        world_size: int | None = None,
        attempt: str | None = None,
        to: Sequence[str] | None = None,
        slots: int = 1,
        when_busy: Literal["wait", "skip", "fail"] = "wait",
        when: When | None = None,
        retention: RetentionPolicy | None = None,
        rank_timeout: float = SILENT_S,
        start_timeout: float = START_S,
    ) -> None:
        self._closed = False
        self._saved: set[str] = set()  # attempts under which this launch made a checkpoint durable
        self._failed: dict[int, str] = {}  # step -> reason, if no later save of that step became durable
        self._verified: set[str] = set()  # tiers that `close` has waited for with success
        self._noticed: str | None = None  # the last notice that was reported
        self._pid = os.getpid()
        # While this link is open, the daemon does not delete the last restored directory.
        self._hold: Link | None = None
        self._when_busy = when_busy
        self.stats = Stats()
        failure: Exception | None = None
        try:
            self._spool = Spool(spool)
        except Exception as error:  # raised later, because the other ranks must be notified first
            failure = error
        room = None if failure or attempt is not None else self._spool.control
        with ExitStack() as undo:
            # Attach at most once, and before the ranks talk, because some ranks talk through their daemons.
            attach = functools.cache(functools.partial(self._attach, to, run, retention, undo))
            silent_s, first_s = _seconds("rank_timeout", rank_timeout), _seconds("start_timeout", start_timeout)
            self._ranks = Ranks(rank, world_size, room, run, silent_s, lambda *launch: attach().board(*launch), first_s)
            with self._ranks.attending():
                self._begin(failure, run, attempt, slots, when, retention, attach)
            undo.pop_all()

    def _attach(
        self, to: Sequence[str] | None, run: str, retention: RetentionPolicy | None, undo: ExitStack
    ) -> Attachment:
        check_run(run)
        with translated(f"spool {self._spool.root}"):
            self._spool.check_way(run)  # because a restore observes what lies inside
        # Set before a daemon starts, because that daemon would otherwise prune without this policy.
        if retention is not None:
            with translated(f"spool {self._spool.root}"):
                set_policy(self._spool.control, run, checked(retention))
        self._daemon = Attachment(self._spool, to, run)
        undo.callback(self._daemon.close)
        return self._daemon

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
            given = check_attempt(attempt) if attempt is not None else None
            self._choice = Schedule(when, self._ranks)
            attach()
        except Exception as error:
            report_failure(self._ranks, run, error)
            raise
        self._beside = Beside(self._spool, asks=self._daemon.tiers)
        seen = functools.partial(self._daemon.attempts, run)
        options = {"when": repr(when), "to": self._daemon.to, "retention": repr(retention)}
        self._launch = Launch(self._spool, run, self._ranks, given, seen, options, self._beside.saving)
        self._capturer = Capturer()
        self._gate = Gate(self.stats)
        self._line = HandoffClient(self._spool) if self._daemon.tiers else None
        self._pipeline = Pipeline(self._spool, slots, self.stats, self._line, self._ended, self._daemon.make_room)
        self._staging = Staging(self._pipeline, self._gate)
        self._staged_bytes = 0  # size of the last staged part; the next one is probably about as large
        self._space = SpaceCheck(self._spool, lambda: self._daemon.keep_last)
        self._space.done = not self._daemon.tiers  # without tiers nothing is pruned, so no expected number is right
        if self._choice.preemption is not None:
            self._choice.preemption.begin()

    @property
    def attempt(self) -> str:
        """This launch's name. It is chosen at the first use, and sorts after every attempt that existed then."""
        return self._launch.attempt

    @property
    def run(self) -> str:
        """The training job's name."""
        return self._launch.run

    @property
    def when(self) -> When | None:
        """The rule by which `due` decides; None without one."""
        return self._choice.when

    @property
    def notice(self) -> str | None:
        """The notice that this node or job ends, by which `due` was last True; None before, and without
        `When(preemption=...)`. It is the same on every rank after the same call of `due`. Save, leave the loop and call
        `close(deadline=...)`.
        """
        return self._choice.preemption.why if self._choice.preemption is not None else None

    def due(self, step: int, epoch: int | None = None, metrics: Mapping[str, float] | None = None) -> bool:
        """Return whether to save now by the rule `when`. Every rank must ask at the same steps; all get the same
        answer.

        Asking changes nothing. `due` keeps returning True, at this step or the next, until a save counts. A save counts
        once its snapshot was taken, or once a DCP save began. A save that `when_busy` skipped does not count. A save
        that fails later counts, but the value of its metric is forgotten. With several ranks, steps and epochs are
        counted from where a checkpoint was last found due. A rank cannot count from the last success, because it does
        not know whether the others' saves succeeded.

        `steps` and `epochs` need no communication between ranks. With `every` and `best`, rank 0 decides. The ranks
        then communicate only where metrics are given, and at steps that may be due by rank 0's clock. Rank 0 names such
        steps in advance.

        With `preemption`, `due` is True once for each notice, whichever rank got it, at the same step on every rank:
        the first at which they ask after all of them know of it. Until then a call waits, about a second.
        A `save` at that step waits for a slot, whatever `when_busy` says. If ranks cannot be reached within 15 s, the
        log says so, and nothing is due by that notice.

        Args:
            step: the training step, at least 0.
            epoch: the epoch that has just ended, counted from 0; None within an epoch.
            metrics: the metrics measured at this step. Give them at the same steps on every rank; only rank 0's values
                count. NaN is not better than any value. After a restore, the best value so far comes from rank 0's
                manifests of the complete checkpoints on the timeline. So let the retention rule `keep_best` keep the
                best checkpoint. A `save` that follows `due` at the same step stores the value in its metrics.

        Raises:
            StepRefused: `step` is no int, or is negative.
            ConfigError: the `Checkpointer` has no `when`; `epoch` is no number; or `metrics` on rank 0 lacks the metric
                of `when`, which is then raised on every rank.
            StoreUnavailable: another rank cannot be reached.
        """
        self._check_open()
        due = self._choice.due(check_step(step), None if epoch is None else check_epoch(epoch), metrics)
        if due and self.notice not in (None, self._noticed):
            self._tell_preempted(step)
        return due

    def _tell_preempted(self, step: int) -> None:
        """Log a notice and report it to the daemon, which then sends the newest checkpoint first."""
        self._noticed = self.notice
        why, launch = str(self._noticed), self._launch
        log.warning("notice: %s; a checkpoint is due at step %d, and training should end after it", why, step)
        part = PartId(CheckpointId(launch.run, launch.attempt, step), launch.rank, launch.world)
        self._daemon.tell(Preempted(part=part, why=why[:MAX_TOLD]))

    # -- save -------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, object], metrics: Mapping[str, float] | None = None) -> Save:
        """Take a snapshot of `state` and return. A thread then makes the snapshot durable behind training.

        Nothing that training changes afterwards gets into the checkpoint. While the last save is still being persisted,
        `when_busy` decides what this call does; the time of a wait is added to `stats.waited_s`. Tensors that only an
        attached optimizer changes are copied behind training. Everything else is copied before `save` returns.

        If a daemon runs, killing this process loses nothing of the snapshot once two things are done. The tensors are
        copied, and the values that are no tensors are encoded (behind the next step if that takes long).

        Args:
            step: the training step, at least 0. An attempt commits each step once.
            state: a mapping of names to objects with `state_dict`, tensors or plain values.
            metrics: a mapping of names to numbers, stored with the checkpoint.

        Returns:
            A `Save`, which reports when the checkpoint is durable or why it failed.

        Raises:
            StepRefused: `step` is no int, is negative, or was already committed by this attempt.
            StateRefused: a value cannot be stored; the message names its path.
            SaveSkipped: an earlier save is still being persisted, and `when_busy` is `"fail"`.
            ConfigError: a metric is not a number; the checkpointer is closed; or another process, which the message
                names, saves this rank of this attempt.
        """
        begun = time.perf_counter()
        self._check_open()
        part, numbers = self._part(step, metrics)
        save = Save(part, self._spool)
        skips = self._when_busy != "wait" and self._pipeline.busy and not self._choice.is_urgent(save.step)
        # Confirm earlier late copies first, because this save would be copied after them.
        self._gate.confirm(wait=not skips)
        if skips:
            return self._skipped(save)
        try:
            with short_turns:
                capture = self._capturer.capture(state)
                self._take(save, capture, numbers)
        except BaseException:
            self._choice.ended(save.step, durable=False)
            raise
        self._choice.took(save.step)
        self._check_space(capture.layout.size)
        self.stats.saves += 1
        blocked = time.perf_counter() - begun
        self.stats.blocked_s += blocked
        save.blocked_s = blocked
        self.stats.first_blocked_s = self.stats.first_blocked_s or blocked
        return save

    def _check_space(self, size_bytes: int) -> None:
        if not self._space.done:
            self._pipeline.behind(lambda: self._space.check(size_bytes))

    def _part(self, step: int, metrics: Mapping[str, float] | None) -> tuple[PartId, dict[str, float]]:
        part, numbers = self._launch.part(step), checked_metrics({} if metrics is None else metrics)
        return part, self._choice.taking(part.checkpoint.step, numbers)

    def _take(self, save: Save, capture: Capture, numbers: dict[str, float]) -> None:
        late = self._gate.late(capture)
        manifest = functools.partial(self._launch.manifest, save.part, numbers)
        snapshot = Snapshot(save, capture, manifest, late, self._gate.distrust)
        self._launch.steps.add(save.step)
        try:
            if snapshot.late and self._pipeline.is_ready(capture.layout.size):
                snapshot.copy_little()
            self._pipeline.take(snapshot)
            if snapshot.late:
                self._gate.watch(snapshot)
                save.asked = snapshot.reached
            else:
                snapshot.encode()  # concurrently with the copy
            snapshot.wait()
        except BaseException:
            if snapshot.give_up():
                self._launch.steps.discard(save.step)
            raise

    def attach(self, *optimizers: Optimizer) -> None:
        """Copy these optimizers' parameters and state behind training, after `save` has returned.

        The copy runs during the forward and backward passes. The optimizers' next `step()` waits until it has ended
        (`stats.step_waited_s`).

        Between a `save` and the next `step()` nothing else may write to those tensors: no manual weight clipping, no
        `load_state_dict`, no `all_reduce`. If tierd notices such a write, that save fails with `TornSnapshot`, and
        later saves copy those tensors before they return. docs/explanation/save.md says which writes are noticed, and
        how.

        Therefore a checkpoint is kept only after the training thread has reached the next `step()`, `save`, `restore`,
        `close`, `Save.wait` or `Save.done`, or after 10 seconds. Buffers, copies that training keeps by itself (an EMA,
        SWA) and everything else are copied before `save` returns.

        Raises:
            ConfigError: an argument is not a `torch.optim.Optimizer`.
        """
        self._check_open()
        self._gate.attach(optimizers)

    def _skipped(self, save: Save) -> Save:
        self.stats.skipped += 1
        self._choice.ended(save.step, durable=False)
        error = SaveSkipped(f"{save.part}: an earlier save is still being persisted")
        if self._when_busy == "fail":
            raise error
        log.warning("skipped: %s", error)
        save.finish(error)
        return save

    def _ended(self, save: Save, error: Exception | None) -> None:
        """Record that a save has become durable or has failed. Runs in another thread than training."""
        if error is not None:
            self._launch.steps.discard(save.step)
            self._report_failed(save.part, error)
        else:
            self._durable(save.part.checkpoint.attempt, save.step)
        self._choice.ended(save.step, durable=error is None)
        save.finish(error)
        if self._line is not None:
            self._line.renew()
        self._daemon.keep()

    @contextmanager
    def stage(self, step: int, metrics: Mapping[str, float] | None = None) -> Iterator[Path]:
        """Give a directory for another library's files, and commit it when the block ends without an exception.

        Args:
            step, metrics: as for `save`.

        Raises:
            StepRefused: as for `save`.
            ManifestError: the directory contains something other than plain files.
            SpoolFull, SpoolUnusable: the directory could not be made durable.
        """
        self._check_open()
        part, numbers = self._part(step, metrics)
        try:
            with translated(f"spool {self._spool.root}"):
                # Make room now, because the other library's write is not tried again.
                if self._spool.free()[0] < self._staged_bytes:
                    self._daemon.make_room(part, self._staged_bytes, quota=False)
                stage = self._spool.stage(part)
            with stage:
                yield stage.path
                with translated(f"spool {self._spool.root}"):
                    files = describe_directory(stage.path)
                    self._staged_bytes = sum(file.size for file in files)
                    stage.commit(msgspec.structs.replace(self._launch.manifest(part, numbers), files=files))
        except BaseException as error:
            self._unstaged(part, error)
            raise
        self._choice.took(part.checkpoint.step)
        self._staged(part.checkpoint.step, numbers)

    def _staged(self, step: int, numbers: dict[str, float]) -> None:
        """Record that a staged directory was committed."""
        self._launch.steps.add(step)
        self._durable(self._launch.attempt, step)
        self.stats.saves += 1
        self._choice.taking(step, numbers)
        self._choice.ended(step, durable=True)
        self._daemon.keep()

    def _unstaged(self, part: PartId, error: BaseException) -> None:
        """Record that a staged directory was not committed."""
        self._choice.ended(part.checkpoint.step, durable=False)
        # A refused step is already committed, so nothing was lost.
        if isinstance(error, Exception) and not isinstance(error, StepRefused):
            self._report_failed(part, error)

    def _durable(self, attempt: str, step: int) -> None:
        self._saved.add(attempt)
        self._failed.pop(step, None)

    def _report_failed(self, part: PartId, error: Exception) -> None:
        why = (str(error) or type(error).__name__)[:MAX_TOLD]
        self._failed[part.checkpoint.step] = why
        self._daemon.tell(Failed(part=part, why=why))

    def report_leaked(self, step: int, why: str) -> None:
        """Report to the daemon that this step trained on repeated or validation samples. Called by `SampleWatch`."""
        launch = self._launch
        part = PartId(CheckpointId(launch.run, launch.attempt, check_step(step)), launch.rank, launch.world)
        self._daemon.tell(Leaked(part=part, why=why[:MAX_TOLD]))

    # -- restore ----------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: MutableMapping[str, Any] | None = None,
        step: int | None = None,
        *,
        attempt: str | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        only: str | Collection[str] | None = None,
        at_least: int | None = None,
        ignore_prefixes: bool = False,
    ) -> Restored | None:
        """Load the newest verified checkpoint of this run's timeline into `state`, or the best one by a metric.

        All ranks of a launch call `restore` together. Either all of them get the same checkpoint, or none gets one.

        Args:
            state: as for `save`. Objects are loaded with `load_state_dict`, plain values are replaced in the mapping,
                and tensors are filled in place. If None, the checkpoint is only verified, and `Restored.directory`
                holds its files (for checkpoints that `stage` wrote).
            step: restore this step and no other.
            attempt: restore a checkpoint of this attempt. A checkpoint of a branch, which is not on the timeline, needs
                this argument.
            best: a metric's name. Restore the complete checkpoint with the smallest (`mode="min"`) or largest (`"max"`)
                value in rank 0's manifest; among equals, the newest. If that checkpoint is corrupt, the next best is
                restored. Every place has to answer.
            mode: whether a smaller (`"min"`) or a larger (`"max"`) value of `best` is better.
            only: names of entries, such as `"model"` or `("model", "ema")`. Only these are loaded; every other entry of
                `state` stays unchanged. Every byte of these entries is verified; other entries are not read.
            at_least: a step that is known to have been saved. Nothing older is restored, and an empty run raises
                instead of counting as a fresh start.
            ignore_prefixes: also load a model whose names differ by prefixes of wrappers alone: `_orig_mod.` of
                `torch.compile`, `module.` of DDP, and those of FSDP1 and activation checkpointing.

        Returns:
            What was restored; None if the run has no checkpoint in any place, which means a fresh start.

        Raises:
            CheckpointNotFound: no checkpoint could be verified, or not the requested one, or none from `at_least` on;
                the message says which were skipped and why. Or no checkpoint has a value for the metric; the message
                says which metrics exist.
            StateMismatch: the checkpoint does not fit `state`; the message names the first few places. Nothing was
                loaded, unless an object's own `load_state_dict` refused a value that fits.
            StoreUnavailable, DaemonUnavailable: a place that may hold a newer checkpoint, or the requested one, did not
                answer; or another rank could not restore, and the message says why.
            ConfigError: the given attempt cannot continue from this checkpoint; ranks asked for different checkpoints;
                or `state` lacks an entry that `only` names.
        """
        goal = None if best is None else Goal(best, mode)
        names = (only,) if isinstance(only, str) else only if only is None else tuple(only)
        device = None if state is None or names is not None else device_of(state)
        uploads = Uploads(state, device) if state is not None and device is not None else None
        restorer = self._restorer(keep=state is not None, best=best, only=names, uploads=uploads)

        def fits(found: Found) -> dict[str, Any]:
            self._launch.check_given(found.part.checkpoint, found.attempts)
            into = chosen({} if state is None else state, names)
            if state is None:
                return {}
            tree = with_names_of(into, self._tree(found)) if ignore_prefixes else self._tree(found)
            check_fit(into, tree)
            return tree

        self._let_go()
        with self._ranks.attending(), contextlib.ExitStack() as ending:
            if uploads:
                ending.callback(uploads.close)
            found = restorer.restore(step, attempt, fits, goal, at_least)
            if found is not None:
                self._hold = found.hold
                self._launch.started_from = found.manifest.started_from
                self._load(found, state, names, restorer, uploads)
        self._choice.resume(found.part.checkpoint if found else None, restorer.resume)
        if found is None:
            self._launch.go_on_from(None, restorer.resume.attempts, restorer.agreement.clocks)
            if state is not None:
                self._pipeline.reserve(estimate(state), device_of(state))
                self._check_space(estimate(state))
            return None
        manifest = found.manifest
        self._launch.go_on_from(found.part.checkpoint, found.attempts, found.clocks)
        if state is not None:
            size = len(found.files[TENSORS])
            self._pipeline.adopt(found.arena)
            self._pipeline.reserve(size, device_of(state))
            self._check_space(size)
        if found.unreached:
            silent = ", ".join(found.unreached) + restorer.because()
            log.warning("restored step %d; not asked for newer ones: %s", manifest.step, silent)
        return Restored(
            step=manifest.step,
            attempt=manifest.attempt,
            tier=found.tier,
            metrics=manifest.numbers,
            skipped=found.skipped,
            unreached=found.unreached,
            directory=found.directory,
        )

    def start_from(self, source: Source) -> None:
        """Record that this run starts from a checkpoint of another run, as a fine-tune does.

        Call it on every rank, after `restore` found nothing of this run and before the first save. Each checkpoint of
        this launch then names `source`, and so do those of later launches that resume from one. `tierd show` prints it.
        Nothing else depends on it: the other run may be deleted.

        Args:
            source: the result of `tierd.open(url, other_run).restore(state)`, or anything with `run`, `step` and
                `attempt`.

        Raises:
            ConfigError: `source` is of this run, or has no `run`; or this launch resumed from a checkpoint.
        """
        self._check_open()
        self._launch.start_from(source)

    def _restorer(
        self,
        *,
        keep: bool,
        best: str | None = None,
        only: Collection[str] | None = None,
        uploads: Uploads | None = None,
    ) -> Restorer:
        """Make the `Restorer`, after every earlier save has become durable or has failed."""
        self._check_open()
        self._gate.confirm()
        self._pipeline.drain()
        self._daemon.renew()
        return Restorer(
            self._spool,
            self._launch.run,
            self._ranks,
            tiers=self._daemon.tiers,
            line=self._line if keep else None,
            keep=keep,
            clock=self._launch.clock,
            tell=self._daemon.tell,
            metrics=tuple({name for name in (best, self._choice.metric) if isinstance(name, str)}),
            only=only,
            silent=self._daemon.silent,
            uploads=uploads,
        )

    def _load(
        self,
        found: Found,
        state: MutableMapping[str, Any] | None,
        names: Collection[str] | None,
        restorer: Restorer,
        uploads: Uploads | None = None,
    ) -> None:
        """Load the verified part, then wait until every rank has loaded its part: only then may any rank continue."""
        failure: Exception | None = None
        try:
            if state is not None:
                into = chosen(state, names)
                staged = uploads.staged(found.tree) if uploads else {}
                load(into, found.tree, lent=found.arena is not None, file=found.files[TENSORS], staged=staged)
                # Any other mapping has no plain values to replace: `fits` has checked that.
                if into is not state and isinstance(state, MutableMapping):
                    state.update(into)
        except Exception as error:
            failure = error
        # Also after a partial load, because the state then still comes from this checkpoint.
        if self._launch.world == 1:
            if failure is not None:
                self._launch.go_on_from(found.part.checkpoint, found.attempts, found.clocks)
                raise failure
            return
        try:
            restorer.agreement.loaded(found.part.checkpoint, failure)
        except BaseException as error:
            self._launch.broke(error)
            raise

    def _tree(self, found: Found) -> dict[str, Any]:
        check_written_by_save(found.part, found.files)
        return unflatten(found.files[TREE], found.files[TENSORS])

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    # -- the end ----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this Checkpointer is closed")
        if os.getpid() != self._pid:
            raise ConfigError("this process was forked from the one that made the Checkpointer: make one of its own")
        self._ranks.check_group()

    def close(self, wait: str | None = None, timeout: float | None = None, deadline: str | float | None = None) -> None:
        """Wait until every save is durable in the spool or has failed, then detach from the daemon, which flushes on.

        `close` warns of the saves that are on no tier, with their number and steps, if nobody would flush them later.
        That is so if no tier accepts checkpoints, if no daemon answers, or if the daemon ends with this process. The
        daemon ends with this process if this process is PID 1 of its container, or if PID 1 ends with it.

        Args:
            wait: None: if the daemon ends with this process, wait for the tiers too, at most 10 minutes. `"local"`:
                wait for no tier. A tier's name: wait until that tier has verified every save of this launch that its
                retention keeps.
            timeout: how many seconds to wait for tiers, after every save has ended. None: 10 minutes, or for a named
                tier, as long as the daemon works.
            deadline: the node ends this long after the notice by which `due` was True, or after this call if there was
                none: seconds, or `"120s"`. The daemon then sends the newest checkpoint first, and an older one that is
                under way gives way. Until then `close` waits for the tiers, also if the daemon would flush on alone.
                What is not durable in the spool by then is logged, and waited for.

        Raises:
            TimeoutError: the named tier lacks saves after `timeout`; the message names their steps.
            SaveFailed: the named tier has everything but saves that failed; the message names their steps.
            StoreRefused: the named tier refuses; the message names the steps.
            ConfigError: `wait`, `timeout` or `deadline` cannot be used, or there is no such tier.
            DaemonUnavailable: a tier was named, and no daemon answers.

        The `Checkpointer` is closed even if `close` raises, unless an argument has a wrong type. After an
        error, or after a close that waited for no tier, call `close` again to wait for a named tier.
        """
        check_wait(wait, timeout, tiers=self._daemon.tiers)
        if os.getpid() != self._pid:  # a forked child has none of the threads
            return
        if self._closed and (wait in (None, SPOOL) or wait in self._verified):
            return
        end_s = self._choice.end_s(deadline)
        if not self._closed:
            self._gate.detach()
            self._drain(end_s)
        if end_s is not None:
            left_s = max(0.0, end_s - time.monotonic())
            timeout = left_s if timeout is None else min(timeout, left_s)
        patience_s = _PATIENCE_S
        try:
            if self._saved and self._daemon.tiers:
                closing = Closing(self._spool, self._is_mine, self._daemon.renew, node_ends=end_s is not None)
                if wait not in (None, SPOOL):
                    closing.wait_for(wait, timeout)
                else:
                    closing.end(patient=wait is None, timeout_s=timeout)
            if wait not in (None, SPOOL):
                check_failed(wait, self._failed)
                self._verified.add(wait)
        except TimeoutError:
            patience_s = 0.0
            raise
        finally:
            if not self._closed:
                self._closed = True
                if self._choice.preemption is not None:
                    self._choice.preemption.close()
                self._pipeline.close()
                self._staging.close()
            self._let_go()
            self._ranks.close()
            self._beside.close()
            self._daemon.close(patience_s)

    def _drain(self, end_s: float | None) -> None:
        """Wait for every save, and log once if that takes longer than until `end_s` of the monotonic clock."""
        if end_s is not None and not self._pipeline.drain(max(0.0, end_s - time.monotonic())):
            log.error(
                "closing: the newest save is not durable in the spool at the deadline, and is lost if the node ends "
                "now; `tierd advise --notice` computes what fits"
            )
        self._pipeline.drain()

    def _is_mine(self, part: PartId) -> bool:
        one = part.checkpoint
        return (one.run, part.rank) == (self._launch.run, self._launch.rank) and one.attempt in self._saved

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as error:
            if kind is None:
                raise
            log.error("closing failed, too: %s", error)  # the caller has to see the exception that is already in flight


def _seconds(name: str, given: float) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 1 <= given < math.inf:
        raise ConfigError(f"{name}={given!r}: seconds, at least 1")
    return float(given)
