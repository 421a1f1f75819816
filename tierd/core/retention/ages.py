"""How much older a checkpoint of a run is than the newest, although any two launches may have had wrong clocks.

Invariant: two clocks that are wrong, each by any time and in any direction, make no checkpoint older than it is, except
that within a launch its own clock counts. The time that passed within launches always counts, and of the pauses between
them only as much as is left whichever two launches are ignored. So an age is too small rather than too large.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from heapq import nlargest, nsmallest
from itertools import accumulate, pairwise
from typing import TypeAlias

Order: TypeAlias = tuple[str, str, int]  # run, attempt, step
_WRONG = 2  # launches with wrong clocks that make no checkpoint older


class Ages:
    """The ages of one run's checkpoints.

    Args:
        dated: the checkpoints, each with the time at which its trainer's clock says that it was made.
    """

    def __init__(self, dated: Iterable[tuple[Order, datetime]]) -> None:
        ordered = sorted(dated)
        self._orders = [order for order, _ in ordered]
        self._times = [created.timestamp() for _, created in ordered]
        self._firsts: dict[str, int] = {}  # attempt -> the index of its first checkpoint
        for index, order in enumerate(self._orders):
            self._firsts.setdefault(order[1], index)
        self._attempts = list(self._firsts)

    def age_s(self, order: Order, created: datetime) -> float:
        """How many seconds a checkpoint is older than the newest; 0 for the newest, and for a newer one.

        Args:
            order: the checkpoint, which may be another than those that the ages were made from.
            created: the time at which it was made.
        """
        if not self._orders or order >= self._orders[-1]:
            return 0.0
        at, following, newest = created.timestamp(), bisect_right(self._orders, order), len(self._orders) - 1
        if order[1] == self._attempts[-1]:
            return self._passed_s(at, following, newest)
        after = bisect_right(self._attempts, order[1])
        last = self._firsts[self._attempts[after]] - 1  # of its own launch, unless `order` is later
        to_end_s = self._passed_s(at, following, last) if following <= last else 0.0
        launch_start = (self._times[last] if following <= last else at) - self._within_s[after]
        in_launches_s = to_end_s + self._within_s[-1] - self._within_s[after]
        later_largest, later_smallest = self._extremes[after]
        largest, smallest = (
            nlargest(_WRONG + 1, (*later_largest, launch_start)),
            nsmallest(_WRONG + 1, (*later_smallest, launch_start)),
        )
        if len(largest) <= _WRONG:
            return in_launches_s
        pauses_s = min(largest[ahead] - smallest[_WRONG - ahead] for ahead in range(_WRONG + 1))
        return in_launches_s + max(pauses_s, 0.0)

    @cached_property
    def _within_s(self) -> list[float]:
        """The seconds that passed within all launches before each one, and within all of them."""
        bounds = pairwise([*self._firsts.values(), len(self._orders)])
        passed = (self._passed_s(self._times[first], first + 1, end - 1) for first, end in bounds)
        return list(accumulate(passed, initial=0.0))

    @cached_property
    def _extremes(self) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        """Of each launch and all later ones: the largest and smallest times, without the time within launches.

        A launch whose clock is ahead can be among the largest alone, one whose clock is behind among the smallest.
        """
        extremes, largest, smallest = [], tuple[float, ...](), tuple[float, ...]()
        starts = [
            self._times[first] - within_s
            for first, within_s in zip(self._firsts.values(), self._within_s[:-1], strict=True)
        ]
        for start in reversed(starts):
            largest = tuple(nlargest(_WRONG + 1, (*largest, start)))
            smallest = tuple(nsmallest(_WRONG + 1, (*smallest, start)))
            extremes.append((largest, smallest))
        return extremes[::-1]

    def _passed_s(self, at: float, following: int, last: int) -> float:
        """The seconds from a checkpoint to a later one of its launch, or to itself if `following` is after `last`.

        Args:
            at: when it was made.
            following: the index of the next checkpoint.
            last: the index of the later one.
        """
        if following > last:
            return 0.0
        if self._times[last] >= at:
            return self._times[last] - at
        # A checkpoint is not made after a later one, so the clock was set back: only the steps forward count.
        return max(self._times[following] - at, 0.0) + self._forward[last] - self._forward[following]

    @cached_property
    def _forward(self) -> list[float]:
        return list(accumulate((max(after - before, 0.0) for before, after in pairwise(self._times)), initial=0.0))
