"""The model of `tierd advise`: published values, a simulation that knows no formula, and what must always hold."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tierd.core.advice.save_interval import (
    Costs,
    advise,
    backlog,
    best_interval,
    daly,
    evaluate_interval,
    goodput,
    young,
)
from tierd.core.errors import ConfigError

MINUTE, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(("mtbf", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_daly_as_published(mtbf: float, minutes: float) -> None:
    """Figures 3 to 5 of the paper: a dump of 5 minutes."""
    assert daly(5 * MINUTE, mtbf) / MINUTE == pytest.approx(minutes, rel=0.006)


def test_young_by_hand() -> None:
    assert young(2, 100) == 20
    assert young(0, 100) == 0


def test_daly_beyond_its_range_is_the_mtbf() -> None:
    assert daly(200, 100) == 100
    assert daly(5000, 100) == 100


def lambert(cost: float, mtbf: float) -> float:
    """The root of e^(x+c) (1-x) = 1, which G'(T) = 0 comes down to with T = x M and C = c M, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if math.exp(middle + cost / mtbf) * (1 - middle) > 1 else (low, middle)
    return low * mtbf


@pytest.mark.parametrize(("cost", "mtbf"), [(1, 1e5), (30, 1e4), (300, 900), (500, 600)])
def test_the_optimum_is_the_exact_root(cost: float, mtbf: float) -> None:
    found = best_interval(Costs(blocked_s=cost, durable_s=cost, restart_s=10, mtbf_s=mtbf))
    assert found == pytest.approx(lambert(cost, mtbf), rel=1e-4)
    assert found == pytest.approx(daly(cost, mtbf), rel=0.03)


def test_the_optimum_does_not_depend_on_latency_until_it_binds() -> None:
    costs = Costs(blocked_s=1, durable_s=1, restart_s=60, mtbf_s=5000)
    free = best_interval(costs)  # about 100 s
    assert best_interval(replace(costs, durable_s=90)) == pytest.approx(free, rel=1e-4)
    assert best_interval(replace(costs, durable_s=400)) == pytest.approx(399, rel=1e-6)


def test_goodput_by_hand() -> None:
    """M = 100, T = 20, C = 5, L = 5, R = 10: (1/5) e^-0.35 / (1 - e^-0.25)."""
    costs = Costs(blocked_s=5, durable_s=5, restart_s=10, mtbf_s=100)
    assert goodput(20, costs) == pytest.approx(0.2 * 0.70468809 / 0.22119922, rel=1e-7)
    dalys_complete_model = 20 / (100 * math.exp(0.1) * (math.exp(0.25) - 1))
    assert goodput(20, costs) == pytest.approx(dalys_complete_model)


def test_a_failure_costs_half_an_interval_the_latency_and_the_restart_to_the_first_order() -> None:
    costs = Costs(blocked_s=0, durable_s=40, restart_s=70, mtbf_s=1e7)
    assert 1 - goodput(100, costs) == pytest.approx((100 / 2 + 40 + 70) / 1e7, rel=1e-3)


# -- a simulation -----------------------------------------------------------------------------------------------------


