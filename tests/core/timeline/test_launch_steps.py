"""How far a launch rolled its run back, also once retention has deleted what was rolled back."""

from __future__ import annotations

import pytest
from support.world import RUN, attempt

from tierd.core.run_report import Checkpoint, launch_steps
from tierd.core.timeline.launch_chain import LaunchRecord

FIRST, SECOND = attempt(1), attempt(2)


def checkpoint(step: int, of: str, origin: str | None = None) -> Checkpoint:
    return Checkpoint(RUN, step, of, 1, None, {}, origin, True, False, False, ())


@pytest.mark.parametrize(
    ("left", "newest", "lost"),
    [
        ((50, 60, 70), 70, 20),  # all is there
        ((50, 60), 70, 20),  # step 70 was pruned since
        ((), 70, 20),  # all of the launch was
        ((50, 60), None, 10),  # no head tells of it
        ((50, 60, 70), 60, 20),  # the newest one was never complete
        ((), None, 0),
        ((50,), 50, 0),
    ],
)
def test_a_rollback_keeps_its_length(left: tuple[int, ...], newest: int | None, lost: int) -> None:
    heads = {FIRST: LaunchRecord(resumed_from=None, newest=newest), SECOND: LaunchRecord(resumed_from=None, newest=80)}
    saved = [checkpoint(step, FIRST) for step in left] + [checkpoint(80, SECOND, f"{50:012}.{FIRST}")]
    found = launch_steps(saved, lambda run: heads if run == RUN else {})
    assert [(one.attempt, one.from_step, one.lost_steps) for one in found][-1] == (SECOND, 50, lost)
