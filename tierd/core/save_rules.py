"""The save policy: when a checkpoint is due, which checkpoint is the best, and when training may stop.

Invariant: asking whether a checkpoint is due has no side effect. The last save, the time and the metric's value are
arguments. NaN is never better than another value, and never better than having no value.
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
from tierd.core.retention.policy import parse_duration
from tierd.core.timeline.launch_chain import ancestor_chain
from tierd.core.units import list_few

CLOUDS = ("ec2", "gce", "azure")
_MODES = ("min", "max")
_NAMES = 10  # the most names of metrics that an error lists


class MetricGoal(msgspec.Struct, frozen=True):
    """The criterion by which a checkpoint is better: a smaller (``min``) or larger (``max``) value of `metric`."""

    metric: str
    mode: Literal["min", "max"] = "min"

    def better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Whether `value` is better than `than` by more than `by`. If `than` is None, every value except NaN is."""
        return value == value and (than is None or self.score(value) > self.score(than) + by)

    def score(self, value: float) -> float:
        """The value as a score, where larger is better."""
        return value if self.mode == "max" else -value


def check_goal(goal: MetricGoal) -> MetricGoal:
    """Return `goal`. Raises `ConfigError` for a name that no metric has, or a mode that is neither `min` nor `max`."""
    if not is_metric_name(goal.metric):
        raise ConfigError(f"best={goal.metric!r}: the name of a metric, 1 to 256 characters")
    if goal.mode not in _MODES:
        raise ConfigError(f"mode={goal.mode!r}: one of {', '.join(_MODES)}")
    return goal


@dataclass(frozen=True, slots=True)
class When:
    """When a checkpoint is due according to `Checkpointer.due`: as soon as one of `steps`, `epochs` and `every` is met,
    or `preemption`.

    Args:
        steps: due when a multiple of this was reached or passed since the last save, the restored step or step 0.
        epochs: due when a multiple of this many epochs has ended since the last save. After a restore the epoch of the
            last save is not known, so only an exact multiple is due.
        every: due this long after the last save, the restore or the beginning: seconds, or a text as in the
            configuration (`"90s"`, `"10m"`, `"12h"`).
        best: a metric; also due when its value is better than those of all checkpoints saved before.
        mode: whether a smaller (``min``) or a larger (``max``) value is better.
        best_only: a checkpoint is due only if it is better. `steps`, `epochs` and `every`, if given, then limit how
            often.
        threshold: until a value was saved, a value has to be better than this to be better.
        preemption: also due once for each notice that this node or job ends, whatever `best_only` says. True: SIGTERM,
            SIGUSR1 and, on a virtual machine of EC2, Compute Engine or Azure, the notices of its metadata server.
            `"ec2"`, `"gce"`, `"azure"`: that server, without looking which cloud this is. These signals then no longer
            end the process: end it after the save, see `Checkpointer.notice`.

    Raises:
        ConfigError: an argument cannot be used, or no argument makes a checkpoint due.
    """

    steps: int | None = None
    epochs: int | None = None
    every: str | float | None = None
    best: str | None = None
    mode: Literal["min", "max"] = "min"
    best_only: bool = False
    threshold: float | None = None
    preemption: bool | Literal["ec2", "gce", "azure"] = False
    every_s: float = field(init=False, repr=False)  # infinity where `every` is not given
    goal: MetricGoal | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, count in (("steps", self.steps), ("epochs", self.epochs)):
            if count is not None and (type(count) is not int or count < 1):
                raise ConfigError(f"When({name}={count!r}): a number from 1 on")
        goal = check_goal(MetricGoal("-" if self.best is None else self.best, self.mode))
        object.__setattr__(
            self, "every_s", math.inf if self.every is None else positive_seconds("When(every=", self.every)
        )
        object.__setattr__(self, "goal", None if self.best is None else goal)
        if self.best_only and self.best is None:
            raise ConfigError("When(best_only=True): by which metric? best='val_loss', say")
        if self.threshold is not None and (self.best is None or not math.isfinite(self.threshold)):
            raise ConfigError(f"When(threshold={self.threshold!r}): a finite number, with best= the metric")
        if self.preemption not in (False, True, *CLOUDS):
            raise ConfigError(f"When(preemption={self.preemption!r}): True, False or one of {', '.join(CLOUDS)}")
        if self.best is None and not self.is_bounded and not self.preemption:
            raise ConfigError("When(): nothing would ever be due; give steps, epochs, every, best or preemption")

    @property
    def is_bounded(self) -> bool:
        """Whether `steps`, `epochs` or `every` is given."""
        return (self.steps, self.epochs, self.every) != (None, None, None)


def positive_seconds(argument: str, value: object) -> float:
    """Return a time given as seconds or as a text such as `90s`, in seconds. Messages begin with `argument`:
    `When(every=`.

    Raises:
        ConfigError: `value` is no time, or is not finite and longer than nothing.
    """
    argument_text = f"{argument}{value!r}{')' * argument.count('(')}"
    try:
        if isinstance(value, bool):
            raise TypeError(value)
        length_s = parse_duration(value) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{argument_text}: seconds, or 90s, 10m, 12h, 7d") from error
    if not 0 < length_s < math.inf:
        raise ConfigError(f"{argument_text}: longer than nothing, and no longer than for ever")
    return length_s


@dataclass(frozen=True, slots=True)
class SaveHistory:
    """The last save, at `at` seconds of the clock of `now` in `is_due`, and the best value of all saves.

    `epoch` is the last that had ended then: -1 before the first, None if it is not known.
    """

    at: float
    step: int = 0
    epoch: int | None = -1
    best: float | None = None


