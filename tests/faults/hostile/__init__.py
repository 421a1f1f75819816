"""Hostile input: what tierd reads that others wrote, made as bad as it gets, is refused as documented, or harmless.

Most inputs go straight to what reads them (`faults.readers`), a few to a daemon's real sockets and to real directories
(`faults.doors`), names and heads to what looks at a tier (`faults.heads`), some are led by coverage (`faults.guided`,
where atheris is installed).
Required: no other error than the documented ones, no hang, nothing opened or done outside of the trial's own room, and
no more memory than what is read, or its documented cap, accounts for.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import time
from pathlib import Path

import pytest
from faults import hands
from faults.hostile import guided
from faults.rounds import Lost, Round
from support.world import hurry

UNIT = "hostile inputs"
SHORT = 4_000
GATE = 200_000


_INPUTS = 40  # of one kind in a trial
_KINDS = {"manifest": 16, "config": 8, "names": 10, "header": 14, "tree": 14, "metadata": 8, "chunk": 14, "message": 10}
_KINDS |= {"control": 3, "entries": 5}
_BESIDE = {"head": 8, "listing": 2}  # in every trial, by draws of their own: names and heads that were planted
MET = (*(f"input: {kind}" for kind in (*_KINDS, *_BESIDE)), *(f"input: atheris, {what}" for what in guided.WHAT))
_MEMORY = 3 << 30  # bytes of address space above what a process has before: some of the largest chunks, and threads
_DEADLINE = 300  # seconds of a trial, of which none takes ten: what a loaded machine cannot reach
_RESIDENT = 700 << 20  # bytes of real memory that one trial's largest input may add


def run(work: Round) -> None:
    if work.only is None or work.only >= guided.FIRST:
        if why := guided.missing():
            work.skip(f"inputs that atheris finds: {why}")
        else:
            guided.run(work)
        if work.only is not None:
            return
    with hands.room(work) as home:
        hands.spread(work, lambda: prepare(home), memory=_MEMORY, deadline_s=_DEADLINE)


def prepare(home: Path) -> hands.Trial:
    from faults.hostile.doors import DOORS
    from faults.hostile.heads import HEADS
    from faults.hostile.readers import READERS
    from faults.hostile.watchman import Watchman

    logging.disable(logging.CRITICAL)
    hurry(pytest.MonkeyPatch())
    room = home / str(os.getpid())
    canary = home / f"canary-{os.getpid()}"
    for one in (room, canary):
        one.mkdir()
    (canary / "mine").write_bytes(b"mine")
    watchman = Watchman(room)
    gc.collect()
    gc.freeze()  # what was imported is not looked through before every trial

    def trial(seed: int) -> tuple[int, list[str]]:
        noise = random.Random(f"hostile {seed}")
        kind = noise.choices(list(_KINDS), list(_KINDS.values()))[0]
        gc.collect()  # errors hold frames, and those the last trial's memory
        hands.forget_peak()
        before, begun = hands.resident(), time.monotonic()
        if kind in READERS:
            units = _INPUTS
            for _ in range(units):
                with watchman.watching():
                    READERS[kind](noise)
        else:
            with watchman.watching(cpu=60):
                units = DOORS[kind](noise, room, canary)
        also = random.Random(f"hostile heads {seed}")
        for what, times in _BESIDE.items():
            for _ in range(times):
                with watchman.watching():
                    HEADS[what](also)
        if hands.resident() - before > _RESIDENT:
            raise Lost(f"{kind}: {(hands.resident() - before) >> 20} MiB were taken")
        if time.monotonic() - begun > _DEADLINE:  # an alarm is an error, too, and may have been taken for damage
            raise Lost(f"{kind}: {time.monotonic() - begun:.0f} seconds")
        if os.listdir(canary) != ["mine"] or (canary / "mine").read_bytes() != b"mine":
            raise Lost(f"{kind}: what lies outside was touched")
        beside = [f"input: {what}" for what, times in _BESIDE.items() for _ in range(times)]
        return units + len(beside), [f"input: {kind}"] * units + beside

    return trial
