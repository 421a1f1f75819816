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
        failed: step -> why its save failed, if no later save of that step became durable.
        nowhere: the parts whose save failed, with the reason, since a save of that step or of a later step became
            durable. A save after a restore counts as later.
    """

    def __init__(
        self, launch: Launch, schedule: Schedule, daemon: Attachment, handoff: HandoffClient | None, stats: Stats
    ) -> None:
        self.saved: set[str] = set()
        self.failed: dict[int, str] = {}
        self.nowhere: dict[PartId, str] = {}
        self._newest: CheckpointId | None = None  # durable, of the last attempt under which a save became durable
        self._launch, self._schedule, self._daemon, self._handoff = launch, schedule, daemon, handoff
        self._stats = stats

    def begin(self, step: int, metrics: Mapping[str, float] | None) -> tuple[PartId, dict[str, float]]:
        """Return the part that a save at `step` writes, and its metrics.

        Raises:
            StepRefused, ConfigError: as `Checkpointer.save`.
        """
        part, numbers = self._launch.part(step), checked_metrics({} if metrics is None else metrics)
        return part, self._schedule.taking(part.checkpoint.step, numbers)

    def ended(self, save: Save, error: Exception | None) -> None:
        """Record that a save has become durable or has failed. Runs in another thread than training."""
        if error is not None:
            self._launch.steps.discard(save.step)
            self._report_failed(save.part, error)
        else:
            self._durable(save.part.checkpoint)
        self._schedule.ended(save.step, durable=error is None)
        save.finish(error)
        if self._handoff is not None:
            self._handoff.renew()
        self._daemon.keep()

    def staged(self, step: int, numbers: dict[str, float]) -> None:
        """Record that a staged directory was committed."""
        self._launch.steps.add(step)
        self._durable(CheckpointId(self._launch.run, self._launch.attempt, step))
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

    def has_saved(self, part: PartId) -> bool:
        """Return whether this launch made `part` durable."""
        one = part.checkpoint
        return (one.run, part.rank) == (self._launch.run, self._launch.rank) and one.attempt in self.saved

    def _durable(self, saved: CheckpointId) -> None:
        self._stats.durable += 1
        self.saved.add(saved.attempt)
        self.failed.pop(saved.step, None)
        for part in list(self.nowhere):
            if part.checkpoint.attempt != saved.attempt or part.checkpoint.step <= saved.step:
                del self.nowhere[part]
        if self._newest is None or self._newest.attempt != saved.attempt or self._newest.step < saved.step:
            self._newest = saved

    def _report_failed(self, part: PartId, error: Exception) -> None:
        why = (str(error) or type(error).__name__)[:MAX_REASON]
        step, newest = part.checkpoint.step, self._newest
        self.failed[step] = why
        # Saves may end in another order than they began.
        if newest is None or newest.attempt != part.checkpoint.attempt or newest.step < step:
            self.nowhere[part] = why
        self._daemon.report(Failed(part=part, why=why))
