"""Flushes that name each other's chunks, and prunes that delete them, at once and on several nodes: no manifest that is
on a tier ever lacks a chunk, whatever is cut off wherever."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from support.doubles import Double, contents, is_manifest
from support.timed import NEVER_MS, Ticking, standing, timed
from support.waiting import until
from support.world import CHUNK, RUN, commit, converge, described, part, reconciler, running

from tierd.core.errors import ObjectNotFound, StoreUnavailable
from tierd.core.ids import chunk_key
from tierd.core.manifest import Chunk, File, StoredChunk
from tierd.core.manifest_codec import decode, encode
from tierd.daemon import daemon_timings
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.daemon.tiers import announcements, intents
from tierd.daemon.tiers.tier_prune import prune
from tierd.stores.base import ObjectInfo
from tierd.stores.memory_store import MemoryStore

MADE = 0x19_0000_0000  # ms: when the nodes' first stamps are made
YOUNG = DaemonTimings(wall_ns=Ticking(MADE), own_stale_ms=NEVER_MS, mark_reads=20, mark_pause_s=0.0)


def aged(ms: int) -> DaemonTimings:
    """The usual timings, `ms` after `MADE`."""
    return replace(YOUNG, own_stale_ms=USUAL.own_stale_ms, wall_ns=standing(MADE + ms))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    YOUNG.wall_ns.at_ms = MADE  # the same in every run of a seed
    monkeypatch.setattr(daemon_timings, "given", lambda: YOUNG)


@pytest.mark.parametrize("folder", ["manifests", "flushing"])
@pytest.mark.parametrize("gone", [False, True], ids=["there", "deleted meanwhile"])
async def test_prune_deletes_nothing_beside_a_manifest_that_is_listed_and_missing(spool, folder, gone):
    """It may name the chunks that the prune is about to delete."""
    store = Double()
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    objects = store.inner.objects
    if folder == "flushing":
        raw = objects[part(2).manifest_key][0]
        await store.inner.delete([part(2).manifest_key])
        naming = intents.protect_chunks(store, part(2), raw, [], "aaaaaaaa")
        await naming.__aenter__()
    chunks = {key for key in objects if "/chunks/" in key}

    def miss(operation: str, key: str) -> None:
        if operation == "get" and f"/{folder}/{part(2).checkpoint.name}" in key:
            if gone and key in objects:
                del objects[key]
                store.inner.keys.remove(key)
            raise ObjectNotFound(key)

    store.before = miss
    if gone:
        assert (await prune(store, [part(1).checkpoint])).deleted
        return
    with pytest.raises(StoreUnavailable, match="is listed, but cannot be found"):
        await prune(store, [part(1).checkpoint])
    assert part(1).manifest_key in objects and chunks <= objects.keys()


def test_a_flush_that_has_ended_leaves_another_nodes_intent_of_the_same_part():
    store = MemoryStore()

    async def left() -> list[str]:
        async with intents.protect_chunks(store, part(1), b"one", [], "aaaaaaaa"):
            async with intents.protect_chunks(store, part(1), b"other", [], "bbbbbbbb"):
                pass
            return [info.key[-8:] async for info in store.scan(f"{RUN}/flushing/")]

    assert asyncio.run(left()) == ["aaaaaaaa"]


def test_a_flush_takes_its_intent_back_where_a_listing_does_not_show_it_yet():
    """ "S3" seed 420: it stood for a quarter of an hour, and held the prunes of the run up."""

    class Stale(MemoryStore):
        async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo]:
            return
            yield

    store = Stale()

    async def left() -> list[str]:
        async with intents.protect_chunks(store, part(1), b"one", [], "aaaaaaaa"):
            pass
        return list(store.keys)

    assert asyncio.run(left()) == []


async def test_announcement_of_a_node_lasts_during_its_flush_and_counts_for_other_nodes():
    store, own = MemoryStore(), part(1).checkpoint
    async with announcements.announcing(store, own, "aaaaaaaa"):
        assert await announcements.find_senders(store, RUN, "bbbbbbbb") == {own: {"aaaaaaaa"}}
        assert await announcements.find_senders(store, RUN, "aaaaaaaa") == {}
        await intents.sweep(
            store, RUN, "aaaaaaaa", replace(YOUNG, own_stale_ms=0)
        )  # a flush may take longer than a quarter of an hour
        assert await announcements.find_senders(store, RUN, "bbbbbbbb") == {own: {"aaaaaaaa"}}
    assert await contents(store) == {}
    await store.put(f"{RUN}/flushing/{own.name}/sending.{0:012x}-aaaaaaaa", b"")  # of 1970
    assert await announcements.find_senders(store, RUN, "bbbbbbbb") == {}
    await intents.sweep(store, RUN, "bbbbbbbb")
    assert await contents(store) == {}


async def test_a_mark_from_far_ahead_holds_nothing_up():
    """By a clock that was wrong, or by somebody who wants to."""
    store, own = MemoryStore(), part(1).checkpoint
    await store.put(f"{RUN}/pruning/{own.name}.ffffffffffff-00000000", b"")
    async with intents.protect_chunks(store, part(2), b"manifest", [own], "aaaaaaaa"):
        pass
    assert (await intents.sweep(store, RUN, "aaaaaaaa"))[0]
    assert not (await prune(store, [own])).deleted
    assert not [info.key async for info in store.scan(f"{RUN}/pruning/")]


@pytest.mark.parametrize("age", [USUAL.own_stale_ms - 1, USUAL.own_stale_ms])
def test_a_flush_waits_for_a_deletion_of_its_own_node_only_until_that_is_over(age):
    """Seed 21 of `python -m faults kills`: the mark stands until its deletion is done again, which may be late."""
    store, own = MemoryStore(), part(1).checkpoint

    async def names(who: str) -> bool:
        try:
            async with intents.protect_chunks(store, part(2), b"manifest", [own], who, aged(age)):
                return True
        except StoreUnavailable:
            return False

    async def work() -> list[bool]:
        await store.put(f"{RUN}/pruning/{own.name}.{MADE:012x}-aaaaaaaa", b"")
        return [await names("aaaaaaaa"), await names("bbbbbbbb")]

    assert asyncio.run(work()) == [age >= USUAL.own_stale_ms, False]


@pytest.mark.parametrize(("age_s", "shared"), [(5, True), (14, True), (16, False), (500, False)])
def test_chunk_marked_by_a_prune_that_an_outage_interrupted_is_sent_instead_of_waited_for(age_s, shared):
    """Its marks stand for a quarter of an hour: flushes that name what lies there waited and failed for ten minutes."""
    store, own = MemoryStore(), part(1).checkpoint

    async def work() -> bool:
        await store.put(f"{RUN}/pruning/{own.name}.{MADE:012x}-aaaaaaaa", b"")
        return own not in await intents.long_marked(store, RUN, aged(1000 * age_s))

    assert asyncio.run(work()) == shared


def test_a_mark_from_before_the_clock_was_set_back_a_day_holds_up_its_own_node_as_briefly_as_any(monkeypatch):
    """It held up each flush that named a chunk there until the clock had made up for the day."""
    now_s = itertools.count(1000, USUAL.own_stale_ms // 1000)  # each look is a quarter of an hour after the one before
    monkeypatch.setattr(announcements.time, "monotonic", lambda: float(next(now_s)))
    store, own = MemoryStore(), part(1).checkpoint

    async def over(who: str) -> bool:
        return bool((await intents.sweep(store, RUN, who, aged(-86_000_000))).cut)

    async def work() -> list[bool]:
        await store.put(f"{RUN}/pruning/{own.name}.{MADE:012x}-aaaaaaaa", b"")
        return [await over("aaaaaaaa"), await over("aaaaaaaa"), await over("bbbbbbbb")]

    assert asyncio.run(work()) == [False, True, False]


async def test_leftover_of_a_prune_under_a_name_that_still_shares_chunks_is_deleted_when_its_mark_is_over(
    spool, quick, monkeypatch
):
    """The manifest is gone, a chunk that nobody names is not, and a later checkpoint borrows another one of there."""
    store = Double()

    def refuse(operation: str, key: str) -> None:
        if operation == "delete" and "/chunks/" in key:
            raise StoreUnavailable("cut off")

    for step in (1, 2):
        commit(spool, part(step), {"same": bytes(CHUNK), "other": bytes([step]) * CHUNK})
        if step == 1:
            await converge(spool, {"tier": store}, keep=1)
    store.before = refuse
    async with running(reconciler(spool, {"tier": store}, keep=1)) as daemon:
        await until(lambda: ("delete", part(1).manifest_key) in store.calls and daemon.workers["tier"].last_error)
    store.before = None
    timed(monkeypatch, own_stale_ms=0)
    await converge(spool, {"tier": store}, keep=1)
    keys = [key for key in await contents(store.inner) if key.startswith(RUN)]
    (manifest,) = [decode(bytes(await store.inner.get(key))) for key in keys if is_manifest(key)]
    named = {f"{RUN}/{chunk.stored.key}" for chunk in manifest.chunks() if chunk.stored}
    assert {key for key in keys if not is_manifest(key)} == named, "or a chunk, or a mark, is left"
    assert manifest.owners == {part(1).checkpoint, part(2).checkpoint}


def most_in_memory(survivors: int) -> int:
    """Bytes at the most while a checkpoint is pruned beside so many that all name the same chunks."""
    store, names = MemoryStore(), [f"{number:032x}" for number in range(1000)]

    async def pruned() -> None:
        for step in range(survivors + 1):
            which, keys = part(step), [chunk_key(part(0), name, "raw") for name in names]
            stored = [
                StoredChunk(codec="raw", size=1, xxh3_128=name, key=key) for name, key in zip(names, keys, strict=True)
            ]
            chunks = tuple(Chunk(size=1, xxh3_128=one.xxh3_128, stored=one) for one in stored)
            await store.put(
                which.manifest_key, encode(described(which, files=(File(path="w", size=1000, chunks=chunks),)))
            )
        tracemalloc.start()
        assert (await prune(store, [part(1).checkpoint])).deleted

    try:
        asyncio.run(pruned())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_pruning_takes_no_more_memory_beside_many_that_share_their_chunks():
    assert most_in_memory(32) < 1.5 * most_in_memory(8)
