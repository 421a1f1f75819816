"""Readers that flip bits, in random histories: nothing that is right where it is stored is lost to them.

Judged by the page "What proves corruption": reads that differ from each other cause no quarantine, no fallback and
no prune; a restore returns the right bytes or raises an error; the same wrong bytes twice are corruption, which is
repaired from another place. A quarantined copy that is right is used again instead of being deleted.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
from support.bad_readers import BadDisk
from support.doubles import is_chunk
from support.seeds import seeds
from support.timed import timed
from support.world import RUN, commit, corrupt, hurry, part, read, reconciler, running, settle

from tierd.client.restoring.source import NodeSource
from tierd.core.corruption import Reading, Verdict
from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreUnavailable, TierdError
from tierd.core.ids import PartId
from tierd.core.planning.place import SPOOL
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.tiers.objects import read_manifest
from tierd.daemon.tiers.prune import quarantine
from tierd.daemon.tiers.verify import verify
from tierd.spool.spool import Spool
from tierd.stores.base import Buffer
from tierd.stores.memory import MemoryStore

RATES = (0.0, 0.05, 0.2, 0.5)  # the share of a reader's reads that are wrong
KEEP = {"keep": 2, "every": 1, "keep_local": 1000, "scrub": "30d"}  # everything is kept but quarantined copies


class BadTier(MemoryStore):
    """A tier over a network that flips bits in a share of the answers; the objects stay right."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rate, self.flips, self._rng = 0.0, 0, rng

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        data = bytearray(await super().get(key))
        if data and self._rng.random() < self.rate:
            self.flips += 1
            flip(data, self._rng)
        if into is None:
            return bytes(data)
        into[: len(data)] = data
        return into[: len(data)]


class BadSpool(BadDisk):
    """A spool's disk with a share of wrong reads that changes."""

    def __init__(self, patched: pytest.MonkeyPatch, home: Path, rng: random.Random) -> None:
        super().__init__(patched, home, 0, 1)
        self.rate, self._rng = 0.0, rng

    def is_bad(self) -> bool:
        return self._rng.random() < self.rate


def flip(data: bytearray | memoryview, rng: random.Random) -> None:
    """Flip a bit, and several of a small object, so that no two reads are wrong in the same way by chance."""
    for _ in range(1 if len(data) > 4096 else 6):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


