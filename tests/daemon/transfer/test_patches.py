"""Patches and deltas: a chunk that changes little is stored as its changes; so it is read, kept, scrubbed and moved."""

from __future__ import annotations

import asyncio
import os
import random
import shutil

import pytest
from support.doubles import Double, contents, flip, flipped, is_chunk
from support.world import CHUNK, commit, converge, manifest_on, part, read, steps_on

from tierd.codec.block_patches import BLOCK
from tierd.core.errors import CorruptChunk, StoreUnavailable
from tierd.core.manifest import VERSION, WITH_DELTAS, Chunk, Manifest
from tierd.core.planning import flush_order
from tierd.core.planning.background_schedule import ScrubbedCopy
from tierd.daemon.tiers.tier_objects import verify_part
from tierd.daemon.tiers.tier_prune import prune
from tierd.daemon.transfer.chunk_source import ReferenceCopy, TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import FlushResult, flush
from tierd.daemon.transfer.run_copy import copy_run
from tierd.daemon.transfer.tier_fetch import fetch, relay
from tierd.spool.spool import Spool

ROWS = 4 * (CHUNK // BLOCK)


class Kind:
    """How steps change the table, and so how its chunks are stored."""

    name = "patch"


@pytest.fixture(autouse=True, params=["patch", "delta"])
def small(request, monkeypatch):
    monkeypatch.setattr(flush_order, "SMALLEST_SHARED_BYTES", 1)
    monkeypatch.setattr(Kind, "name", request.param)


def table(step: int) -> dict[str, bytes]:
    """An embedding of which each step changes one row of each chunk, or adds 1 to one number in 40, and another file
    that is new at each step."""
    data = bytearray(random.Random(0).randbytes(4 * CHUNK))
    for one in range(1, step + 1):
        noise = random.Random(one)
        for at in range(one, len(data), 40) if Kind.name == "delta" else ():
            data[at] = (data[at] + 1) % 256
        for chunk in range(4) if Kind.name == "patch" else ():
            at = chunk * CHUNK + noise.randrange(CHUNK // BLOCK) * BLOCK
            data[at : at + BLOCK] = noise.randbytes(BLOCK)
    return {"table": bytes(data), "state.json": b'{"step": %d}' % step}


def committed(spool: Spool, *steps: int) -> None:
    for step in steps:
        commit(spool, part(step), table(step))


async def sent(spool: Spool, store, *steps: int) -> list[FlushResult]:
    """Flush these steps, each with the one before it as the base checkpoint."""
    done, before = [], None
    for step in steps:
        done.append(await flush(spool, part(step), TierUploadContext(store), base=before))
        before = await manifest_on(store, part(step))
    return done


def chain(manifest: Manifest) -> list[int]:
    """How many objects each chunk of the table needs."""
    return [len(list(chunk.objects())) for chunk in of_table(manifest)]


def of_table(manifest: Manifest) -> tuple[Chunk, ...]:
    return next(file.chunks for file in manifest.files if file.path == "table")


async def fetched(spool: Spool, step: int, **stores) -> dict[str, bytes]:
    shutil.rmtree(spool.path(part(step)), ignore_errors=True)
    await fetch(spool, part(step), stores)
    return read(spool, part(step))


async def test_changed_row_is_the_only_data_sent_and_the_patch_restores_it(spool):
    committed(spool, 1, 2, 3)
    store = Double()
    first, second, third = await sent(spool, store, 1, 2, 3)
    assert second.sent < first.sent / 4 and third.sent < first.sent / 4
    manifest = await manifest_on(store, part(3))
    assert manifest.version == (WITH_DELTAS if Kind.name == "delta" else VERSION)
    assert {stored.codec[:5] for stored in manifest.objects() if stored.base} == {Kind.name}
    assert spool.manifest(part(3)).version == VERSION
    assert chain(manifest) == [3] * 4
    assert manifest.owners == {part(step).checkpoint for step in (1, 2, 3)}
    for step in (3, 2, 1):
        assert await fetched(spool, step, tier=store) == table(step)


async def test_a_chain_of_patches_ends_and_a_whole_chunk_begins_the_next(spool, monkeypatch):
    monkeypatch.setattr(flush_order, "MOST_PATCHES", 3)
    committed(spool, *range(1, 10))
    store = Double()
    await sent(spool, store, *range(1, 10))
    assert [chain(await manifest_on(store, part(step)))[0] for step in range(1, 10)] == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert await fetched(spool, 8, tier=store) == table(8)


async def test_whole_chunks_are_sent_where_the_older_copy_has_left_the_spool_or_is_corrupt_there(spool):
    committed(spool, 1, 2, 3)
    store = Double()
    await sent(spool, store, 1)
    (spool.path(part(1)) / "table").write_bytes(table(2)["table"])  # a patch of that would be empty
    await flush(spool, part(2), TierUploadContext(store), base=await manifest_on(store, part(1)))
    assert chain(await manifest_on(store, part(2))) == [1] * 4
    shutil.rmtree(spool.path(part(2)))
    await flush(spool, part(3), TierUploadContext(store), base=await manifest_on(store, part(2)))
    assert chain(await manifest_on(store, part(3))) == [1] * 4
    assert await fetched(spool, 3, tier=store) == table(3)


@pytest.mark.timeout(20)
async def test_a_fifo_in_the_place_of_the_older_copy_is_not_waited_for(spool):
    committed(spool, 1, 2)
    store = Double()
    await sent(spool, store, 1)
    (spool.path(part(1)) / "table").unlink()
    os.mkfifo(spool.path(part(1)) / "table")
    await flush(spool, part(2), TierUploadContext(store), base=await manifest_on(store, part(1)))
    assert chain(await manifest_on(store, part(2))) == [1] * 4


async def test_bases_are_needed_on_the_tier_and_their_loss_is_noticed_before_the_manifest(spool):
    committed(spool, 1, 2, 3)
    store = Double()
    await sent(spool, store, 1, 2)
    base = await manifest_on(store, part(2))
    gone = next(key for key in await contents(store) if is_chunk(key) and part(1).checkpoint.name in key)
    await store.delete([gone])
    await flush(spool, part(3), TierUploadContext(store), base=base)
    assert sorted(chain(await manifest_on(store, part(3)))) == [1, 3, 3, 3]


async def test_a_prune_keeps_the_bases_that_a_patch_needs_and_deletes_them_with_the_last_patch(spool):
    committed(spool, 1, 2, 3)
    store = Double()
    await sent(spool, store, 1, 2, 3)
    await prune(store, [part(1).checkpoint, part(2).checkpoint])
    assert steps_on(await contents(store)) == [3]
    assert await fetched(spool, 3, tier=store) == table(3)
    assert (await verify_part(store, part(3), lambda size: None))[1] == []
    await prune(store, [part(3).checkpoint])
    assert not [key for key in await contents(store) if is_chunk(key)]


async def test_verify_names_a_corrupt_base_and_a_restore_does_not_return_its_bytes(spool):
    committed(spool, 1, 2)
    store = Double()
    await sent(spool, store, 1, 2)
    base = next(iter(list(of_table(await manifest_on(store, part(2)))[0].objects())[1:])).key
    await flip(store, f"run/{base}")
    assert [base in one for one in (await verify_part(store, part(2), lambda size: None))[1]] == [True]
    with pytest.raises(CorruptChunk):
        await fetched(spool, 2, tier=store)


@pytest.mark.parametrize("source", ["spool", "other"])
@pytest.mark.parametrize("order", [(1, 2, 3), (3,)])
@pytest.mark.parametrize("bad", [(0,), (1,), (2,), (0, 2)], ids=str)
async def test_a_scrub_repairs_a_corrupt_base_or_patch_where_it_lies(spool, bad, order, source):
    """Whichever copy is read first, nothing is stored again, and no object is reported twice."""
    stores = {"tier": Double(), "other": Double()} if source == "other" else {"tier": Double()}
    for step in (1, 2, 3):
        committed(spool, step)
        node = await converge(spool, stores, keep=3, keep_local=3, scrub="30d")
    if source == "other":
        spool.remove([part(1), part(2)])  # so the scrub finds the newest there alone
    store = stores["tier"]
    objects = list(of_table(await manifest_on(store, part(3)))[0].objects())
    pristine = await contents(store)
    assert len(objects) == 3
    for one in bad:
        await flip(store, f"run/{objects[one].key}")
    await node.observe("local")
    for name in stores:
        await node.observe(name)
    for step in order:
        await node.scrubber.scrub(ScrubbedCopy("tier", part(step)))
    assert await contents(store) == pristine
    assert 1 <= node.journal.counters["scrub_findings"] <= len(bad)  # of one chunk, the first object is named


async def test_links_of_one_chain_may_be_read_from_different_tiers(spool):
    """The base is right on one tier, the patch on the other: a reader fell back, and a scrub quarantined."""
    committed(spool, 1, 2, 3)
    near, far = Double(), Double()
    await sent(spool, near, 1, 2, 3)
    await sent(spool, far, 1, 2, 3)
    bases, patches = of_table(await manifest_on(near, part(1))), of_table(await manifest_on(far, part(2)))
    for base, patch in zip(bases, patches, strict=True):
        await flip(near, f"run/{base.stored.key}")
        await flip(far, f"run/{patch.stored.key}")
    for step in (3, 2, 1):
        assert await fetched(spool, step, near=near, far=far) == table(step)
    with pytest.raises(CorruptChunk):
        await fetched(spool, 3, far=far)


async def test_link_is_read_from_a_tier_whose_own_manifest_is_damaged(spool):
    """A patch has one key for one base, so both tiers have it; a reader looked there for whole chunks alone."""
    committed(spool, 1, 2, 3)
    near, far = Double(), Double()
    await sent(spool, near, 1, 2, 3)
    await sent(spool, far, 1, 2, 3)
    links = [chunk.stored.key for chunk in of_table(await manifest_on(near, part(2)))]
    await near.delete([f"run/{key}" for key in links])
    await flip(far, part(3).manifest_key)
    assert await fetched(spool, 3, near=near, far=far) == table(3)


def test_a_tier_that_cannot_be_asked_may_have_the_base(spool):
    committed(spool, 1, 2)
    near, far = Double(), Double()

    async def work():
        await sent(spool, near, 1, 2)
        await sent(spool, far, 1)
        for base in of_table(await manifest_on(near, part(1))):
            await flip(near, f"run/{base.stored.key}")
        far.before = _refuse
        with pytest.raises(StoreUnavailable):
            await fetched(spool, 2, near=near, far=far)
        far.before = None
        assert await fetched(spool, 2, near=near, far=far) == table(2)

    def _refuse(operation: str, key: str) -> None:
        if operation == "get" and is_chunk(key):
            raise StoreUnavailable("the network went away")

    asyncio.run(work())


async def test_a_relay_and_a_copy_put_whole_chunks_where_the_bases_are_not(spool):
    committed(spool, 1, 2, 3)
    store, other, third = Double(), Double(), Double()
    await sent(spool, store, 1, 2, 3)
    await relay({"tier": store}, part(3), TierUploadContext(other))
    assert chain(await manifest_on(other, part(3))) == [1] * 4
    assert await fetched(spool, 3, other=other) == table(3)
    await copy_run(store, third, "run", "run", None, None, Progress())
    for step in (1, 2, 3):
        assert await fetched(spool, step, third=third) == table(step)


async def test_a_second_tier_does_not_take_over_patches_whose_bases_it_lacks(spool):
    committed(spool, 1, 2)
    store, other = Double(), Double()
    await sent(spool, store, 1, 2)
    await flush(spool, part(2), TierUploadContext(other), twin=ReferenceCopy(store, await manifest_on(store, part(2))))
    assert chain(await manifest_on(other, part(2))) == [1] * 4
    assert await fetched(spool, 2, other=other) == table(2)


async def test_two_flushes_of_one_part_with_different_bases_do_not_overwrite_each_other(spool):
    committed(spool, 1, 2, 3)
    store = Double()
    await sent(spool, store, 1, 2)
    base_copies = [await manifest_on(store, part(step)) for step in (1, 2)]
    kept = []
    for base in base_copies:
        await flush(spool, part(3), TierUploadContext(store), base=base)
        kept.append((bytes(await store.get(part(3).manifest_key)), await manifest_on(store, part(3))))
    for data, manifest in kept:  # as if each of them had been the last
        await store.put(part(3).manifest_key, data)
        assert chain(manifest)[0] > 1
        assert await fetched(spool, 3, tier=store) == table(3)


async def test_any_flipped_bit_of_a_patch_is_detected(spool):
    committed(spool, 1, 2)
    store = Double()
    await sent(spool, store, 1, 2)
    stored = of_table(await manifest_on(store, part(2)))[0].stored
    before = bytes(await store.get(f"run/{stored.key}"))
    for byte in range(stored.size):
        await store.put(f"run/{stored.key}", flipped(before, byte))
        with pytest.raises(CorruptChunk):
            await fetched(spool, 2, tier=store)
