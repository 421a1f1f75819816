"""Choosing: when a checkpoint is due, which of them is the best, and when training may stop.

Law: whoever asks changes nothing. What was saved, what time it is and what a metric says are given; NaN is better than
nothing and no better than anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tierd.core.errors import ConfigError, StateMismatch
from tierd.core.ids import CheckpointId
from tierd.core.manifest import is_metric_name
from tierd.core.retention import seconds
from tierd.core.timeline import way

_MODES = ("min", "max")
_NAMES = 10  # of metrics, that an error lists


class Goal(msgspec.Struct, frozen=True):
    """What makes a checkpoint better than another: the smaller (``min``) or larger (``max``) value of `metric`."""

    metric: str
    mode: Literal["min", "max"] = "min"

    def better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Whether `value` is better than another, or than none at all, by more than `by`."""
        return value == value and (than is None or self.score(value) > self.score(than) + by)

    def score(self, value: float) -> float:
        """The larger, the better."""
        return value if self.mode == "max" else -value


def check_goal(goal: Goal) -> Goal:
    """Raises `ConfigError` where it names no metric, or its mode is none."""
    if not is_metric_name(goal.metric):
        raise ConfigError(f"best={goal.metric!r}: the name of a metric, 1 to 256 characters")
    if goal.mode not in _MODES:
        raise ConfigError(f"mode={goal.mode!r}: one of {', '.join(_MODES)}")
    return goal


@dataclass(frozen=True, slots=True)
class When:
    """When `Checkpointer.due` says that a checkpoint is due: as soon as one of `steps`, `epochs` and `every` says so.

    Args:
        steps: a multiple of this was reached or passed since the last save (since step 0, or what was restored).
        epochs: the same of epochs that have ended. Of an epoch before the restore nobody knows: only a multiple then.
        every: this long after the last save, the restore or the beginning: seconds, or as in the configuration
            (`"90s"`, `"10m"`, `"12h"`).
        best: a metric; due is also what is better by it than all that were saved before.
        mode: whether less of it (``min``) or more (``max``) is better.
        best_only: nothing is due unless it is better; the others, where given, say how often at most.

    Raises:
        ConfigError: one of these cannot be used, or they say nothing.
    """

    steps: int | None = None
    epochs: int | None = None
    every: str | float | None = None
    best: str | None = None
    mode: Literal["min", "max"] = "min"
    best_only: bool = False
    every_s: float = field(init=False, repr=False)  # infinity where `every` is not given
    goal: Goal | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, count in (("steps", self.steps), ("epochs", self.epochs)):
            if count is not None and (type(count) is not int or count < 1):
                raise ConfigError(f"When({name}={count!r}): a number from 1 on")
        goal = check_goal(Goal("-" if self.best is None else self.best, self.mode))
        object.__setattr__(self, "every_s", _length(self.every))
        object.__setattr__(self, "goal", None if self.best is None else goal)
        if self.best_only and self.best is None:
            raise ConfigError("When(best_only=True): by which metric? best='val_loss', say")
        if self.best is None and not self.is_bounded:
            raise ConfigError("When(): nothing would ever be due; give steps, epochs, every or best")

    @property
    def is_bounded(self) -> bool:
        """Whether it says how often."""
        return (self.steps, self.epochs, self.every) != (None, None, None)


def _length(every: object) -> float:
    if every is None:
        return math.inf
    try:
        length = seconds(every) if isinstance(every, str) else float(every)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"When(every={every!r}): seconds, or 90s, 10m, 12h, 7d") from error
    if not 0 < length < math.inf:
        raise ConfigError(f"When(every={every!r}): longer than nothing, and no longer than for ever")
    return length


@dataclass(frozen=True, slots=True)
class Saved:
    """What was saved last, and what was best of all that was. `at` is in seconds of the clock that `now` is of; `epoch`
    had ended then, -1 before the first, and None where that is not known."""

    at: float
    step: int = 0
    epoch: int | None = -1
    best: float | None = None


def check_epoch(epoch: object) -> int:
    """Raises `ConfigError` for what is no whole number from 0 on."""
    try:
        number = operator.index(epoch)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"epoch={epoch!r}: the number of the epoch that has just ended, from 0 on; None within one")
    return number


