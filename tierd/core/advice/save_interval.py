"""How often to save: the interval with the best expected goodput, from measured costs and a failure rate.

Invariant: goodput is the closed form of a renewal argument, which a simulation in the tests confirms; it is never a
rule of thumb. The same costs give the same numbers. All times are seconds.

**The model.** A job trains for an interval T, saves, and continues. A save blocks training for C and is durable L after
its call, L >= C; the next save waits for it. So saves are P = max(T + C, L) apart, and bandwidth bounds how often a job
can save. Times between failures are exponential with mean M. A failure loses the training that is not durable, and the
restart takes R, during which the job may fail again.

One renewal lies between two failures. Training and saving take M of it, and restarting takes (e^(R/M) - 1) M, the mean
time until R has passed once without a failure. Together this is M e^(R/M). The k-th save is durable at
T + L + (k-1) P and then keeps T of training. So with a failure at X ~ Exp(M) training keeps on average

    T * sum over k >= 1 of Pr[X >= T + L + (k-1) P]  =  T e^(-(T+L)/M) / (1 - e^(-P/M)).

The goodput, also called the effective training time ratio, is this divided by the length of the renewal:

    G(T) = (T/M) e^(-(R+T+L)/M) / (1 - e^(-P/M)).

To the first order in 1/M a failure costs T/2 + L + R. With L = C this is Daly's complete model (2006). If P = T + C,
L > C scales G by a factor without T. So the best interval is Daly's unless L bounds it.

**Two levels.** A share q of the failures also loses the spool. Training then resumes from the newest checkpoint on a
tier. A copy to the tier takes F more; copies follow one another, each of the newest save. If F <= P every save is
copied, and the first copy is complete at T + L + F. So such failures keep T e^(-(T+L+F)/M) / (1 - e^(-P/M)).

If F > P, the j-th copy begins at T + L + (j-1) F, copies save number n_j = floor((j-1) F/P) + 1, and is complete F
later. Such failures keep

    T e^(-(T+L)/M) (1 - e^(-F/M)) * sum over j >= 1 of n_j e^(-jF/M).

This is a saw-tooth in T, because it depends on how saves and copies align, which differs each time in a real job. So
the interval is chosen with the mean of the floor, (j-1) F/P - 1/2, while the displayed goodput is the exact one.

**Backlog.** Both sums assume that the tier has caught up when training resumes, which holds if F <= R. Otherwise a node
that is lost early takes training of the launch before along, and the first copy of the new launch begins late. No
closed form is known for this loss, so `backlog` simulates it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tierd.core.errors import ConfigError

SHOWN_FACTORS = (0.25, 0.5, 2.0, 4.0)  # the other displayed intervals, as multiples of the recommended one
_GRIDS = (400, *(12 * [16]))  # intervals to try between two bounds, then between the neighbours of the best, and so on
_COPIES = 1000  # terms of the second level's sum; later terms are replaced by their mean
_NOTHING = 1e-4  # goodput below which no interval is recommended
_LIVES = 6000  # simulated lives of a job, where a life is the time between two failures


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of saves and failures for one job, in seconds; see the model above.

    Attributes:
        blocked_s: the time for which one save blocks training (C).
        durable_s: the time from the call of a save until it is durable (L); more than 0, and at least `blocked_s`.
        restart_s: the time from a failure until training resumes (R).
        mtbf_s: the mean time between failures of the job (M).
        flush_s: the time to copy one checkpoint to a tier (F).
        node_loss: the share of failures that lose the spool, after which only the tier's copy counts (q).
    """

    blocked_s: float
    durable_s: float
    restart_s: float
    mtbf_s: float
    flush_s: float = 0.0
    node_loss: float = 0.0

    def period_s(self, interval: float) -> float:
        """The time from one save to the next (P)."""
        return max(interval + self.blocked_s, self.durable_s)