class History:
    """One history, and what is true in it."""

    def __init__(self, root: Path, patched: pytest.MonkeyPatch, seed: int) -> None:
        self.rng = random.Random(seed)
        self.spool = Spool(root)
        self.tiers = {name: BadTier(self.rng) for name in ("a", "b")[: self.rng.randint(1, 2)]}
        self.disk = BadSpool(patched, root, self.rng)
        self.data: dict[PartId, dict[str, bytes]] = {}
        self.stored: dict[tuple[str, PartId], dict[str, bytes]] = {}  # copies on tiers that are right, with all objects
        self.broken: set[PartId] = set()  # parts of which one copy is really wrong
        self.rotten: set[PartId] = set()  # those, and those that were repaired
        self.counts: Counter[str] = Counter()

    # -- what happens -----------------------------------------------------------------------------------------------

    async def play(self) -> None:
        for _ in range(self.rng.randint(2, 3)):
            self.make_bad()
            async with running(reconciler(self.spool, self.tiers, **KEEP)) as daemon:
                for _ in range(self.rng.randint(2, 5)):
                    await self.act(daemon)
                    self.judge_events(daemon)
                self.make_good()
                while len(self.data) < 3:  # `plant` quarantines all but the two newest
                    await self.save(daemon, None)
                    daemon.wake()
                await self.repair(daemon)
                await settle(daemon)
                self.judge_events(daemon)
            await self.judge_copies()
        await self.judge_end()

    def make_bad(self) -> None:
        self.disk.rate = self.rng.choice(RATES)
        for tier in self.tiers.values():
            tier.rate = self.rng.choice(RATES)

    def make_good(self) -> None:
        self.disk.rate = 0.0
        for tier in self.tiers.values():
            tier.rate = 0.0

    async def act(self, daemon: Reconciler) -> None:
        known = sorted(self.data)
        acts = [self.save, self.scrub, self.scrub, self.restore, self.fetch, self.verify, self.rot]
        act = self.rng.choice(acts) if known else self.save
        self.counts[act.__name__] += 1
        await act(daemon, self.rng.choice(known) if known else None)
        daemon.wake()
        await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.05)))

    async def save(self, daemon: Reconciler, _: PartId | None) -> None:
        new = part(len(self.data) + 1)
        self.data[new] = commit(self.spool, new)

    async def scrub(self, daemon: Reconciler, which: PartId) -> None:
        for place in (SPOOL, *self.tiers):
            daemon.scrubber.suspect(place, which)

    async def restore(self, daemon: Reconciler, which: PartId) -> None:
        """Restore from the spool, without a daemon."""
        source = NodeSource(self.spool, RUN, tiers=False, line=None, keep=True)
        try:
            _, files, _ = await asyncio.to_thread(source.obtain, which)
        except (StoreUnavailable, ObjectNotFound):
            return
        except (CorruptChunk, ManifestError) as error:
            assert which in self.broken, error
            return
        assert {name: bytes(view) for name, view in files.items()} == self.data[which]

    async def fetch(self, daemon: Reconciler, which: PartId) -> None:
        """Lose the spool's copy, if a tier has one, and fetch it again."""
        held = [tier for tier in self.tiers.values() if which.manifest_key in await keys_of(tier)]
        if held and which not in self.broken and self.rng.random() < 0.7:
            shutil.rmtree(self.spool.path(which), ignore_errors=True)
        try:
            await daemon.repairs.fetch(which)
        except (StoreUnavailable, OSError):
            return
        except (CorruptChunk, ManifestError) as error:
            assert which in self.broken, error

    async def verify(self, daemon: Reconciler, which: PartId) -> None:
        for tier in self.tiers.values():
            try:
                assert (await verify(tier, which, lambda size: None))[1] == [] or which in self.broken
            except (StoreUnavailable, ObjectNotFound):
                pass
            except ManifestError as error:
                assert which in self.broken, error

    async def rot(self, daemon: Reconciler, which: PartId) -> None:
        """Flip a stored bit of one copy, if each place has a right one."""
        held = [tier for tier in self.tiers.values() if which.manifest_key in await keys_of(tier)]
        if which in self.broken or len(held) < len(self.tiers) or not self.spool.has(which):
            return
        self.broken.add(which)
        self.rotten.add(which)
        if self.rng.random() < 0.5:
            corrupt(self.spool.path(which) / "weights.bin")
        else:
            tier = self.rng.choice(held)
            chunks = [key for key in await keys_of(tier) if is_chunk(key) and f"/{which.checkpoint.name}/" in key]
            key = self.rng.choice(sorted(chunks))
            data = bytearray(await MemoryStore.get(tier, key))
            flip(data, self.rng)
            await tier.put(key, data)
        await self.scrub(daemon, which)

    async def repair(self, daemon: Reconciler) -> None:
        """Wait until scrubs with good readers have repaired what is really corrupt."""
        end_s = time.monotonic() + 60
        for which in sorted(self.broken):
            while await self.defects(which):
                assert time.monotonic() < end_s, f"{which} is not repaired: {await self.defects(which)}"
                if not self.spool.has(which):  # a restore without a daemon quarantined the corrupt copy
                    await daemon.repairs.fetch(which)
                await self.scrub(daemon, which)
                daemon.wake()
                await asyncio.sleep(0.02)
            for name in self.tiers:
                self.stored.pop((name, which), None)
        self.counts["rotten"] += len(self.broken)
        self.broken.clear()

    async def defects(self, which: PartId) -> list[str]:
        """Say which copies of a part are wrong or missing."""
        try:
            wrong = [(await verify(tier, which, lambda size: None))[1] for tier in self.tiers.values()]
            if read(self.spool, which) != self.data[which]:
                wrong.append(["other bytes"])
            return [why for some in wrong for why in some]
        except (TierdError, OSError) as error:
            return [repr(error)]

    async def plant(self) -> None:
        """Quarantine right copies, as an older version did because of a bad reader."""
        for tier in self.tiers.values():
            for number, which in enumerate(sorted(self.data)[:-2]):
                if (number == 0 or self.rng.random() < 0.3) and await quarantine(tier, which):
                    self.counts["planted"] += 1

    # -- what must hold ---------------------------------------------------------------------------------------------

    def judge_events(self, daemon: Reconciler) -> None:
        kinds = ("corrupt", "quarantined", "pruned")
        repairs = {("repaired", name) for name in self.tiers}  # of the spool they are fetches
        events = [one for one in daemon.journal.events if one.what in kinds or (one.what, one.place) in repairs]
        wrong = {str(which) for which in self.rotten}
        said = [f"{one.place}: {one.what} {one.subject}: {one.why}" for one in events if one.subject not in wrong]
        assert not said and self.spool.quarantined().keys() <= self.rotten

    async def judge_copies(self) -> None:
        """Every copy that was ever right on a tier is there, unchanged, and nothing is quarantined."""
        for name, tier in self.tiers.items():
            objects = await contents(tier)
            assert not [key for key in objects if "/quarantine/" in key]
            for which in self.data:
                own = {key: data for key, data in objects.items() if f"/{which.checkpoint.name}/" in key}
                before = self.stored.setdefault((name, which), own)
                assert which.manifest_key in own and before.items() <= own.items()

    async def judge_end(self) -> None:
        """Also quarantined copies are used again; a fresh node gets every byte of every checkpoint from each tier."""
        await self.plant()
        shutil.rmtree(self.spool.root / RUN)
        async with running(reconciler(self.spool, self.tiers, **KEEP)) as daemon:
            self.make_bad()
            daemon.wake()
            await asyncio.sleep(0.05)
            self.make_good()
            await settle(daemon)
            released = [event for event in daemon.journal.events if event.what == "released"]
            self.counts["released"] += len(released)
        for name, tier in self.tiers.items():
            for which in self.data:
                assert await read_manifest(tier, which) and (await verify(tier, which, lambda size: None))[1] == []
                assert not [key for key in await keys_of(tier) if "/quarantine/" in key], name
            fresh = Spool(self.spool.root.with_name(f"{self.spool.root.name}-{name}"))
            restoring = reconciler(fresh, {name: tier}, **KEEP)
            for which, data in self.data.items():
                await restoring.repairs.fetch(which)
                assert read(fresh, which) == data
        self.counts["flips"] += self.disk.flips + sum(tier.flips for tier in self.tiers.values())


