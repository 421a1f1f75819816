"""The saves of one launch: how each begins, and whether it became durable or failed.

Invariant: every save that begins ends here once, so that the schedule, the counters and the daemon have the same
results.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierd.client.attachment import Attachment
from tierd.client.ranks.launch import Launch
from tierd.client.saving.handoff import HandoffClient
from tierd.client.saving.save import Save, Stats, checked_metrics
from tierd.client.schedule import Schedule
from tierd.core.errors import StepRefused
from tierd.core.ids import CheckpointId, PartId
from tierd.ipc.messages import MAX_REASON, Failed


class SaveRecords:
    """What `close` and the daemon need to know of this launch's saves.

    Attributes:
        saved: the attempts under which this launch made a checkpoint durable. A restore begins another attempt.
        failed: step -> why its save failed, if no save of that step in this attempt or a later one became durable.
        nowhere: the parts whose save failed, with the reason, since a save of that step or of a later step became
            durable. A save after a restore counts as later.
    """

    def __init__(
        self, launch: Launch, schedule: Schedule, daemon: Attachment, handoff: HandoffClient | None, stats: Stats
    ) -> None:
        self.saved: set[str] = set()
        self.failed: dict[int, str] = {}
        self.nowhere: dict[PartId, str] = {}
        self._newest: CheckpointId | None = None  # durable, of the latest attempt that has a durable save
        self._durable_in: dict[int, str] = {}  # the latest attempt in which a step became durable, by step
        self._launch, self._schedule, self._daemon, self._handoff = launch, schedule, daemon, handoff
        self._stats = stats

    def begin(self, step: int, metrics: Mapping[str, float] | None) -> tuple[PartId, dict[str, float]]:
        """Claim the step and return the part that its save writes, and its metrics.

        A save that fails releases the claim.

        Raises:
            StepRefused, ConfigError: as `Checkpointer.save`.
        """
        part = self._launch.part(step, claim=True)
        try:
            return part, self._schedule.taking(
                part.checkpoint.step, checked_metrics({} if metrics is None else metrics)
            )
        except BaseException:
            self._launch.release(part)
            raise

    def ended(self, save: Save, error: Exception | None) -> None:
        """Record that a save has become durable or has failed. Runs in another thread than training."""
        if error is not None:
            self._report_failed(save.part, error)
            self._launch.release(save.part)  # last, because another save of the step may then become durable at once
        else:
            self._durable(save.part.checkpoint)
        self._schedule.ended(save.step, durable=error is None)
        save.finish(error)
        if self._handoff is not None:
            self._handoff.renew()
        self._daemon.keep()

    def staged(self, part: PartId, numbers: dict[str, float]) -> None:
        """Record that a staged directory was committed."""
        step = part.checkpoint.step
        self._launch.keep(part)
        self._durable(part.checkpoint)
        self._stats.saves += 1
        self._schedule.taking(step, numbers)
        self._schedule.ended(step, durable=True)
        self._daemon.keep()

    def unstaged(self, part: PartId, error: BaseException) -> None:
        """Record that a staged directory was not committed."""
        self._schedule.ended(part.checkpoint.step, durable=False)
        # A refused step is already committed, so nothing was lost.
        if isinstance(error, Exception) and not isinstance(error, StepRefused):
            self._stats.failed += 1
            self._report_failed(part, error)
        self._launch.release(part)

    def has_saved(self, part: PartId) -> bool:
        """Return whether this launch made `part` durable."""
        one = part.checkpoint
        return (one.run, part.rank) == (self._launch.run, self._launch.rank) and one.attempt in self.saved

    def _durable(self, saved: CheckpointId) -> None:
        self._stats.durable += 1
        self.saved.add(saved.attempt)
        # A save that began before a restore may end after a save of the attempt that the restore began.
        if saved.attempt >= self._durable_in.get(saved.step, ""):
            self._durable_in[saved.step] = saved.attempt
            self.failed.pop(saved.step, None)
        for part in list(self.nowhere):
            if _order(part.checkpoint) <= _order(saved):
                del self.nowhere[part]
        if self._newest is None or _order(self._newest) < _order(saved):
            self._newest = saved

    def _report_failed(self, part: PartId, error: Exception) -> None:
        why = (str(error) or type(error).__name__)[:MAX_REASON]
        step, newest = part.checkpoint.step, self._newest
        # Saves may end in another order than they began.
        if self._durable_in.get(step, "") < part.checkpoint.attempt:
            self.failed[step] = why
        if newest is None or _order(newest) < _order(part.checkpoint):
            self.nowhere[part] = why
        self._daemon.report(Failed(part=part, why=why))


def _order(checkpoint: CheckpointId) -> tuple[str, int]:
    """Sort a launch's checkpoints as training made them: by attempt, because a restore begins a later one."""
    return checkpoint.attempt, checkpoint.step
