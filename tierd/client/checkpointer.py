"""The training process's side: save and go on, restore what is verified.

Law: training never waits for the daemon and never dies of it. What fails after `save` returned is a value on the
`Save`, a log line and a count; only what the caller got wrong is raised.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tierd.client.attachment import Attachment
from tierd.client.beside import Beside
from tierd.client.capture import Capture, Capturer
from tierd.client.choosing import Choice
from tierd.client.closing import Closing, check_failed, check_wait
from tierd.client.entries import check_written_by_save
from tierd.client.handoff import HandOff
from tierd.client.launch import Launch, tell_failure
from tierd.client.load import check_fit, chosen, load
from tierd.client.overlap import Gate
from tierd.client.pipeline import Pipeline
from tierd.client.ranks import SILENT_S, Ranks
from tierd.client.restore import Found, Restored, Restorer
from tierd.client.save import Save, Stats, checked_metrics
from tierd.client.slots import device_of, estimate
from tierd.client.snapshot import Snapshot
from tierd.client.source import MEMORY
from tierd.client.space import SpaceCheck
from tierd.client.state import unflatten
from tierd.client.turns import short_turns
from tierd.core.choose import Goal, When, check_epoch
from tierd.core.errors import ConfigError, SaveSkipped, StepRefused
from tierd.core.ids import PartId, check_attempt, check_run, check_step
from tierd.core.manifest import TENSORS, TREE
from tierd.core.retention import RetentionPolicy, checked
from tierd.core.wire import MAX_TOLD, Failed
from tierd.core.world import SPOOL
from tierd.link import Link
from tierd.records import set_policy
from tierd.spool import Spool, translated
from tierd.stage import describe_directory

if TYPE_CHECKING:
    from typing import Self

    from torch.optim import Optimizer

log = logging.getLogger("tierd")

_BUSY = ("wait", "skip", "fail")
_MAX_SLOTS = 16
_PATIENCE_S = 2.0  # that closing waits for what the daemon is still being told


class Checkpointer:
    """Saves and restores one run's checkpoints through a spool.

    Every rank of a launch makes one, and restores, together with the others: that is where they agree. Saving waits for
    no other rank.

    Args:
        spool: directory on local disk; made if it is missing.
        run: the training job's name, the same in every launch.
        rank, world_size: from an initialised `torch.distributed`, else from the environment of the launcher (torchrun,
            mpirun, srun, …: the README's table), when not given; else rank 0 of 1.
        attempt: this launch's name, shared by all ranks; agreed on through `torch.distributed` or torchrun's agent, or
            derived from SLURM's environment, when not given.
        to: URLs of the tiers: a daemon for them is started unless one holds the spool. Not given: a daemon is expected
            to be there or to come (systemd). Empty: the spool is all there is, and nothing prunes it.
        slots: snapshots that may be in memory at a time; each takes the size of the state.
        when_busy: what `save` does while every slot is still being persisted: `"wait"` for one, `"skip"` (the `Save`
            has then ended with `SaveSkipped`), or `"fail"` (raise it).
        when: what `due` goes by, the same on every rank.
        retention: what the run keeps on every tier, and in the spool where no configuration says that; the same on
            every rank. Not given: what a configuration or an earlier launch said, else `keep_last=3`.
        rank_timeout: seconds that ranks wait, in `restore`, for one that does not come to it or gives no sign of life
            in it; one that reads is waited for. A process group's own timeout counts where it is shorter.

    Raises:
        ConfigError: a name, rank, URL or policy cannot be used; or the launcher told a rank and not how many there are,
            or the reverse; or ranks were given different ones, or cannot agree; or `when` hangs on a clock or a metric,
            and they cannot talk.
        StoreUnavailable: another rank could not begin; says which and why.
        SpoolUnusable: the spool cannot be written to, or something of the run lies behind a link.
        DaemonUnavailable: the daemon for `to` did not start. One that is there and stopped is done without.
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
    ) -> None:
        self._closed = False
        self._saved: set[str] = set()  # attempts that this launch made something durable under
        self._failed: dict[int, str] = {}  # why, by step, where no later save of the step became durable
        self._verified: set[str] = set()  # tiers that `close` has waited for with success
        self._pid = os.getpid()
        self._hold: Link | None = None  # while it is open, the daemon leaves the last restored directory alone
        self._when_busy = when_busy
        self.stats = Stats()
        failure: Exception | None = None
        try:
            self._spool = Spool(spool)
        except Exception as error:  # the others are told before it is raised
            failure = error
        room = None if failure or attempt is not None else self._spool.control
        self._ranks = Ranks(rank, world_size, room, run, _seconds(rank_timeout))
        with self._ranks.attending():
            self._begin(failure, run, attempt, to, slots, when, retention)

    def _begin(
        self,
        failure: Exception | None,
        run: str,
        attempt: str | None,
        to: Sequence[str] | None,
        slots: int,
        when: When | None,
        retention: RetentionPolicy | None,
    ) -> None:
        """Settle with the other ranks what this launch is; a rank that cannot tells them, because they wait for it."""
        try:
            if failure is not None:
                raise failure
            if type(slots) is not int or not 1 <= slots <= _MAX_SLOTS:
                raise ConfigError(f"slots={slots!r}: a number from 1 to {_MAX_SLOTS}")
            if self._when_busy not in _BUSY:
                raise ConfigError(f"when_busy={self._when_busy!r}: one of {', '.join(_BUSY)}")
            check_run(run)
            given = check_attempt(attempt) if attempt is not None else None
            self._choice = Choice(when, self._ranks)
            with translated(f"spool {self._spool.root}"):
                self._spool.check_home(run)
            if retention is not None:  # before a daemon is there that would decide without it
                with translated(f"spool {self._spool.root}"):
                    set_policy(self._spool.control, run, checked(retention))
            self._daemon = Attachment(self._spool, to, run)
        except Exception as error:
            tell_failure(self._ranks, run, error)
            raise
        try:
            self._beside = Beside(self._spool, asks=self._daemon.tiers)
            seen = functools.partial(self._daemon.attempts, run)
            options = {"when": repr(when), "to": self._daemon.to, "retention": repr(retention)}
            self._launch = Launch(self._spool, run, self._ranks, given, seen, options, self._beside.saving)
        except BaseException:
            self._daemon.close()
            raise
        self._capturer = Capturer()
        self._gate = Gate(self.stats)
        self._line = HandOff(self._spool) if self._daemon.tiers else None
        self._pipeline = Pipeline(self._spool, slots, self.stats, self._line, self._ended, self._daemon.make_room)
        self._staged_bytes = 0  # of what was last staged: the next will be about as large
        self._space = SpaceCheck(self._spool, lambda: self._daemon.keep_last)
        self._space.done = not self._daemon.tiers  # nothing is pruned there, so no number is right

    @property
    def attempt(self) -> str:
        """This launch's name. Settled at the first use: later than everything that was there before."""
        return self._launch.attempt

    def due(self, step: int, epoch: int | None = None, metrics: Mapping[str, float] | None = None) -> bool:
        """Whether to save now, by `when`; the same on every rank, which all ask at the same steps.

        It changes nothing: it says so again, at this step or the next, until a save counts, which is when its snapshot
        was taken (or a DCP save began); one skipped by `when_busy` does not. One that fails later counts, but its
        metric is forgotten. Several ranks count steps and epochs from where a checkpoint was last found due: what it
        came to on one rank the others do not know.

        Steps and epochs cost no talk between ranks. With `every` and `best` rank 0 decides: at steps that may be due by
        its clock, which it names in advance, and where metrics are given.

        Args:
            epoch: which has just ended, counted from 0; None within one.
            metrics: given where they were measured, at the same steps on every rank; only rank 0's count. NaN is no
                better than anything. What was best so far is known again after a restore, from the metrics of rank 0's
                manifests of the complete checkpoints on the timeline (a `save` after `due` at the same step has the
                value in its metrics by itself); so let `keep_best` keep it.

        Raises:
            StepRefused: no int, or negative.
            ConfigError: there is no `when`; `epoch` is no number; or `metrics` lacks what it goes by on rank 0, which
                every rank is told.
            StoreUnavailable: another rank cannot be heard.
        """
        self._check_open()
        return self._choice.due(check_step(step), None if epoch is None else check_epoch(epoch), metrics)

    # -- save -------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, object], metrics: Mapping[str, float] | None = None) -> Save:
        """Snapshot `state` and return; persisting goes on behind.

        Nothing that training changes afterwards gets into the checkpoint. While the last save is still being persisted,
        this one does what `when_busy` says; a wait is counted (`stats.waited_s`). What an attached optimizer alone
        changes is copied behind training; everything else before this returns. Once that is copied, what is no
        tensor is encoded (behind the next step where it is long) and a daemon is there, killing this process loses
        nothing of it.

        Raises:
            StepRefused: no int, negative, or already committed by this attempt.
            StateRefused: a value cannot be stored; names its path.
            SaveSkipped: an earlier save is still being persisted, and `when_busy` is `"fail"`.
            ConfigError: a metric is not a number, or the checkpointer is closed; or another process saves this rank of
                this attempt, which is named.
        """
        begun = time.perf_counter()
        self._check_open()
        part, numbers = self._part(step, metrics)
        save = Save(part, self._spool)
        skips = self._when_busy != "wait" and self._pipeline.busy
        self._gate.confirm(wait=not skips)  # this save would be copied behind them
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
                snapshot.encode()  # beside the copy
            snapshot.wait()
        except BaseException:
            if snapshot.give_up():
                self._launch.steps.discard(save.step)
            raise

    def attach(self, *optimizers: Optimizer) -> None:
        """Let `save` return before what these optimizers change is copied: their parameters and their own state. It is
        copied behind forward and backward, and their next `step()` waits for it (`stats.step_waited_s`).

        Between a `save` and the next `step()` nothing else may write to those tensors (a hand-made weight clipping,
        `load_state_dict`, `all_reduce`). Such a write is noticed: that save fails with `TornSnapshot`, and later saves
        copy those tensors before they return. So a checkpoint is kept only after the training thread has come to the
        next `step()`, `save`, `restore`, `close`, `Save.wait` or `Save.done`, or after 10 seconds. The README's table
        of writers says what is noticed, and how. Copies that training keeps by itself (an EMA, SWA), buffers and
        everything else are copied before `save` returns.

        Raises:
            ConfigError: something other than a `torch.optim.Optimizer`.
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
        """A save has become durable or failed. Not in the thread that trains."""
        if error is not None:
            self._launch.steps.discard(save.step)
            self._tell_failed(save.part, error)
        else:
            self._durable(save.part.checkpoint.attempt, save.step)
        self._choice.ended(save.step, durable=error is None)
        save.finish(error)
        if self._line is not None:
            self._line.renew()
        self._daemon.keep()

    @contextmanager
    def stage(self, step: int, metrics: Mapping[str, float] | None = None) -> Iterator[Path]:
        """A directory for any other library to write into; leaving the block without an exception commits it.

        Raises:
            StepRefused: as `save`.
            ManifestError: something other than plain files was written there.
            SpoolFull, SpoolUnusable: it could not be made durable.
        """
        self._check_open()
        part, numbers = self._part(step, metrics)
        try:
            with translated(f"spool {self._spool.root}"):
                if self._spool.free()[0] < self._staged_bytes:  # what writes there is asked for no second try
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
        """What something else wrote is committed."""
        self._launch.steps.add(step)
        self._durable(self._launch.attempt, step)
        self.stats.saves += 1
        self._choice.taking(step, numbers)
        self._choice.ended(step, durable=True)
        self._daemon.keep()

    def _unstaged(self, part: PartId, error: BaseException) -> None:
        """What something else was to write is not there."""
        self._choice.ended(part.checkpoint.step, durable=False)
        if isinstance(error, Exception) and not isinstance(error, StepRefused):  # a committed step was not lost
            self._tell_failed(part, error)

    def _durable(self, attempt: str, step: int) -> None:
        self._saved.add(attempt)
        self._failed.pop(step, None)

    def _tell_failed(self, part: PartId, error: Exception) -> None:
        why = (str(error) or type(error).__name__)[:MAX_TOLD]
        self._failed[part.checkpoint.step] = why
        self._daemon.tell(Failed(part=part, why=why))

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
    ) -> Restored | None:
        """Load the newest verified checkpoint of this run's timeline into `state`, or the best.

        All ranks of a launch call it together, and get the same checkpoint, or none of them does.

        Args:
            state: as for `save`. Objects get `load_state_dict`, plain values are replaced in the mapping, tensors are
                filled in place. None: only verify, and return the directory (for what `stage` wrote).
            step: this step and no other.
            attempt: of this attempt; a checkpoint of a branch that the timeline left is asked for so.
            best: a metric: the complete checkpoint with the smallest (`mode="min"`) or largest (`"max"`) number for it
                in rank 0's manifest, of equals the newest; if that is corrupt, the next best. Every place has to
                answer.
            only: names of entries, `"model"` say, or `("model", "ema")`: they alone are loaded, and whatever else is
                in `state` stays as it is. Of these every byte is verified, and others are not read.
            at_least: a step that is known to have been saved: nothing older is restored, and a run that has nothing is
                no fresh start.

        Returns:
            None when the run has no checkpoint anywhere: a fresh start.

        Raises:
            CheckpointNotFound: none could be verified, or not the one asked for, or none of `at_least`; says what was
                skipped and why. Or none has a number for the metric; says which there are.
            StateMismatch: it does not fit `state`; names the first few places. Nothing was loaded, unless an object's
                own `load_state_dict` refused what fitted.
            StoreUnavailable, DaemonUnavailable: a place that may hold a newer or the right copy did not answer; or
                another rank could not restore, and why.
            ConfigError: a given attempt cannot go on from it; ranks were asked for different checkpoints; `state` lacks
                what `only` names.
        """
        goal = None if best is None else Goal(best, mode)
        names = (only,) if isinstance(only, str) else only if only is None else tuple(only)
        restorer = self._restorer(keep=state is not None, best=best, only=names)

        def fits(found: Found) -> dict[str, Any]:
            self._launch.check_given(found.part.checkpoint, found.attempts)
            into = chosen({} if state is None else state, names)
            tree = {} if state is None else self._tree(found)
            if state is not None:
                check_fit(into, tree)
            return tree

        self._let_go()
        with self._ranks.attending():
            found = restorer.restore(step, attempt, fits, goal, at_least)
            if found is not None:
                self._hold = found.hold
                self._load(found, state, names, restorer)
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

    def _restorer(self, *, keep: bool, best: str | None = None, only: Collection[str] | None = None) -> Restorer:
        """What finds the way back, once all that was saved before is durable, or has failed."""
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
        )

    def _load(
        self, found: Found, state: MutableMapping[str, Any] | None, names: Collection[str] | None, restorer: Restorer
    ) -> None:
        """Load what every rank has verified, and hear that every rank has loaded it: only then all go on from there."""
        failure: Exception | None = None
        try:
            if state is not None:
                into = chosen(state, names)
                load(into, found.tree, lent=found.tier == MEMORY, file=found.files[TENSORS])
                if into is not state and isinstance(state, MutableMapping):  # another takes no values, as `fits` saw
                    state.update(into)
        except Exception as error:
            failure = error
        if self._launch.world == 1:  # what was loaded halfway still came from there
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

    def close(self, wait: str | None = None, timeout: float | None = None) -> None:
        """Wait until every save is durable in the spool (or failed), and let go of the daemon, which flushes on alone.

        Where nobody would flush on, this warns of the saves that are on no tier, with their number and steps: no tier
        accepts checkpoints, no daemon answers, or the daemon ends with this process, because this process is PID 1 of
        its container or PID 1 ends with it.

        Args:
            wait: None: where the daemon ends with this process, also wait for the tiers, at most 10 minutes. `"local"`:
                never wait for a tier. A tier's name: wait until that tier has verified every save of this launch that
                its retention wants.
            timeout: seconds that the wait for tiers may take, after every save has ended. None: 10 minutes, or for a
                named tier, as long as the daemon works.

        Raises:
            TimeoutError: the named tier does not have everything after `timeout`; names the steps.
            SaveFailed: a tier was named, and has everything but saves that failed; names the steps.
            StoreRefused: the named tier says no; names the steps.
            ConfigError: `wait` or `timeout` cannot be used, or there is no such tier.
            DaemonUnavailable: a tier was named, and no daemon answers.

        It is closed in any case, except after a `wait` or `timeout` of the wrong kind. A named tier can still be waited
        for then: call it again after an error, or after a close that waited for no tier.
        """
        check_wait(wait, timeout, tiers=self._daemon.tiers)
        if os.getpid() != self._pid:  # a forked child has none of the threads
            return
        if self._closed and (wait in (None, SPOOL) or wait in self._verified):
            return
        if not self._closed:
            self._gate.detach()
            self._pipeline.drain()
        patience_s = _PATIENCE_S
        try:
            if self._saved and self._daemon.tiers:
                closing = Closing(self._spool, self._is_mine, self._daemon.renew)
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
                self._pipeline.close()
            self._let_go()
            self._ranks.close()
            self._beside.close()
            self._daemon.close(patience_s)

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
            log.error("closing failed, too: %s", error)  # what is in flight is what the caller has to see


def _seconds(rank_timeout: float) -> float:
    if isinstance(rank_timeout, bool) or not isinstance(rank_timeout, int | float) or not 1 <= rank_timeout < math.inf:
        raise ConfigError(f"rank_timeout={rank_timeout!r}: seconds, at least 1")
    return float(rank_timeout)