@dataclass(frozen=True, slots=True)
class IntervalChoice:
    """One interval and the shares of time spent on each activity. The four shares sum to 1.

    Attributes:
        interval_s: training between two saves, in seconds.
        steps: the interval in steps; None: the step time is not known.
        blocked_s: the time for which each save blocks training, including its wait for the save before, in seconds.
        goodput: the share of time that ends up as training kept.
        saving: the share that saves take.
        redoing: the share that repeats training lost by failures.
        restarting: the share between a failure and the resumption of training.
    """

    interval_s: float
    steps: int | None
    blocked_s: float
    goodput: float
    saving: float
    redoing: float
    restarting: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended interval and others for comparison.

    Attributes:
        recommended: the interval with the highest goodput.
        others: intervals around the recommended one.
        yours: the interval that the caller gave; None: none was given.
        young_s: the interval by the formula of Young, 1974, in seconds.
        daly_s: the interval by the formula of Daly, 2006, in seconds.
        bandwidth_bound: whether saves are as frequent as the time until a save is durable permits. `young_s` and
            `daly_s` ignore this bound.
    """

    recommended: IntervalChoice
    others: tuple[IntervalChoice, ...]
    yours: IntervalChoice | None
    young_s: float
    daly_s: float
    bandwidth_bound: bool


def young(cost: float, mtbf: float) -> float:
    """Young's first-order optimum of the training between two saves, for C and the interval much smaller than M.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, 530-531.
    """
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Daly's higher-order optimum: a perturbation solution of G'(T) = 0 with L = C; R has no influence.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22(3), 2006, 303-312.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return young(cost, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def goodput(interval: float, costs: Costs, *, smooth: bool = False) -> float:
    """The expected share of time that ends up as training kept: G(T), for a tier that has caught up at each start.

    `smooth` takes the mean over all alignments of saves and copies, if a copy takes longer than P.
    """
    mtbf, period = costs.mtbf_s, costs.period_s(interval)
    first = math.exp(-(interval + costs.durable_s + costs.restart_s) / mtbf)
    intervals_kept = 1 / -math.expm1(-period / mtbf)
    if costs.node_loss:
        intervals_kept += costs.node_loss * (_copied(period, costs, smooth) - intervals_kept)
    return interval / mtbf * first * intervals_kept


def _copied(period: float, costs: Costs, smooth: bool) -> float:
    """The expected number of intervals that a failure that loses the spool keeps, divided by e^(-(T+L)/M)."""
    mtbf, flush = costs.mtbf_s, costs.flush_s
    survives, fails = math.exp(-flush / mtbf), -math.expm1(-flush / mtbf)
    if flush <= period:
        return survives / -math.expm1(-period / mtbf)
    ratio = flush / period
    copies = 1 if smooth else min(_COPIES, math.ceil(50 * mtbf / flush))  # e^-50 is negligible
    exact = fails * math.fsum((math.floor(copy * ratio) + 1) * survives ** (copy + 1) for copy in range(copies))
    # The later terms, with 1/2 for the mean of the fraction that the floor removes.
    return exact + survives ** (copies + 1) * (copies * ratio + 0.5 + ratio * survives / fails)


def backlog(interval: float, period: float, costs: Costs) -> float:
    """The loss of goodput compared with a tier that has caught up at each start of training.

    Each simulated life is compared with the same life on a tier that had caught up. Only the difference counts; it is
    small, so its error is smaller still. Every restart takes the mean time, because its variance changes the loss by
    less than that error. Within a life, time is counted in periods from the first durable save.
    """
    if not costs.node_loss or costs.flush_s <= costs.restart_s:
        return 0.0
    chance = _numbers()
    mtbf = costs.mtbf_s / period
    restart = mtbf * math.expm1(min(700.0, costs.restart_s / costs.mtbf_s))
    flush = max(costs.flush_s / period, 1e-9)  # a shorter copy makes no difference, but its quotients overflow
    start = -(interval + costs.durable_s) / period
    caught_up = tier = _Tier(0, 0, start)
    lag = 0
    for _ in range(_LIVES):
        end = start - mtbf * math.log(next(chance))
        tier = tier.at_rest(min(end, 0.0), 0, flush).in_training(end, flush)
        lag += caught_up.in_training(end, flush).newest - tier.newest
        if next(chance) < costs.node_loss:
            tier = caught_up
        else:
            saves, resumes = _saves(end), end + restart
            tier = tier.at_rest(resumes, saves, flush)
            tier = _Tier(tier.newest - saves, tier.copying - saves, start + tier.free - resumes)
    return costs.node_loss * interval / period * (lag / _LIVES) / (mtbf + restart)


class _Tier(NamedTuple):
    """The newest save on a tier, and the save of its last copy, which ends or ended at `free`.

    Saves are counted from the start of a life, so that older ones are negative.
    """

    newest: int
    copying: int
    free: float

    def at_rest(self, time: float, saves: int, flush: float) -> _Tier:
        """The tier at `time`, while the newest save in the spool is number `saves`."""
        newest, copying, free = self
        while newest < saves and free <= time:
            newest = copying
            if copying < saves:
                copying, free = saves, free + flush
        return _Tier(newest, copying, free)

    def in_training(self, time: float, flush: float) -> _Tier:
        """The tier at `time`, while save k is durable at k - 1.

        Copy i begins once copy i - 1 has ended and a new save is durable, at max(begin + i flush, save - 1 + i).
        """
        begin = max(self.free, 0.0)
        if begin > time:
            return self
        save = _saves(begin)
        ended = max(0, math.floor(min((time - begin) / flush, time - flush - save + 2)))
        last, following = (max(begin + copy * flush, save - 1 + copy) for copy in (ended - 1, ended))
        newest = _saves(last) if ended else self.copying
        if following > time:
            return _Tier(newest, newest, time)
        return _Tier(newest, _saves(following), following + flush)


def _saves(time: float) -> int:
    """The number of saves that are durable at `time`."""
    return max(0, math.floor(time) + 1)


def _numbers() -> Iterator[float]:
    """A fixed sequence of numbers in (0, 1), from the generator of Knuth's MMIX: TAOCP vol. 2, 3.3.4."""
    state = 1
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        yield (state + 0.5) / (1 << 64)


