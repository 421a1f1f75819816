"""Flush: what a tier shows was read back from it first, and what was cut off goes on where it stopped."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import replace

import msgspec
import pytest
from support.doubles import Double, contents, damage, flip, flipped, is_chunk, is_manifest
from support.world import CHUNK, commit, content, part, read

from tierd.core.errors import CorruptChunk, ManifestError, StoreRefused, StoreUnavailable
from tierd.core.ids import pruning_prefix
from tierd.core.manifest import Manifest
from tierd.core.manifest_codec import decode
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.daemon_timings import USUAL
from tierd.daemon.tiers.tier_observer import find_base, observe_places
from tierd.daemon.tiers.tier_prune import quarantine
from tierd.daemon.transfer.chunk_source import ReferenceCopy, TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

PART = part(7)
FILES = content(7)


def flushed(spool: Spool, *stores) -> None:
    async def work():
        for store in stores:
            await flush(spool, PART, TierUploadContext(store))

    asyncio.run(work())


def keys(store, of=lambda key: True) -> list[str]:
    return [key for key in asyncio.run(contents(store)) if of(key)]


def test_the_manifest_is_put_last_and_after_every_chunk_was_read_back(spool):
    commit(spool, PART)
    store = Double()
    flushed(spool, store)
    order = [call for call in store.calls if call[0] in ("put", "get")]
    shown = order.index(("put", PART.manifest_key))
    assert ("put", PART.manifest_key) == [call for call in order if call[0] == "put"][-1]
    for key in store.puts(is_chunk):
        assert order.index(("put", key)) < order.index(("get", key)) < shown
    assert len(store.puts(is_chunk)) == 4  # three of the weights, one of the state; an empty file has none


@pytest.mark.parametrize(
    "spoil",
    [flipped, lambda data: data[:-1], lambda data: data + b"x", lambda data: b"", lambda data: bytes(len(data))],
    ids=["bit", "short", "long", "empty", "zeros"],
)
def test_chunk_that_does_not_read_back_as_it_was_put_is_never_shown(spool, spoil):
    commit(spool, PART)
    store = Double()
    store.spoil = lambda key, data: spoil(data) if is_chunk(key) else data
    with pytest.raises(StoreUnavailable, match="read back"):
        flushed(spool, store)
    assert not keys(store.inner, is_manifest)
    store.spoil = None
    flushed(spool, store)
    assert asyncio.run(restored(spool, store)) == FILES


class Directory(FileStore):
    """Keeps something else of each chunk than it was given, where `spoil` is set; notes the chunks that are got."""

    spoil = None

    def __init__(self, root):
        super().__init__(root)
        self.root, self.got = root, []

    async def put(self, key, data):
        await super().put(key, data)
        if self.spoil and is_chunk(key):
            self.spoil(self.root / key)
        return ""

    async def get(self, key, into=None):
        self.got += [key] if is_chunk(key) else []
        return await super().get(key, into)


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "lengthen", "remove", "fifo"])
async def test_object_in_a_directory_is_digested_there_and_never_shown_if_it_differs(spool, tmp_path, harm):
    commit(spool, PART)
    (tmp_path / "tier").mkdir()
    store = Directory(tmp_path / "tier")
    store.spoil = lambda path: damage(path, harm)
    with pytest.raises(StoreUnavailable, match="read back"):
        await flush(spool, PART, TierUploadContext(store))
    assert not (tmp_path / "tier" / PART.manifest_key).exists()
    for _ in range(100):  # a put that was cancelled may still end in its thread
        shutil.rmtree(tmp_path / "tier" / PART.checkpoint.run, ignore_errors=True)
        await asyncio.sleep(0.01)
    store.spoil = None
    await flush(spool, PART, TierUploadContext(store))
    assert not store.got
    assert await restored(spool, store) == FILES
    await store.aclose()


def test_manifest_spoiled_on_its_way_is_no_copy_and_the_quarantined_manifest_is_kept_until_it_is_right(spool):
    """It may be all that tells of its launch, once the node is gone. Seed 100255 of `python -m faults simulation`."""
    commit(spool, PART)
    store = Double()
    flushed(spool, store)
    assert asyncio.run(quarantine(store, PART))
    quarantined = asyncio.run(contents(store.inner))[PART.quarantine_key]
    store.spoil = lambda key, data: flipped(data) if is_manifest(key) else data
    with pytest.raises(StoreUnavailable, match="read back"):
        flushed(spool, store)
    assert asyncio.run(contents(store.inner))[PART.quarantine_key] == quarantined
    assert asyncio.run(quarantine(store, PART))  # as another node does, which finds it damaged
    assert asyncio.run(contents(store.inner))[PART.quarantine_key] == quarantined
    store.spoil = None
    flushed(spool, store)
    assert decode(asyncio.run(contents(store.inner))[PART.manifest_key], PART)
    assert PART.quarantine_key not in asyncio.run(contents(store.inner))


def test_manifest_is_deleted_only_once_its_quarantined_copy_is_right(spool):
    commit(spool, PART)
    store = Double()
    flushed(spool, store)
    store.spoil = lambda key, data: flipped(data)
    with pytest.raises(StoreUnavailable, match="read back"):
        asyncio.run(quarantine(store, PART))
    assert keys(store.inner, is_manifest) == [PART.manifest_key]
    store.spoil = None
    assert asyncio.run(quarantine(store, PART))
    assert decode(asyncio.run(contents(store.inner))[PART.quarantine_key], PART)


async def restored(spool: Spool, *stores) -> dict[str, bytes]:
    """The part from the tiers alone."""
    shutil.rmtree(spool.path(PART), ignore_errors=True)
    await fetch(spool, PART, {f"tier{number}": store for number, store in enumerate(stores)})
    return read(spool, PART)


def test_interrupted_flush_does_not_send_chunks_again_that_lie_there(spool):
    commit(spool, PART)
    store = Double()

    def fail_at_the_third(operation, key):
        if operation == "put" and len(store.puts(is_chunk)) == 3 and is_chunk(key):
            raise StoreUnavailable("the network went away")

    store.before = fail_at_the_third
    with pytest.raises(StoreUnavailable):
        flushed(spool, store)
    there = set(keys(store.inner, is_chunk))
    assert 1 <= len(there) < 4 and not keys(store.inner, is_manifest)
    store.before, store.calls = None, []
    flushed(spool, store)
    assert not there & set(store.puts(is_chunk))
    assert len(set(store.puts(is_chunk)) | there) == 4


def test_corrupt_chunk_of_an_interrupted_flush_is_sent_again(spool):
    commit(spool, PART)
    store = Double()
    flushed(spool, store)
    victim = keys(store.inner, is_chunk)[0]
    asyncio.run(flip(store.inner, victim))
    store.calls = []
    flushed(spool, store)
    assert store.puts(is_chunk) == [victim]


@pytest.mark.parametrize("error", [StoreUnavailable("EIO"), StoreRefused("403")])
def test_unreadable_chunk_of_an_interrupted_flush_is_sent_again(spool, error):
    """One object that cannot be read kept its part, and all that waits behind it, from a tier for ever."""
    commit(spool, PART)
    store = Double()
    flushed(spool, store)
    victim = keys(store.inner, is_chunk)[0]

    def unreadable(operation, key):
        if (operation, key) == ("get", victim) and victim not in store.puts():
            raise error

    store.calls, store.before = [], unreadable
    flushed(spool, store)
    assert store.puts(is_chunk) == [victim]
    assert asyncio.run(restored(spool, store)) == FILES


@pytest.mark.parametrize("error", [StoreUnavailable("EIO"), StoreRefused("403")])
async def test_a_base_that_cannot_be_read_is_not_shared_with(spool, error):
    """It only saves bytes; each later save read it first, and failed."""
    old, new = part(1), part(2)
    commit(spool, old, FILES)
    commit(spool, new, FILES)
    store = Double()
    await flush(spool, old, TierUploadContext(store))
    place = (await observe_places(spool, {"a": store}, "run")).tiers["a"]
    assert place is not None
    found, _ = await find_base(store, place, new)
    assert found is not None and found.step == 1

    def unreadable(operation, key):
        if (operation, key) == ("get", old.manifest_key):
            raise error

    store.before = unreadable
    assert await find_base(store, place, new) == (None, frozenset())


def test_a_put_whose_answer_was_lost_is_settled_by_the_next_try(spool):
    commit(spool, PART)
    for lost in range(1, 8):
        store = Double()
        store.lose = lost
        for _ in range(lost + 1):
            try:
                flushed(spool, store)
            except StoreUnavailable:
                continue
        assert asyncio.run(restored(spool, store)) == FILES


def test_chunks_deleted_meanwhile_keep_the_manifest_back(spool):
    commit(spool, PART)
    store = Double()

    def another_launch_prunes(operation, key):
        if operation == "put" and "/flushing/" in key:
            victim = next(key for key in store.inner.keys if is_chunk(key))
            store.inner.keys.remove(victim)
            del store.inner.objects[victim]

    store.before = another_launch_prunes
    with pytest.raises(StoreUnavailable, match="deleted while"):
        flushed(spool, store)
    assert not keys(store.inner, is_manifest)


@pytest.mark.parametrize("harm", ["flip", "truncate", "lengthen", "remove"])
def test_a_corrupt_local_copy_is_never_flushed(spool, harm):
    commit(spool, PART)
    damage(spool.path(PART) / "weights.bin", harm)
    store = Double()
    with pytest.raises(CorruptChunk):
        flushed(spool, store)
    assert not keys(store.inner, is_manifest)


# -- what proves a put ------------------------------------------------------------------------------------------------


def manifest_on(store: Double, which=PART) -> Manifest:
    return decode(bytes(asyncio.run(contents(store.inner))[which.manifest_key]), which)


@pytest.mark.parametrize(("reread", "reads"), [(False, 0), (True, 4)])
def test_chunk_that_a_server_verified_is_read_back_only_where_configured(spool, reread, reads):
    commit(spool, PART)
    store = Double()
    store.verifies = "crc64nvme"
    asyncio.run(flush(spool, PART, TierUploadContext(store, reread=reread)))
    assert len([key for operation, key in store.calls if operation == "get" and is_chunk(key)]) == reads
    assert (("get", PART.manifest_key) in store.calls) == reread
    recorded = {chunk.stored.checked for chunk in manifest_on(store).chunks()}
    assert recorded == ({""} if reread else {"crc64nvme"})


# -- what another checkpoint has already ------------------------------------------------------------------------------


def steps(spool: Spool, store: Double, *contents_of: dict[str, bytes]) -> list[Manifest]:
    """Flush one checkpoint after the other, each with the one before as the base; their manifests on the tier."""
    found: list[Manifest] = []
    for step, files in enumerate(contents_of):
        which = part(step)
        commit(spool, which, files)
        store.calls = []
        asyncio.run(flush(spool, which, TierUploadContext(store), base=found[-1] if found else None))
        found.append(manifest_on(store, which))
    return found


def test_a_chunk_that_the_checkpoint_before_has_is_named_and_not_sent(spool):
    store = Double()
    still, news = bytes(range(250)) * 4 * 19, b"a" * CHUNK
    first, second = steps(spool, store, {"w": still + news}, {"w": still + b"b" * CHUNK})
    assert len(store.puts(is_chunk)) == 1
    assert [chunk.stored.key for chunk in second.chunks()][:19] == [chunk.stored.key for chunk in first.chunks()][:19]
    assert second.owners == {part(0).checkpoint, part(1).checkpoint}


def test_unchanged_chunk_keeps_the_name_of_its_first_owner(spool):
    store = Double()
    _, _, third = steps(spool, store, {"w": b"x" * CHUNK}, {"w": b"x" * CHUNK}, {"w": b"x" * CHUNK})
    assert third.owners == {part(0).checkpoint} and store.puts(is_chunk) == []


def test_shared_chunk_that_its_owner_has_lost_is_sent(spool):
    store = Double()
    (first,) = steps(spool, store, {"w": b"x" * CHUNK + b"y" * CHUNK})
    asyncio.run(store.inner.delete([f"{first.run}/{next(first.chunks()).stored.key}"]))
    commit(spool, part(1), {"w": b"x" * CHUNK + b"y" * CHUNK})
    asyncio.run(flush(spool, part(1), TierUploadContext(store), base=first))
    assert manifest_on(store, part(1)).owners == {part(0).checkpoint, part(1).checkpoint}
    shutil.rmtree(spool.path(part(1)))
    asyncio.run(fetch(spool, part(1), {"tier": store}, MemoryBudget()))
    assert read(spool, part(1)) == {"w": b"x" * CHUNK + b"y" * CHUNK}


def test_nothing_is_borrowed_from_another_rank(spool):
    store = Double()
    for rank in (0, 1):
        which = part(rank, rank=rank, world=2)
        commit(spool, which, {"w": b"x" * CHUNK})
        base = manifest_on(store, part(0, rank=0, world=2)) if rank else None
        asyncio.run(flush(spool, which, TierUploadContext(store), base=base))
        assert manifest_on(store, which).owners == {which.checkpoint}


def test_where_a_dead_nodes_mark_stands_nothing_is_borrowed(spool):
    """It stands for a day; so long nobody would flush, where chunks under that checkpoint were named."""
    store = Double()
    (first,) = steps(spool, store, {"w": b"x" * CHUNK})
    when = time.time_ns() // 1_000_000 - 3_600_000
    mark = f"{pruning_prefix(first.run)}{first.part.checkpoint.name}.{when:012x}-12345678"
    asyncio.run(store.inner.put(mark, b""))
    commit(spool, part(1), {"w": b"x" * CHUNK})
    asyncio.run(flush(spool, part(1), TierUploadContext(store, timings=replace(USUAL, mark_reads=2)), base=first))
    assert manifest_on(store, part(1)).owners == {part(1).checkpoint}


def test_a_twin_that_does_not_answer_is_not_waited_for_at_every_chunk(spool):
    commit(spool, PART, content(7, chunks=40))
    other, store = Double(), Double()

    async def work() -> int:
        await flush(spool, PART, TierUploadContext(other))
        other.delay = 3600
        other.calls.clear()
        await flush(
            spool, PART, TierUploadContext(store), twin=ReferenceCopy(other, in_other_forms(other), answer_s=0.3)
        )
        return len(other.calls)

    assert asyncio.run(work()) <= 16  # of 40 chunks, those that were asked for together, before it was known to be mute
    assert keys(store.inner, is_manifest) == [PART.manifest_key]


def in_other_forms(store: Double) -> Manifest:
    """A tier's manifest of the part, as if none of its chunks were stored as today's encoder does."""
    manifest = decode(store.inner.objects[PART.manifest_key][0])
    files = []
    for file in manifest.files:
        stored = [msgspec.structs.replace(chunk.stored, xxh3_128="0" * 32) for chunk in file.chunks]
        chunks = [msgspec.structs.replace(c, stored=s) for c, s in zip(file.chunks, stored, strict=True)]
        files.append(msgspec.structs.replace(file, chunks=tuple(chunks)))
    return msgspec.structs.replace(manifest, files=tuple(files))


def test_a_manifest_that_only_grew_too_large_is_no_corruption(spool, monkeypatch):
    def refuse(manifest: Manifest) -> bytes:
        raise ManifestError("33554433 bytes; at most 33554432 are read")

    commit(spool, PART)
    monkeypatch.setattr("tierd.daemon.transfer.flush.encode_manifest", refuse)
    with pytest.raises(StoreRefused, match="no tier can describe it"):
        flushed(spool, Double())


# -- memory -----------------------------------------------------------------------------------------------------------


class Counting(MemoryBudget):
    """Notes the most that was out at a time."""

    most = 0

    async def _wait_for(self, size: int) -> None:
        await super()._wait_for(size)
        self.most = max(self.most, self._total - self._free)


@pytest.mark.parametrize("total", [CHUNK, 5 * CHUNK, 1000 * CHUNK])
def test_flush_uses_no_more_memory_than_its_budget_and_returns_all_of_it(spool, total):
    commit(spool, PART, content(7, chunks=20))
    budget = Counting(total)
    asyncio.run(flush(spool, PART, TierUploadContext(Double(), budget=budget)))
    assert 0 < budget.most <= total and budget._free == total


def test_a_chunk_that_a_part_holds_twice_is_one_object(spool):
    commit(spool, PART, {"w": b"x" * (3 * CHUNK), "v": b"x" * CHUNK})
    store = Double()
    flushed(spool, store)
    assert len(store.puts(is_chunk)) == 1
    assert asyncio.run(restored(spool, store)) == {"w": b"x" * (3 * CHUNK), "v": b"x" * CHUNK}


async def test_a_flush_that_was_cancelled_is_at_rest(spool, monkeypatch):
    """What it gives back to the budget is not in memory any more."""
    reading = []

    def slow(*args):
        reading.append(1)
        time.sleep(0.3)
        reading.pop()

    commit(spool, PART)
    monkeypatch.setattr("tierd.daemon.transfer.chunk_source.read_recent_chunk", slow)
    task = asyncio.ensure_future(flush(spool, PART, TierUploadContext(Double())))
    while not reading:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not reading
