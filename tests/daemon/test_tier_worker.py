"""What one tier worker puts off: nobody's turn is lost, and others come first meanwhile."""

from __future__ import annotations

import math
import random

import pytest

from tierd.daemon.reconciling.tier_worker import TierWorker


def test_deferred_work_is_due_again_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, clock = TierWorker("tier"), [1000.0]
    monkeypatch.setattr(worker, "now", lambda: clock[0])
    assert worker.deferred_s == math.inf and not worker.is_deferred("one")
    worker.defer("one", 60.0)
    worker.defer("two", 5.0)
    assert worker.is_deferred("one") and worker.is_deferred("two") and not worker.is_deferred("three")
    assert worker.deferred_s == 5.0  # the next to have its turn
    clock[0] += 5.0
    assert worker.is_deferred("one") and not worker.is_deferred("two") and worker.deferred_s == 55.0
    worker.defer("one", 1.0)  # it was tried early, and is put off anew
    assert worker.deferred_s == 1.0
    clock[0] += 1.0
    assert not worker.is_deferred("one") and worker.deferred_s == math.inf


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize(("outage_s", "at_most_s"), [(5, 20), (40, 20), (60, 20), (600, 160), (7200, 310)])
def test_worker_continues_soon_after_an_outage(
    refused: bool, outage_s: float, at_most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 9 of the network's issue: 52 to 88 s after an outage of 40 s. Each try takes 3 s."""
    for seed in range(200):
        worker, clock, tries, rng = TierWorker("tier"), [1000.0], 0, random.Random(seed)
        monkeypatch.setattr(worker, "now", lambda clock=clock: clock[0])
        while clock[0] < 1000 + outage_s:
            clock[0] += 3.0 + worker.note_failure(OSError(), rng, long=refused)
            tries += 1
        assert clock[0] - 1000 - outage_s <= at_most_s
        assert outage_s < 7200 or tries < 80  # and long ones are not asked after all the time
        worker.note_success()
        assert worker.note_failure(OSError(), rng, long=False) <= 2.0


def test_work_that_failed_once_is_tried_again_soon_and_later_after_each_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, clock = TierWorker("tier"), [1000.0]
    monkeypatch.setattr(worker, "now", lambda: clock[0])
    worker.defer_stuck("one")
    assert worker.deferred_s == 10.0
    clock[0] += 20.0
    worker.defer_stuck("two")
    worker.defer_stuck("one")
    assert worker.is_deferred("one") and worker.deferred_s == 10.0
    clock[0] += 15.0
    assert worker.is_deferred("one") and not worker.is_deferred("two")
    clock[0] += 1000.0
    worker.defer_stuck("three")
    worker.defer_stuck("one")  # it has been long since
    assert worker.deferred_s == 10.0
    clock[0] += 11.0
    assert not worker.is_deferred("one")


def test_work_deferred_for_another_place_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, clock, rng = TierWorker("tier"), [1000.0], random.Random(1)
    monkeypatch.setattr(worker, "now", lambda: clock[0])
    worker.defer("corrupt elsewhere", 3600.0)
    for what in ("one", "two", "three"):
        worker.defer_stuck(what)
        worker.note_failure(OSError(), rng, long=False, subject=what)
    worker.note_success("another")
    assert worker.retries_later and worker.blocking_error
    worker.note_success("one")
    worker.defer("two", 3600.0)  # it now waits for another place, too
    worker.note_success("another")
    assert worker.retries_later and worker.blocking_error
    clock[0] += 11.0  # no plan names the third one any more
    worker.note_success("another")
    assert not worker.retries_later and not worker.blocking_error and worker.deferred_s > 3000
