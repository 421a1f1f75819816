"""Over how long a flush is spread."""

from __future__ import annotations

import pytest

from tierd.core.planning.background_schedule import LONGEST_SPREAD_S, flush_spread_s


def test_before_an_interval_is_known_nothing_is_spread():
    assert flush_spread_s([], 0) == flush_spread_s([10], 11) == flush_spread_s([10, 20, 30], 30) == 0


def test_it_ends_half_way_to_the_next_save():
    assert flush_spread_s([0, 10, 20, 30], 30) == 5
    assert flush_spread_s([0, 10, 20, 30], 33) == 2  # what began late has less time
    assert flush_spread_s([0, 10, 20, 30], 36) == 0


@pytest.mark.parametrize("odd", [0.1, 5000])
def test_one_odd_interval_changes_nothing(odd):
    saved = [0, 10, 20, 30, 30 + odd, 40 + odd]
    assert flush_spread_s(saved, saved[-1]) == 5


def test_a_lost_node_costs_no_more_because_of_it_than_half_a_minute():
    assert flush_spread_s([0, 3600, 7200, 10800], 10800) == LONGEST_SPREAD_S == 30
