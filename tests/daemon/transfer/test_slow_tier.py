"""A tier that is slower than the saves: there is always something to send, for as long as training lasts."""

from __future__ import annotations

import asyncio
import errno
import time
from itertools import count

import pytest
from support.doubles import Double
from support.waiting import until
from support.world import commit, corrupt, hurry, part, reconciler, running, settle, steps_in, steps_on

from tierd.core.errors import StoreUnavailable
from tierd.core.planning.background_schedule import ScrubbedCopy
from tierd.core.planning.place import SPOOL
from tierd.stores.base import Buffer
from tierd.stores.memory_store import MemoryStore

_SENT = 12


class Slow(MemoryStore):
    """Training saves five more checkpoints while each manifest is put.

    Attributes:
        most: manifests that there were at once.
        most_here: copies in the spool that stayed there, whatever time it was given.
        sent: steps, in the order in which they came.
    """

    def __init__(self, spool, room: int) -> None:
        super().__init__()
        self.spool, self._room, self._steps = spool, room, count(1)
        self.most, self.most_here, self.sent = 0, 0, list[int]()
        self.leading: list[bool] = []  # of each that was sent, whether it was the newest when that began
        self._saved = 0

    def save(self) -> None:
        self._saved = next(self._steps)
        commit(self.spool, part(self._saved))

    async def put(self, key: str, data: Buffer) -> str:
        done = await super().put(key, data)
        if "/manifests/" in key:
            manifests = [one for one in self.keys if "/manifests/" in one]
            self.sent.append(max(steps_on([key])))
            self.leading.append(self.sent[-1] == self._saved)
            self.most = max(self.most, len(steps_on(manifests)))
            if len(self.sent) < _SENT:
                for _ in range(5):
                    self.save()
                end = time.monotonic() + 5.0
                while len(steps_in(self.spool)) > self._room and time.monotonic() < end:
                    await asyncio.sleep(0.02)
                self.most_here = max(self.most_here, len(steps_in(self.spool)))
        return done


def lived(spool, room: int = 4, **options) -> Slow:
    store = Slow(spool, room)
    store.save()

    async def work() -> None:
        daemon = reconciler(spool, {"tier": store}, **options)
        async with running(daemon):
            for _ in range(600):
                daemon.wake()  # as the events of the spool's file system do
                await asyncio.sleep(0.05)
                if len(store.sent) >= _SENT:
                    break
            await until(lambda: len(store.sent) >= _SENT)
            await settle(daemon)

    asyncio.run(work())
    return store


def test_it_is_pruned_all_the_while(spool):
    store = lived(spool, keep=2, keep_local=1)
    assert store.most <= 4  # two are kept, one is new, and another may have come before the deletion had its turn


def test_slow_tier_does_not_fill_the_spool_and_gets_the_newest_checkpoint_by_then(spool):
    store = lived(spool, keep=2, keep_local=1)
    assert store.most_here <= 4  # the two newest, which the tier wants, the newest verified, and what is on its way
    assert store.sent[:_SENT] == sorted(store.sent[:_SENT]) and store.sent[_SENT - 1] > _SENT
    assert steps_in(spool)[-1] == 5 * (_SENT - 1) + 1


def test_checkpoints_wanted_for_good_hold_up_no_newest(spool):
    """The rule wants more for good than the tier can take; the newest was not sent again while any of that waited."""
    store = lived(spool, room=1000, keep=1, keep_local=1, every=2)
    first = store.leading[:_SENT]
    assert first.count(True) >= _SENT / 4
    assert first.count(False) >= _SENT / 4, "and both kinds go on"


