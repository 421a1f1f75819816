"""Corruptions: seeded harms to a spool and two tiers, each noticed, healed where anything right is left, or given up.

A world (`faults.places`) is made once. A trial harms it one to many times and then lets tierd's own code answer: verify
a place, look, heal a part, scrub a copy, restore down the timeline, export from the tiers, or scrub and flush until
nothing is left to do. What must come out was worked out before, byte by byte and by none of tierd's code
(`faults.judge`). Required: no wrong byte is given, no harmed copy is taken as good, no right one is called corrupt or
touched, and whatever can be put together from right pieces is. `test_corruption.py` does the same through real clients.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import shutil
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
from faults import hands
from faults.corruption.harms import LOCAL, Harms
from faults.corruption.judge import Judge
from faults.corruption.places import OTHER, RUN, TIERS, WORLD, Places, build, noise_of
from faults.rounds import Lost, Mutant, Round
from support.world import hurry, reconciler, running, settle

from tierd.core.errors import CheckpointNotFound, CorruptChunk, ManifestError, ObjectNotFound
from tierd.core.ids import CheckpointId, PartId
from tierd.core.resume import restore_candidates
from tierd.core.scrub import Copy
from tierd.daemon.budget import Budget
from tierd.daemon.download import Progress
from tierd.daemon.export import export
from tierd.daemon.flush import Way, flush
from tierd.daemon.journal import Journal
from tierd.daemon.observe import look_around
from tierd.daemon.pause import at_once
from tierd.daemon.prune import verify
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.repair import Repairer
from tierd.daemon.reread import Reader
from tierd.persist import bad_chunks
from tierd.priority import hasten

Whole = dict[tuple[str, PartId], bool]  # a place and a part -> whether its copy is right

UNIT = "corruptions"
SHORT = 4_000
GATE = 100_000
MET: tuple[str, ...] = ()  # what no full round is without
MUTANTS = (
    Mutant(
        "stored bytes are not compared with their digest",
        "tierd/codec.py",
        "    if digest(data) != stored.xxh3_128:\n",
        "    if False:\n",
        "corruption --trials 600",
    ),
    Mutant(
        "decoded bytes are not compared with their digest",
        "tierd/codec.py",
        "    if len(raw) != chunk.size or digest(raw) != chunk.xxh3_128:\n",
        "    if len(raw) != chunk.size:\n",
        "corruption --trials 600",
    ),
    Mutant(
        "bytes that are read from the spool are not compared",
        "tierd/persist.py",
        "    if digest(data) != chunk.xxh3_128:\n",
        "    if False:\n",
        "corruption --trials 600",
    ),
    Mutant(
        "a manifest's seal is not checked",
        "tierd/core/manifest.py",
        "    if seal[len(_SEAL) : -3] != xxhash.xxh3_128_hexdigest(body).encode():\n",
        "    if False:\n",
        "corruption --trials 600",
    ),
    Mutant(
        "a manifest is taken for whatever part it is found at",
        "tierd/core/manifest.py",
        "    if expected is not None and manifest.part != expected:\n",
        "    if False:\n",
        "corruption --trials 600",
    ),
    Mutant(
        "a chunk's key may be another one's",
        "tierd/core/manifest.py",
        "    if (match[2], match[3]) != (chunk.xxh3_128, chunk.stored.codec):",
        "    if False:",
        "corruption --trials 2000",
    ),
    Mutant(
        "a mended chunk is shown where it lay before",
        "tierd/daemon/mend.py",
        "        if now is not manifest:\n",
        "        if False:\n",
        "corruption --trials 2000",
    ),
)

_ENCRYPTED = 0.25  # of all trials have the tier `near` encrypted
_DEADLINE = 300  # seconds of a trial, of which none takes five: what a loaded machine cannot reach
_PATIENCE = 240.0  # seconds that a daemon may take to settle: only a hang is meant
_KINDS = {"verify": 20, "heal": 30, "scrub": 25, "restore": 15, "export": 8, "settle": 2}


def missing() -> str | None:
    return None


def run(work: Round) -> None:
    home = hands.room(work)
    try:
        hands.spread(work, lambda: prepare(home), deadline_s=_DEADLINE)
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
        worlds[name] = Trials(build(root / name, encrypted=encrypted), root / name)
    gc.collect()
    gc.freeze()
    runner = asyncio.Runner()

    def trial(seed: int) -> tuple[int, list[str]]:
        noise = noise_of(seed)
        name = "encrypted" if noise.random() < _ENCRYPTED else "plain"
        units, notes = runner.run(worlds[name].one(noise))
        return units, [*notes, f"tier near: {name}"]

    return trial


class Trials:
    """The trials of one process, on its own world."""

    def __init__(self, places: Places, root: Path) -> None:
        self.places, self.judge, self._root = places, Judge(places), root

    async def one(self, noise: random.Random) -> tuple[int, list[str]]:
        """Harm, ask, compare, put back."""
        hasten()  # a machine that others load has no idle time to give
        kind = noise.choices(list(_KINDS), list(_KINDS.values()))[0]
        try:
            mine = [part for part in self.places.parts if part.checkpoint.run == RUN]
            focus = mine[min(int(noise.expovariate(0.35)), len(mine) - 1) * -1 - 1]
            if noise.random() < 0.35:  # retention has taken it from the spool
                for rank in range(WORLD) if noise.random() < 0.5 else (focus.rank,):
                    self.places.drop(PartId(focus.checkpoint, rank, WORLD))
            if noise.random() < 0.2:
                for part in mine[: noise.randrange(len(mine))]:
                    if part not in self.places.gone:
                        self.places.drop(part)
            harms = Harms(self.places, focus, noise, deep=kind in ("heal", "restore", "export"))
            number = noise.randrange(8, 26) if kind == "settle" else 1 + min(int(noise.expovariate(0.3)), 11)
            done = harms.inflict(number, TIERS if kind == "export" else (LOCAL, *TIERS))
            before, journal = self._whole(), Journal()
            answer = await getattr(self, f"_{kind}")(focus, noise, before, journal)
            self._nothing_got_worse(before, journal)
            return len(done), [f"asked: {kind}: {answer}", *(f"harm: {what}" for what in done)]
        finally:
            self.places.reset()

    def _whole(self) -> Whole:
        return {(place, part): self.judge.copy_is_right(place, part) for part in self.places.parts for place in PLACES}

    def _nothing_got_worse(self, before: Whole, journal: Journal) -> None:
        for (place, part), right in before.items():
            if right and not self.judge.copy_is_right(place, part):
                raise Lost(f"{place}'s copy of {part} was right, and is not any more")
        good = {(place, str(part)) for (place, part), right in before.items() if right}
        for event in journal.events:
            if event.what in ("corrupt", "quarantined") and (event.place, event.subject) in good:
                raise Lost(f"a false alarm: {event}")

    # -- verify and look ----------------------------------------------------------------------------------------------

    async def _verify(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        """Every byte of some copies read and compared; what is named must be what is wrong."""
        answers = Counter[bool]()
        for part in {focus, *noise.sample(self.places.parts, 2)}:
            for tier in TIERS:
                answers[await self._verify_tier(tier, part)] += 1
            if self.judge.is_local(part):
                answers[self._verify_local(part)] += 1
        world = await look_around(self.places.spool, self.places.stores, RUN)
        for place, seen in (("local", world.spool), *world.tiers.items()):
            assert seen is not None
            for part in (one for one in self.places.parts if one.checkpoint.run == RUN):
                there = self.judge.is_local(part) if place == LOCAL else self.judge.manifest(place, part) is not None
                found = seen.checkpoints.get(part.checkpoint)
                listed = found is not None and part.rank in found.ranks.get(part.world, ())
                usable = found is not None and part in found.facts
                if listed != there or usable != (self.judge.readable(place, part) is not None):
                    raise Lost(f"a look at {place} takes {part} for {'usable' if usable else 'unusable'}")
        return "all right" if not answers[False] else "some wrong"

    async def _verify_tier(self, tier: str, part: PartId) -> bool:
        told = self.judge.readable(tier, part)
        if self.judge.manifest(tier, part) is None:
            return True
        try:
            _, wrong = await verify(self.places.stores[tier], part, lambda size: None)
        except ManifestError:
            if told is not None:
                raise Lost(f"{tier}: the manifest of {part} is right and was refused") from None
            return False
        if told is None:
            raise Lost(f"{tier}: the manifest of {part} is wrong and was taken")
        chunks = [chunk for file in told["files"] for chunk in file["chunks"]]
        bad = [chunk for chunk in chunks if not self.judge.stored(tier, part, chunk)]
        if len(bad) != len(wrong):
            raise Lost(f"{tier}: {len(bad)} chunks of {part} are wrong, and these were named: {wrong}")
        for chunk, text in zip(bad, wrong, strict=True):
            if chunk.get("stored", {}).get("key", chunk["xxh3_128"]) not in text:
                raise Lost(f"{tier}: {chunk} is wrong, and {text!r} was said")
        return not bad

    def _verify_local(self, part: PartId) -> bool:
        spool = self.places.spool
        try:
            manifest = spool.manifest(part)
        except ManifestError:
            if self.judge.readable(LOCAL, part) is not None:
                raise Lost(f"the spool's manifest of {part} is right and was refused") from None
            return False
        if self.judge.readable(LOCAL, part) is None:
            raise Lost(f"the spool's manifest of {part} is wrong and was taken")
        for number, (path, pieces) in enumerate(self.judge.truth[part].pieces):
            data, right = self.judge.local(part, path), self.judge.truth[part].files[path]
            bad = {index for index in range(len(pieces)) if not self.judge.chunk_in_spool(part, number, index)}
            if data is None or len(data) != len(right):
                bad.add(max(len(pieces) - 1, 0))
            named = {index for index, _, _ in bad_chunks(spool.path(part) / path, manifest.files[number])}
            if bad != named:
                raise Lost(f"{part}: chunks {sorted(bad)} of {path} are wrong, {sorted(named)} were named")
        right = self.judge.copy_is_right(LOCAL, part)
        if (self._read(part) is not None) != right:
            raise Lost(f"{part}: the spool's copy is {'right' if right else 'wrong'}, and was read otherwise")
        return right

    def _read(self, part: PartId) -> dict[str, bytes] | None:
        """What the spool gives of a part; None where it is proven corrupt. Wrong bytes are a loss, whoever asks."""
        try:
            files = self.places.spool.read(part, self.places.spool.manifest(part))
        except (CorruptChunk, ManifestError, ObjectNotFound):
            return None
        found = {path: bytes(data) for path, data in files.items()}
        if found != self.places.held[part]:
            raise Lost(f"{part}: wrong bytes were given")
        return found

    # -- heal ---------------------------------------------------------------------------------------------------------

    async def _heal(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        repairer = Repairer(self.places.spool, self.places.stores, journal, Budget())
        there = self.judge.exists(focus)
        can, lenient = self.judge.can_be_had(focus), self.judge.lenient(focus)
        try:
            await repairer.heal(focus)
        except CorruptChunk as error:
            if can:
                raise Lost(f"{focus} can be had and was given up: {error}") from error
            if self.judge.exists(focus):
                raise Lost(f"{focus} is proven corrupt everywhere and was not set aside") from error
            return "lost"
        except ObjectNotFound as error:
            if there:
                raise Lost(f"{focus} is there and was not found") from error
            return "absent"
        if not self.judge.copy_is_right(LOCAL, focus) or self._read(focus) is None:
            raise Lost(f"{focus} was healed, and is not right")
        if not can and not lenient:
            raise Lost(f"{focus} cannot be had and was given all the same")
        return "right before" if before[LOCAL, focus] else "healed"

    # -- scrub --------------------------------------------------------------------------------------------------------

    async def _scrub(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        place = noise.choice(PLACES)
        judge = self.judge
        repairer = Repairer(self.places.spool, self.places.stores, journal, Budget())
        reader = Reader(self.places.spool, self.places.stores, repairer, journal, Budget(), 1 << 50, at_once, Counter())
        lenient = judge.lenient(focus)
        there = judge.is_local(focus) if place == LOCAL else judge.manifest(place, focus) is not None
        must = self._mendable(place, focus)
        aside = place in TIERS and judge.honest(place, focus) is None and judge.readable(LOCAL, focus) is not None
        try:
            whole = await reader.read(Copy(place, focus))
        except ObjectNotFound:
            if there:
                raise Lost(f"{place}: {focus} is there and was not found") from None
            return "absent"
        found = journal.counters["scrub_findings"]
        if before[place, focus]:
            if found or not whole:
                raise Lost(f"{place}: {focus} is right, and scrubbing found {found} findings")
            return "right"
        if not found:
            raise Lost(f"{place}: {focus} is wrong, and scrubbing found nothing")
        if whole != judge.copy_is_right(place, focus):
            raise Lost(f"{place}: {focus} was called {'right' if whole else 'wrong'} after mending, and is not")
        if whole and not must and not lenient:
            raise Lost(f"{place}: {focus} cannot be mended and was called right")
        if whole:
            return "mended"
        if must and not aside:
            raise Lost(f"{place}: {focus} can be mended and was not")
        if judge.exists(focus, spool=False) and place in TIERS and judge.manifest(place, focus) is not None:
            raise Lost(f"{place}: {focus} was not mended and not set aside")
        if place in TIERS and judge.copy_is_right(LOCAL, focus):
            await flush(self.places.spool, focus, Way(self.places.stores[place]))
            if not judge.copy_is_right(place, focus):
                raise Lost(f"{place}: {focus} was flushed anew and is not right")
            return "flushed anew"
        return "set aside"

    def _mendable(self, place: str, part: PartId) -> bool:
        if place == LOCAL:
            return self.judge.can_be_had(part)
        if self.judge.honest(place, part) is None and not any(
            self.judge.honest(tier, part) for tier in TIERS if tier != place
        ):
            return False
        return self.judge.can_be_mended(place, part)

    # -- restore and export -------------------------------------------------------------------------------------------

    async def _restore(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        """What the ranks of a launch do: the newest on the timeline of which every part is right, or can be made so."""
        repairer = Repairer(self.places.spool, self.places.stores, journal, Budget())
        line = self.judge.line()
        can = [all(self.judge.can_be_had(part) for part in parts) for parts in line]
        lenient = any(self.judge.lenient(part) for part in self.places.parts)
        wanted = line[can.index(True)][0].checkpoint if True in can else None
        world = await look_around(self.places.spool, self.places.stores, RUN)
        got = None
        for candidate in restore_candidates(world, RUN).candidates:
            parts = [PartId(candidate.checkpoint, rank, candidate.world) for rank in range(candidate.world)]
            if all([await self._load(repairer, part) for part in parts]):
                got = candidate.checkpoint
                break
        return self._compared(wanted, got, line, lenient)

    async def _load(self, repairer: Repairer, part: PartId) -> bool:
        if self._read(part) is not None:
            return True
        try:
            await repairer.heal(part)
        except (CorruptChunk, ObjectNotFound):
            return False
        if self._read(part) is None:
            raise Lost(f"{part} was healed and does not read")
        return True

    async def _export(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        line = self.judge.line(spool=False)
        can = [all(self.judge.can_be_had(part, spool=False) for part in parts) for parts in line]
        lenient = any(self.judge.lenient(part) for part in self.places.parts)
        wanted = line[can.index(True)][0].checkpoint if True in can else None
        target = self._root / "exported"
        got: CheckpointId | None = None
        try:
            found = await export(self.places.stores, RUN, target, None, None, Progress())
            got = CheckpointId(RUN, found.attempt, found.step)
            for rank in range(WORLD):
                part = PartId(got, rank, WORLD)
                for path, data in self.places.held[part].items():
                    if (target / part.name / path).read_bytes() != data:
                        raise Lost(f"{part}: wrong bytes of {path} were exported")
        except CheckpointNotFound:
            if target.exists():
                raise Lost("nothing was found, and something was exported") from None
        finally:
            shutil.rmtree(target, ignore_errors=True)
            shutil.rmtree(target.with_name(".exported.partial"), ignore_errors=True)
        return self._compared(wanted, got, line, lenient)

    def _compared(
        self, wanted: CheckpointId | None, got: CheckpointId | None, line: list[list[PartId]], lenient: bool
    ) -> str:
        order = [parts[0].checkpoint for parts in line]
        if got != wanted:
            better = got in order and (wanted is None or order.index(got) < order.index(wanted))
            if not (better and lenient):
                raise Lost(f"{wanted or 'nothing'} can be had, and {got or 'nothing'} was given, of {order}")
        return "nothing" if got is None else f"passed over {order.index(got)}"

    # -- everything ---------------------------------------------------------------------------------------------------

    async def _settle(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        """Scrub every copy, and let the reconciler work until nothing is left to do: what can be right is, and what is
        not is out of sight."""
        owed = self._owed()
        lenient = any(self.judge.lenient(part) for part in self.places.parts)
        daemon = self._daemon(journal, scrub="30d")
        async with running(daemon):
            await self._scrub_all(daemon)
        self._all_paid(owed, lenient)
        return "right" if all(self._whole().values()) else "what could be"

    def _daemon(self, journal: Journal, **options: Any) -> Reconciler:
        daemon = reconciler(self.places.spool, self.places.stores, **options)
        journal.events = daemon.journal.events = deque()
        daemon.interest |= {RUN, OTHER}
        return daemon

    async def _scrub_all(self, daemon: Reconciler) -> None:
        for _ in range(2):
            for name in daemon.lanes:
                await daemon.look(name)
            world: dict[str, Any] = {LOCAL: daemon.world().spool, **daemon.world().tiers}
            for name, place in world.items():
                for part in sorted(place.parts()):
                    await daemon.scrubber.scrub(Copy(name, part))
            await settle(daemon, _PATIENCE)

    def _owed(self) -> set[tuple[str, PartId]]:
        """The copies that must be right in the end, by what lies there now: of what can be had, each place's that has
        one, right or wrong, and each tier's where the spool can send it one."""
        owed = set()
        for part in self.places.parts:
            if self.judge.can_be_had(part):
                local = self.judge.is_local(part)
                owed |= {(LOCAL, part)} if local else set()
                owed |= {(tier, part) for tier in TIERS if local or self.judge.manifest(tier, part) is not None}
        return owed

    def _all_paid(self, owed: set[tuple[str, PartId]], lenient: bool) -> None:
        for place, part in sorted(owed):
            if not self.judge.copy_is_right(place, part):
                raise Lost(f"{place}: {part} could be had and is not right after all was scrubbed and flushed")
        for part in self.places.parts:
            right = [self.judge.copy_is_right(place, part) for place in PLACES]
            if any(one == part for _, one in owed) and not any(right):
                raise Lost(f"{part} could be had and is right nowhere")
            for place, whole in zip(PLACES, right, strict=True):
                there = self.judge.is_local(part) if place == LOCAL else self.judge.manifest(place, part) is not None
                if there and not whole and not lenient:
                    raise Lost(f"{place}: {part} is wrong, and still offered after all was scrubbed")


PLACES = (LOCAL, *TIERS)
