"""What one lane puts off: nobody's turn is lost, and others come first meanwhile."""

from __future__ import annotations

import math

import pytest

from tierd.daemon.lane import Lane


def test_what_was_put_off_has_its_turn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, clock = Lane("tier"), [1000.0]
    monkeypatch.setattr(lane, "now", lambda: clock[0])
    assert lane.off_for == math.inf and not lane.is_off("one")
    lane.put_off("one", 60.0)
    lane.put_off("two", 5.0)
    assert lane.is_off("one") and lane.is_off("two") and not lane.is_off("three")
    assert lane.off_for == 5.0  # the next to have its turn
    clock[0] += 5.0
    assert lane.is_off("one") and not lane.is_off("two") and lane.off_for == 55.0
    lane.put_off("one", 1.0)  # it was tried early, and is put off anew
    assert lane.off_for == 1.0
    clock[0] += 1.0
    assert not lane.is_off("one") and lane.off_for == math.inf
