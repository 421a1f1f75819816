"""The loss from failures when a tier has not caught up as training resumes; a part of the model of `tierd advise`.

A daemon continues copying while a job restarts, and after the restart if a copy takes longer. A node that is lost then
also loses training of the launch before, and the first copy of the new launch begins late. Because no closed form is
known, this module simulates lives of a job, where a life is the time between two failures. Each life takes constant
time to compute, and uses a fixed sequence of pseudo-random numbers. It is compared with the same life on a tier that
had caught up. Only the difference is used. It is small, so its error is smaller still.

Invariant: the same costs give the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

_LIVES = 6000  # the number of simulated lives
_BITS = 64
_FACTOR, _ADDEND = 6364136223846793005, 1442695040888963407  # Knuth's MMIX: TAOCP vol. 2, 3.3.4


class Times(Protocol):
    """The members of `Costs` that this module reads; times are in seconds."""

    @property
    def durable_s(self) -> float: ...
    @property
    def restart_s(self) -> float: ...
    @property
    def mtbf_s(self) -> float: ...
    @property
    def flush_s(self) -> float: ...
    @property
    def node_loss(self) -> float: ...


_MOST_COPIES = 1e15


class _Tier(NamedTuple):
    """A tier's state at a moment. Saves are counted from the start of a life, so that older ones are negative.

    `newest` is the newest save on the tier. `copying` is the save that is being copied until `ends`; it equals `newest`
    if no copy runs.
    """

    newest: float = 0
    copying: float = 0
    ends: float = 0.0


def backlog(interval: float, period: float, costs: Times) -> float:
    """The loss of goodput compared with a tier that has caught up at each start of training.

    Args:
        interval: training between two saves, in seconds.
        period: the time from one save to the next, in seconds.
        costs: the costs.
    """
    if not costs.node_loss or costs.flush_s <= costs.restart_s:
        return 0.0
    life = _Life(interval + costs.durable_s, period, costs.flush_s)
    chance = _numbers()
    tier, lag = _Tier(), 0.0
    for _ in range(_LIVES):
        end = -costs.mtbf_s * math.log(next(chance))
        away_s, spool_lost = _sample_away_s(costs, chance), next(chance) < costs.node_loss
        saved, after = life.saved(end), life.at(end, tier)
        lag += life.at(end, _Tier()).newest - after.newest
        tier = _Tier() if spool_lost else _came_back(after, saved, end, away_s, costs.flush_s)
    length = costs.mtbf_s * math.exp(min(700.0, costs.restart_s / costs.mtbf_s))
    return costs.node_loss * interval * lag / _LIVES / length


class _Life:
    """The time from the start of training to a failure: which saves are durable, and which are on the tier."""

    def __init__(self, first: float, period: float, flush: float) -> None:
        self._first, self._period, self._flush = first, period, flush

    def saved(self, time: float) -> int:
        """The number of saves that are durable in the spool at `time`."""
        return max(0, math.floor((time - self._first) / self._period) + 1)

    def at(self, time: float, tier: _Tier) -> _Tier:
        """The tier's state at `time`, if `tier` is its state at the start."""
        flush, period = self._flush, self._period
        busy = tier.copying > tier.newest
        if busy and tier.ends > time:
            return tier
        newest = tier.copying
        begins = max(tier.ends if busy else 0.0, self._first)
        if begins > time:
            return _Tier(newest, newest)
        save = self.saved(begins)
        # Copies that have ended, if each begins when the one before ends. With no flush time they would be infinite.
        copies = math.floor(min((time - begins) / flush, _MOST_COPIES))
        if flush > period:
            if copies:
                newest = self.saved(begins + (copies - 1) * flush)
            return _Tier(newest, self.saved(begins + copies * flush), begins + (copies + 1) * flush)
        copied = min(save - 1 + copies, math.floor((time - self._first - flush) / period) + 1)
        if copied >= save:
            newest = copied
        else:
            copied = save - 1
        next_begins = max(self._first + copied * period, begins + (copied + 1 - save) * flush)
        if next_begins > time:
            return _Tier(newest, newest)
        return _Tier(newest, copied + 1, next_begins + flush)


def _came_back(tier: _Tier, saved: int, end: float, away_s: float, flush: float) -> _Tier:
    """The tier's state when training resumes, with times and saves counted from that moment."""
    newest, copying, ends = tier.newest, tier.copying, tier.ends
    while copying > newest and ends <= end + away_s:
        newest = copying
        if saved > newest:
            copying, ends = saved, ends + flush
    if newest == copying:
        return _Tier()  # the tier has all saves of the spool
    return _Tier(newest - saved, copying - saved, ends - end - away_s)


def _sample_away_s(costs: Times, chance: Iterator[float]) -> float:
    """The time of a restart in seconds, including failed restarts before it."""
    ratio = costs.restart_s / costs.mtbf_s
    fails = -math.expm1(-ratio)
    tries = math.floor(math.log(next(chance)) / math.log(fails)) if 0 < fails < 1 else 0
    if tries > 50:  # for so many, the mean is accurate enough
        return costs.restart_s + tries * costs.mtbf_s * (1 - ratio * math.exp(-ratio) / fails)
    return costs.restart_s + sum(-costs.mtbf_s * math.log1p(-fails * next(chance)) for _ in range(tries))


def _numbers() -> Iterator[float]:
    """A fixed sequence of numbers in (0, 1) from a linear congruential generator, which suffices for a mean."""
    state = 1
    while True:
        state = (state * _FACTOR + _ADDEND) % (1 << _BITS)
        yield (state + 0.5) / (1 << _BITS)
