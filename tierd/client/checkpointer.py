"""`Checkpointer`: save and restore the checkpoints of one run from inside the training process.

Each method checks that the `Checkpointer` is open, and calls a part of `client/checkpointer_parts.py`. Most of the
module is docstrings, because they are the public reference.

Invariant: training never waits for the daemon and never fails because of it. A failure after `save` has returned is
recorded in the `Save`, in the log and in `Stats`, and `close` raises if the last state was lost by it. Before that only
a caller's mistake raises an exception.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tierd.client.checkpointer_parts import CheckpointerParts, Shutdown
from tierd.client.ranks.launch import ResumeSource
from tierd.client.ranks.ranks import SILENT_S, START_S
from tierd.client.restoring.restorer import Restored
from tierd.client.saving.save_jobs import Save, Stats
from tierd.core.ids import CheckpointId, PartId, check_step
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.save_rules import MetricGoal, When, check_epoch
from tierd.core.units import format_duration, format_size, html_table
from tierd.ipc.messages import MAX_REASON, DataLeakNotice, PreemptionNotice

if TYPE_CHECKING:
    from typing import Self

    from torch.optim import Optimizer

log = logging.getLogger("tierd")


class Checkpointer:
    """Save and restore the checkpoints of one run through a spool.

    Every rank of a launch makes one `Checkpointer`. All ranks call `restore` together, because there they agree on one
    checkpoint. `save` waits for no other rank.

    Args:
        spool: a directory on a local disk. It is created if it is missing.
        run: the training job's name, the same in every launch: 1 to 128 of `A-Za-z0-9._-`, a letter or digit first.
        rank, world_size: this process's rank and the number of ranks. If not given, they are read from an initialised
            `torch.distributed`, else from the launcher's environment (torchrun, mpirun, srun, …: see the how-to for
            several ranks), else they are rank 0 of 1.
        attempt: this launch's name, shared by all ranks, and used by no earlier launch. If not given, the ranks agree
            on one through `torch.distributed`, torchrun's agent, the spool or a tier, or derive it from SLURM's
            environment.
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
        replicated: names of the entries of the state that have the same bytes on every rank. They are then stored once,
            and restore on any number of ranks. A `DistributedDataParallel` module, and the optimizers, schedulers and
            scalers of its parameters, need not be named.
        prefer_equal_replicas: `restore` passes over a checkpoint in which replicated tensors differ between ranks, as
            far as its save compared them, and takes the next older one without a difference. If there is none, it
            takes the newest one and warns. Without it, differences are only reported. The same on every rank.

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
        replicated: Collection[str] = (),
        prefer_equal_replicas: bool = False,
    ) -> None:
        self._noticed: str | None = None  # the last notice that was reported
        self.stats = Stats()
        self._inner = CheckpointerParts(
            spool,
            run,
            rank,
            world_size,
            attempt,
            to,
            slots,
            when_busy,
            when,
            retention,
            rank_timeout,
            start_timeout,
            replicated,
            prefer_equal_replicas,
            stats=self.stats,
        )
        self._shutdown = Shutdown(self._inner)

    def __repr__(self) -> str:
        stats = self.stats
        failed = f", {stats.failed} failed" if stats.failed else ""
        return f"<Checkpointer of run {self.run!r} in {self._inner.spool.root}: {stats.durable} saves durable{failed}>"

    def _repr_html_(self) -> str:
        stats = self.stats
        cells = (self._inner.spool.root, stats.durable, stats.failed, format_size(stats.persisted_bytes))
        columns = ("spool", "durable", "failed", "written", "blocked")
        return html_table(f"run {self.run}", columns, [(*cells, format_duration(stats.blocked_s))])

    @property
    def attempt(self) -> str:
        """This launch's name. It is chosen at the first use, and sorts after every attempt that existed then."""
        return self._inner.launch.attempt

    @property
    def run(self) -> str:
        """The training job's name."""
        return self._inner.launch.run

    @property
    def when(self) -> When | None:
        """The rule by which `due` decides; None without one."""
        return self._inner.schedule.when

    @property
    def notice(self) -> str | None:
        """The notice that this node or job ends, by which `due` was last True; None before, and without
        `When(preemption=...)`. It is the same on every rank after the same call of `due`. Save, leave the loop and call
        `close(deadline=...)`.
        """
        return self._inner.schedule.preemption.why if self._inner.schedule.preemption is not None else None

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
        A `save` at that step waits for a slot, whatever `when_busy` says. If ranks cannot be reached within 15 s,
        or longer with more than 450 ranks, the log says so, and nothing is due by that notice.

        Args:
            step: the training step, from 0 to 999,999,999,999.
            epoch: the epoch that has just ended, counted from 0; None within an epoch.
            metrics: the metrics measured at this step. Give them at the same steps on every rank; only rank 0's values
                count. NaN is not better than any value. After a restore, the best value so far comes from rank 0's
                manifests of the complete checkpoints on the timeline. So let the retention rule `keep_best` keep the
                best checkpoint. A `save` that follows `due` at the same step stores the value in its metrics.

        Raises:
            StepRefused: `step` is no int, or out of range.
            ConfigError: the `Checkpointer` has no `when`; `epoch` is no number; or `metrics` on rank 0 lacks the metric
                of `when`, which is then raised on every rank.
            StoreUnavailable: another rank cannot be reached.
        """
        self._inner.check_open()
        saves_now = self._inner.schedule.due(check_step(step), None if epoch is None else check_epoch(epoch), metrics)
        if saves_now and self.notice not in (None, self._noticed):
            self._report_preempted(step)
        return saves_now

    def _report_preempted(self, step: int) -> None:
        self._noticed = self.notice
        why = str(self._noticed)
        log.warning("notice: %s; a checkpoint is due at step %d, and training should end after it", why, step)
        self._inner.daemon.report(PreemptionNotice(part=self._part(step), why=why[:MAX_REASON]))

    def _part(self, step: int) -> PartId:
        launch = self._inner.launch
        return PartId(CheckpointId(launch.run, launch.attempt, step), launch.rank, launch.world)

    def save(self, step: int, state: Mapping[str, object], metrics: Mapping[str, float] | None = None) -> Save:
        """Take a snapshot of `state` and return. A thread then makes the snapshot durable behind training.

        Nothing that training changes afterwards gets into the checkpoint. While the last save is still being persisted,
        `when_busy` decides what this call does; the time of a wait is added to `stats.waited_s`. Tensors that only an
        attached optimizer changes are copied behind training. Everything else is copied before `save` returns.

        If a daemon runs, killing this process loses nothing of the snapshot once two things are done. The tensors are
        copied, and the values that are no tensors are encoded (behind the next step if that takes long).

        Args:
            step: the training step, from 0 to 999,999,999,999. An attempt commits each step once.
            state: a mapping of names to objects with `state_dict`, tensors or plain values.
            metrics: a mapping of names to numbers, stored with the checkpoint.

        Returns:
            A `Save`, which reports when the checkpoint is durable or why it failed.

        Raises:
            StepRefused: `step` is no int, is out of range, or was already committed by this attempt.
            StateRefused: a value cannot be stored; the message names its path.
            SaveSkipped: an earlier save is still being persisted, and `when_busy` is `"fail"`.
            ConfigError: a metric is not a number; the checkpointer is closed; a `restore` runs, or the last one failed;
                or another process, which the message names, saves this rank of this attempt.
        """
        self._inner.check_open()
        return self._inner.state_saver.save(step, state, metrics)

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
        self._inner.check_open()
        self._inner.attach(optimizers)

    def stage(self, step: int, metrics: Mapping[str, float] | None = None) -> AbstractContextManager[Path]:
        """Give a directory for another library's files, and commit it when the block ends without an exception.

        Args:
            step, metrics: as for `save`.

        Raises:
            StepRefused: as for `save`.
            ManifestError: the directory contains something other than plain files, or was itself replaced or removed.
            SpoolFull, SpoolUnusable: the directory could not be made durable.
        """
        self._inner.check_open()
        return self._inner.directory_saver.stage(step, metrics)

    def report_leaked(self, step: int, why: str) -> None:
        """Report to the daemon that this step trained on repeated or validation samples. Called by `SampleWatch`."""
        self._inner.daemon.report(DataLeakNotice(part=self._part(check_step(step)), why=why[:MAX_REASON]))

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
        fresh: str | Collection[str] | None = None,
        ignore_prefixes: bool = False,
    ) -> Restored | None:
        """Load the newest verified checkpoint of this run's timeline into `state`, or the best one by a metric.

        All ranks of a launch call `restore` together. Either all of them get the same checkpoint, or none gets one.

        Nothing is saved while `restore` runs, also not by a signal's handler. After one that raised, even
        KeyboardInterrupt, saves are refused until a restore succeeds, because the state may be loaded in part. Only a
        launch that had restored or saved before may save on, if nothing was loaded.

        Args:
            state: as for `save`. Objects are loaded with `load_state_dict`, plain values are replaced in the mapping,
                and tensors are filled in place. If None, the checkpoint is only verified, and `Restored.directory`
                holds its files (for checkpoints that `stage` wrote).
            step: restore this step and no other: the timeline's checkpoint, or if the timeline has none, that of the
                newest attempt that has one, which is on an abandoned branch. `Restored.attempt` says which.
            attempt: restore a checkpoint of this attempt, also where the timeline or a newer attempt has that step.
            best: a metric's name. Restore the complete checkpoint with the smallest (`mode="min"`) or largest (`"max"`)
                value in rank 0's manifest; among equals, the newest. If that checkpoint is corrupt, the next best is
                restored. Every place has to answer.
            mode: whether a smaller (`"min"`) or a larger (`"max"`) value of `best` is better.
            only: names of entries, such as `"model"` or `("model", "ema")`. Only these are loaded; every other entry of
                `state` stays unchanged. Every byte of these entries is verified; other entries are not read.
            at_least: a step that is known to have been saved. Nothing older is restored, and an empty run raises
                instead of counting as a fresh start.
            fresh: names of entries that differ from rank to rank, such as `"rng"`. They matter if another number of
                ranks saved the checkpoint: each rank gets its own, and a rank for which none was saved keeps its
                present one. Entries that are the same on every rank (`replicated`) are loaded on any number of ranks.
            ignore_prefixes: also load a model whose names differ by prefixes of wrappers alone: `_orig_mod.` of
                `torch.compile`, `module.` of DDP, and those of FSDP1 and activation checkpointing.

        Returns:
            What was restored; None if the run has no checkpoint in any place, which means a fresh start.

        Raises:
            CheckpointNotFound: no checkpoint could be verified, or not the requested one, or none from `at_least` on;
                the message says which were skipped and why. Or no checkpoint has a value for the metric; the message
                says which metrics exist.
            StateMismatch: the checkpoint does not fit `state`; the message names the first few places. Or another
                number of ranks saved it, and entries differ from rank to rank that `fresh` does not name. Nothing was
                loaded, unless an object's own `load_state_dict` refused a value that fits.
            StoreUnavailable, DaemonUnavailable: a place that may hold a newer checkpoint, or the requested one, did not
                answer; or another rank could not restore, and the message says why.
            ConfigError: the given attempt cannot continue from this checkpoint, or is an earlier launch's; ranks asked
                for different checkpoints; or `state` lacks an entry that `only` names.
        """
        self._inner.check_open()
        goal = None if best is None else MetricGoal(best, mode)
        names = (only,) if isinstance(only, str) else only if only is None else tuple(only)
        beginning_anew = (fresh,) if isinstance(fresh, str) else tuple(fresh or ())
        with self._inner.launch.restoring():
            return self._inner.state_restorer.restore(
                state, step, attempt, goal, names, at_least, beginning_anew, ignore_prefixes=ignore_prefixes
            )

    def start_from(self, source: ResumeSource) -> None:
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
        self._inner.check_open()
        self._inner.launch.start_from(source)

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
            SaveFailed: the save of the last state failed, so that it is in no place: no later save of that step or of a
                later step, or after a restore, became durable. The message names the steps, the spool's path, the
                reason and the way out. Only the first `close` raises this. With a named tier: the tier has everything
                but saves that failed. A save that `when_busy` skipped has not failed.
            StoreRefused: the named tier refuses; the message names the steps.
            ConfigError: `wait`, `timeout` or `deadline` cannot be used, or there is no such tier.
            DaemonUnavailable: a tier was named, and no daemon answers.

        The `Checkpointer` is closed even if `close` raises, unless an argument has a wrong type. After an
        error, or after a close that waited for no tier, call `close` again to wait for a named tier.
        """
        self._shutdown.close(wait, timeout, deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: object) -> None:
        try:
            self.close()
        except Exception as error:
            if raised is None:
                raise
            # The caller has to see the exception that is already in flight.
            log.error("closing failed, too: %s", error)
            raised.add_note(f"closing the Checkpointer failed, too: {error}")


def internals(checkpointer: Checkpointer) -> CheckpointerParts:
    """Return the parts, for packages of tierd that save and restore through a `Checkpointer`."""
    return checkpointer._inner
