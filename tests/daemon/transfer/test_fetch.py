"""Fetch: a part is made whole from any mixture of copies, and none is given up before every other was asked."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from support.doubles import Double, contents, damage, flip, is_chunk
from support.world import RUN, commit, content, listing, part, read, reconciler

from tierd.core.errors import CorruptChunk, ManifestError, StoreUnavailable
from tierd.core.ids import chunk_key
from tierd.core.manifest import MANIFEST_NAME, Chunk, File, StoredChunk
from tierd.core.manifest_codec import decode, encode, seal
from tierd.daemon.transfer import download as download_module
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.restore_to_directory import restore_to_directory
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.spool.file_io import digest
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore

PART = part(7)
FILES = content(7)


def flushed(spool: Spool, *stores) -> None:
    async def work():
        for store in stores:
            await flush(spool, PART, TierUploadContext(store))

    asyncio.run(work())


def keys(store, of=lambda key: True) -> list[str]:
    return [key for key in asyncio.run(contents(store)) if of(key)]


HARMS = ["flip", "truncate", "empty", "lengthen", "remove", "directory", "symlink", "fifo"]


@pytest.mark.parametrize("victim", ["weights.bin", "deep/er/state.json", "empty", MANIFEST_NAME])
@pytest.mark.parametrize("harm", HARMS)
def test_damaged_local_file_of_any_kind_is_repaired(spool, harm, victim):
    commit(spool, PART)
    store = MemoryStore()
    flushed(spool, store)
    path = spool.path(PART) / victim
    if victim == "empty" and harm in ("flip", "truncate", "empty"):
        path.write_bytes(b"something")
    else:
        damage(path, harm)
    asyncio.run(fetch(spool, PART, {"tier": store}))
    assert read(spool, PART) == FILES
    assert path.is_file() and not path.is_symlink()


@pytest.mark.parametrize("of", ["bytes", "manifest"])
def test_one_wrong_read_of_a_local_copy_is_no_corruption(spool, monkeypatch, of):
    commit(spool, PART)
    left = [CorruptChunk("a flipped bit") if of == "bytes" else ManifestError("a flipped bit")]
    owner, name = (download_module, "read_chunk") if of == "bytes" else (Spool, "manifest")
    real = getattr(owner, name)

    def wrong_once(*arguments):
        if left:
            raise left.pop()
        return real(*arguments)

    monkeypatch.setattr(owner, name, wrong_once)
    assert asyncio.run(fetch(spool, PART, {})).chunks == 0, "no tier is needed, and none is there"
    assert not left and read(spool, PART) == FILES


def test_a_mixture_of_half_bad_tiers_makes_a_whole(spool):
    """Each of four chunks is right in exactly one place: the spool, one tier or the other."""
    commit(spool, PART)
    first, second = MemoryStore(), MemoryStore()
    flushed(spool, first, second)
    chunks = sorted(keys(first, is_chunk))
    for number, key in enumerate(chunks):
        asyncio.run(flip(second if number % 2 else first, key))
    for name in ("weights.bin", "deep/er/state.json"):
        path = spool.path(PART) / name
        path.write_bytes(bytes(len(path.read_bytes())))
    fetched = asyncio.run(fetch(spool, PART, {"first": first, "second": second}))
    assert read(spool, PART) == FILES
    assert set(fetched.tiers) == {"first", "second"}
    assert set(fetched.defects) == {"first"}  # the second was asked only for what the first had wrong


def test_whole_part_is_fetched_into_an_empty_spool(spool, tmp_path):
    commit(spool, PART)
    store = MemoryStore()
    flushed(spool, store)
    fresh = Spool(tmp_path / "fresh")
    fetched = asyncio.run(fetch(fresh, PART, {"tier": store}))
    assert read(fresh, PART) == FILES and fetched.tiers == ("tier",)
    assert [path for path in listing(fresh) if path.startswith(".tierd/")] == [
        ".tierd/alive",
        ".tierd/boot",
        ".tierd/fetch",
        ".tierd/local-only",
        ".tierd/node",
        ".tierd/quarantine",
        ".tierd/recycle",
        ".tierd/retention",
        ".tierd/saved",
        ".tierd/stage",
        ".tierd/timeline",
        ".tierd/trash",
    ]


@pytest.mark.parametrize("where", ["local", "first", "second", "local first", "local second", "first second"])
def test_a_corrupt_manifest_is_made_good_from_any_other(spool, where):
    commit(spool, PART)
    stores = {"first": MemoryStore(), "second": MemoryStore()}
    flushed(spool, *stores.values())
    path = spool.path(PART) / MANIFEST_NAME
    for place in where.split():
        if place == "local":
            damage(path, "flip")
        else:
            asyncio.run(flip(stores[place], PART.manifest_key))
    fetched = asyncio.run(fetch(spool, PART, stores))
    assert read(spool, PART) == FILES
    assert set(fetched.defects) == set(where.split()) - {"local"}


def test_a_corrupt_manifest_everywhere_is_proven_corruption(spool):
    commit(spool, PART)
    store = MemoryStore()
    flushed(spool, store)
    damage(spool.path(PART) / MANIFEST_NAME, "flip")
    asyncio.run(flip(store, PART.manifest_key))
    with pytest.raises(CorruptChunk):
        asyncio.run(fetch(spool, PART, {"tier": store}))


def test_a_chunk_that_is_bad_everywhere_is_named_with_every_reason(spool):
    commit(spool, PART)
    stores = {"first": MemoryStore(), "second": MemoryStore()}
    flushed(spool, *stores.values())
    path = spool.path(PART) / "deep/er/state.json"
    damage(path, "flip")
    key = f"{RUN}/" + next(
        chunk.stored.key
        for file in decode(bytes(asyncio.run(stores["first"].get(PART.manifest_key)))).files
        for chunk in file.chunks
        if file.path == "deep/er/state.json"
    )
    asyncio.run(flip(stores["first"], key))
    asyncio.run(stores["second"].delete([key]))
    with pytest.raises(CorruptChunk) as error:
        asyncio.run(fetch(spool, PART, stores))
    message = str(error.value)
    assert "local" in message and "first" in message and "second" in message and "missing" in message


@pytest.mark.parametrize("order", [("good", "down"), ("down", "good")])
def test_tier_that_is_down_does_not_stop_a_repair_from_another(spool, order):
    commit(spool, PART)
    good, down = Double(), Double()
    flushed(spool, good, down)
    down.error = StoreUnavailable("down")
    stores = {"good": good, "down": down}
    damage(spool.path(PART) / "weights.bin", "remove")
    fetched = asyncio.run(fetch(spool, PART, {name: stores[name] for name in order}))
    assert read(spool, PART) == FILES and fetched.tiers == ("good",) and not fetched.defects


def test_nothing_is_called_corrupt_while_a_tier_cannot_be_asked(spool):
    commit(spool, PART)
    bad, down = Double(), Double()
    flushed(spool, bad, down)
    for key in keys(bad.inner, is_chunk):
        asyncio.run(flip(bad.inner, key))
    down.error = StoreUnavailable("down")
    damage(spool.path(PART) / "weights.bin", "flip")
    with pytest.raises(StoreUnavailable):
        asyncio.run(fetch(spool, PART, {"bad": bad, "down": down}))


def test_tier_whose_manifest_describes_other_content_is_not_believed(spool):
    """Sealed and well-formed, and about other bytes: with the spool's manifest whole, the spool's word counts."""
    commit(spool, PART)
    store = MemoryStore()
    flushed(spool, store)
    manifest = decode(bytes(asyncio.run(store.get(PART.manifest_key))))
    other = b"other bytes altogether"
    key = chunk_key(PART, digest(other), "raw")
    chunk = Chunk(
        size=len(other),
        xxh3_128=digest(other),
        stored=StoredChunk(codec="raw", size=len(other), xxh3_128=digest(other), key=key),
    )
    lie = msgspec.structs.replace(manifest, files=(File(path="weights.bin", size=len(other), chunks=(chunk,)),))
    asyncio.run(store.put(f"{RUN}/{key}", other))
    asyncio.run(store.put(PART.manifest_key, encode(lie)))
    damage(spool.path(PART) / "weights.bin", "flip")
    fetched = asyncio.run(fetch(spool, PART, {"tier": store}))
    assert read(spool, PART) == FILES, "what the tier has under the right digest is right, whatever its manifest says"
    assert "other content" in fetched.defects["tier"]
    damage(spool.path(PART) / "weights.bin", "flip")
    asyncio.run(store.delete([key for key in keys(store, is_chunk) if digest(other) not in key]))
    with pytest.raises(CorruptChunk, match="other content"):
        asyncio.run(fetch(spool, PART, {"tier": store}))


def test_forged_manifest_on_a_tier_does_not_lose_the_right_copy_of_another(spool, tmp_path):
    commit(spool, PART)
    stores = {"first": MemoryStore(), "second": MemoryStore()}
    flushed(spool, *stores.values())
    reported = decode(bytes(asyncio.run(stores["first"].get(PART.manifest_key))))
    *files, last = reported.files
    chunk, *rest = last.chunks
    key = chunk.stored.key.replace(chunk.xxh3_128, "0" * 32)
    false = Chunk(size=chunk.size, xxh3_128="0" * 32, stored=msgspec.structs.replace(chunk.stored, key=key))
    files.append(msgspec.structs.replace(last, chunks=(false, *rest)))
    lie = encode(msgspec.structs.replace(reported, files=tuple(files)))
    asyncio.run(stores["first"].put(PART.manifest_key, lie))
    fresh = Spool(tmp_path / "fresh")
    fetched = asyncio.run(fetch(fresh, PART, stores))
    assert read(fresh, PART) == FILES and set(fetched.defects) == {"first"}
    found = asyncio.run(restore_to_directory(stores, RUN, tmp_path / "to", None, None, Progress()))
    assert found.step == PART.checkpoint.step and not found.skipped
    for name, data in FILES.items():
        assert (tmp_path / "to" / PART.name / name).read_bytes() == data
    daemon = reconciler(Spool(tmp_path / "some"), stores)
    for some in ({}, {"weights.bin": ((0, 1),)}):  # proves nothing: the place that was asked first may lie
        asyncio.run(daemon.repairs.fetch(PART, chunk_runs=some))
        assert asyncio.run(stores["second"].get(PART.manifest_key))


def test_chunk_in_another_form_than_its_manifest_says_is_detected(spool, tmp_path):
    commit(spool, PART)
    near, far = MemoryStore(), MemoryStore()
    flushed(spool, near, far)
    manifest = decode(bytes(asyncio.run(near.get(PART.manifest_key))))
    packed = next(chunk for chunk in manifest.chunks() if chunk.stored.codec == "zst")
    other = msgspec.structs.replace(
        packed.stored, codec="raw", size=packed.size, xxh3_128=packed.xxh3_128, key=f"{packed.stored.key[:-4]}.raw"
    )
    files = tuple(
        msgspec.structs.replace(
            file,
            chunks=tuple(msgspec.structs.replace(c, stored=other) if c == packed else c for c in file.chunks),
        )
        for file in manifest.files
    )
    asyncio.run(near.put(PART.manifest_key, encode(msgspec.structs.replace(manifest, files=files))))
    fresh = Spool(tmp_path / "fresh")
    asyncio.run(fetch(fresh, PART, {"near": near}))
    assert read(fresh, PART) == FILES


@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_fetch_reads_a_chunk_by_its_digest_on_a_tier_that_lost_its_manifest(spool, harm):
    commit(spool, PART)
    store = MemoryStore()
    flushed(spool, store)
    asyncio.run(flip(store, PART.manifest_key) if harm == "flip" else store.delete([PART.manifest_key]))
    damage(spool.path(PART) / "weights.bin", "remove")
    damage(spool.path(PART) / "deep/er/state.json", "flip")
    fetched = asyncio.run(fetch(spool, PART, {"tier": store}))
    assert read(spool, PART) == FILES and fetched.tiers == ("tier",)


@pytest.mark.parametrize("escape", ["../outside", "/tmp/tierd-escape", "a/../../outside", "deep/../..//outside"])
def test_a_hostile_manifest_never_writes_outside(spool, tmp_path, escape):
    commit(spool, PART)
    store = MemoryStore()
    flushed(spool, store)
    manifest = decode(bytes(asyncio.run(store.get(PART.manifest_key))))
    hostile = tuple(
        msgspec.structs.replace(file, path=escape) if file.path == "weights.bin" else file for file in manifest.files
    )
    asyncio.run(store.put(PART.manifest_key, seal(msgspec.structs.replace(manifest, files=hostile))))
    fresh = Spool(tmp_path / "fresh")
    before = listing(fresh)
    with pytest.raises(CorruptChunk):
        asyncio.run(fetch(fresh, PART, {"tier": store}))
    assert listing(fresh) == before
    assert not os.path.exists("/tmp/tierd-escape") and not list(tmp_path.rglob("outside"))


def test_a_link_out_of_the_part_is_never_written_through(spool, tmp_path):
    commit(spool, PART)
    store = MemoryStore()
    flushed(spool, store)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "state.json").write_bytes(b"mine")
    shutil.rmtree(spool.path(PART) / "deep" / "er")
    (spool.path(PART) / "deep" / "er").symlink_to(outside)
    asyncio.run(fetch(spool, PART, {"tier": store}))
    assert (outside / "state.json").read_bytes() == b"mine"
    assert read(spool, PART) == FILES and not (spool.path(PART) / "deep" / "er").is_symlink()


@pytest.mark.parametrize("victim", [MANIFEST_NAME, "weights.bin"])
def test_a_disk_that_does_not_answer_proves_nothing(spool, monkeypatch, victim):
    commit(spool, PART)
    bad = spool.path(PART) / victim

    def failing(path, *rest, **options):
        if Path(path) == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *rest, **options)

    real = os.open
    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(StoreUnavailable):
        asyncio.run(fetch(spool, PART, {"tier": MemoryStore()}))


def test_a_fetch_that_is_cut_off_leaves_a_whole_part_or_none(spool, tmp_path):
    """Cancelled at every step of the way, the commit included."""
    commit(spool, PART)
    store = MemoryStore()
    flushed(spool, store)

    async def cut(fresh: Spool, after: int) -> bool:
        work = asyncio.ensure_future(fetch(fresh, PART, {"tier": store}))
        for _ in range(after):
            await asyncio.sleep(0)
            if work.done():
                return True
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return work.done() and not work.cancelled()

    for after in range(0, 4000, 37):
        fresh = Spool(tmp_path / f"fresh{after}")
        asyncio.run(cut(fresh, after))  # ends the loop, and so its threads
        if fresh.parts():
            assert read(fresh, PART) == FILES, after
