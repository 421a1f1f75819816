"""`due`: nothing but what `when` says, remembered over saves, skips, failures and restores, the same on every rank."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from support.interrupted import at_line
from support.ranks import Group
from support.training import tensors
from support.world import attempt

import tierd
from tierd.client import save_schedule
from tierd.client.saving import save_pipeline
from tierd.core.errors import ConfigError, SaveFailed, StateRefused
from tierd.spool.spool import Spool


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(spool: Spool, when: tierd.When | None, **options) -> tierd.Checkpointer:
    return tierd.Checkpointer(spool.root, "run", to=[], when=when, **options)


def test_due_without_a_policy_names_the_missing_option(local):
    with pytest.raises(ConfigError, match=r"when=tierd\.When\(steps"):
        local.due(1)


@pytest.mark.parametrize("epoch", [0.5, -1, "1"])
def test_an_epoch_that_has_not_ended_is_none(spool, epoch):
    with made(spool, tierd.When(epochs=1)) as checkpointer, pytest.raises(ConfigError, match="has just ended"):
        checkpointer.due(1, epoch=epoch)


def test_due_changes_nothing_and_a_save_does(spool):
    with made(spool, tierd.When(steps=10)) as checkpointer:
        assert [step for step in range(12) if checkpointer.due(step)] == [10, 11]
        checkpointer.save(11, tensors(11))
        assert not any(checkpointer.due(step) for step in range(11, 20)) and checkpointer.due(20)
        with checkpointer.stage(20) as directory:
            (directory / "weights").write_bytes(b"1")
        assert not checkpointer.due(20) and not checkpointer.due(29) and checkpointer.due(30)


def test_save_skipped_as_busy_does_not_count_and_a_failed_save_counts_but_for_its_metric(spool, monkeypatch):
    real, go_on = save_pipeline.write_part, threading.Event()

    def slow(*arguments, **options):
        assert go_on.wait(60)
        if fail:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(save_pipeline, "write_part", slow)
    fail: list[int] = []
    with made(spool, tierd.When(steps=10, best="loss"), when_busy="skip") as checkpointer:
        assert checkpointer.due(10, metrics={"loss": 5.0})
        first = checkpointer.save(10, tensors(10))
        assert not checkpointer.due(11, metrics={"loss": 5.0}), "what is being persisted counts"
        assert checkpointer.due(20) and checkpointer.save(20, tensors(20)).error()
        assert checkpointer.due(21), "20 was skipped"
        go_on.set()
        first.wait()
        fail.append(1)
        assert checkpointer.due(21, metrics={"loss": 1.0})
        failed = checkpointer.save(21, tensors(21))
        with pytest.raises(SaveFailed):
            failed.wait()
        assert not checkpointer.due(22), "or a full disk would be tried at every step"
        assert checkpointer.due(22, metrics={"loss": 2.0}), "nothing keeps the 1.0"
        assert not checkpointer.due(22, metrics={"loss": 5.0})
        fail.clear()
        checkpointer.save(22, tensors(22)).wait()


def test_a_save_that_is_refused_counts_for_nothing(spool):
    with made(spool, tierd.When(steps=10, best="loss")) as checkpointer:
        assert checkpointer.due(10, metrics={"loss": 5.0})
        with pytest.raises(StateRefused):
            checkpointer.save(10, {"bad": object()}, {"loss": 5.0})
        assert checkpointer.due(10) and checkpointer.due(3, metrics={"loss": 5.0})


def test_the_best_so_far_is_known_again_after_a_restore(spool):
    when = tierd.When(best="val", best_only=True)
    with made(spool, when) as checkpointer:
        assert checkpointer.restore(tensors(0)) is None
        for step, value in enumerate([9.0, 7.0, 8.0, 3.0, 6.0]):
            if checkpointer.due(step, metrics={"val": value, "loss": 1.0}):
                checkpointer.save(step, tensors(step), {"loss": 1.0}).wait()
        assert checkpointer.stats.saves == 3
    with made(spool, when) as checkpointer:
        found = checkpointer.restore(tensors(0))
        assert (found.step, found.metrics) == (3, {"val": 3.0, "loss": 1.0}), "with the value that it was due by"
        assert not checkpointer.due(5, metrics={"val": 3.5}) and checkpointer.due(5, metrics={"val": 2.5})
    with made(spool, when) as checkpointer:  # 3 is not on this timeline any more
        assert checkpointer.restore(tensors(0), step=1).step == 1
        assert not checkpointer.due(2, metrics={"val": 7.5}) and checkpointer.due(2, metrics={"val": 6.5})
        with pytest.raises(ConfigError, match=r"no metric 'val'.*there are: loss"):
            checkpointer.due(2, metrics={"loss": 0.0})


def test_time_counts_from_the_beginning_the_restore_and_the_last_save(spool, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(save_schedule.SaveSchedule.__init__, "__defaults__", (clock,))
    with made(spool, tierd.When(every="10m")) as checkpointer:
        clock.now += 599
        assert not checkpointer.due(5)
        clock.now += 1
        assert checkpointer.due(6) and checkpointer.due(7)
        checkpointer.save(7, tensors(7)).wait()
        assert not checkpointer.due(8)
        clock.now += 600
        assert checkpointer.due(9)
        assert checkpointer.restore(tensors(0)).step == 7
        assert not checkpointer.due(8)


@pytest.mark.timeout(30)
def test_a_handler_may_save_at_any_line_of_the_schedule(spool):
    """The thread that persists the handler's save must not wait for the thread that the handler has interrupted."""
    steps = iter(range(1, 10_000))

    def save() -> None:
        step = next(steps)
        checkpointer.due(step, metrics={"loss": -step})
        checkpointer.save(step, tensors(1), {"loss": -step}).wait(timeout=60)

    with made(spool, tierd.When(steps=1, best="loss")) as checkpointer:
        for moment in range(200):
            with at_line(moment, {"save_schedule.py", "queue.py"}, save) as fired:
                save()
            if not fired:
                break
        assert 20 < moment < 199
        last = next(steps) - 1
        assert not checkpointer.due(last, metrics={"loss": -last})
        assert checkpointer.due(last, metrics={"loss": -last - 1})


