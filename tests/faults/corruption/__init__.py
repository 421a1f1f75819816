"""Corruptions: seeded harms to a spool and two tiers, each noticed, repaired where anything right is left, or given up.

Two worlds (`faults.corruption.places`) are made once, one with an encrypted tier. A trial harms one of them one to
many times and then lets tierd's own code answer: verify a place, look, repair a part, scrub a copy, restore down the
timeline as all ranks of a launch, export from the tiers, scrub and flush until nothing is left to do, or let retention
keep few. What must come out was worked out before, byte by byte and by none of tierd's code
(`faults.corruption.judge`). Required: no wrong byte is given, no harmed copy is taken as good, counted, or left to be
found, no right one is called corrupt or touched, whatever can be put together from right pieces is, and what is passed
over is named with the reason. Beside each trial stands one of the run's history (`faults.corruption.histories`), and
beside some a trainer on a fresh node, which reads the harmed tiers past its spool (`faults.corruption.streams`).
`test_corruption.py` does the same through real clients.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
from pathlib import Path

import pytest
from faults import hands
from faults.corruption import histories, planted, streams
from faults.corruption.places import build, noise_of
from faults.corruption.trials import KINDS, STREAM
from faults.rounds import Round
from support.world import hurry

UNIT = "corruptions"
SHORT = 2_000
GATE = 100_000
RESUMES = 20_000  # from harmed histories in a full round, at least: one beside each trial, and counted for nothing
MET = (
    *(f"asked: verify: {answer}" for answer in ("all right", "some wrong")),
    *(f"asked: heal: {answer}" for answer in ("right before", "healed", "lost")),
    *(f"asked: scrub: {answer}" for answer in ("right", "mended", "set aside", "flushed anew", "absent")),
    *(f"asked: {kind}: {answer}" for kind in ("restore", "export") for answer in ("passed over 0", "passed over 1")),
    "asked: export: nothing",
    *(f"asked: stream: {answer}" for answer in (*streams.ANSWERS, "a tier stopped, then through the spool")),
    *("asked: settle: right", "asked: settle: what could be"),
    *("asked: prune: scrubbed, pruned", "asked: prune: unscrubbed, pruned"),
    *(f"harm: tier: {what}" for what in ("chunk", "swap", "foreign", "twin", "manifest", "other manifest", "forged")),
    *(f"harm: local: {what}" for what in ("file", "manifest", "swap", "foreign", "other manifest", "forged")),
    *("harm: everywhere: chunk", "harm: everywhere: manifest"),
    *(f"harm: {what}" for what in planted.HARMS),
    *(f"resumed: {what}" for what in histories.ANSWERS),
    *(f"told: {what}" for what in histories.REPORTED),
    *(f"near {how}: {kind}" for how in ("plain", "encrypted") for kind in KINDS),
)


_ENCRYPTED = 0.25  # of all trials have the tier `near` encrypted
_STREAMED = 0.1  # of all trials have a restore on a fresh node beside them
_DEADLINE = 300  # seconds of a trial, of which none takes five: what a loaded machine cannot reach


def run(work: Round) -> None:
    with hands.room(work) as home:
        hands.spread(work, lambda: prepare(home), deadline_s=_DEADLINE)
    resumes = sum(many for note, many in work.notes.items() if note.startswith("resumed: "))
    if work.only is None and work.trials >= GATE and resumes < RESUMES:
        work.lost(work.first, f"{resumes} resumes from harmed histories, and a full round has {RESUMES}", units=0)


def prepare(home: Path) -> hands.Trial:
    logging.disable(logging.CRITICAL)
    patch = pytest.MonkeyPatch()
    hurry(patch)
    patch.setattr(os, "fsync", lambda fd: None)  # nothing here loses power
    root = home / str(os.getpid())
    root.mkdir()
    worlds = {}
    for name, encrypted in (("plain", False), ("encrypted", True)):
        (root / name).mkdir()
        worlds[name] = histories.Histories(build(root / name, encrypted=encrypted), root / name)
    gc.collect()
    gc.freeze()
    runner = asyncio.Runner()

    def trial(seed: int) -> tuple[int, list[str]]:
        noise = noise_of(seed)
        name = "encrypted" if noise.random() < _ENCRYPTED else "plain"
        units, notes = runner.run(worlds[name].one(noise))
        history = random.Random(f"history {seed}")
        which = worlds["encrypted" if history.random() < _ENCRYPTED else "plain"]
        more = runner.run(which.resume(history))
        fresh = random.Random(f"stream {seed}")
        if fresh.random() < _STREAMED:
            streamed, answers = runner.run(worlds[name].one(fresh, STREAM))
            units, more = units + streamed, [*more, *answers]
        return units, [*notes, f"near {name}: {notes[0].split(': ')[1]}", *more]

    return trial
