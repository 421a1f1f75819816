"""Which runs have a trainer: who does not say which run it saves may save any."""

from __future__ import annotations

import time

import pytest

from tierd.daemon.reconciling import client_requests
from tierd.daemon.reconciling.client_requests import TrainerActivity

DAY = 86400.0


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now, self.today = 1000.0, time.time()
        monkeypatch.setattr(client_requests.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(client_requests.time, "time", lambda: self.today)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_attached_trainers_and_writers_are_trainers(clock):
    known = TrainerActivity()
    known.trainer_attached("a")
    assert known.trainerless_runs(["a", "b", "c.d"], {"c.d.00000-of-00002"}) == {"b"}
    known.trainer_attached("a")
    known.trainer_detached("a")
    assert "a" not in known.trainerless_runs(["a"], ())
    known.trainer_detached("a")
    assert known.trainerless_runs(["a"], ()) == {"a"}


def test_a_trainer_that_does_not_say_its_run_may_save_any(clock):
    known = TrainerActivity()
    known.trainer_attached(None)
    assert not known.trainerless_runs(["a", "b"], ()) and not known.quiet_runs({"a": 0.0}, (), DAY)
    known.trainer_detached(None)
    assert known.quiet_runs({"a": 0.0}, (), DAY) == {"a"}


def test_a_run_is_finished_when_both_its_trainer_and_its_newest_part_are_old(clock):
    known = TrainerActivity()
    assert known.quiet_runs({"a": clock.today - DAY, "b": clock.today - DAY + 1}, (), DAY) == {"a"}
    known.trainer_attached("a")
    assert not known.quiet_runs({"a": 0.0}, (), DAY)
    known.trainer_detached("a")
    assert not known.quiet_runs({"a": 0.0}, (), DAY), "its trainer has just left"
    clock.now += DAY
    assert known.quiet_runs({"a": 0.0}, (), DAY) == {"a"}
    known.note_request("a")
    assert not known.quiet_runs({"a": 0.0}, (), DAY), "somebody restores it"


def test_clock_that_was_set_back_finishes_nothing(clock):
    assert not TrainerActivity().quiet_runs({"a": clock.today + 1000}, (), DAY)


def test_a_run_of_which_the_spool_has_nothing_counts_from_when_it_was_asked_for(clock):
    known = TrainerActivity()
    assert not known.quiet_runs({"a": None}, (), DAY)
    clock.now += DAY
    assert known.quiet_runs({"a": None}, (), DAY) == {"a"}


def test_clock_that_is_ahead_in_one_daemon_finishes_no_run(clock):
    """A year passed, or the clock is wrong: the daemon before this one saw only an hour of it."""
    saved = clock.today
    clock.today += 365 * DAY
    presence = TrainerActivity()
    presence.watched_until = saved + 3600
    assert not presence.finished_runs({"a": saved}, (), DAY)
    clock.now += DAY - 3600
    assert presence.finished_runs({"a": saved}, (), DAY) == {"a"}


def test_time_that_earlier_daemon_saw_counts(clock):
    presence = TrainerActivity()
    presence.watched_until = clock.today - 10 * DAY
    touched = {"a": clock.today - 12 * DAY, "b": clock.today - 10.5 * DAY}
    assert presence.finished_runs(touched, (), DAY) == {"a"}


def test_earlier_daemon_with_clock_ahead_finishes_no_run(clock):
    presence = TrainerActivity()
    presence.watched_until = clock.today + 365 * DAY
    touched = {"a": clock.today - 60.0, "b": clock.today - 2 * DAY}
    assert presence.finished_runs(touched, (), DAY) == {"b"}


def test_run_saved_by_clock_that_was_ahead_is_finished_after_time_of_daemon(clock):
    presence = TrainerActivity()
    saved = clock.today + 365 * DAY
    assert not presence.finished_runs({"a": saved}, (), DAY)
    clock.now += DAY
    assert presence.finished_runs({"a": saved}, (), DAY) == {"a"}


def test_part_that_is_dated_a_moment_ahead_does_not_finish_its_run(clock):
    """The clock of a file system may run a moment ahead of the node's. Found by the simulation, seed 0."""
    known = TrainerActivity()
    clock.now += 10 * DAY
    touched = {"a": clock.today + 0.001}
    assert known.finished_runs(touched, (), DAY) == frozenset()
    clock.now += 1.5 * DAY
    assert known.finished_runs(touched, (), DAY) == {"a"}
