"""Followers: `tierd follow --exec` is killed at any point, alone or with its command, while checkpoints arrive.

Required, by the judge of `support/killed_followers.py`: a follower that is killed alone and started again runs its
command for each checkpoint exactly once, over the whole files; if the command is killed as well, it is run again until
it has ended once.
"""

from __future__ import annotations

import shutil

from faults import hands
from faults.rounds import Round

UNIT, SHORT, GATE = "lives of a follower", 8, 400  # every second one is killed with its command
MET = (
    *("killed alone", "killed with its command"),
    *("killed before the first command", "killed while a command runs", "killed between commands"),
)
_LIMIT_S = 120  # of a life, which gives up after half of that


def run(work: Round) -> None:
    from support.following import put
    from support.killed_followers import STEPS, play

    with hands.room(work) as place:
        full = put(place, STEPS)

        def trial(seed: int) -> tuple[int, list[str]]:
            home = place / str(seed)
            home.mkdir()
            try:
                return 1, play(seed, bool(seed % 2), full, home)
            finally:
                shutil.rmtree(home)

        hands.spread(work, lambda: trial, deadline_s=_LIMIT_S, batch=1)