class Job:
    """Walks a job save by save, copy by copy and failure by failure; knows nothing of the closed form.

    The spool outlives most failures and the daemon goes on copying meanwhile; a lost node takes both along. Failures
    while coming back cost time only.
    """

    def __init__(self, interval: float, costs: Costs, seed: int) -> None:
        self.interval, self.costs, self.chance = interval, costs, random.Random(seed)
        self.now = self.spool = self.tier = 0.0
        self.copying: tuple[float, float] | None = None  # when it ends, and the training in it

    def run(self, failures: int) -> tuple[float, float]:
        """The goodput, and that number's standard error as a ratio of means."""
        samples = []
        for _ in range(failures):
            began, base = self.now, self.spool
            self.live()
            self.come_back()
            samples.append((self.spool - base, self.now - began))
        length = math.fsum(time for _, time in samples) / failures
        ratio = math.fsum(kept for kept, _ in samples) / failures / length
        spread = math.fsum((kept - ratio * time) ** 2 for kept, time in samples) / failures
        return ratio, math.sqrt(spread / failures) / length

    def live(self) -> None:
        """Train and save until a failure."""
        end = self.now + self.chance.expovariate(1 / self.costs.mtbf_s)
        trained, clock, durable = self.spool, self.now, self.now
        while True:
            trained += self.interval
            begin = max(clock + self.interval, durable)  # a save waits for the one before
            clock, durable = begin + self.costs.blocked_s, begin + self.costs.durable_s
            if durable > end:
                break
            self.copy_until(durable)
            self.spool = trained
            self.copying = self.copying or (durable + self.costs.flush_s, trained)
        self.copy_until(end)
        self.now = end
        if self.chance.random() < self.costs.node_loss:
            self.spool, self.copying = self.tier, None

    def come_back(self) -> None:
        while (failed := self.chance.expovariate(1 / self.costs.mtbf_s)) < self.costs.restart_s:
            self.now += failed
        self.now += self.costs.restart_s
        self.copy_until(self.now)

    def copy_until(self, time: float) -> None:
        """The daemon: one copy at a time, always of the newest that the tier has not."""
        while self.copying and self.copying[0] <= time:
            done, self.tier = self.copying
            self.copying = (done + self.costs.flush_s, self.spool) if self.spool > self.tier else None