# -- several ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def group(monkeypatch):
    made = Group(2)
    made.install(monkeypatch)
    return made


def test_ranks_that_cannot_talk_count_and_nothing_else(spool):
    for when in (tierd.When(every="10m"), tierd.When(steps=1, best="loss")):
        with pytest.raises(ConfigError, match=r"2 ranks have no way to be told.*steps and epochs"):
            made(spool, when, rank=0, world_size=2, attempt=attempt(1))
    with made(spool, tierd.When(steps=2), rank=0, world_size=2, attempt=attempt(1)) as checkpointer:
        assert [step for step in range(7) if checkpointer.due(step)] == [2, 4, 6]


def test_ranks_of_one_launch_have_the_same_policy(spool, group):
    for error in group.run(lambda number: made(spool, tierd.When(steps=2 + number))):
        assert isinstance(error, ConfigError) and "when=" in str(error)


def test_due_by_steps_needs_no_messages_and_skips_a_save_that_a_rank_did_not_make(spool, group):
    def work(number: int):
        with made(spool, tierd.When(steps=2)) as checkpointer:
            group.together.wait()
            group.deaf = True
            found = []
            for step in range(9):
                if checkpointer.due(step) and checkpointer.due(step):
                    found.append(step)
                    checkpointer.save(step, tensors(step)) if step != 4 or number else None
            return found

    assert group.run(work) == [[2, 4, 6, 8]] * 2


def test_rank_0s_clock_decides_and_is_looked_at_seldom(spool, group, monkeypatch):
    clocks = [Clock(), Clock()]
    monkeypatch.setattr(save_schedule.SaveSchedule.__init__, "__defaults__", (lambda: clocks[group.me.rank].now,))

    def work(number: int):
        with made(spool, tierd.When(every="100s")) as checkpointer:
            before, found = group.exchanges, []
            for step in range(1000):
                clocks[number].now += 1.0 if number == 0 else 50.0  # the other rank's clock runs wild
                if checkpointer.due(step):
                    found.append(step)
                    checkpointer.save(step, tensors(1))
            return found, group.exchanges - before

    (found, talks), other = group.run(work)
    assert other[0] == found and len(found) == 10
    assert all(100 <= after - step <= 102 for step, after in pairwise(found))
    assert talks < 100, "of a thousand steps"


def test_rank_0s_metrics_decide_and_are_asked_for_only_where_something_may_be_due(spool, group):
    def work(number: int):
        with made(spool, tierd.When(steps=10, best="val", best_only=True)) as checkpointer:
            found = []
            for step, value in ((5, 1.0), (10, 5.0), (15, 3.0), (20, 6.0), (25, 4.0), (30, 7.0), (40, 2.0)):
                before = group.exchanges
                if checkpointer.due(step, metrics={"val": value} if number == 0 else {}):
                    found.append(step)
                    checkpointer.save(step, tensors(step), {"val": value} if number == 0 else None)
                assert not checkpointer.due(step + 1), "no value, and no talk"
                group.together.wait()
                assert (group.exchanges > before) == (step not in (5, 15))
                group.together.wait()
            return found

    assert group.run(work) == [[10, 25, 40]] * 2

    def wrong(number: int):
        with made(spool, tierd.When(best="val")) as checkpointer:
            return checkpointer.due(1, metrics={"loss": 1.0})

    first, second = group.run(wrong)
    assert all(isinstance(error, ConfigError) and "no metric 'val'" in str(error) for error in (first, second))
    assert "rank 0: " in str(second)

    def resumed(number: int):
        with made(spool, tierd.When(best="val")) as checkpointer:
            assert checkpointer.restore(tensors(0)).step == 40
            return checkpointer.due(41, metrics={"val": 2.5}), checkpointer.due(42, metrics={"val": 1.5})

    assert group.run(resumed) == [(False, True)] * 2
