"""Power cuts: ext4 and xfs lose their power at the k-th call that changes anything, for every k of every scene.

A trial is a seed: a scene of `cut_scenes` on one kind of file system, played once to its end, then again for each of
the seed's cuts: before, during or after a call, with the journal's last part flushed or lost (FS_IOC_SHUTDOWN). Each
time the file systems are mounted anew, and

- what was said to be done is there, whole, byte by byte; all else is there whole or not at all (P1, P2, P5), and a
  restore is offered the complete checkpoints and no half ones;
- a daemon's start, and the same thing done again, lead to where they lead without a cut: the same parts, chunks, pins;
  nothing left over (P6).

Every other round of seeds takes each scene as it is, and each seed of a scene its share of all cuts that there are; so
a window of `window()` seeds has made every one, wherever it begins. The rounds between draw sizes and cuts by chance.
What threads do at once in "saves of two ranks" is not the seed's to say.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from faults.hands import Trial, in_child, spread
from faults.mounts import mount_memory, own_mounts
from faults.power import loopfs
from faults.power.cutter import MOMENTS, can_trace
from faults.power.loopfs import FLAGS, LoopFs
from faults.power.play import Bench, Plan, Play, warm_up, window
from faults.power.scenes import SCENES
from faults.rounds import Round

UNIT = "power cuts"
SHORT = 120
GATE = 11_800  # all cuts of every scene as it is, and half as many again that are drawn
MET = (
    "times that every cut was made",
    *(f"{scene.name} on {kind}" for scene in SCENES for kind in loopfs.KINDS),
    *(f"{moment} a call, {flag}, {kind}" for moment in MOMENTS for flag in FLAGS.values() for kind in loopfs.KINDS),
    "plays seen by strace, too",
)

_LIMIT_S = 900  # of a trial, which is all cuts of a seed


@cache
def _kinds() -> dict[str, str | None]:
    """Each kind of file system, and why it cannot be had here, by trying."""
    return {kind: loopfs.missing(kind) or in_child(lambda kind=kind: _refusal(kind)) for kind in loopfs.KINDS}


def _refusal(kind: str) -> str | None:
    room = Path(tempfile.mkdtemp())
    try:
        own_mounts()
        mount_memory(room)
        _try(LoopFs(kind, room, kind))
    except OSError as error:
        return str(error)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    return None


def _try(system: LoopFs) -> None:
    for _ in range(2):  # the second time after a cut
        system.mount()
        home = os.open(system.home, os.O_RDONLY | os.O_DIRECTORY)
        loopfs.cut(home, loopfs.LOG_LOST)
        os.close(home)
        system.unmount()


def missing() -> str | None:
    if all(_kinds().values()):
        return "; ".join(f"{kind}: {why}" for kind, why in _kinds().items())
    return None


def run(work: Round) -> None:
    kinds = [kind for kind, why in _kinds().items() if not why]
    for kind, why in _kinds().items():
        if why:
            work.skip(f"{kind}: {why}")
    if not can_trace():
        work.skip("the check of what is hooked: there is no strace")
    seeds = 0

    def prepare() -> Trial:
        """Make this process's file systems: in memory, and nobody else's."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        own_mounts()
        place = Path(tempfile.mkdtemp(dir=work.room))
        mount_memory(place)
        bench = Bench({kind: LoopFs(kind, place, kind) for kind in kinds}, place)
        warm_up(place / "warm")
        gc.freeze()  # what is there is not looked through again by every child
        return lambda seed: Play(bench, Plan.of(seed, kinds)).run()

    def counted() -> Iterator[int]:
        nonlocal seeds
        for seed in work.seeds():
            seeds += 1
            yield seed

    # Seeds go on until enough was cut, because fences count on the scenes that a round of so many cuts plays.
    spread(work, prepare, deadline_s=_LIMIT_S, batch=1, hands=3, worth=0, seeds=counted())
    every = window(kinds)  # and a round may be played in pieces
    work.notes["times that every cut was made"] = (work.first + seeds) // every - work.first // every
