"""How often a watched directory is listed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.intake.intake import rest_until_next
from tierd.threads import cpu_wait_s

TIMINGS = DaemonTimings()


@pytest.mark.parametrize("listing_s", [0.001, 0.6, 5.0])
def test_unit_that_settles_is_listed_again_when_it_has_settled(listing_s: float) -> None:
    assert rest_until_next(TIMINGS, listing_s, is_waiting=True) <= TIMINGS.settle_s


def test_slow_listing_takes_a_small_share_of_the_time_once_all_is_taken() -> None:
    assert rest_until_next(TIMINGS, 5.0, is_waiting=False) == 100.0


def test_very_slow_listing_takes_at_most_half_of_the_time_while_a_unit_settles() -> None:
    assert rest_until_next(TIMINGS, 60.0, is_waiting=True) == 60.0


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel counts no waiting")
def test_time_asleep_does_not_count_as_waiting_for_a_cpu() -> None:
    before_s, began_s = cpu_wait_s(), time.monotonic()
    threading.Event().wait(0.2)
    assert 0.0 <= cpu_wait_s() - before_s <= time.monotonic() - began_s
