"""Kills: rank writers and a daemon of one spool, SIGKILLed at random, and what they were told is held against what is
there afterwards. Required: what was acknowledged is restored, bit for bit, and nothing older, mixed or wrong; nothing
hangs; and when faults stop, nothing is left over and each place holds what its retention wants. Now and then a second
daemon is started on the spool, which must refuse, or a second launch beside one that lives on (P10).

A seed is one life of a spool with `_KILLS` kills: when who is killed follows from it, where the operating system lets
the two race. Some are at random times, some at the n-th system call of a kind, which a victim counts itself. On a node
whose spool is lost, the daemon or a rank is killed at a chunk of the restore, or the daemon is stopped there.
"""

from __future__ import annotations

import gc
import os
import shutil

from faults.hands import spread
from faults.kills.fresh_nodes import STOPPED
from faults.kills.lives import KilledLife
from faults.kills.victims import CALLS
from faults.rounds import Round

UNIT = "kills of live processes"
SHORT = 40
GATE = 2_000
MET = (
    *("kills of the daemon", "kills of the writer", "of these, of both at once", "at random times"),
    *(f"at the n-th call: {call}" for call in CALLS),
    *(f"daemon in the middle of {verb}" for verb in ("persist", "flush", "prune")),
    *(f"writer in the middle of {verb}" for verb in ("save", "stage", "persist", "restore")),
    *(f"restores from {place}" for place in ("memory", "local", "first")),
    *("spools lost with their node", "launches beside one that lives on", "second daemons refused"),
    STOPPED,
)

_KILLS = 25  # in one life
_BESIDE = 5  # lives at a time: most of their time they wait
_LIMIT_S = 1200  # of a life, which gives up long before where nothing moves


def missing() -> str | None:
    return None if hasattr(os, "memfd_create") else "this system has no memfd"


def run(work: Round) -> None:
    import torch

    torch.set_num_threads(1)  # a forked child has none of OpenMP's others
    gc.collect()
    gc.freeze()
    kills = _KILLS if work.only is not None else min(_KILLS, max(5, -(-work.trials // _BESIDE)))

    def trial(seed: int) -> tuple[int, list[str]]:
        home = work.room / str(seed)
        home.mkdir()
        life = KilledLife(seed, home)
        try:
            life.live(kills)
        finally:
            shutil.rmtree(home, ignore_errors=True)
        return life.kills, ["lives", *life.notes.elements()]

    spread(work, lambda: trial, deadline_s=_LIMIT_S, batch=1, hands=_BESIDE, worth=kills)