# A copy that lasts three saves and a moment finds the third just made: then nothing is left out by the closed form.
SCENES = {
    "short saves": (100.0, Costs(blocked_s=5, durable_s=5, restart_s=60, mtbf_s=1000)),
    "slow to become durable": (150.0, Costs(blocked_s=5, durable_s=140, restart_s=60, mtbf_s=1000)),
    "saves wait for each other": (50.0, Costs(blocked_s=5, durable_s=140, restart_s=60, mtbf_s=1000)),
    "fails all the time": (60.0, Costs(blocked_s=20, durable_s=30, restart_s=80, mtbf_s=100)),
    "a fast tier": (100.0, Costs(blocked_s=5, durable_s=50, restart_s=90, mtbf_s=1000, flush_s=80, node_loss=0.4)),
    "a tier of every third save": (
        50.0,
        Costs(blocked_s=10, durable_s=30, restart_s=200, mtbf_s=1500, flush_s=180.001, node_loss=1),
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_closed_form_equals_the_goodput_of_a_simulated_job(scene: str) -> None:
    """Within four standard errors, which are small enough to tell a wrong model: half a percent of goodput."""
    interval, costs = SCENES[scene]
    found, error = Job(interval, costs, seed=1).run(failures=40_000)
    assert error < 0.005
    assert abs(found - goodput(interval, costs)) < 4 * error


def drawn(number: int) -> tuple[float, Costs]:
    """An interval and the costs of a job; every seventh is an extreme one."""
    chance = random.Random(number)
    extreme = number % 7 == 0
    mtbf = 10 ** chance.uniform(1, 7)
    durable = mtbf * 10 ** chance.uniform(-4, 0.5 if extreme else -0.5)
    blocked = durable * chance.choice([0.0, 1.0, chance.random()])
    restart = mtbf * chance.choice([0.0, 10 ** chance.uniform(-3, 0.5 if extreme else -0.5)])
    flush = mtbf * 10 ** chance.uniform(-3, 0.5 if extreme else -0.3)
    interval = mtbf * 10 ** chance.uniform(-2.5, 0.5 if extreme else 0)
    return interval, Costs(blocked, durable, restart, mtbf, flush, chance.choice([0.0, 1.0, chance.random()]))


@pytest.mark.timeout(400)
def test_goodput_of_200_drawn_jobs_equals_the_model() -> None:
    """Also where copies are slower than saves, a tier has not caught up at a restart, and restarts outlast the MTBF."""
    off = []
    for number in range(200):
        interval, costs = drawn(number)
        saves = costs.mtbf_s / max(interval + costs.blocked_s, costs.durable_s)
        failures = max(300, min(3000, int(60_000 / max(saves, math.exp(costs.restart_s / costs.mtbf_s)))))
        found, error = Job(interval, costs, seed=number).run(failures)
        if abs(found - evaluate_interval(interval, costs).goodput) > 4 * error + 1e-6:
            off.append((number, found, error, evaluate_interval(interval, costs).goodput))
    assert off == []


def test_tier_that_has_not_caught_up_costs_more_and_so_does_an_empty_tier() -> None:
    costs = Costs(blocked_s=10, durable_s=30, restart_s=100, mtbf_s=1500, flush_s=156, node_loss=0.3)
    assert backlog(50, 60, replace(costs, restart_s=156)) == backlog(50, 60, replace(costs, node_loss=0)) == 0
    assert 0 < backlog(50, 60, costs) < backlog(50, 60, replace(costs, restart_s=0)) < 0.3 * 156 / 1500


# -- what always holds ------------------------------------------------------------------------------------------------

times = st.floats(1e-3, 1e6)


@st.composite
def jobs(draw: st.DrawFn) -> Costs:
    mtbf = draw(st.floats(1, 1e8))
    durable = draw(st.floats(1e-6, 0.99)) * mtbf
    blocked = draw(st.floats(0, 1)) * durable
    restart, flush = draw(st.floats(0, 0.99)) * mtbf, draw(st.floats(0, 0.99)) * mtbf
    return Costs(blocked, durable, restart, mtbf, flush, node_loss=draw(st.just(0.0) | st.floats(0, 1)))


@example(Costs(blocked_s=0.0, durable_s=0.5, restart_s=0.0, mtbf_s=1.0, flush_s=5e-324, node_loss=1.0), 1.0)
@given(jobs(), times)
def test_shares_are_shares(costs: Costs, interval: float) -> None:
    found = evaluate_interval(interval, costs)
    shares = (found.goodput, found.saving, found.redoing, found.restarting)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)
    assert sum(shares) == pytest.approx(1, abs=1e-9)


@given(jobs(), times)
@example(Costs(1.0, 10.0, 500.0, 1000.0, 400.0, 1.0), 391.0)
def test_no_interval_beats_the_optimum(costs: Costs, interval: float) -> None:
    best = best_interval(costs)
    assert 0 < best <= costs.mtbf_s * 1.02
    assert goodput(interval, costs, smooth=True) <= goodput(best, costs, smooth=True) * (1 + 1e-6)


def keeps_up(interval: float, costs: Costs) -> bool:
    """Whether each checkpoint is on the tier before the next one is saved."""
    return costs.flush_s <= max(interval + costs.blocked_s, costs.durable_s)


@given(jobs(), times, st.floats(1, 10))
@example(Costs(1.875, 3.75, 0.0, 5.0, 4.375, 1.0), 1.0, 2.0)
def test_higher_cost_gives_lower_goodput(costs: Costs, interval: float, factor: float) -> None:
    """Except where saves become so rare that the tier keeps up: then no copy waits for an earlier one any more."""
    mean = partial(goodput, smooth=True)  # how copies happen to align is luck
    now = mean(interval, costs) * (1 + 1e-9)
    assert mean(interval, replace(costs, restart_s=costs.restart_s * factor)) <= now
    assert mean(interval, replace(costs, flush_s=costs.flush_s * factor)) <= now
    assert mean(interval, replace(costs, node_loss=min(1, costs.node_loss * factor))) <= now
    durable = replace(costs, durable_s=costs.durable_s * factor)
    blocked = replace(costs, blocked_s=min(costs.durable_s, costs.blocked_s * factor))
    for rarer in (durable, blocked):
        if not costs.node_loss or keeps_up(interval, rarer) == keeps_up(interval, costs):
            assert mean(interval, rarer) <= now


@given(jobs(), st.floats(1, 100))
def test_fewer_failures_keep_more_and_ask_for_fewer_saves(costs: Costs, factor: float) -> None:
    better = replace(costs, mtbf_s=costs.mtbf_s * factor)
    mean = partial(goodput, smooth=True)
    assert mean(best_interval(better), better) >= mean(best_interval(costs), costs) * (1 - 1e-6)
    one_level = replace(costs, node_loss=0.0)
    assert best_interval(replace(better, node_loss=0.0)) >= best_interval(one_level) * (1 - 1e-2)


@given(jobs(), st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(costs: Costs, factor: float) -> None:
    scaled = Costs(
        *(value * factor for value in (costs.blocked_s, costs.durable_s, costs.restart_s, costs.mtbf_s, costs.flush_s))
    )
    plain = replace(costs, node_loss=0.0)
    assert goodput(best_interval(scaled), scaled) == pytest.approx(goodput(best_interval(plain), plain), rel=1e-6)


# -- advice -----------------------------------------------------------------------------------------------------------

COSTS = Costs(blocked_s=1, durable_s=20, restart_s=300, mtbf_s=20_000)


def test_steps_are_whole_and_the_better_neighbour() -> None:
    found = advise(COSTS, step_time=60.0, every=10)
    best = found.recommended
    assert best.steps == 3  # 199.7 s at the optimum
    assert best.interval_s == 180
    assert all(goodput(60 * steps, COSTS) <= best.goodput for steps in range(1, 50))
    assert found.yours is not None
    assert (found.yours.steps, found.yours.interval_s, found.yours.goodput) == (10, 600, goodput(600, COSTS))
    assert [one.steps for one in found.others] == [1, 2, 6, 12]


def test_a_step_longer_than_the_optimum_is_one_step() -> None:
    found = advise(COSTS, step_time=5000.0)
    assert found.recommended.steps == 1
    assert [one.steps for one in found.others] == [2, 4]


def test_without_a_step_time_there_are_no_steps() -> None:
    found = advise(COSTS)
    assert found.recommended.steps is None
    assert found.yours is None
    assert [one.interval_s / found.recommended.interval_s for one in found.others] == [0.25, 0.5, 2, 4]


def test_bandwidth_binds() -> None:
    assert not advise(COSTS).bandwidth_bound
    found = advise(replace(COSTS, durable_s=1000))
    assert found.bandwidth_bound
    assert found.recommended.interval_s == pytest.approx(999)
    assert found.recommended.blocked_s == pytest.approx(1)
    assert found.others[0].blocked_s == pytest.approx(1000 - 999 / 4)


def test_a_save_that_costs_nothing_is_made_as_often_as_it_can_be() -> None:
    found = advise(replace(COSTS, blocked_s=0))
    assert found.recommended.interval_s == pytest.approx(20)
    assert found.young_s == found.daly_s == 0


@pytest.mark.parametrize(
    ("changed", "step_time", "good"),
    [
        ({"restart_s": 20_000.0, "durable_s": 1.0}, None, 0.36),
        ({"durable_s": 30_000.0}, None, 0.09),
        ({}, 20_001.0, 0.5),
        ({"flush_s": 20_000.0, "node_loss": 0.1}, None, 0.8),
    ],
)
def test_advise_answers_jobs_with_little_goodput(
    changed: dict[str, float], step_time: float | None, good: float
) -> None:
    """A restart, a save, a step or a copy that takes as long as a job lives."""
    assert good < advise(replace(COSTS, **changed), step_time).recommended.goodput < good + 0.15


@pytest.mark.parametrize(
    ("changed", "step_time", "message"),
    [
        ({"restart_s": 200_000.0}, None, "no interval helps: coming back from a failure takes 200000 s"),
        ({"durable_s": 3e7}, None, "no interval helps: a save until it is durable takes 3e"),
        ({}, 2e6, "no interval helps: one step takes 2e"),
        ({"flush_s": 1e6, "node_loss": 1.0}, None, "no interval helps: a copy to the tier takes 1e"),
    ],
)
def test_where_no_interval_helps_it_says_so(changed: dict[str, float], step_time: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        advise(replace(COSTS, **changed), step_time)


def test_extreme_costs_give_finite_goodput() -> None:
    for costs in (Costs(0, 1e-9, 0, 1e12), Costs(1e-6, 1e-6, 0, 1e12), Costs(9.9e11, 9.9e11, 9e11, 1e12)):
        found = advise(costs, step_time=None)
        assert 0 <= found.recommended.goodput <= 1
    assert goodput(1e15, COSTS) == 0
