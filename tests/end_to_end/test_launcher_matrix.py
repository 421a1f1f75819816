"""The judge of launch cycles (`python -m faults launchers`) finds what it is for."""

from __future__ import annotations

import pytest
from support import launchers

A, B, C = (f"00000000000{number}-00000000" for number in (1, 2, 3))
FIRST = ["0 resumed 0 " + A, "1 resumed 0 " + A]


@pytest.mark.parametrize(
    ("log", "fault"),
    [
        ([*FIRST, "0 resumed 3 " + B, "1 resumed 6 " + B], "do not go together"),
        ([*FIRST, "0 resumed 0 " + B, "0 resumed 0 " + B], "do not go together"),
        ([*FIRST, "0 resumed 3 " + B, "1 resumed 3 " + C], "2 launches"),
        ([*FIRST, "0 resumed 0 " + A, "1 resumed 0 " + A], "2 launches"),
        (["0 resumed 0 " + B, "1 resumed 0 " + B, *FIRST], "2 launches"),
        ([*FIRST, "1 resumed 0 " + B], "not whole"),
        ([*FIRST, "0 acked 3 " + A, "1 acked 3 " + A, "0 resumed 0 " + B], "was durable"),
    ],
)
def test_judge_of_the_matrix_detects_each_planted_fault(log, fault):
    with pytest.raises(AssertionError, match=fault):
        launchers.judge(log, "planted", 2)


def test_judge_of_waits_detects_a_wait_that_is_too_long():
    assert launchers.judge_waits(["0 restore 3.00", "1 close 59.00"], "planted") == 59
    with pytest.raises(AssertionError, match="rank 1 in close for"):
        launchers.judge_waits(["0 restore 3.00", "1 close 61.00"], "planted")


def test_an_uninterrupted_run_hangs_on_everything():
    from support.launched import Training, uninterrupted

    assert uninterrupted(4, True) == uninterrupted(4, True) != uninterrupted(5, True)
    assert len({*uninterrupted(4, True), *uninterrupted(4, False)}) == 4
    first, second = Training(0), Training(0)
    second.state["noise"].manual_seed(7)
    assert first.digest() != second.digest()