def evaluate_interval(interval: float, costs: Costs, steps: int | None = None) -> IntervalChoice:
    """The shares of time with one interval. Training has (1 - e^(-T/M)) / (1 - e^(-P/M)) of the time not restarting."""
    period = costs.period_s(interval)
    up = math.exp(-costs.restart_s / costs.mtbf_s)
    training = up * math.expm1(-interval / costs.mtbf_s) / math.expm1(-period / costs.mtbf_s)
    kept = max(0.0, goodput(interval, costs) - backlog(interval, period, costs))
    return IntervalChoice(interval, steps, period - interval, kept, up - training, max(0.0, training - kept), 1 - up)


def best_interval(costs: Costs) -> float:
    """The interval with the best goodput.

    With one level G has a single peak, at T <= M. With two levels G can have two peaks, so the first grid is fine. A
    peak may be a corner, where P equals F, so the corner is tried as well.
    """
    free = replace(costs, restart_s=0.0)  # R only contributes a factor without T, which may underflow

    def worth(interval: float) -> float:
        return goodput(interval, free, smooth=True)

    shortest = min(costs.mtbf_s, costs.durable_s) * 1e-3
    best, low, high = shortest, shortest, costs.mtbf_s
    for grid in _GRIDS:
        factor = (high / low) ** (1 / grid)
        best = max((low * factor**index for index in range(grid + 1)), key=worth)
        low, high = best / factor, best * factor
    corner = (costs.flush_s - costs.blocked_s) * (1 + 1e-12)
    if costs.node_loss and shortest < corner <= costs.mtbf_s:
        best = max(best, corner, key=worth)
    return best


def advise(costs: Costs, step_time: float | None = None, every: int | None = None) -> Advice:
    """The recommended interval, in whole steps if the time of one is known, and the goodput of `every` steps.

    Raises:
        ConfigError: no interval keeps more than 0.01 % of the time.
    """
    best, yours = best_interval(costs), None
    if step_time is None:
        recommended = evaluate_interval(best, costs)
        others = [evaluate_interval(best * factor, costs) for factor in SHOWN_FACTORS]
    else:
        neighbours = {max(1, math.floor(best / step_time)), max(1, math.ceil(best / step_time))}
        count = max(neighbours, key=lambda steps: goodput(steps * step_time, costs, smooth=True))
        recommended = evaluate_interval(count * step_time, costs, count)
        counts = [round(count * factor) for factor in SHOWN_FACTORS]
        others = [evaluate_interval(steps * step_time, costs, steps) for steps in counts if steps]
        yours = None if every is None else evaluate_interval(every * step_time, costs, every)
    if recommended.goodput < _NOTHING:
        raise ConfigError(_hopeless(costs, step_time))
    bandwidth_bound = best + costs.blocked_s <= costs.durable_s * (1 + 1e-6)
    cost, mtbf = costs.blocked_s, costs.mtbf_s
    return Advice(recommended, tuple(others), yours, young(cost, mtbf), daly(cost, mtbf), bandwidth_bound)


def _hopeless(costs: Costs, step_time: float | None) -> str:
    time, cause, way_out = max(
        (costs.restart_s, "coming back from a failure", "a faster restart"),
        (costs.durable_s, "a save until it is durable", "more bandwidth"),
        (costs.flush_s * (costs.node_loss > 0), "a copy to the tier", "more bandwidth to the tier"),
        (step_time or 0.0, "one step", "shorter steps"),
    )
    return (
        f"no interval helps: {cause} takes {time:g} s, and the job fails every {costs.mtbf_s:g} s, so less than "
        f"{_NOTHING:.2%} of the time is kept; it needs {way_out} or fewer failures"
    )
