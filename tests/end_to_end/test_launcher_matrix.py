"""One training under every launcher, hurt at a seeded place, and launched again: as if nothing had happened.

A rank is killed, stopped, or raises, before, in or after a save or in a restore; where nodes have daemons of their own,
a daemon is killed or stopped. `TIERD_LAUNCHES` says how many seeds each launcher is tried with, from
`TIERD_LAUNCHES_FROM` on; a failure names launcher and seed.
"""

from __future__ import annotations

import shutil

import pytest
from support import launchers
from support.launchers import MPI, PLAIN, SEEDS, cycle


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("launcher", PLAIN, ids=str)
def test_a_killed_rank_and_a_restart_leave_no_trace(launcher, seed, tmp_path):
    cycle(launcher, seed, tmp_path)


@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("launcher", MPI, ids=str)
def test_under_mpirun_a_killed_rank_and_a_restart_leave_no_trace(launcher, seed, tmp_path):
    assert shutil.which(launcher.command[0]), f"{launcher.command[0]} is not there: apt-get install openmpi-bin mpich"
    cycle(launcher, seed, tmp_path)


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
def test_the_matrix_finds_what_it_is_for(log, fault):
    with pytest.raises(AssertionError, match=fault):
        launchers.judge(log, "planted", 2)


def test_an_uninterrupted_run_hangs_on_everything():
    from support.launched import Training, uninterrupted

    assert uninterrupted(4, True) == uninterrupted(4, True) != uninterrupted(5, True)
    assert len({*uninterrupted(4, True), *uninterrupted(4, False)}) == 4
    first, second = Training(0), Training(0)
    second.state["noise"].manual_seed(7)
    assert first.digest() != second.digest()
