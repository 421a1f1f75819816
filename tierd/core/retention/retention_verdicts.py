"""Retention: which of one run's checkpoints in one place are kept, and why; and how old each checkpoint is.

Invariant: only verified, complete checkpoints count towards a rule, and the newest of them is always kept. A checkpoint
that is not verified is not deleted. One that cannot become complete any more is deleted once enough newer complete ones
exist. No wall clock decides, because ages are differences between checkpoints' times of creation.

Two clocks that are wrong, each by any time and in any direction, make no checkpoint older than it is, except that
within a launch its own clock counts. The time that passed within launches always counts, and of the pauses between them
only as much as is left whichever two launches are ignored. So an age is too small rather than too large.

A checkpoint of a watched run has the time of its files, which any program may set. So within an attempt of such a run
neither the longest step from one checkpoint to the next counts, nor the time of any single checkpoint.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from heapq import nlargest, nsmallest
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from tierd.core.ids import CheckpointId
from tierd.core.retention.policy import Best, Duration, RetentionPolicy, parse_duration, rule_values
from tierd.core.timeline.launch_chain import ancestor_chain

Order: TypeAlias = tuple[str, str, int]  # run, attempt, step
_WRONG = 2  # launches with wrong clocks that make no checkpoint older


class Ages:
    """The ages of one run's checkpoints.

    Args:
        dated: the checkpoints, each with the time at which its trainer's clock says that it was made.
        by_files: whether the times are those of a watched run's files.
    """

    def __init__(self, dated: Iterable[tuple[Order, datetime]], *, by_files: bool = False) -> None:
        self._by_files = by_files
        ordered = sorted(dated)
        self._orders = [order for order, _ in ordered]
        self._times = [created.timestamp() for _, created in ordered]
        self._firsts: dict[str, int] = {}  # attempt -> the index of its first checkpoint
        for index, order in enumerate(self._orders):
            self._firsts.setdefault(order[1], index)
        self._attempts = list(self._firsts)

    def age_s(self, order: Order, created: datetime) -> float:
        """How many seconds a checkpoint, perhaps another one, is older than the newest; 0 for the newest, and for a
        newer one.
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
        """The seconds from a checkpoint to the last one of its launch, or to itself if `following` is after `last`.

        Args:
            at: when it was made.
            following: the index of the next checkpoint.
            last: the index of the launch's last one.
        """
        if following > last:
            return 0.0
        return self._confirmed_s(at, following, last) if self._by_files else self._elapsed_s(at, following, last)

    def _confirmed_s(self, at: float, following: int, last: int) -> float:
        """The same if a clock was set forward once, or one of the times is wrong: at least this time passed."""
        if following == last:
            return 0.0  # nothing confirms a single step
        to_next_s = self._times[following] - at
        longest_s = max(to_next_s, self._longest[following])
        return max(
            0.0,
            min(
                self._elapsed_s(at, following, last),
                self._elapsed_s(at, following, last - 1),
                self._elapsed_s(self._times[following], following + 1, last),
                max(to_next_s, 0.0) + self._forward[last] - self._forward[following] - longest_s,
            ),
        )

    def _elapsed_s(self, at: float, following: int, last: int) -> float:
        """The seconds from a checkpoint to a later one of its launch, whose time may be wrong."""
        if self._times[last] >= at:
            return self._times[last] - at
        # A checkpoint is not made after a later one, so the clock was set back: only the steps forward count.
        return max(self._times[following] - at, 0.0) + self._forward[last] - self._forward[following]

    @cached_property
    def _forward(self) -> list[float]:
        return list(accumulate((max(after - before, 0.0) for before, after in pairwise(self._times)), initial=0.0))

    @cached_property
    def _longest(self) -> list[float]:
        """By checkpoint, the longest step from one to the next of those from it to the end of its launch."""
        longest = [0.0] * len(self._orders)
        for index in range(len(longest) - 2, -1, -1):
            if self._orders[index][1] == self._orders[index + 1][1]:
                longest[index] = max(longest[index + 1], self._times[index + 1] - self._times[index])
        return longest


T = TypeVar("T", bound=tuple[Any, ...])
Origins: TypeAlias = Mapping[str, CheckpointId | None]  # attempt -> the checkpoint that it resumed from

AWAITS_PARTS = "incomplete: its other parts may still come"


