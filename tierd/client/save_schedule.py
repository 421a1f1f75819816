"""Decide whether a checkpoint is due, by `tierd.When` and the same on every rank.

Invariant: each rank counts steps and epochs for itself, from numbers that are the same on all ranks. If a clock or a
metric decides, rank 0 decides and sends its decision to the others, only at steps that may be due. On the step of a
notice of preemption the ranks agree (`client/preemption/`) before any of them is asked there.

Invariant: no lock is held here, because a signal handler may save between any two lines. Its save would wait for the
thread that persists, which would wait here for the interrupted thread.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping

import msgspec

from tierd.client.preemption.notices import Preemption
from tierd.client.ranks.ranks import Ranks
from tierd.core.errors import ConfigError
from tierd.core.ids import CheckpointId
from tierd.core.save_rules import (
    SaveHistory,
    When,
    best_so_far,
    is_counted,
    is_due,
    positive_seconds,
    steps_to_wait,
    value_of,
)
from tierd.core.timeline.restore_order import RestoreOrder


class DueDecision(msgspec.Struct, frozen=True):
    """Rank 0's decision, the next step at which its clock may decide, or what was given wrongly.

    Decisions of other ranks are ignored.
    """

    due: bool = False
    look: int = 0
    error: str = ""


# The step, epoch and metric value at which a checkpoint was last found due.
_NOTHING: tuple[int, int | None, float | None] = -1, None, None
_START = 0, -1  # the step and epoch of `SaveHistory` before the first save


class SaveSchedule:
    """One rank's record of past saves, by which it decides whether a checkpoint is due (`Checkpointer.due`).

    A save that fails later counts, because otherwise a full disk would be tried at every step. With several ranks,
    steps and epochs are counted from where a checkpoint was last found due, because a rank does not know the result of
    another rank's save.

    Raises `ConfigError` if `when` depends on a clock, a metric or a notice, and the ranks cannot talk to each other.
    """

    def __init__(self, when: When | None, ranks: Ranks, now: Callable[[], float] = time.monotonic) -> None:
        if when is not None and not isinstance(when, When):
            raise ConfigError(f"when={when!r}: a tierd.When, such as tierd.When(steps=1000)")
        self.when, self._ranks, self._now = when, ranks, now
        # Each attribute is replaced in one step. The thread that persists only puts results into the queue, because two
        # threads that replace one attribute could undo each other's change.
        self._saved_at = now()
        self._counted: tuple[int, int | None] = _START  # the step and epoch of the last save
        self._best: float | None = None  # of the saves that have ended
        self._values: dict[int, float] = {}  # metric values by step, of saves whose result was not taken yet
        self._results: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()  # a step, and whether it is durable
        self._last_asked = _NOTHING
        self._next_clock = 0
        self._decided: tuple[int, float] | None = None  # the step and time at which rank 0's clock last decided
        if when is not None and not ranks.can_communicate and (when.every is not None or when.best is not None):
            rule = f"every={when.every!r}" if when.every is not None else f"best={when.best!r}"
            raise ConfigError(
                f"When({rule}): rank 0 decides, and {ranks.world} ranks have no way to be told: initialise "
                "torch.distributed first, or let steps and epochs decide"
            )
        self.preemption = Preemption(when.preemption, ranks) if when is not None and when.preemption else None

    @property
    def metric(self) -> str | None:
        return self.when.best if self.when else None

    def due(self, step: int, epoch: int | None, metrics: Mapping[str, float] | None) -> bool:
        when = self.when
        if when is None:
            raise ConfigError("when is a checkpoint due? Checkpointer(…, when=tierd.When(steps=…)) says it")
        asked_step, asked_epoch, _ = self._last_asked
        if asked_step != step and self._ranks.world > 1:
            self._count(asked_step, asked_epoch)
            self._last_asked = _NOTHING
        if self.preemption is not None and self.preemption.due(step):  # on every rank, so none waits in an exchange
            self._last_asked, self._next_clock = (step, epoch, None), step + 1
            return True
        judged_metrics = metrics if when.best is not None else None
        if self._ranks.world == 1:
            value = value_of(judged_metrics, when.best or "") if judged_metrics is not None else None
            decision = is_due(when, self._so_far(), step, epoch, value, self._now())
        elif self._needs_agreement(when, step, epoch, judged=judged_metrics is not None):
            value, decision = self._agreed(when, step, epoch, judged_metrics)
        else:
            decision = not when.best_only and is_counted(when, self._so_far(), step, epoch)
            value = (
                value_of(judged_metrics, when.best or "")
                if decision and judged_metrics and when.best in judged_metrics
                else None
            )
        if decision:
            self._last_asked = step, epoch, value
        return decision

    def is_urgent(self, step: int) -> bool:
        """Whether a checkpoint was found due at `step` by a notice, the same on every rank."""
        return self.preemption is not None and self.preemption.agreement.is_due_at(step)

    def end_s(self, deadline: str | float | None) -> float | None:
        """Return the monotonic time that lies `deadline` after the last notice, or after now without one."""
        if deadline is None:
            return None
        length_s = positive_seconds("deadline=", deadline)
        return length_s + (self.preemption.begun_s() if self.preemption is not None else time.monotonic())

    def _needs_agreement(self, when: When, step: int, epoch: int | None, *, judged: bool) -> bool:
        """Whether rank 0 has to decide, the same on every rank."""
        counted = is_counted(when, self._so_far(), step, epoch)
        is_timed = when.every is not None and step >= self._next_clock
        if when.best_only:
            return judged and (counted or is_timed or not when.is_bounded)
        return not counted and (judged or is_timed)

    def _agreed(
        self, when: When, step: int, epoch: int | None, metrics: Mapping[str, float] | None
    ) -> tuple[float | None, bool]:
        value, word = None, DueDecision()
        if self._ranks.rank == 0:
            try:
                value = value_of(metrics, when.best or "") if metrics is not None else None
                now = self._now()
                decision = is_due(when, self._so_far(), step, epoch, value, now)
                word = DueDecision(decision, step + self._ahead(when, step, now), "")
            except ConfigError as error:
                word = DueDecision(error=str(error))
        rank0_word = self._ranks.gather(word, first=True)[0]  # a rank may evaluate for long before it calls `due`
        if rank0_word.error:
            raise ConfigError(rank0_word.error if self._ranks.rank == 0 else f"rank 0: {rank0_word.error}")
        self._next_clock = step + 1 if rank0_word.due else rank0_word.look
        return value, rank0_word.due

    def _ahead(self, when: When, step: int, now: float) -> int:
        before, self._decided = self._decided, (step, now)
        if before is None or step <= before[0]:
            return 1
        return steps_to_wait(self._so_far().at + when.every_s - now, (now - before[1]) / (step - before[0]))

    def _so_far(self) -> SaveHistory:
        self._take_results()
        best = self._best
        for value in list(self._values.values()):
            best = self._better(best, value)
        return SaveHistory(self._saved_at, *self._counted, best)

    def _better(self, best: float | None, value: float) -> float | None:
        goal = self.when.goal if self.when else None
        return value if goal and goal.better(value, best) else best

    def _take_results(self) -> None:
        """Take the results of saves that have ended, in the thread that trains."""
        while not self._results.empty():
            try:
                step, durable = self._results.get_nowait()
            except queue.Empty:  # a signal handler that saves took it
                return
            value = self._values.get(step)
            if value is not None and durable:
                self._best = self._better(self._best, value)
            self._values.pop(step, None)  # only now, so that a handler's save finds it in one of both

    def resume(self, checkpoint: CheckpointId | None, resume: RestoreOrder) -> None:
        """Start counting from the checkpoint that training resumes from, or from nothing.

        The best value so far is of the complete checkpoints on the timeline up to there, among the places that
        answered.
        """
        best: float | None = None
        if self.when and self.when.goal and checkpoint:
            values = resume.values.get(self.when.goal.metric, {})
            complete = {candidate: value for candidate, value in values.items() if candidate in resume.complete}
            best = best_so_far(complete, checkpoint, resume.origins, self.when.goal)
        self._take_results()
        self._values = {}
        self._best, self._saved_at = best, self._now()
        self._counted = (checkpoint.step, None) if checkpoint else _START
        self._last_asked, self._next_clock, self._decided = _NOTHING, 0, None
        if self.preemption is not None:
            self.preemption.restored()

    def add_metric(self, step: int, numbers: dict[str, float]) -> dict[str, float]:
        """Return a save's metrics with the value by which it was found due."""
        metric = self.metric
        if metric is None:
            return numbers
        self._take_results()  # first, because an earlier save of this step may have failed
        asked_step, _, value = self._last_asked
        if asked_step == step and value is not None:
            numbers = {metric: value, **numbers}
        if metric in numbers:
            self._values[step] = numbers[metric]
        return numbers

    def count_save(self, step: int | None) -> None:
        """Count a save whose snapshot is taken, or a DCP save that begins (None: at the step last found due)."""
        asked_step, epoch, _ = self._last_asked
        self._saved_at = self._now()
        if self.preemption is not None:
            self.preemption.agreement.saved()
        if self._ranks.world == 1:
            self._count(asked_step if step is None else step, epoch if step in (None, asked_step) else None)

    def take_result(self, step: int, *, durable: bool) -> None:
        """Record that the save at `step` became durable or failed. Any thread may call this."""
        if self.metric is not None:
            self._results.put((step, durable))

    def _count(self, step: int, epoch: int | None) -> None:
        last_step, last_epoch = self._counted
        self._counted = max(last_step, step), last_epoch if epoch is None else epoch
