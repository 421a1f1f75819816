"""When training may stop: a metric has not improved for some time.

Invariant: NaN is never better than another value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from tierd.core.errors import ConfigError, StateMismatch
from tierd.core.save_policy import Goal, check_goal, value_of


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
        self._goal = check_goal(Goal(metric, mode))
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
        """The metric, its mode, the best value and the saves without a better one; all JSON."""
        return {"metric": self._goal.metric, "mode": self._goal.mode, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state.

        Raises:
            StateMismatch: the state is of another metric or mode.
        """
        saved = state["metric"], state["mode"]
        if saved != (self._goal.metric, self._goal.mode):
            raise StateMismatch(
                f"EarlyStopping watched {saved[0]!r} ({saved[1]}), and watches {self._goal.metric!r} "
                f"({self._goal.mode}) now"
            )
        self.best, self.waited = state["best"], state["waited"]
