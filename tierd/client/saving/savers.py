"""The saves of one launch: of a state, and of a directory that another library writes; how each begins and ends.

Invariants:

- Every save that begins ends here once, so that the schedule, the counters and the daemon have the same results.
- An earlier copy that runs behind training is confirmed before a later snapshot is taken.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from tierd.client import client_timings
from tierd.client.daemon_attachment import Attachment
from tierd.client.ranks.launch import Launch
from tierd.client.save_schedule import SaveSchedule
from tierd.client.saving.node_parts import NodeParts
from tierd.client.saving.save_jobs import Save, Stats, checked_metrics, short_switches
from tierd.client.saving.save_pipeline import SavePipeline
from tierd.client.saving.snapshot import Snapshot
from tierd.client.saving.snapshot_handoff import HandoffClient
from tierd.client.saving.step_gate import OptimizerStepGate
from tierd.client.user_messages import SpaceCheck
from tierd.core.errors import DivisionMismatch, SaveSkipped, StepRefused
from tierd.core.ids import CheckpointId, PartId
from tierd.core.storage_faults import lacks_inodes
from tierd.ipc.messages import MAX_REASON, SaveGivenUp
from tierd.spool.foreign_files import unshare_tree
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors
from tierd.spool.stage import describe_directory
from tierd.state.capture import Capture
from tierd.state.capturer import CapturerPool
from tierd.state.replicas import ReplicaGroup
from tierd.state.tensor_file import TensorFileLayout

log = logging.getLogger("tierd")


class SaveRecords:
    def __init__(
        self, launch: Launch, schedule: SaveSchedule, daemon: Attachment, handoff: HandoffClient | None, stats: Stats
    ) -> None:
        self.saved: set[str] = set()  # attempts under which a checkpoint is durable; a restore begins another one
        # Threads add to these in any order, so each question is answered from both when it is asked.
        self._durable_checkpoints: set[CheckpointId] = set()
        self._failures: dict[PartId, str] = {}
        self._launch, self._schedule, self._daemon, self._handoff = launch, schedule, daemon, handoff
        self._stats = stats
        # Called with each part that was committed; returns why nobody can restore this one, or an earlier one.
        self.find_mismatches: Callable[[PartId | None], dict[PartId, DivisionMismatch]] = lambda part: {}
        self._mismatched: dict[PartId, DivisionMismatch] = {}

    @property
    def failed(self) -> dict[int, str]:
        """Why saves failed, by step, if no save of that step in that attempt or a later one is durable."""
        latest: dict[int, str] = {}
        for saved in list(self._durable_checkpoints):
            latest[saved.step] = max(saved.attempt, latest.get(saved.step, ""))
        failures = [(part.checkpoint, why) for part, why in list(self._failures.items())]
        return {failed.step: why for failed, why in failures if latest.get(failed.step, "") < failed.attempt}

    @property
    def lost_parts(self) -> dict[PartId, str]:
        """The parts whose save failed, with the reason, if no save of that step or of a later one is durable.

        A save after a restore counts as later.
        """
        newest = max(map(_order, list(self._durable_checkpoints)), default=("", -1))
        return {part: why for part, why in list(self._failures.items()) if _order(part.checkpoint) > newest}

    @property
    def mismatched(self) -> str:
        """Why nobody can restore the newest checkpoint, if a later one was not saved; else empty."""
        lost = self._mismatched.keys() & self.lost_parts.keys()
        return f"{max(lost)}: {self._mismatched[max(lost)]}" if lost else ""

    def compare_parts(self, committed: PartId | None = None) -> None:
        """Find checkpoints that nobody can restore because the ranks of this node divided different states."""
        for part, why in self.find_mismatches(committed).items():
            log.error("%s: %s", part, why)
            self._mismatched[part] = why
            self._durable_checkpoints.discard(part.checkpoint)
            self._stats.durable -= 1
            self._stats.failed += 1
            self._report_failed(part, why)

    def begin(self, step: int, metrics: Mapping[str, float] | None) -> tuple[PartId, dict[str, float]]:
        """Return the part that a save at `step` writes, and its metrics. The save then claims the part."""
        part, numbers = self._launch.part(step), checked_metrics({} if metrics is None else metrics)
        return part, self._schedule.add_metric(part.checkpoint.step, numbers)

    def record_end(self, save: Save, error: Exception | None) -> None:
        """Record that a save has become durable or has failed. Runs in another thread than training."""
        if error is not None:
            self._report_failed(save.part, error)
            self._launch.release(save.part)
        else:
            self._durable(save.part.checkpoint)
            self.compare_parts(save.part)
            error = self._mismatched.get(save.part)
        self._schedule.take_result(save.step, durable=error is None)
        save.finish(error)
        if self._handoff is not None:
            self._handoff.renew()
        self._daemon.renew_soon()

    def record_staged(self, part: PartId, numbers: dict[str, float]) -> None:
        step = part.checkpoint.step
        self._launch.keep(part)
        self._durable(part.checkpoint)
        self._stats.saves += 1
        self._schedule.add_metric(step, numbers)
        self._schedule.take_result(step, durable=True)
        self._daemon.renew_soon()

    def record_unstaged(self, part: PartId, error: BaseException) -> None:
        self._schedule.take_result(part.checkpoint.step, durable=False)
        # A refused step is already committed, so nothing was lost.
        if isinstance(error, Exception) and not isinstance(error, StepRefused):
            self._stats.failed += 1
            self._report_failed(part, error)
        self._launch.release(part)

    def has_saved(self, part: PartId) -> bool:
        checkpoint = part.checkpoint
        return (checkpoint.run, part.rank) == (self._launch.run, self._launch.rank) and checkpoint.attempt in self.saved

    def _durable(self, saved: CheckpointId) -> None:
        self._stats.durable += 1
        self.saved.add(saved.attempt)
        self._durable_checkpoints.add(saved)

    def _report_failed(self, part: PartId, error: Exception) -> None:
        why = (str(error) or type(error).__name__)[:MAX_REASON]
        self._failures[part] = why
        self._daemon.report(SaveGivenUp(part=part, why=why))


def _order(checkpoint: CheckpointId) -> tuple[str, int]:
    """Sort a launch's checkpoints as training made them: by attempt, because a restore begins a later one."""
    return checkpoint.attempt, checkpoint.step


