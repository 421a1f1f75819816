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
from tierd.ipc.messages import MAX_REASON, SaveGivenUp


class SaveRecords:
    """What `close` and the daemon need to know of this launch's saves.

    Attributes:
        saved: the attempts under which this launch made a checkpoint durable. A restore begins another attempt.
    """

    def __init__(
        self, launch: Launch, schedule: Schedule, daemon: Attachment, handoff: HandoffClient | None, stats: Stats
    ) -> None:
        self.saved: set[str] = set()
        # Threads add to these in any order, so each question is answered from both when it is asked.
        self._durable_checkpoints: set[CheckpointId] = set()
        self._failures: dict[PartId, str] = {}
        self._launch, self._schedule, self._daemon, self._handoff = launch, schedule, daemon, handoff
        self._stats = stats

    @property
    def failed(self) -> dict[int, str]:
        """Why the save of a step failed, by step, if no save of that step in its attempt or a later one is durable."""
        latest: dict[int, str] = {}
        for saved in list(self._durable_checkpoints):
            latest[saved.step] = max(saved.attempt, latest.get(saved.step, ""))
        failures = [(part.checkpoint, why) for part, why in list(self._failures.items())]
        return {failed.step: why for failed, why in failures if latest.get(failed.step, "") < failed.attempt}

    @property
    def nowhere(self) -> dict[PartId, str]:
        """The parts whose save failed, with the reason, if no save of that step or of a later step is durable. A save
        after a restore counts as later.
        """
        newest = max(map(_order, list(self._durable_checkpoints)), default=("", -1))
        return {part: why for part, why in list(self._failures.items()) if _order(part.checkpoint) > newest}

    def begin(self, step: int, metrics: Mapping[str, float] | None) -> tuple[PartId, dict[str, float]]:
        """Return the part that a save at `step` writes, and its metrics. The save then claims the part.

        Raises:
            StepRefused, ConfigError: as `Checkpointer.save`.
        """
        part, numbers = self._launch.part(step), checked_metrics({} if metrics is None else metrics)
        return part, self._schedule.taking(part.checkpoint.step, numbers)

    def ended(self, save: Save, error: Exception | None) -> None:
        """Record that a save has become durable or has failed. Runs in another thread than training."""
        if error is not None:
            self._report_failed(save.part, error)
            self._launch.release(save.part)
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