def is_counted(when: When, saved: Saved, step: int, epoch: int | None) -> bool:
    """Whether it is due by `steps` or `epochs`, which are the same on every rank."""
    if when.steps is not None and step // when.steps > saved.step // when.steps:
        return True
    if when.epochs is None or epoch is None:
        return False
    ended = epoch + 1
    if saved.epoch is None:
        return ended % when.epochs == 0
    return ended // when.epochs > (saved.epoch + 1) // when.epochs


def is_due(when: When, saved: Saved, step: int, epoch: int | None, value: float | None, now: float) -> bool:
    """Whether a checkpoint is due.

    Args:
        epoch: that has just ended; None within one.
        value: of the metric; None where it is not known at this step.
    """
    often = is_counted(when, saved, step, epoch) or now - saved.at >= when.every_s
    if when.goal is None or (often and not when.best_only):
        return often
    better = value is not None and when.goal.better(value, saved.best)
    return better and (often or not when.best_only or not when.is_bounded)


def next_look(left_s: float, step_s: float) -> int:
    """In how many steps to look at the clock again: after half of what is left, since steps may become slower."""
    return max(1, int(min(left_s / 2 / step_s, 1e9))) if step_s > 0 else 1


def best_so_far(
    values: Mapping[CheckpointId, float], here: CheckpointId, origins: Mapping[str, CheckpointId | None], goal: Goal
) -> float | None:
    """The best value on the timeline that leads to `here`, itself included; None where none has one."""
    limits = {**way(here.attempt, origins), here.attempt: here.step}
    best: float | None = None
    for one, value in values.items():
        limit = limits.get(one.attempt, -1)
        if limit is not None and one.step <= limit and goal.better(value, best):
            best = value
    return best


def value_of(metrics: Mapping[str, float], metric: str) -> float:
    """The value of a metric that has to be there; NumPy scalars and 0-d tensors are numbers, too.

    Raises:
        ConfigError: it is not, or is no number; names those that are there.
    """
    if metric not in metrics:
        raise ConfigError(f"no metric {metric!r} was given; {listed(metrics)}")
    value: Any = metrics[metric]
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"metrics[{metric!r}]: {type(value).__name__} is not a number") from error


def listed(metrics: Iterable[str]) -> str:
    """The names of metrics, as an error lists them."""
    names = sorted(metrics)
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"there are: {', '.join(names[:_NAMES])}{more}" if names else "there is none at all"


class EarlyStopping:
    """Says when a metric has not become better for `patience` calls of `stop` in a row. It goes into `state`.

    On several ranks give each the same numbers, or they stop at different steps. To end with the best:
    `ckpt.restore(state, best=metric)`, or with `only="model"` its weights alone.

    Args:
        metric: the name of what is watched, in what `stop` is given.
        patience: calls that may pass without a better value; 0 stops at the first.
        min_delta: by how much a value has to be better than the best one to count.
        mode: whether less of it (``min``) or more (``max``) is better.

    Attributes:
        best: the best value that counted; None before the first.
        waited: calls since.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(self, metric: str, patience: int, min_delta: float = 0.0, mode: Literal["min", "max"] = "min") -> None:
        self._goal = check_goal(Goal(metric, mode))
        if type(patience) is not int or patience < 0:
            raise ConfigError(f"patience={patience!r}: a number of calls, from 0 on")
        if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise ConfigError(f"min_delta={min_delta!r}: a number from 0 on")
        self._patience, self._min_delta = patience, float(min_delta)
        self.best: float | None = None
        self.waited = 0

    def stop(self, metrics: Mapping[str, float]) -> bool:
        """Take the next values in; whether to stop. NaN is no better than anything.

        Raises:
            ConfigError: `metrics` lacks the metric; names those that it has.
        """
        value = value_of(metrics, self._goal.metric)
        if self._goal.better(value, self.best, self._min_delta):
            self.best, self.waited = value, 0
            return False
        self.waited += 1
        return self.waited >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._goal.metric, "mode": self._goal.mode, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `StateMismatch` where another metric, or another mode, was watched."""
        saved = state["metric"], state["mode"]
        if saved != (self._goal.metric, self._goal.mode):
            raise StateMismatch(
                f"EarlyStopping watched {saved[0]!r} ({saved[1]}), and watches {self._goal.metric!r} "
                f"({self._goal.mode}) now"
            )
        self.best, self.waited = state["best"], state["waited"]
