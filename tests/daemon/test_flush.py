"""Flush: what a tier shows was read back from it first, and what was cut off goes on where it stopped."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from support.doubles import Double, contents, damage, flip, flipped, is_chunk, is_manifest
from support.world import commit, content, part, read

from tierd.core.errors import CorruptChunk, StoreUnavailable
from tierd.daemon.fetch import fetch
from tierd.daemon.flush import flush
from tierd.spool import Spool

PART = part(7)
FILES = content(7)


def flushed(spool: Spool, *stores) -> None:
    async def work():
        for store in stores:
            await flush(spool, PART, store)

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
def test_what_does_not_read_back_as_it_was_put_is_never_shown(spool, spoil):
    commit(spool, PART)
    store = Double()
    store.spoil = lambda key, data: spoil(data) if is_chunk(key) else data
    with pytest.raises(StoreUnavailable, match="read back"):
        flushed(spool, store)
    assert not keys(store.inner, is_manifest)
    store.spoil = None
    flushed(spool, store)
    assert asyncio.run(restored(spool, store)) == FILES


async def restored(spool: Spool, *stores) -> dict[str, bytes]:
    """The part from the tiers alone."""
    shutil.rmtree(spool.path(PART), ignore_errors=True)
    await fetch(spool, PART, {f"tier{number}": store for number, store in enumerate(stores)})
    return read(spool, PART)


def test_an_interrupted_flush_does_not_send_again_what_lies_there(spool):
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


def test_what_an_interrupted_flush_left_corrupt_is_sent_again(spool):
    commit(spool, PART)
    store = Double()
    flushed(spool, store)
    victim = keys(store.inner, is_chunk)[0]
    asyncio.run(flip(store.inner, victim))
    store.calls = []
    flushed(spool, store)
    assert store.puts(is_chunk) == [victim]


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


def test_chunks_deleted_while_the_manifest_was_on_its_way_take_it_back(spool):
    commit(spool, PART)
    store = Double()

    def another_launch_prunes(operation, key):
        if operation == "put" and is_manifest(key):
            victim = next(key for key in store.inner._keys if is_chunk(key))
            store.inner._keys.remove(victim)
            del store.inner._objects[victim]

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
