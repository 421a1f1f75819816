"""When a checkpoint is due, which is the best, when training may stop: as tables, and what always holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inventories import checkpoint

from tierd.core.errors import ConfigError, StateMismatch
from tierd.core.save_rules import EarlyStopping, MetricGoal, SaveHistory, When, best_so_far, is_due, steps_to_wait

NAN = math.nan


def played(when: When, calls, saves=lambda step: True, saved: SaveHistory | None = None) -> list[int]:
    """The steps at which something is due. A call is step, epoch, value, second; what `saves` takes counts."""
    saved, found = saved or SaveHistory(0.0), []
    for step, epoch, value, now in calls:
        if is_due(when, saved, step, epoch, value, now):
            found.append(step)
            if saves(step):
                better = when.goal and value is not None and when.goal.better(value, saved.best)
                saved = SaveHistory(now, step, saved.epoch if epoch is None else epoch, value if better else saved.best)
    return found


def steps(*numbers: int):
    return [(number, None, None, 0.0) for number in numbers]


def test_due_steps_are_multiples_after_any_restore_or_missed_step():
    assert played(When(steps=3), steps(*range(10))) == [3, 6, 9], "step 0 has nothing to lose yet"
    assert played(When(steps=3), steps(*range(5, 13)), saved=SaveHistory(0.0, 4)) == [6, 9, 12]
    assert played(When(steps=3), steps(0, 2, 4, 6, 8)) == [4, 6], "not asked at 3: 4 is the first after it"
    assert played(When(steps=3), steps(*range(8)), saves=lambda step: step != 3) == [3, 4, 6], "a skipped one"


def test_epochs_are_those_that_have_ended():
    ends = [(10 * epoch + 9, epoch, None, 0.0) for epoch in range(6)]
    within = [(10 * epoch + 3, None, None, 0.0) for epoch in range(6)]
    assert played(When(epochs=1), sorted(ends + within)) == [9, 19, 29, 39, 49, 59]
    assert played(When(epochs=2), ends) == [19, 39, 59]
    assert played(When(epochs=2), ends[3:], saved=SaveHistory(0.0, 25, None)) == [39, 59], "after a restore, too"
    assert played(When(epochs=2), ends, saves=lambda step: step != 19) == [19, 29, 39, 59]


def test_time_counts_from_the_last_save():
    calls = [(step, None, None, step * 4.0) for step in range(1, 20)]
    assert played(When(every="10s"), calls) == [3, 6, 9, 12, 15, 18]
    assert played(When(every=10), calls, saves=lambda step: step != 3) == [3, 4, 7, 10, 13, 16, 19]
    assert played(When(every="10s", steps=5), calls) == [3, 5, 8, 10, 13, 15, 18]


def test_the_best_is_better_than_all_that_were_saved():
    values = [NAN, 5.0, 5.0, 6.0, NAN, 4.0, None, 3.0, math.inf, -math.inf]
    calls = [(step, None, value, 0.0) for step, value in enumerate(values)]
    assert played(When(best="loss"), calls) == [1, 5, 7, 9]
    assert played(When(best="loss", best_only=True), calls) == [1, 5, 7, 9]
    assert played(When(best="acc", mode="max"), calls) == [1, 3, 8]
    assert played(When(best="loss"), calls, saved=SaveHistory(0.0, best=4.0)) == [7, 9], "known again after a restore"
    assert played(When(best="loss", steps=3), calls) == [1, 3, 5, 6, 7, 9]
    assert played(When(best="loss", steps=3, best_only=True), calls) == [3, 7, 9], "the first better one from there on"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing would ever be due"),
        ({"steps": 0}, "steps=0"),
        ({"steps": True}, "steps=True"),
        ({"steps": 1.0}, "steps=1.0"),
        ({"epochs": -1}, "epochs=-1"),
        ({"every": "10"}, "every='10'"),
        ({"every": 0}, "every=0"),
        ({"every": NAN}, "every=nan"),
        ({"every": []}, r"every=\[\]"),
        ({"best": ""}, "name of a metric"),
        ({"best": 3}, "name of a metric"),
        ({"best": "loss", "mode": "auto"}, "mode='auto'.*min, max"),
        ({"steps": 1, "mode": "auto"}, "mode='auto'"),
        ({"steps": 1, "best_only": True}, "by which metric"),
    ],
)
def test_when_refuses_useless_options(options, said):
    with pytest.raises(ConfigError, match=said):
        When(**options)


@given(st.floats(0.1, 1e5), st.floats(1e-3, 1e3), st.floats(0.01, 1.0))
def test_the_clock_is_looked_at_few_times_and_not_too_late(every, step_s, faster):
    """Steps may also become faster than they were; then it is looked at more often, and never late."""
    at, step, observations = 0.0, 0, 0
    while at < every:
        ahead = steps_to_wait(every - at, step_s)
        step, at, observations = step + ahead, at + ahead * step_s * faster, observations + 1
    assert at < every + step_s
    assert observations <= 3 + math.log2(1 + every / step_s) * 2 / faster


def test_the_best_so_far_is_that_of_the_timeline_alone():
    values = {checkpoint(1, 1): 3.0, checkpoint(1, 2): 1.0, checkpoint(1, 3): 0.5, checkpoint(2, 2): 2.0}
    values |= {checkpoint(2, 9): 0.1, checkpoint(3, 1): NAN}
    origins = {checkpoint(2, 0).attempt: checkpoint(1, 2), checkpoint(1, 0).attempt: None}
    assert best_so_far(values, checkpoint(2, 2), origins, MetricGoal("loss")) == 1.0
    assert best_so_far(values, checkpoint(2, 2), origins, MetricGoal("loss", "max")) == 3.0
    assert best_so_far(values, checkpoint(3, 1), {}, MetricGoal("loss")) is None


# -- early stopping ---------------------------------------------------------------------------------------------------


def test_training_stops_when_nothing_became_better_for_long_enough():
    def stopped(values, **options) -> int | None:
        stopping = EarlyStopping("loss", **options)
        return next((n for n, value in enumerate(values) if stopping.stop({"loss": value, "acc": 1})), None)

    assert stopped([5, 4, 4, 3, 3, 3, 3], patience=3) == 6
    assert stopped([5, 4, 3, 2, 1], patience=1) is None
    assert stopped([5, 5], patience=0) == 1
    assert stopped([5, 4.95, 4.9, 4.85], patience=3, min_delta=0.2) == 3
    assert stopped([1, 2, 2, 2], patience=2, mode="max") == 3
    assert stopped([5, NAN, NAN], patience=2) == 2 and stopped([NAN, NAN], patience=2) == 1
    assert stopped([math.inf, 7, math.inf], patience=1) == 2


def test_early_stopping_continues_where_it_was_saved():
    one, other = EarlyStopping("loss", 3), EarlyStopping("loss", 3)
    for value in (5, 4, 6, 6):
        assert not one.stop({"loss": value})
    other.load_state_dict(one.state_dict())
    assert (other.best, other.waited) == (4, 2) and other.stop({"loss": 4})
    with pytest.raises(StateMismatch, match=r"'loss' \(min\), and watches 'loss' \(max\)"):
        EarlyStopping("loss", 3, mode="max").load_state_dict(one.state_dict())


@pytest.mark.parametrize("options", [{"patience": -1}, {"patience": 1.0}, {"min_delta": -1}, {"min_delta": NAN}])
def test_early_stopping_refuses_unusable_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        EarlyStopping("loss", **{"patience": 1, **options})


def test_a_metric_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ConfigError, match=r"no metric 'val_loss'.*there are: acc, loss"):
        EarlyStopping("val_loss", 1).stop({"loss": 1.0, "acc": 2.0})
    with pytest.raises(ConfigError, match="str is not a number"):
        EarlyStopping("loss", 1).stop({"loss": "low"})


# -- what Keras has as well -------------------------------------------------------------------------------------------


def test_threshold_stands_for_the_best_before_the_first_save():
    """Keras's initial_value_threshold."""
    when = When(best="loss", best_only=True, threshold=0.5)
    assert not is_due(when, SaveHistory(0.0), 1, None, 0.6, 0.0)
    assert is_due(when, SaveHistory(0.0), 1, None, 0.4, 0.0)
    assert is_due(when, SaveHistory(0.0, best=0.9), 1, None, 0.6, 0.0)  # something was saved
    for wrong in ({"steps": 1, "threshold": 0.5}, {"best": "loss", "threshold": float("nan")}):
        with pytest.raises(ConfigError, match="threshold"):
            When(**wrong)


def test_a_baseline_has_to_be_beaten_too():
    """Keras's: an improvement that does not come to the baseline counts as a call without one."""
    stopping = EarlyStopping("loss", patience=2, baseline=0.5)
    assert [stopping.stop({"loss": value}) for value in (0.9, 0.7)] == [False, True]
    stopping = EarlyStopping("loss", patience=2, baseline=0.5)
    assert [stopping.stop({"loss": value}) for value in (0.9, 0.4, 0.45)] == [False, False, False]
    assert stopping.best == 0.4 and stopping.waited == 1
    with pytest.raises(ConfigError, match="baseline"):
        EarlyStopping("loss", patience=2, baseline=float("inf"))
