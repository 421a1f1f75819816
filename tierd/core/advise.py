"""How often to save: the interval with the best expected goodput, from measured costs and a failure rate.

Law: goodput is the closed form of a renewal argument that a simulation in the tests confirms, never a rule of thumb.
All times are seconds.

**The model.** A job trains for an interval T, saves, and goes on. A save takes C from training and is durable L after
it was called, L >= C; the next save waits for it. So saves are P = max(T + C, L) apart: bandwidth bounds how often one
can save. Failures are exponential with mean M; each loses what is not durable, and coming back takes R, in which it may
fail again.

Between two failures lies one renewal. Its length is M for training and saving, and (e^(R/M) - 1) M for coming back (the
mean time until R has passed once without a failure), together M e^(R/M). In it the k-th save is durable at
T + L + (k-1) P and then keeps T of training, so with a failure at X ~ Exp(M) training keeps on average

    T * sum over k >= 1 of Pr[X >= T + L + (k-1) P]  =  T e^(-(T+L)/M) / (1 - e^(-P/M)).

Kept over length is the goodput, also called the effective training time ratio:

    G(T) = (T/M) e^(-(R+T+L)/M) / (1 - e^(-P/M)).

To the first order in 1/M a failure costs T/2 + L + R. With a synchronous save, L = C, this is Daly's complete model
(2006). As L > C scales G by a factor without T wherever P = T + C, the best interval is Daly's unless L bounds it.

**Two levels.** A share q of the failures takes the spool along; then training goes on from the newest checkpoint on a
tier, which takes F more to copy there, the newest first. The first is there at T + L + F, and from then on one each
Q = max(P, F), which on average keeps T Q/P more. Such failures keep, instead of the sum above,

    T e^(-(T+L+F)/M) (1 + (Q/P) / (e^(Q/M) - 1)).

Exact when F <= P. Beyond, a copy begins up to P after the newest save, which is left out: optimistic by less than one
interval for each lost node. It takes for granted that the tier has caught up when training goes on, as when F <= R.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierd.core.errors import ConfigError

FACTORS = (0.25, 0.5, 2.0, 4.0)  # what else is shown, as multiples of the recommended interval
_GRID = 400  # candidates before the refinement
_REFINE = 100  # each step keeps two thirds of the bracket


@dataclass(frozen=True, slots=True)
class Costs:
    """What saving and failing cost one job, in seconds; see the model above.

    `durable_s` is more than 0 and not less than `blocked_s`. `flush_s` is the time to copy one checkpoint to a tier,
    `node_loss` the share of failures that need it.
    """

    blocked_s: float
    durable_s: float
    restart_s: float
    mtbf_s: float
    flush_s: float = 0.0
    node_loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One interval and where the time goes: `goodput`, `saving`, `redoing` and `restarting` are shares that sum to 1.

    `interval_s` is training between two saves, `steps` the same in steps where the step time is known; `blocked_s` is
    what each save takes from training, with its wait for the save before.
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
    """The recommended interval, others around it, and the caller's own.

    `bandwidth_bound` says that saves are as close as they can become durable, a bound that `young_s` and `daly_s` do
    not know.
    """

    recommended: Choice
    others: tuple[Choice, ...]
    yours: Choice | None
    young_s: float
    daly_s: float
    bandwidth_bound: bool


def young(cost: float, mtbf: float) -> float:
    """Young's first-order optimum of the training between two saves: sqrt(2 C M).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, 530-531. For C and
    the interval much smaller than M, and a restart that does not depend on the interval.
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


def goodput(interval: float, costs: Costs) -> float:
    """The expected share of time that ends up as training kept: G(T)."""
    mtbf, period = costs.mtbf_s, _period(interval, costs)
    first = interval + costs.durable_s + costs.restart_s
    kept = math.exp(-first / mtbf) / -math.expm1(-period / mtbf)
    if costs.node_loss:
        each = max(period, costs.flush_s)
        # 1 / (e^y - 1), written so that a large y does not overflow
        later = (each / period) * math.exp(-each / mtbf) / -math.expm1(-each / mtbf)
        kept_on_tier = math.exp(-(first + costs.flush_s) / mtbf) * (1 + later)
        kept += costs.node_loss * (kept_on_tier - kept)
    return interval / mtbf * kept


def choice(interval: float, costs: Costs, steps: int | None = None) -> Choice:
    """Where the time goes with one interval. Of the time up, training has (1 - e^(-T/M)) / (1 - e^(-P/M))."""
    period = _period(interval, costs)
    up = math.exp(-costs.restart_s / costs.mtbf_s)
    training = up * math.expm1(-interval / costs.mtbf_s) / math.expm1(-period / costs.mtbf_s)
    good = goodput(interval, costs)
    return Choice(interval, steps, period - interval, good, up - training, max(0.0, training - good), 1 - up)


def optimum(costs: Costs) -> float:
    """The interval with the best goodput.

    On one level G has a single peak, at most M away; two levels can have two, so a grid comes first.
    """
    low = min(costs.mtbf_s, costs.durable_s) * 1e-3
    scale = math.log(costs.mtbf_s / low) / _GRID
    best = max(range(_GRID + 1), key=lambda index: goodput(low * math.exp(index * scale), costs))
    left, right = (low * math.exp(index * scale) for index in (best - 1, best + 1))
    for _ in range(_REFINE):
        third = (right - left) / 3
        if goodput(left + third, costs) < goodput(right - third, costs):
            left += third
        else:
            right -= third
    return (left + right) / 2


def advise(costs: Costs, step_time: float | None = None, every: int | None = None) -> Advice:
    """The interval to choose, in whole steps where `step_time` is given, and what `every` steps would give.

    Raises:
        ConfigError: the job fails faster than any interval could help.
    """
    _refuse_hopeless(costs, step_time)
    best = optimum(costs)
    if step_time is None:
        recommended = choice(best, costs)
        others = [choice(best * factor, costs) for factor in FACTORS]
    else:
        around = {max(1, math.floor(best / step_time)), max(1, math.ceil(best / step_time))}
        count = max(around, key=lambda steps: goodput(steps * step_time, costs))
        recommended = choice(count * step_time, costs, count)
        counts = [round(count * factor) for factor in FACTORS]
        others = [choice(steps * step_time, costs, steps) for steps in counts if steps]
    yours = choice(every * step_time, costs, every) if every is not None and step_time is not None else None
    classic = young(costs.blocked_s, costs.mtbf_s), daly(costs.blocked_s, costs.mtbf_s)
    return Advice(recommended, tuple(others), yours, *classic, best + costs.blocked_s <= costs.durable_s * (1 + 1e-6))


def _period(interval: float, costs: Costs) -> float:
    return max(interval + costs.blocked_s, costs.durable_s)


def _refuse_hopeless(costs: Costs, step_time: float | None) -> None:
    for what, time, way_out in (
        ("coming back from a failure", costs.restart_s, "a faster restart"),
        ("a save until it is durable", costs.durable_s, "more bandwidth"),
        ("one step", step_time or 0.0, "shorter steps"),
    ):
        if time >= costs.mtbf_s:
            raise ConfigError(
                f"no interval helps: {what} takes {time:g} s, and the job fails every {costs.mtbf_s:g} s; "
                f"it needs {way_out} or fewer failures"
            )
    if costs.flush_s >= costs.mtbf_s:
        raise ConfigError(
            f"a tier that takes {costs.flush_s:g} s for each checkpoint does not catch up with a job that fails every "
            f"{costs.mtbf_s:g} s: it needs more bandwidth to the tier or fewer failures"
        )