class StateSaver:
    def __init__(
        self,
        spool: Spool,
        launch: Launch,
        schedule: SaveSchedule,
        records: SaveRecords,
        gate: OptimizerStepGate,
        pipeline: SavePipeline,
        space: SpaceCheck,
        stats: Stats,
        when_busy: str,
        group: ReplicaGroup,
    ) -> None:
        self._divide_among(group)
        self._turns = itertools.count()
        self._unchecked = group.declared  # names that no state was compared with
        self._spool, self._launch, self._schedule, self._records = spool, launch, schedule, records
        self._gate, self._pipeline, self._space = gate, pipeline, space
        self._stats, self._when_busy = stats, when_busy
        self._node_parts = NodeParts(spool, group.node)
        self._layout: TensorFileLayout | None = None  # of the last save
        records.find_mismatches = self._find_mismatches

    def save(self, step: int, state: Mapping[str, object], metrics: Mapping[str, float] | None) -> Save:
        start_s = time.perf_counter()
        turn = next(self._turns)  # also of a save that is skipped or refused, because it is none of the other ranks'
        part, numbers = self._records.begin(step, metrics)
        save = Save(part, self._spool)
        skips = self._when_busy != "wait" and self._pipeline.busy and not self._schedule.is_urgent(save.step)
        snapshot: Snapshot | None = None
        try:
            self._launch.claim(part)  # in the block, because an interrupted save must release it
            # Confirm earlier late copies first, because this save would be copied after them.
            self._gate.confirm(wait=not skips)
            if not skips:
                self._warn_of_unknown(state)
                with short_switches:
                    snapshot = self._snapshot(save, self._capturers.capture(state), numbers, turn)
                    self._take(snapshot)
        except BaseException:
            if snapshot is None or snapshot.give_up():  # else the pipeline ends the save
                self._launch.release(part)
            self._schedule.take_result(save.step, durable=False)
            raise
        if snapshot is None:
            return self._skipped(save)
        self._schedule.count_save(save.step)
        self._space.check(snapshot.capture.layout.size)
        self._stats.saves += 1
        blocked = time.perf_counter() - start_s
        self._stats.blocked_s += blocked
        save.blocked_s = blocked
        self._stats.first_blocked_s = self._stats.first_blocked_s or blocked
        return save

    def _warn_of_unknown(self, state: Mapping[str, object]) -> None:
        unknown, self._unchecked = self._unchecked - state.keys(), frozenset()
        if unknown:
            log.warning(
                "run %s: `replicated` names %s, which the state does not have",
                self._launch.run,
                ", ".join(sorted(unknown)),
            )

    def declare(self, replicated: Collection[str]) -> None:
        """Declare entries of the state that are the same on all ranks, as an adapter knows it of its framework. Every
        rank declares the same, before its first save.
        """
        self._divide_among(replace(self.group, declared=self.group.declared.union(replicated)))

    def _snapshot(self, save: Save, capture: Capture, numbers: dict[str, float], turn: int) -> Snapshot:
        self._gate.report_interrupted(save.part)
        self._layout = capture.layout
        deferred = self._gate.deferred_tensors(capture)
        manifest = functools.partial(self._launch.manifest, save.part, numbers, capture.division, capture.senders)
        replicas = capture.replicas(_replica_round(save.part, turn))
        late_replicas = self._gate.changed_by_steps(replicas) if deferred.names else frozenset()
        timings = client_timings.current_timings()
        return Snapshot(save, capture, manifest, deferred, self._gate.distrust, timings, replicas, late_replicas)

    def _find_mismatches(self, committed: PartId | None) -> dict[PartId, DivisionMismatch]:
        """Runs in another thread than training, after a part was committed."""
        mismatches = self._node_parts.mismatches(committed, self._layout) if self._layout is not None else {}
        if mismatches:
            self._divide_among(self.group.undivided())
        return mismatches

    def _divide_among(self, group: ReplicaGroup) -> None:
        self.group, self._capturers = group, CapturerPool(group)

    def _take(self, snapshot: Snapshot) -> None:
        if snapshot.deferred_names and self._pipeline.is_ready(snapshot.capture.layout.size):
            snapshot.copy_if_few()
        self._pipeline.take(snapshot)
        if snapshot.deferred_names:
            self._gate.watch(snapshot)
            snapshot.save.confirm_copy = snapshot.confirm_if_copied
        else:
            snapshot.encode()  # concurrently with the copy
        snapshot.wait()

    def _skipped(self, save: Save) -> Save:
        self._launch.release(save.part)
        self._stats.skipped += 1
        self._schedule.take_result(save.step, durable=False)
        error = SaveSkipped(f"{save.part}: an earlier save is still being persisted")
        if self._when_busy == "fail":
            raise error
        log.warning("skipped: %s", error)
        save.finish(error)
        return save


