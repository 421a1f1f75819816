"""Kills: rank writers and a daemon of one spool, SIGKILLed at random, and what they were told is held against what is
there afterwards. Required: what was acknowledged is restored, bit for bit, and nothing older, mixed or wrong; nothing
hangs; and when faults stop, nothing is left over and each place holds what its retention wants. Now and then a second
daemon is started on the spool, which must refuse, or a second launch beside one that lives on (P10).

A seed is one life of a spool with `_KILLS` kills: when who is killed follows from it, where the operating system lets
the two race. Some are at random times, some at the n-th system call of a kind, which a victim counts itself.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from faults.kills.lives import KilledLife
from faults.kills.victims import CALLS, end_with_parent
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
)

_KILLS = 25  # in one life
_BESIDE = 5  # lives at a time: most of their time they wait
_LIMIT = 1200.0  # seconds that a life may take: it gives up long before where nothing moves


def missing() -> str | None:
    return None if hasattr(os, "memfd_create") else "this system has no memfd"


def run(work: Round) -> None:
    import torch

    torch.set_num_threads(1)  # a forked child has none of OpenMP's others
    gc.collect()
    gc.freeze()
    lives: dict[int, _Begun] = {}
    asked = 0
    for seed in work.seeds():
        kills = _KILLS if work.only is not None else min(_KILLS, max(5, -(-work.trials // _BESIDE)))
        lives |= _begin(seed, work.room, kills)
        asked += kills
        while (
            len(lives) >= _BESIDE or (lives and work.done + asked >= work.trials) or (lives and work.only is not None)
        ):
            asked -= _end_one(work, lives)
    while lives:
        _end_one(work, lives)


@dataclass(frozen=True)
class _Begun:
    """A life under way; its answer will be a file; `kills` were asked for."""

    seed: int
    answer: Path
    kills: int
    at: float  # monotonic seconds


def _begin(seed: int, room: Path, kills: int) -> dict[int, _Begun]:
    answer, home = room / f"{seed}.json", room / str(seed)
    home.mkdir()
    pid = os.fork()
    if pid:
        return {pid: _Begun(seed, answer, kills, time.monotonic())}
    try:
        end_with_parent()
        life = KilledLife(seed, home)
        lost = None
        try:
            life.live(kills)
        except BaseException as error:
            lost = "".join(traceback.format_exception(error))
        answer.write_text(json.dumps({"kills": life.kills, "notes": dict(life.notes), "lost": lost}))
    finally:
        os._exit(0)


def _end_one(work: Round, lives: dict[int, _Begun]) -> int:
    """Wait for a life's end; how many kills it was asked for."""
    vanished = "it vanished"
    while not (ended := next((pid for pid in lives if os.waitpid(pid, os.WNOHANG)[0]), 0)):
        for pid, life in lives.items():
            if time.monotonic() > life.at + _LIMIT:
                os.kill(pid, signal.SIGKILL)  # and all of its victims with it
                vanished = f"it hangs, or was not done in {_LIMIT:.0f} s"
        time.sleep(0.02)
    life = lives.pop(ended)
    seed, answer, asked = life.seed, life.answer, life.kills
    reported = json.loads(answer.read_text()) if answer.exists() else {"kills": 0, "notes": {}, "lost": vanished}
    work.notes.update(reported["notes"])
    if reported["lost"]:
        work.lost(seed, reported["lost"], reported["kills"])
    else:
        work.passed(reported["kills"], "lives")
    shutil.rmtree(work.room / str(seed), ignore_errors=True)
    return asked
