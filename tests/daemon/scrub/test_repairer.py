"""Corruption, met by the reconciler: repaired from a right copy, quarantined only where there is none, and reported."""

from __future__ import annotations

import asyncio
import gc

import pytest
from support.doubles import Double, contents, flip, flipped, is_chunk, is_manifest
from support.waiting import until
from support.world import (
    commit,
    content,
    converge,
    corrupt,
    part,
    read,
    reconciler,
    running,
    settle,
    steps_in,
    steps_on,
)

from tierd.core.errors import ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.manifest import MANIFEST_NAME
from tierd.core.manifest_codec import decode
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore


async def test_corrupt_local_part_is_repaired_from_the_other_tier_and_then_flushed(spool):
    first, second = MemoryStore(), MemoryStore()
    commit(spool, part(1))
    await converge(spool, {"first": first})
    corrupt(spool.path(part(1)) / "weights.bin")
    daemon = await converge(spool, {"first": first, "second": second})
    assert read(spool, part(1)) == content(1)
    assert await contents(first) == await contents(second)
    assert daemon.journal.counters["healed_chunks"] == 1 and daemon.journal.counters["corruptions"] == 1
    assert not daemon.journal.counters["quarantined"] and not spool.quarantined()


@pytest.mark.parametrize("victim", ["weights.bin", MANIFEST_NAME])
async def test_corrupt_local_part_without_another_copy_is_quarantined_and_reported(spool, victim):
    store = MemoryStore()
    commit(spool, part(1))
    commit(spool, part(2))
    corrupt(spool.path(part(2)) / victim)
    daemon = await converge(spool, {"tier": store})
    assert steps_on(await contents(store)) == [1] and steps_in(spool) == [1]
    assert set(spool.quarantined()) == {part(2)}
    assert [event.subject for event in daemon.journal.events if event.what == "quarantined"] == [str(part(2))]
    assert daemon.journal.counters["corruptions"] == 1
    # asked for again, what was quarantined stays where it is: it is all that is left
    async with running(reconciler(spool, {"tier": store})) as again:
        with pytest.raises(ObjectNotFound):
            await again.repairs.fetch(part(2))
    assert set(spool.quarantined()) == {part(2)}


@pytest.mark.parametrize("error", [StoreUnavailable("timeout"), StoreRefused("403")], ids=["unavailable", "refused"])
async def test_nothing_is_quarantined_while_a_tier_cannot_be_asked(spool, error):
    down, up = Double(), MemoryStore()
    commit(spool, part(1))
    await converge(spool, {"down": down})
    commit(spool, part(2))
    corrupt(spool.path(part(1)) / "weights.bin")
    corrupt(spool.path(part(2)) / MANIFEST_NAME)
    down.error = error
    async with running(reconciler(spool, {"down": down, "up": up})) as daemon:
        await until(lambda: daemon.journal.counters["errors"] > 10)
        assert not spool.quarantined() and not daemon.journal.counters["quarantined"]
        with pytest.raises(StoreUnavailable):
            await daemon.repairs.fetch(part(1))
        down.error = None
        await settle(daemon)
    assert read(spool, part(1)) == content(1) and set(spool.quarantined()) == {part(2)}
    assert steps_on(await contents(down.inner)) == [1] == steps_on(await contents(up))


async def test_part_that_cannot_be_repaired_yet_holds_up_neither_flushes_nor_evictions(spool):
    down, up = Double(), MemoryStore()
    down.error = StoreUnavailable("down")
    commit(spool, part(9))
    corrupt(spool.path(part(9)) / MANIFEST_NAME)
    for step in range(4):
        commit(spool, part(step))
    async with running(reconciler(spool, {"down": down, "up": up}, keep=100, keep_local=1)) as daemon:
        await until(lambda: daemon.wake() or steps_in(spool) == [3, 9])
        assert steps_on(await contents(up)) == [0, 1, 2, 3]


async def test_corrupt_manifest_that_only_a_tier_has_is_quarantined_there(spool, tmp_path):
    store = MemoryStore()
    commit(spool, part(1))
    commit(spool, part(2))
    await converge(spool, {"tier": store})
    await flip(store, part(1).manifest_key)
    fresh = Spool(tmp_path / "fresh")
    commit(fresh, part(3))
    await converge(fresh, {"tier": store})
    objects = await contents(store)
    assert steps_on(objects) == [2, 3] and part(1).quarantine_key in objects


async def test_a_manifest_that_is_spoiled_on_its_way_again_is_not_rebuilt(spool):
    first, second = Double(), MemoryStore()
    commit(spool, part(1))
    daemon = await converge(spool, {"first": first, "second": second})
    spool.remove([part(1)])
    await flip(first.inner, part(1).manifest_key)
    first.spoil = lambda key, data: flipped(data) if is_manifest(key) else data
    with pytest.raises(StoreUnavailable, match="read back"):
        await daemon._repairer.rebuild("first", part(1), "damaged")
    first.spoil = None
    assert await daemon._repairer.rebuild("first", part(1), "damaged")
    assert decode(bytes(await first.get(part(1).manifest_key)), part(1))


async def test_tier_that_proves_bad_during_a_fetch_is_flushed_again(spool):
    first, second = MemoryStore(), MemoryStore()
    commit(spool, part(1))
    await converge(spool, {"first": first, "second": second})
    pristine = await contents(first)
    for key in pristine:
        if is_chunk(key):
            await flip(first, key)
    corrupt(spool.path(part(1)) / "weights.bin")
    async with running(reconciler(spool, {"first": first, "second": second})) as daemon:
        assert (await daemon.repairs.fetch(part(1))).tiers == ("second",)
        await settle(daemon)
    repaired = await contents(first)
    named = [key for key in repaired if is_manifest(key)]
    assert named == [part(1).manifest_key] and read(spool, part(1)) == content(1)
    await second.delete(list(await contents(second)))
    spool.remove([part(1)])
    async with running(reconciler(spool, {"first": first})) as daemon:
        await daemon.repairs.fetch(part(1))
    assert read(spool, part(1)) == content(1)


async def test_no_lock_is_left_of_a_part_that_was_fetched(spool):
    def locks() -> int:
        gc.collect()
        return sum(type(one) is asyncio.Lock for one in gc.get_objects())

    store = MemoryStore()
    for step in range(5):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    daemon = reconciler(spool, {"tier": store})

    async def restored(step: int) -> None:
        daemon.repairs.hold(part(step))
        await asyncio.gather(*[daemon.repairs.fetch(part(step)) for _ in range(3)])
        daemon.repairs.release(part(step))

    await restored(0)
    before = locks()
    for step in range(1, 5):
        await restored(step)
    assert locks() == before