def _replica_round(part: PartId, turn: int) -> int:
    """Return which replicated tensors a save compares. Every rank calls `save` at the same steps, so all count alike.
    Each launch begins elsewhere, because one that ends after few saves must not compare the same ones again.
    """
    return int(part.checkpoint.attempt[-8:], 16) + turn


class DirectorySaver:
    def __init__(
        self, spool: Spool, launch: Launch, schedule: SaveSchedule, records: SaveRecords, daemon: Attachment
    ) -> None:
        self._spool, self._launch, self._schedule, self._records = spool, launch, schedule, records
        self._daemon = daemon
        self._staged_bytes = 0  # size of the last staged part; the next one is probably about as large

    @contextmanager
    def stage(self, step: int, metrics: Mapping[str, float] | None) -> Iterator[Path]:
        part, numbers = self._records.begin(step, metrics)
        try:
            self._launch.claim(part)
            with spool_errors(f"spool {self._spool.root}", self._spool.root):
                # Make room now, because the other library's write is not tried again.
                if self._spool.free()[0] < self._staged_bytes or lacks_inodes(os.statvfs(self._spool.root)):
                    self._daemon.make_room(part, self._staged_bytes, quota=False)
                stage = self._spool.stage(part)
            with stage:
                yield stage.path
                with spool_errors(f"spool {self._spool.root}", self._spool.root):
                    stage.check()  # before anything is read, because a link would lead out of the stage
                    unshare_tree(stage.path)
                    files = describe_directory(stage.path)
                    self._staged_bytes = sum(file.size for file in files)
                    stage.commit(msgspec.structs.replace(self._launch.manifest(part, numbers), files=files))
        except BaseException as error:
            self._records.record_unstaged(part, error)
            raise
        self._schedule.count_save(part.checkpoint.step)
        self._records.record_staged(part, numbers)
