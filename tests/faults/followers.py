"""Followers: `tierd follow --exec` is killed at any point, alone or with its command, while checkpoints arrive.

Required, by the judge of `support/killed_followers.py`: a follower that is killed alone and started again runs its
command for each checkpoint exactly once, over the whole files; if the command is killed as well, it is run again until
it has ended once.
"""

from __future__ import annotations

import shutil

from faults.hands import room
from faults.rounds import Round

UNIT, SHORT, GATE = "lives of a follower", 8, 400  # every second one is killed with its command
MET = (
    *("killed alone", "killed with its command"),
    *("killed before the first command", "killed while a command runs", "killed between commands"),
)


def missing() -> str | None:
    return None


def run(work: Round) -> None:
    from support.following import put
    from support.killed_followers import STEPS, play

    place = room(work)
    try:
        full = put(place, STEPS)

        for seed in work.seeds():
            home = place / str(seed)
            home.mkdir()
            try:
                notes = play(seed, bool(seed % 2), full, home)
            except Exception as error:
                work.lost(seed, error)
            else:
                work.passed(1, *notes)
            shutil.rmtree(home)
    finally:
        shutil.rmtree(place, ignore_errors=True)
