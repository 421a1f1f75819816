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
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path

from faults.power import loopfs
from faults.power.cutter import MOMENTS, can_trace
from faults.power.loopfs import FLAGS, LoopFs
from faults.power.play import Bench, Outcome, Plan, Play, Say, in_child, warm_up, window
from faults.power.scenes import SCENES
from faults.rounds import Lost, Round

UNIT = "power cuts"
SHORT = 120
GATE = 11_800  # all cuts of every scene as it is, and half as many again that are drawn
MET = (
    "times that every cut was made",
    *(f"{scene.name} on {kind}" for scene in SCENES for kind in loopfs.KINDS),
    *(f"{moment} a call, {flag}, {kind}" for moment in MOMENTS for flag in FLAGS.values() for kind in loopfs.KINDS),
    "plays seen by strace, too",
)

_WORKERS = 2


_bench: Bench | None = None  # a worker's


def _set_up(room: Path, kinds: Sequence[str]) -> None:
    """Make a worker's file systems: in memory, and nobody else's."""
    global _bench
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loopfs.hide_mounts()
    place = Path(tempfile.mkdtemp(dir=room))
    loopfs.mount_memory(place)
    _bench = Bench({kind: LoopFs(kind, place, kind) for kind in kinds}, place)
    warm_up(place / "warm")
    gc.freeze()  # what is there is not looked through again by every child


def _trial(seed: int) -> Outcome:
    assert _bench is not None
    outcome = Outcome()
    try:
        Play(_bench, Plan.of(seed, list(_bench.systems))).run(outcome)
    except Exception as error:
        outcome.loss = str(error) if isinstance(error, Lost) else traceback.format_exc()
    return outcome


@cache
def _kinds() -> dict[str, str | None]:
    """Each kind of file system, and why it cannot be had here, by trying."""

    def work(say: Say) -> None:
        loopfs.hide_mounts()
        for kind in loopfs.KINDS:
            why = loopfs.missing(kind)
            room = Path(tempfile.mkdtemp())
            try:
                if not why:
                    loopfs.mount_memory(room)
                    _try(LoopFs(kind, room, kind))
            except OSError as error:
                why = str(error)
            finally:
                shutil.rmtree(room, ignore_errors=True)
            say([kind, why])

    return dict(in_child(work))


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
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(_WORKERS, fork, _set_up, (work.room, kinds)) as pool:
        under_way: dict[Future[Outcome], int] = {}
        seeds = 0

        def take(enough: int) -> None:
            while len(under_way) > enough:
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    _note(work, under_way.pop(future), future.result())

        for seed in work.seeds():
            under_way[pool.submit(_trial, seed)] = seed
            take(_WORKERS)
            seeds += 1
        take(0)
    every = window(kinds)  # and a round may be played in pieces
    work.notes["times that every cut was made"] = (work.first + seeds) // every - work.first // every


def _note(work: Round, seed: int, outcome: Outcome) -> None:
    work.passed(outcome.cuts, *outcome.notes.elements())
    if outcome.loss:
        work.lost(seed, outcome.loss)
