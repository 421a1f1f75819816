"""Which runs have a trainer: who does not say which run it saves may save any."""

from __future__ import annotations

import time

import pytest

from tierd.daemon import presence
from tierd.daemon.presence import Presence

DAY = 86400.0


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now, self.today = 1000.0, time.time()
        monkeypatch.setattr(presence.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(presence.time, "time", lambda: self.today)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_attached_trainers_and_writers_are_trainers(clock):
    known = Presence()
    known.came("a")
    assert known.trainerless(["a", "b", "c.d"], {"c.d.00000-of-00002"}) == {"b"}
    known.came("a")
    known.left("a")
    assert "a" not in known.trainerless(["a"], ())
    known.left("a")
    assert known.trainerless(["a"], ()) == {"a"}


def test_a_trainer_that_does_not_say_its_run_may_save_any(clock):
    known = Presence()
    known.came(None)
    assert not known.trainerless(["a", "b"], ()) and not known.quiet({"a": 0.0}, (), DAY)
    known.left(None)
    assert known.quiet({"a": 0.0}, (), DAY) == {"a"}


def test_a_run_is_finished_when_both_its_trainer_and_its_newest_part_are_old(clock):
    known = Presence()
    assert known.quiet({"a": clock.today - DAY, "b": clock.today - DAY + 1}, (), DAY) == {"a"}
    known.came("a")
    assert not known.quiet({"a": 0.0}, (), DAY)
    known.left("a")
    assert not known.quiet({"a": 0.0}, (), DAY), "its trainer has just left"
    clock.now += DAY
    assert known.quiet({"a": 0.0}, (), DAY) == {"a"}
    known.asked("a")
    assert not known.quiet({"a": 0.0}, (), DAY), "somebody restores it"


def test_a_clock_that_was_set_back_finishes_nothing(clock):
    assert not Presence().quiet({"a": clock.today + 1000}, (), DAY)


def test_a_run_of_which_the_spool_has_nothing_counts_from_when_it_was_asked_for(clock):
    known = Presence()
    assert not known.quiet({"a": None}, (), DAY)
    clock.now += DAY
    assert known.quiet({"a": None}, (), DAY) == {"a"}
