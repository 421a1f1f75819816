"""How much older a checkpoint of a run is than the newest, although any single launch may have had a wrong clock.

Invariant: a clock that is ahead or behind during one launch never makes a checkpoint of another launch older. The time
between two launches counts only as far as the times of other launches confirm it, so an age is too small rather than
too large.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeAlias

Order: TypeAlias = tuple[str, str, int]  # run, attempt, step


class Ages:
    """The ages of one run's checkpoints.

    Args:
        made: the checkpoints, each with the time at which its trainer's clock says that it was made.
    """

    def __init__(self, made: Iterable[tuple[Order, datetime]]) -> None:
        ordered = sorted(made)
        self._orders = [order for order, _ in ordered]
        self._times = [created.timestamp() for _, created in ordered]
        self._firsts: dict[str, float] = {}  # attempt -> the time of its first checkpoint
        self._lasts: dict[str, tuple[Order, float]] = {}
        for order, at in zip(self._orders, self._times, strict=True):
            self._firsts.setdefault(order[1], at)
            self._lasts[order[1]] = order, at
        self._attempts = list(self._firsts)

    def age_s(self, order: Order, created: datetime) -> float:
        """How many seconds a checkpoint is older than the newest; 0 for the newest, and for a newer one.

        Args:
            order: the checkpoint, which may be another than those that the ages were made from.
            created: the time at which it was made.
        """
        if not self._orders or order >= self._orders[-1]:
            return 0.0
        at, now, newest = created.timestamp(), self._times[-1], self._attempts[-1]
        ages = [now - at]  # if every clock is right
        if order[1] != newest:
            own = max((order, at), self._lasts.get(order[1], (order, at)))
            before = max(own, self._lasts[self._attempts[-2]]) if len(self._attempts) > 1 else own
            after = self._attempts[bisect_right(self._attempts, order[1])]
            # If the newest launch's clock is wrong: without the time between that launch and the one before it.
            ages.append(before[1] - at + now - self._firsts[newest])
            # If its own launch's clock is wrong: without the time between that launch and the next one.
            ages.append(own[1] - at + now - self._firsts[after])
        # A checkpoint is not made after a later one, so a clock that says so is wrong.
        return min((age for age in ages if age >= 0), default=self._forward_s(order, at))

    def _forward_s(self, order: Order, at: float) -> float:
        """The time from a checkpoint to the newest, without the steps back of the clocks in between."""
        following = bisect_right(self._orders, order)
        return max(self._times[following] - at, 0.0) + self._forward[-1] - self._forward[following]

    @cached_property
    def _forward(self) -> list[float]:
        return list(accumulate((max(after - before, 0.0) for before, after in pairwise(self._times)), initial=0.0))