def check_epoch(epoch: object) -> int:
    """Return `epoch` as an int. Raises `ConfigError` for a negative number, and for what is no integer."""
    try:
        number = operator.index(epoch)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"epoch={epoch!r}: the number of the epoch that has just ended, from 0 on; None within one")
    return number


def is_counted(when: When, saved: SaveHistory, step: int, epoch: int | None) -> bool:
    """Whether a checkpoint is due by `steps` or `epochs`, which are equal on every rank."""
    if when.steps is not None and step // when.steps > saved.step // when.steps:
        return True
    if when.epochs is None or epoch is None:
        return False
    epochs_trained = epoch + 1
    if saved.epoch is None:
        return epochs_trained % when.epochs == 0
    return epochs_trained // when.epochs > (saved.epoch + 1) // when.epochs


def is_due(when: When, saved: SaveHistory, step: int, epoch: int | None, value: float | None, now: float) -> bool:
    """Whether a checkpoint is due at `now`, in seconds of the clock of `saved.at`.

    `epoch` is the epoch that has just ended, None within one. `value` is None if the metric is not known at this step.
    """
    often = is_counted(when, saved, step, epoch) or now - saved.at >= when.every_s
    if when.goal is None or (often and not when.best_only):
        return often
    best = when.threshold if saved.best is None else saved.best
    better = value is not None and when.goal.better(value, best)
    return better and (often or not when.best_only or not when.is_bounded)


def steps_to_wait(left_s: float, step_s: float) -> int:
    """How many steps later to read the clock again: after half of the time left, because steps may become slower."""
    return max(1, int(min(left_s / 2 / step_s, 1e9))) if step_s > 0 else 1


def best_so_far(
    values: Mapping[CheckpointId, float],
    checkpoint: CheckpointId,
    origins: Mapping[str, CheckpointId | None],
    goal: MetricGoal,
) -> float | None:
    """The best value on the timeline down from `checkpoint`, which counts too; None if no checkpoint has a value."""
    limits = {**ancestor_chain(checkpoint.attempt, origins), checkpoint.attempt: checkpoint.step}
    best: float | None = None
    for candidate, value in values.items():
        limit = limits.get(candidate.attempt, -1)
        if limit is not None and candidate.step <= limit and goal.better(value, best):
            best = value
    return best


def value_of(metrics: Mapping[str, float], metric: str) -> float:
    """The value of a required metric. NumPy scalars and 0-d tensors count as numbers.

    Raises:
        ConfigError: the metric is missing, and the message names the existing ones; or its value is not a number.
    """
    if metric not in metrics:
        raise ConfigError(f"no metric {metric!r} was given; {list_metrics(metrics)}")
    value: Any = metrics[metric]
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"metrics[{metric!r}]: {type(value).__name__} is not a number") from error


def list_metrics(metrics: Iterable[str]) -> str:
    """The names of metrics as a list in an error message."""
    names = sorted(metrics)
    return f"there are: {list_few(names, _NAMES)}" if names else "there is none at all"


class EarlyStopping:
    """Decide to stop when a metric has not improved for `patience` calls of `stop` in a row. Save it in `state`.

    Give every rank the same values, because otherwise ranks stop at different steps. To end with the best checkpoint,
    call `ckpt.restore(state, best=metric)`; with `only="model"` this restores the weights alone.

    Args:
        metric: the name of the metric among those passed to `stop`.
        patience: the number of calls without a better value after which to stop; 0 stops at the first such call.
        min_delta: by how much a value has to be better than the best one to count.
        mode: whether a smaller (``min``) or a larger (``max``) value is better.
        baseline: a value better than the best one also has to be better than this, or the call counts as one without a
            better value.

    Attributes:
        best: the best value that counted; None before the first.
        waited: the number of calls since then.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        metric: str,
        patience: int,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        baseline: float | None = None,
    ) -> None:
        self._goal = check_goal(MetricGoal(metric, mode))
        if type(patience) is not int or patience < 0:
            raise ConfigError(f"patience={patience!r}: a number of calls, from 0 on")
        if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise ConfigError(f"min_delta={min_delta!r}: a number from 0 on")
        if baseline is not None and not math.isfinite(baseline):
            raise ConfigError(f"baseline={baseline!r}: a finite number")
        self._patience, self._min_delta, self._baseline = patience, float(min_delta), baseline
        self.best: float | None = None
        self.waited = 0

    def stop(self, metrics: Mapping[str, float]) -> bool:
        """Take the next values; return whether to stop. NaN is never better.

        Raises:
            ConfigError: `metrics` lacks the metric, and the message names those that it has; or the value is no number.
        """
        value = value_of(metrics, self._goal.metric)
        if self._goal.better(value, self.best, self._min_delta):
            self.best = value
            if self._baseline is None or self._goal.better(value, self._baseline, self._min_delta):
                self.waited = 0
                return False
        self.waited += 1
        return self.waited >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """The metric, its mode, the best value and the calls since then; all JSON."""
        return {"metric": self._goal.metric, "mode": self._goal.mode, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state. Raises `StateMismatch` for the state of another metric or mode."""
        saved = state["metric"], state["mode"]
        if saved != (self._goal.metric, self._goal.mode):
            raise StateMismatch(
                f"EarlyStopping watched {saved[0]!r} ({saved[1]}), and watches {self._goal.metric!r} "
                f"({self._goal.mode}) now"
            )
        self.best, self.waited = state["best"], state["waited"]