@dataclass(frozen=True)
class CheckpointInfo:
    """The facts that retention needs about one checkpoint in one place."""

    id: CheckpointId
    complete: bool
    verified: bool
    pinned: bool = False
    created: datetime | None = None  # when it was made; None if no manifest can be read
    metrics: Mapping[str, float] | None = None  # by name, the metrics that were passed to `save`
    origin: CheckpointId | None = None  # the checkpoint from which its attempt resumed
    quarantined: bool = False
    is_watched: bool = False  # whether it is a watched run's, so that `created` is the time of its files

    @cached_property
    def order(self) -> Order:
        return self.id.run, self.id.attempt, self.id.step  # sorts like the id, and many times as fast


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a checkpoint is kept, and every reason. `waiting_tiers` are those for which alone it is kept."""

    id: CheckpointId
    keep: bool
    reasons: tuple[str, ...]
    waiting_tiers: tuple[str, ...] = ()


class Ranking:
    """The ranks by each rule of one run's checkpoints in one place. It judges these checkpoints and any single other.

    Args:
        origins: the checkpoint from which each attempt resumed, according to all places, so that retention follows the
            same timeline as a resume.
        live: the attempts whose launches live. Each also keeps the checkpoints that it would keep if no later launch
            existed, because its trainer continues from these.
    """

    def __init__(
        self,
        checkpoints: Sequence[CheckpointInfo],
        policy: RetentionPolicy,
        origins: Origins = MappingProxyType({}),
        live: Collection[str] = (),
    ) -> None:
        counted = sorted((info for info in checkpoints if info.complete and info.verified), key=_order)
        self._infos, self._counted, self._own_pins = checkpoints, counted, any(info.pinned for info in checkpoints)
        # The timeline of a resume includes a launch that has no complete checkpoint yet, because that launch needs the
        # checkpoint from which it resumed.
        launch_origins = {info.id.attempt: info.origin for info in checkpoints if info.created} | dict(origins)
        self._policy = policy
        self._chain = ancestor_chain(max(launch_origins), launch_origins) if launch_origins else {}
        self._all = [_order(info) for info in counted]  # oldest first, like the lists below
        self._on_path = [info for info in counted if self._is_on_path(info)]
        self._path = [_order(info) for info in self._on_path]
        self._rules = [rule(value, counted) for name, rule in _RULES.items() for value in rule_values(policy, name)]
        self._alone: dict[str, Ranking] = {}
        for live_attempt in live:
            if any(info.id.attempt > live_attempt for info in checkpoints):
                before = [info for info in checkpoints if info.id.attempt <= live_attempt]
                come = {attempt: origin for attempt, origin in origins.items() if attempt <= live_attempt}
                self._alone[live_attempt] = Ranking(before, policy, come)

    @cached_property
    def kept_ids(self) -> frozenset[CheckpointId]:
        """The checkpoints whose verdict is to keep. Slicing the sorted lists is faster than judging each checkpoint."""
        count, order = self._policy.keep_last, _order
        ids = {info.id for info in (*self._counted[-count:], *self._on_path[-count:])}
        if len(self._counted) < len(self._infos) or self._own_pins:
            bound = self._all[-count] if len(self._all) >= count else None
            ids |= {
                info.id
                for info in self._infos
                if info.pinned or not info.verified or (not info.complete and (bound is None or order(info) >= bound))
            }
        ids.update(*(rule.kept_ids() for rule in self._rules))
        return frozenset(ids).union(*(alone.kept_ids for alone in self._alone.values()))

    def verdict(self, info: CheckpointInfo) -> Verdict:
        """The verdict over `info`: one of the ranked checkpoints, or another one as if it alone were added to them."""
        verdict = self._verdict(info)
        for attempt, ranking in self._alone.items():
            if verdict.keep or info.id.attempt > attempt:
                continue
            alone = ranking._verdict(info)
            if alone.keep:
                return Verdict(info.id, True, (*alone.reasons, f"launch {attempt} lives, beside a later one"))
        return verdict

    def _verdict(self, info: CheckpointInfo) -> Verdict:
        newer = _above(self._all, _order(info))
        reasons = ["pinned"] if info.pinned else []
        if not info.verified:
            reasons.append("not verified yet")
        if info.complete and info.verified:
            reasons += self._reasons(info, newer)
        if reasons:
            return Verdict(info.id, True, tuple(reasons))
        if info.complete:
            return Verdict(info.id, False, (f"older than the last {self._policy.keep_last}, and no rule keeps it",))
        if newer < self._policy.keep_last:
            why = "quarantined: kept to be looked at" if info.quarantined else AWAITS_PARTS
            return Verdict(info.id, True, (why,))
        state = "quarantined" if info.quarantined else "incomplete"
        return Verdict(info.id, False, (f"{state}, and {newer} newer complete ones are verified",))

    def _reasons(self, info: CheckpointInfo, newer: int) -> Iterator[str]:
        count = self._policy.keep_last
        on_path = newer == 0 or self._is_on_path(info)
        place = 1 + (_above(self._path, _order(info)) if on_path else newer)
        if place <= count:
            yield "newest" if newer == 0 else f"last {place} of {count}" + ("" if on_path else ", off the timeline")
        yield from filter(None, (rule.reason(info) for rule in self._rules))

    def is_permanent(self, info: CheckpointInfo) -> bool:
        """Whether a checkpoint is kept however many newer ones follow: by a pin, or by a rule that keeps so."""
        return info.pinned or any(rule.is_permanent and rule.reason(info) for rule in self._rules)

    def _is_on_path(self, info: CheckpointInfo) -> bool:
        limit = self._chain.get(info.id.attempt, -1)
        return limit is None or info.id.step <= limit


_order = operator.attrgetter("order")


class _Rule(ABC):
    """One value of a rule, applied to the complete and verified checkpoints of one place, oldest first."""

    is_permanent = True  # keeps a checkpoint however many newer ones follow

    def __init__(self, counted: Sequence[CheckpointInfo]) -> None:
        self._counted = counted

    @abstractmethod
    def reason(self, info: CheckpointInfo) -> str:
        """Why the rule keeps `info`, of these checkpoints or as if it were added to them; empty if it does not."""

    def kept_ids(self) -> Iterable[CheckpointId]:
        """Those of the checkpoints that the rule keeps."""
        return (info.id for info in self._counted if self.reason(info))


class _EverySteps(_Rule):
    def __init__(self, steps: int, counted: Sequence[CheckpointInfo]) -> None:
        super().__init__(counted)
        self._steps = steps

    def reason(self, info: CheckpointInfo) -> str:
        return "" if info.id.step % self._steps else f"every {self._steps} steps"


class _Within(_Rule):
    is_permanent = False

    def __init__(self, within: Duration, counted: Sequence[CheckpointInfo]) -> None:
        super().__init__(counted)
        self._within, self._within_s = within, parse_duration(within)

    @cached_property
    def _ages(self) -> Ages:
        by_files = any(info.is_watched for info in self._counted if info.created)
        return Ages(((_order(info), info.created) for info in self._counted if info.created), by_files=by_files)

    def reason(self, info: CheckpointInfo) -> str:
        if info.created is None or self._ages.age_s(_order(info), info.created) > self._within_s:
            return ""
        return f"within {self._within} of the newest"


class _Spaced(_Rule):
    def __init__(self, span: Duration, counted: Sequence[CheckpointInfo]) -> None:
        super().__init__(counted)
        self._span, self._span_s = span, parse_duration(span)
        self._spaced: list[tuple[Order, datetime]] = []  # those that the rule keeps, oldest first
        for info in counted:
            if info.created is not None and self._is_apart(info.created, self._spaced[-1:]):
                self._spaced.append((_order(info), info.created))

    def reason(self, info: CheckpointInfo) -> str:
        # Only older checkpoints that this rule keeps decide, so that pruning others in between changes no verdict.
        before = bisect_left(self._spaced, _order(info), key=operator.itemgetter(0))
        if info.created is None or not self._is_apart(info.created, self._spaced[max(before - 1, 0) : before]):
            return ""
        return f"one every {self._span}"

    def kept_ids(self) -> Iterable[CheckpointId]:
        return (CheckpointId(*order) for order, _ in self._spaced)

    def _is_apart(self, created: datetime, last: list[tuple[Order, datetime]]) -> bool:
        return not last or abs((created - last[0][1]).total_seconds()) >= self._span_s


class _BestByMetric(_Rule):
    def __init__(self, best: Best, counted: Sequence[CheckpointInfo]) -> None:
        super().__init__(counted)
        self._best = best
        self._ranks = sorted(rank for info in counted if (rank := self._rank(info)))

    def reason(self, info: CheckpointInfo) -> str:
        best, rank = self._best, self._rank(info)
        if rank is None or (place := 1 + _above(self._ranks, rank)) > best.count:
            return ""
        return f"best {best.metric}" + (f" ({place} of {best.count})" if best.count > 1 else "")

    def kept_ids(self) -> Iterable[CheckpointId]:
        return (CheckpointId(*order) for _, order in self._ranks[-self._best.count :])

    def _rank(self, info: CheckpointInfo) -> tuple[float, Order] | None:
        """The sort key, larger is better; None if the metric is missing or NaN."""
        value = (info.metrics or {}).get(self._best.metric)
        if value is None or value != value:
            return None
        # Of equal values the newer wins, because a plateau should not keep its oldest checkpoint.
        return value if self._best.mode == "max" else -value, _order(info)


# The rules besides `keep_last`, in the order of their reasons; each has an instance for each of its values.
_RULES: dict[str, Callable[[Any, Sequence[CheckpointInfo]], _Rule]] = {
    "keep_every_steps": _EverySteps,
    "keep_within": _Within,
    "keep_every": _Spaced,
    "keep_best": _BestByMetric,
}


def _above(ascending: list[T], threshold: T) -> int:
    return len(ascending) - bisect_right(ascending, threshold)
