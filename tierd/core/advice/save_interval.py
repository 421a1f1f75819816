"""How often to save: the interval with the best expected goodput, from measured costs and a failure rate.

Invariant: goodput is the closed form of a renewal argument, which a simulation in the tests confirms; it is never a
rule of thumb. All times are seconds.

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

To the first order in 1/M a failure costs T/2 + L + R. With a synchronous save, L = C, this is Daly's complete model
(2006). If P = T + C, L > C scales G by a factor without T. So the best interval is Daly's unless L bounds it.

**Two levels.** A share q of the failures also loses the spool. Training then resumes from the newest checkpoint on a
tier. A copy to the tier takes F more; copies follow one another, each of the newest save. If F <= P every save is
copied, and the first copy is complete at T + L + F. So such failures keep, instead of the sum above,

    T e^(-(T+L+F)/M) / (1 - e^(-P/M)).

If F > P, copies follow each other without a pause: the j-th begins at T + L + (j-1) F, copies save number
n_j = floor((j-1) F/P) + 1, and is complete F later. Such failures keep

    T e^(-(T+L)/M) * sum over j >= 1 of e^(-jF/M) (n_j - n_(j-1)),  n_0 = 0.

This is a saw-tooth in T, because it depends on how saves and copies align, which differs each time in a real job. So
the interval is chosen with the mean of the floor, (j-1) F/P - 1/2, while the displayed goodput is the exact one. Both
sums assume that the tier has caught up when training resumes, which holds if F <= R.
`core/advice/upload_backlog.py` computes the additional loss otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tierd.core.advice.upload_backlog import backlog
from tierd.core.errors import ConfigError

FACTORS = (0.25, 0.5, 2.0, 4.0)  # the other displayed intervals, as multiples of the recommended one
_GRID = 400  # candidates before the refinement
_REFINE = 100  # steps, each of which keeps two thirds of the bracket
_COPIES = 1000  # terms of the second level's sum; later terms are replaced by their mean
_NOTHING = 1e-4  # goodput below which no interval is recommended


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
    """Young's first-order optimum of the training between two saves: sqrt(2 C M).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, 530-531. It holds
    for C and the interval much smaller than M, and for a restart time that does not depend on the interval.
    """
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Daly's higher-order optimum: sqrt(2 C M) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C for C < 2M, and M from there on.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22(3), 2006, 303-312. A perturbation solution of G'(T) = 0 with L = C; R has no influence.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return young(cost, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def goodput(interval: float, costs: Costs, *, smooth: bool = False) -> float:
    """The expected share of time that ends up as training kept: G(T), for a tier that has caught up at each start.

    Args:
        interval: training between two saves, in seconds.
        costs: the costs.
        smooth: whether to take the mean over all alignments of saves and copies, if a copy takes longer than P.
    """
    mtbf, period = costs.mtbf_s, _period(interval, costs)
    first = math.exp(-(interval + costs.durable_s + costs.restart_s) / mtbf)
    intervals_kept = 1 / -math.expm1(-period / mtbf)
    if costs.node_loss:
        intervals_kept += costs.node_loss * (_copied(period, costs, smooth) - intervals_kept)
    return interval / mtbf * first * intervals_kept


def _copied(period: float, costs: Costs, smooth: bool) -> float:
    """The expected number of intervals that a failure that loses the spool keeps, divided by e^(-(T+L)/M)."""
    mtbf, flush = costs.mtbf_s, costs.flush_s
    if flush <= period:
        return math.exp(-flush / mtbf) / -math.expm1(-period / mtbf)
    ratio, fades = flush / period, math.exp(-flush / mtbf)
    copies = 1 if smooth else min(_COPIES, math.ceil(50 * mtbf / flush))  # e^-50 is negligible
    total, weight, newest = 0.0, 1.0, 0
    for copy in range(copies):
        weight *= fades
        saved = math.floor(copy * ratio) + 1
        total, newest = total + weight * (saved - newest), saved
    # The remaining terms, with 1/2 for the mean of the fraction that the floor removes.
    return total + weight * fades * (copies * ratio + 0.5 - newest + ratio * fades / -math.expm1(-flush / mtbf))


def choice(interval: float, costs: Costs, steps: int | None = None) -> IntervalChoice:
    """The shares of time with one interval. Training has (1 - e^(-T/M)) / (1 - e^(-P/M)) of the time not restarting."""
    period = _period(interval, costs)
    up = math.exp(-costs.restart_s / costs.mtbf_s)
    training = up * math.expm1(-interval / costs.mtbf_s) / math.expm1(-period / costs.mtbf_s)
    goodput_share = max(0.0, goodput(interval, costs) - backlog(interval, period, costs))
    return IntervalChoice(
        interval, steps, period - interval, goodput_share, up - training, max(0.0, training - goodput_share), 1 - up
    )


def optimum(costs: Costs) -> float:
    """The interval with the best goodput.

    With one level G has a single peak, at T <= M. With two levels G can have two peaks, so a grid search precedes the
    refinement. A peak may be a corner, where P equals L or F, so the corners are tried as well.
    """
    free = replace(costs, restart_s=0.0)  # R only contributes a factor without T, which may underflow

    def worth(interval: float) -> float:
        return goodput(interval, free, smooth=True)

    low = min(costs.mtbf_s, costs.durable_s) * 1e-3
    scale = math.log(costs.mtbf_s / low) / _GRID
    best = max(range(_GRID + 1), key=lambda index: worth(low * math.exp(index * scale)))
    left, right = (low * math.exp(index * scale) for index in (best - 1, best + 1))
    for _ in range(_REFINE):
        third = (right - left) / 3
        if worth(left + third) < worth(right - third):
            left += third
        else:
            right -= third
    corner = costs.flush_s - costs.blocked_s if costs.node_loss else 0.0
    peaks = [(left + right) / 2, *([corner * (1 + 1e-12)] if low < corner <= costs.mtbf_s else [])]
    return max(peaks, key=worth)


def advise(costs: Costs, step_time: float | None = None, every: int | None = None) -> Advice:
    """The recommended interval, in whole steps if `step_time` is given, and the goodput of `every` steps.

    Args:
        costs: the costs.
        step_time: the time of one step, in seconds; None: not known.
        every: an interval in steps to compare; None: none.

    Raises:
        ConfigError: no interval keeps more than 0.01 % of the time.
    """
    best = optimum(costs)
    if step_time is None:
        recommended = choice(best, costs)
        alternatives = [choice(best * factor, costs) for factor in FACTORS]
    else:
        around = {max(1, math.floor(best / step_time)), max(1, math.ceil(best / step_time))}
        count = max(around, key=lambda steps: goodput(steps * step_time, costs, smooth=True))
        recommended = choice(count * step_time, costs, count)
        counts = [round(count * factor) for factor in FACTORS]
        alternatives = [choice(steps * step_time, costs, steps) for steps in counts if steps]
    if recommended.goodput < _NOTHING:
        raise ConfigError(_hopeless(costs, step_time))
    yours = choice(every * step_time, costs, every) if every is not None and step_time is not None else None
    classic = young(costs.blocked_s, costs.mtbf_s), daly(costs.blocked_s, costs.mtbf_s)
    return Advice(
        recommended, tuple(alternatives), yours, *classic, best + costs.blocked_s <= costs.durable_s * (1 + 1e-6)
    )


def _period(interval: float, costs: Costs) -> float:
    return max(interval + costs.blocked_s, costs.durable_s)


def _hopeless(costs: Costs, step_time: float | None) -> str:
    cause, time, way_out = max(
        ("coming back from a failure", costs.restart_s, "a faster restart"),
        ("a save until it is durable", costs.durable_s, "more bandwidth"),
        ("a copy to the tier", costs.flush_s * (costs.node_loss > 0), "more bandwidth to the tier"),
        ("one step", step_time or 0.0, "shorter steps"),
        key=lambda cost: cost[1],
    )
    return (
        f"no interval helps: {cause} takes {time:g} s, and the job fails every {costs.mtbf_s:g} s, so less than "
        f"{_NOTHING:.2%} of the time is kept; it needs {way_out} or fewer failures"
    )
