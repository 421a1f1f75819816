"""Corruptions: seeded harms to a spool and two tiers, each noticed, repaired where anything right is left, or given up.

Two worlds (`faults.corruption.places`) are made once, one with an encrypted tier. A trial harms one of them one to
many times and then lets tierd's own code answer: verify a place, look, repair a part, scrub a copy, restore down the
timeline as all ranks of a launch, export from the tiers, scrub and flush until nothing is left to do, or let retention
keep few. What must come out was worked out before, byte by byte and by none of tierd's code
(`faults.corruption.judge`). Required: no wrong byte is given, no harmed copy is taken as good, counted, or left to be
found, no right one is called corrupt or touched, whatever can be put together from right pieces is, and what is passed
over is named with the reason. Beside each trial stands one of the run's history (`faults.corruption.histories`).
`test_corruption.py` does the same through real clients.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import shutil
from pathlib import Path

import pytest
from faults import hands
from faults.corruption import histories, planted
from faults.corruption.places import build, noise_of
from faults.corruption.trials import KINDS
from faults.rounds import Mutant, Round
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
MUTANTS = (
    Mutant(
        "stored bytes are not compared with their digest",
        "tierd/codec/codec.py",
        "    if found != stored.xxh3_128:\n",
        "    if False:\n",
        "corruption --only 11",
        "are wrong, and these were named",
    ),
    Mutant(
        "decoded bytes are not compared with their digest",
        "tierd/codec/codec.py",
        "    if len(raw) != chunk.size or digest(raw) != chunk.xxh3_128:\n",
        "    if len(raw) != chunk.size:\n",
        "corruption --only 52",
        "was healed, and is not right",
    ),
    Mutant(
        "bytes that are read from the spool are not compared",
        "tierd/spool/verified_reads.py",
        "    if digest(data) != chunk.xxh3_128:\n",
        "    if False:\n",
        "corruption --only 11",
        "[] were named",
    ),
    Mutant(
        "a manifest's seal is not checked",
        "tierd/core/seal.py",
        "    if seal[len(_SEAL) : -3] != xxhash.xxh3_128_hexdigest(body).encode():\n",
        "    if False:\n",
        "corruption --only 579",
        "is wrong and was taken",
    ),
    Mutant(
        "a manifest is taken for whatever part it is found at",
        "tierd/core/manifest_codec.py",
        "    if expected is not None and manifest.part != expected:\n",
        "    if False:\n",
        "corruption --only 7",
        "was healed, and is not right",
    ),
    Mutant(
        "a chunk's key may be another one's",
        "tierd/core/manifest_codec.py",
        "    if (match[2], match[3]) != (chunk.xxh3_128, chunk.stored.codec):",
        "    if False:",
        "corruption --only 35",
        "was called right after mending, and is not",
    ),
    Mutant(
        "a mended chunk is shown where it lay before",
        "tierd/daemon/scrub/tier_repair.py",
        "        if now is not manifest:\n",
        "        if False:\n",
        "corruption --only 176",
        "was called right after mending, and is not",
    ),
    Mutant(
        "a manifest that this key made and that is damaged is another key's",
        "tierd/stores/encrypted.py",
        "            wrong = ManifestError(",
        "            wrong = WrongKey(",
        "corruption --only 86",
        "a tier's copy could not be read",
    ),
    Mutant(
        "retention counts what lacks parts",
        "tierd/core/planning/tier_verdicts.py",
        "    infos = [info_of(seen, pins, complete=seen.complete) for seen in tier.copies(run)]\n",
        "    infos = [info_of(seen, pins, complete=True) for seen in tier.copies(run)]\n",
        "pytest tests/core/planning/test_plan.py -k incomplete_checkpoint",
    ),
    Mutant(
        "retention keeps one less",
        "tierd/core/retention/ranking.py",
        "        if place <= count:\n",
        "        if place < count:\n",
        "pytest tests/core/retention/test_policy.py -k golden",
    ),
    Mutant(
        "a restore does not say why it skips",
        "tierd/client/restoring/search.py",
        "            self._passed[candidate.checkpoint] = settled.corrupt\n",
        '            self._passed[candidate.checkpoint] = ""\n',
        "corruption --only 83",
        "and this was said of it",
    ),
    Mutant(
        "an export does not say what it skipped",
        "tierd/daemon/transfer/export.py",
        "            tuple(skipped),\n",
        "            (),\n",
        "corruption --only 86",
        "and this was said of it",
    ),
    Mutant(
        "a resume reads no heads",
        "tierd/core/planning/inventory.py",
        "        for attempt, known in self.remembered(run).items():\n",
        "        for attempt, known in {}.items():\n",
        "corruption --only 18",
        "run step 3 (attempt 001800000001-00000001) came",
    ),
    Mutant(
        "only the first rank's manifest tells where a launch came from",
        "tierd/daemon/tiers/manifests.py",
        "            if not any(isinstance(said, ManifestFacts) for said in one.said.values()):\n",
        "            if False:\n",
        "corruption --only 160",
        "run step 3 (attempt 001800000001-00000001) came",
    ),
    Mutant(
        "a history that went back is not told",
        "tierd/core/timeline/run_view.py",
        "    if lost := inventory.gone(run):\n",
        "    if lost := None:\n",
        "corruption --only 27",
        "(gone) is newer than",
    ),
    Mutant(
        "a planted name decides what is newest",
        "tierd/core/timeline/chain.py",
        "    newest = max(origins or steps, default=None)\n",
        "    newest = max({*origins, *steps}, default=None)\n",
        "corruption --only 7",
        "can be had, and nothing came",
    ),
    Mutant(
        "planted names of another number of ranks stop a resume",
        "tierd/core/timeline/candidates.py",
        "        hollow = {one for one in hollow if complete[one] != world}\n",
        "        hollow.clear()\n",
        "corruption --only 24",
        "can be had, and the resume was stopped",
    ),
    Mutant(
        "a launch begins anew where only a head remembers that there was one",
        "tierd/client/restoring/search.py",
        "any(one.reason != INCOMPLETE for one in skipped):\n",
        "any(one.reason not in (GONE, INCOMPLETE) for one in skipped):\n",
        "corruption --only 86",
        "and a launch began anew",
    ),
    Mutant(
        "what is newer by name alone is passed over unsaid",
        "tierd/client/restoring/search.py",
        "        unusable |= dict.fromkeys(resume.unvouched, UNVOUCHED)\n",
        "",
        "corruption --only 12",
        "(unvouched) is newer than",
    ),
)

_ENCRYPTED = 0.25  # of all trials have the tier `near` encrypted
_DEADLINE = 300  # seconds of a trial, of which none takes five: what a loaded machine cannot reach


def missing() -> str | None:
    return None


def run(work: Round) -> None:
    home = hands.room(work)
    try:
        hands.spread(work, lambda: prepare(home), deadline_s=_DEADLINE)
        resumes = sum(many for note, many in work.notes.items() if note.startswith("resumed: "))
        if work.only is None and work.trials >= GATE and resumes < RESUMES:
            work.lost(work.first, f"{resumes} resumes from harmed histories, and a full round has {RESUMES}", units=0)
    finally:
        shutil.rmtree(home, ignore_errors=True)


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
        return units, [*notes, f"near {name}: {notes[0].split(': ')[1]}", *more]

    return trial