async def test_no_copy_is_deleted_because_of_a_newer_copy_that_is_rotten(spool):
    """Simulation, seed 224: the newest was rotten before any tier had it, and the one before it went."""

    class Stuck(MemoryStore):
        async def put(self, key: str, data: Buffer) -> str:
            if "/chunks/" in key:
                waiting.set()
                await go.wait()
            return await super().put(key, data)

    waiting, go, store = asyncio.Event(), asyncio.Event(), Stuck()
    daemon = reconciler(spool, {"tier": store}, keep=2, keep_local=1)
    for step in (1, 2, 3):
        commit(spool, part(step))
    corrupt(spool.path(part(2)) / "weights.bin")
    async with running(daemon):
        await waiting.wait()  # the third is on its way, and stays there
        await until(lambda: spool.quarantined())
        assert steps_in(spool) == [1, 3]
        go.set()
        await settle(daemon)
    assert steps_on(store.keys)[-2:] == [1, 3]


@pytest.mark.parametrize("what", ["pin", "restore"])
async def test_only_copy_that_becomes_wanted_before_its_deletion_is_kept(spool, monkeypatch, what):
    """The newer copies are read before it goes, which takes minutes."""
    hurry(monkeypatch)

    class Stuck(MemoryStore):
        async def put(self, key: str, data: Buffer) -> str:
            if "/chunks/" in key:
                await asyncio.sleep(3600)
            return await super().put(key, data)

    daemon = reconciler(spool, {"tier": Stuck()}, keep=2, keep_local=1)
    one, is_right = part(1).checkpoint, daemon.scrubber.is_right

    async def meanwhile(copy):
        if what == "pin":
            spool.pin(one, pinned=True)
        else:
            daemon.requests.needed_checkpoints[one] += 1
        return await is_right(copy)

    monkeypatch.setattr(daemon.scrubber, "is_right", meanwhile)
    for step in range(1, 7):
        commit(spool, part(step))
    async with running(daemon):
        await until(lambda: 2 not in steps_in(spool))
        assert 1 in steps_in(spool)


async def test_a_deletion_that_fails_holds_up_no_flush(spool, monkeypatch):
    hurry(monkeypatch)
    store = Double()

    def refuse(operation: str, key: str) -> None:
        if operation == "delete" and "/manifests/" in key:
            raise StoreUnavailable("not now")

    daemon = reconciler(spool, {"tier": store}, keep=1, keep_local=100)
    store.before = refuse
    async with running(daemon):
        for step in range(1, 6):
            commit(spool, part(step))
            daemon.wake()
            await until(lambda step=step: daemon.tiers.observed.has(part(step), "tier"))
        assert daemon.journal.counters["errors"]
        store.before = None
        await settle(daemon)


async def test_a_prune_waits_for_the_copy_that_cannot_be_read_and_is_not_asked_for_again_each_second(
    spool, monkeypatch
):
    hurry(monkeypatch)
    observed, failing = [], [True]

    class Down(MemoryStore):
        async def put(self, key: str, data: Buffer) -> str:
            await asyncio.Event().wait()
            raise AssertionError

    daemon = reconciler(spool, {"tier": Down()}, keep=1, keep_local=1)
    real, wrong = daemon.tiers.find_missing_parts, daemon.scrubber._reader.read

    async def lacking(parts):
        observed.append(parts)
        return await real(parts)

    async def read(copy):
        if failing:
            raise OSError(errno.EIO, "Input/output error")
        return await wrong(copy)

    async def is_right(part):
        return not failing

    monkeypatch.setattr(daemon.tiers, "find_missing_parts", lacking)
    monkeypatch.setattr(daemon.scrubber._reader, "read", read)
    monkeypatch.setattr(daemon.scrubber._reader, "is_right", is_right)
    for step in (1, 2):
        commit(spool, part(step))
    async with running(daemon):
        await until(lambda: observed and daemon.scrubber.postponed_s(part(2)) > 60)
        await asyncio.sleep(0.1)
        before = len(observed)
        for _ in range(10):
            daemon.wake()
            await asyncio.sleep(0.05)
        assert len(observed) == before
        failing.clear()
        await daemon.scrubber.scrub(ScrubbedCopy(SPOOL, part(2)))  # its turn comes
        await until(lambda: steps_in(spool) == [2])