async def keys_of(tier: MemoryStore) -> list[str]:
    return [info.key async for info in tier.scan("")]


async def contents(tier: BadTier) -> dict[str, bytes]:
    assert not tier.rate
    return {key: bytes(await tier.get(key)) for key in await keys_of(tier)}


def history(root: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> Counter[str]:
    with monkeypatch.context() as patched:
        timed(patched, scrub_later_s=0.001, scrub_rest_s=0.02)  # also a copy whose reads differed is soon due again
        one = History(root, patched, seed)
        asyncio.run(one.play())
    return one.counts


@pytest.mark.parametrize("seed", seeds(first=5))
def test_nothing_right_is_lost_to_a_bad_reader(tmp_path, monkeypatch, seed):
    hurry(monkeypatch)
    history(tmp_path / "spool", monkeypatch, seed)


def test_histories_of_readers_meet_flips_rot_and_releases(tmp_path, monkeypatch):
    hurry(monkeypatch)
    histories = (history(tmp_path / str(seed), monkeypatch, seed) for seed in range(5))
    assert any(
        counts["flips"] > 20 and counts["rotten"] and counts["planted"] and counts["released"]
        for counts in accumulate(histories)
    )


@pytest.mark.parametrize("reads", [1, 2])
def test_histories_find_a_judge_that_believes_the_first_wrong_reads(tmp_path, monkeypatch, reads):
    """So many wrong reads are corruption, also if they differ from each other."""
    hurry(monkeypatch)

    def believing(readings: Sequence[Reading], paths: int = 1) -> Verdict:
        if any(reading.is_right for reading in readings):
            return Verdict.RIGHT
        return Verdict.CORRUPT if len(readings) >= reads else Verdict.READ_AGAIN

    for module in ("core.corruption", "daemon.tiers.objects", "spool.verified_reads"):
        monkeypatch.setattr(f"tierd.{module}.judge", believing)
    with pytest.raises(AssertionError):
        for seed in range(12):
            history(tmp_path / str(seed), monkeypatch, seed)
