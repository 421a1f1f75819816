"""Save a state: take its snapshot, and give that to the pipeline, which makes it durable behind training.

Invariant: an earlier copy that runs behind training is confirmed before a later snapshot is taken.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping

from tierd.client import timings
from tierd.client.disk_space import SpaceCheck
from tierd.client.ranks.launch import Launch
from tierd.client.saving.interpreter_lock import short_switches
from tierd.client.saving.pipeline import Pipeline
from tierd.client.saving.save import Save, Stats
from tierd.client.saving.save_records import SaveRecords
from tierd.client.saving.snapshot import Snapshot
from tierd.client.saving.step_gate import OptimizerStepGate
from tierd.client.schedule import Schedule
from tierd.core.errors import SaveSkipped
from tierd.spool.spool import Spool
from tierd.state.capture import Capture
from tierd.state.capturer import CapturerPool

log = logging.getLogger("tierd")


class StateSaver:
    """Takes snapshots of states. `when_busy` and the errors are those of `Checkpointer`."""

    def __init__(
        self,
        spool: Spool,
        launch: Launch,
        schedule: Schedule,
        records: SaveRecords,
        gate: OptimizerStepGate,
        pipeline: Pipeline,
        space: SpaceCheck,
        stats: Stats,
        when_busy: str,
    ) -> None:
        self._spool, self._launch, self._schedule, self._records = spool, launch, schedule, records
        self._gate, self._pipeline, self._space = gate, pipeline, space
        self._stats, self._when_busy = stats, when_busy
        self._capturers = CapturerPool()

    def save(self, step: int, state: Mapping[str, object], metrics: Mapping[str, float] | None) -> Save:
        """Take a snapshot of `state` and return, as `Checkpointer.save` does."""
        start_s = time.perf_counter()
        part, numbers = self._records.begin(step, metrics)
        save = Save(part, self._spool)
        skips = self._when_busy != "wait" and self._pipeline.busy and not self._schedule.is_urgent(save.step)
        snapshot: Snapshot | None = None
        try:
            self._launch.claim(part)  # in the block, because an interrupted save must release it
            # Confirm earlier late copies first, because this save would be copied after them.
            self._gate.confirm(wait=not skips)
            if not skips:
                with short_switches:
                    snapshot = self._snapshot(save, self._capturers.capture(state), numbers)
                    self._take(snapshot)
        except BaseException:
            if snapshot is None or snapshot.give_up():  # else the pipeline ends the save
                self._launch.release(part)
            self._schedule.ended(save.step, durable=False)
            raise
        if snapshot is None:
            return self._skipped(save)
        self._schedule.took(save.step)
        self._space.check(snapshot.capture.layout.size)
        self._stats.saves += 1
        blocked = time.perf_counter() - start_s
        self._stats.blocked_s += blocked
        save.blocked_s = blocked
        self._stats.first_blocked_s = self._stats.first_blocked_s or blocked
        return save

    def _snapshot(self, save: Save, capture: Capture, numbers: dict[str, float]) -> Snapshot:
        self._gate.report_interrupted(save.part)
        deferred = self._gate.late(capture)
        manifest = functools.partial(self._launch.manifest, save.part, numbers)
        return Snapshot(save, capture, manifest, deferred, self._gate.distrust, timings.given())

    def _take(self, snapshot: Snapshot) -> None:
        if snapshot.late and self._pipeline.is_ready(snapshot.capture.layout.size):
            snapshot.copy_little()
        self._pipeline.take(snapshot)
        if snapshot.late:
            self._gate.watch(snapshot)
            snapshot.save.asked = snapshot.reached
        else:
            snapshot.encode()  # concurrently with the copy
        snapshot.wait()

    def _skipped(self, save: Save) -> Save:
        self._launch.release(save.part)
        self._stats.skipped += 1
        self._schedule.ended(save.step, durable=False)
        error = SaveSkipped(f"{save.part}: an earlier save is still being persisted")
        if self._when_busy == "fail":
            raise error
        log.warning("skipped: %s", error)
        save.finish(error)
        return save
