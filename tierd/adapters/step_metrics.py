"""What the adapters share at a step: the numbers that a framework logs, as metrics, and the newest save.

Invariant: nothing that a program logs ends its training. What cannot be a metric is left out, with one warning.
Frameworks ask more than once to save the same step, so the newest save is remembered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from tierd.client.checkpointer import Checkpointer
from tierd.client.saving.save_jobs import Save
from tierd.core.errors import StepRefused
from tierd.core.manifest import MAX_METRICS, is_metric_name
from tierd.core.save_rules import list_metrics

log = logging.getLogger("tierd")
_MAX_NAMES = 5  # names that the warning shows
_NO_METRIC = f"a metric is a number with a name of 1 to 256 characters, and a checkpoint holds at most {MAX_METRICS}"


class StepMetrics:
    """Makes metrics of what a framework logged at one step."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._warned: set[str] = set()

    def usable(self, logged: Mapping[Any, Any], first: Iterable[str | None] = ()) -> dict[str, float]:
        """Return what is a number, as floats: at most as many as a checkpoint holds.

        NumPy scalars and tensors of one element are numbers. Names in `first` are kept if there are too many, beside
        the one of the checkpointer's `when`.
        """
        numbers = {name: number for name, value in logged.items() if (number := _number(name, value)) is not None}
        when = self._checkpointer.when
        preferred = [name for name in (when.best if when else None, *first) if name in numbers]
        names = dict.fromkeys((*preferred, *numbers))
        usable = {name: numbers[name] for name in list(names)[:MAX_METRICS]}
        self.warn([name for name in logged if name not in usable], _NO_METRIC)
        return usable

    def decisive(self, numbers: Mapping[str, float]) -> Mapping[str, float] | None:
        """Return `numbers` for `due`; None if they lack the metric that decides, of which a warning tells once."""
        when = self._checkpointer.when
        if when is None or when.best is None or when.best in numbers:
            return numbers
        if when.best not in self._warned:
            self._warned.add(when.best)
            log.warning(
                "no metric %r was logged at this step, so it does not decide; %s", when.best, list_metrics(numbers)
            )
        return None

    def warn(self, left_out: list[Any], why: str) -> None:
        """Warn of names that were logged and are left out, once for each reason."""
        if not left_out or why in self._warned:
            return
        self._warned.add(why)
        names = ", ".join(map(repr, left_out[:_MAX_NAMES])) + (" ..." if len(left_out) > _MAX_NAMES else "")
        log.warning(
            "%d of the logged values are left out of the checkpoints, because %s: %s", len(left_out), why, names
        )


def as_plain_numbers(value: Any) -> tuple[Any, list[str]]:
    """Return a value for JSON, and the names of members that have no such form and are left out."""
    left_out: list[str] = []

    def converted(value: Any) -> Any:
        if isinstance(value, dict):
            members = {}
            for name, member in value.items():
                try:
                    members[name if isinstance(name, str) else str(name)] = converted(member)
                except (TypeError, ValueError, RuntimeError):
                    left_out.append(str(name))
            return members
        if isinstance(value, (list, tuple)):
            return [converted(member) for member in value]
        if hasattr(value, "tolist"):  # of NumPy or torch
            return converted(value.tolist())
        if value is None or isinstance(value, (str, bool, int, float)):
            return value
        raise TypeError(f"{type(value).__name__} has no form in JSON")

    return converted(value), left_out


def _number(name: Any, value: Any) -> float | None:
    if not isinstance(name, str) or not is_metric_name(name) or isinstance(value, (str, bytes)):
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


class LastSave:
    """The step that was saved or restored last, and whether its save was lost.

    Invariant: a step is saved once, and again only after its save was skipped or has failed.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._save: Save | None = None

    def save(
        self, checkpointer: Checkpointer, step: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None
    ) -> None:
        """Save the state of a step. Raises as `Checkpointer.save`, but not if a save that failed had committed it."""
        try:
            save = checkpointer.save(step, state, metrics=metrics)
        except StepRefused as error:
            if self._save is None or step != self.step:
                raise
            log.warning("%s; its save had failed after that", error)
            self._save = None
        else:
            self.step, self._save = step, save

    def is_of_step(self, step: int) -> bool:
        """Whether the last save is of this step, and running or durable."""
        return step == self.step and (self._save is None or self._save.error() is None)

    def needs_save(self, step: int) -> bool:
        """Whether a loop that never goes back has yet to save this step."""
        return step >= self.step and not self.is_of_step(step)
