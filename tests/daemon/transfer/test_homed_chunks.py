"""Chunks that several ranks hold: all nodes together put each once, and each node's manifest names them verified."""

from __future__ import annotations

import asyncio
import random
from bisect import insort
from collections import Counter
from dataclasses import replace

import pytest
import zstandard
from support.chunk_keys import owner_name
from support.doubles import Double, contents, flip, is_chunk
from support.timed import QUICK
from support.world import CHUNK, commit, manifest_on, part, read

from tierd.codec.block_patches import BLOCK
from tierd.core.errors import StoreUnavailable
from tierd.core.ids import PartId, chunk_directory
from tierd.core.planning import flush_order
from tierd.core.planning.copies import most_freed_size, total_stored_size
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.scrub.tier_repair import TierRepairer
from tierd.daemon.tiers.tier_objects import verify_part
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.tiers.tier_prune import prune, quarantine
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import FlushResult, flush
from tierd.daemon.transfer.restore_to_directory import restore_to_directory
from tierd.daemon.transfer.run_copy import copy_run
from tierd.daemon.transfer.tier_fetch import fetch, relay
from tierd.spool.file_io import digest
from tierd.spool.spool import Spool
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.retry import RetryingStore

WORLD, SHARED = 4, 80  # ranks, each on a node of its own; chunks that all of them hold
SOON = DaemonTimings(chunks_listed_s=0.02, chunks_awaited_s=0.2, mark_pause_s=QUICK.mark_pause_s)


@pytest.fixture
def nodes(tmp_path) -> list[Spool]:
    return [Spool(tmp_path / f"node{rank}") for rank in range(WORLD)]


def files(step: int, rank: int, shared: bytes | None = None) -> dict[str, bytes]:
    noise = random.Random(step).randbytes(SHARED * CHUNK) if shared is None else shared
    return {"shared": noise, "own": random.Random(f"{step} {rank}").randbytes(5 * CHUNK)}


def save(nodes: list[Spool], step: int, shared: bytes | None = None) -> list[PartId]:
    parts = [part(step, rank=rank, world=len(nodes)) for rank in range(len(nodes))]
    for rank, which in enumerate(parts):
        senders = {0: (rank, len(nodes), True)}
        commit(nodes[rank], which, files(step, rank, shared), homes={"shared": 0}, senders=senders)
    return parts


async def send(nodes: list[Spool], parts: list[PartId], store, base: int | None = None) -> list[FlushResult]:
    """Flush all nodes' parts at the same time."""

    async def work(rank: int) -> FlushResult:
        older = await manifest_on(store, part(base, rank=rank, world=WORLD)) if base is not None else None
        return await flush(nodes[rank], parts[rank], TierUploadContext(store, timings=SOON), base=older)

    return list(await asyncio.gather(*map(work, range(len(nodes)))))


async def check(nodes: list[Spool], parts: list[PartId], store, tmp_path, shared: bytes | None = None) -> None:
    """Every rank's part is on the tier, and a node that has nothing else restores it."""
    for rank, which in enumerate(parts):
        assert (await verify_part(store, which, lambda size: None))[1] == []
        fresh = Spool(tmp_path / f"fresh {which.checkpoint.step} {rank}")
        await fetch(fresh, which, {"tier": store})
        assert read(fresh, which) == files(which.checkpoint.step, rank, shared)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_nodes_together_put_each_shared_chunk_once(nodes, tmp_path, encrypted):
    double = Double()
    store = EncryptedStore(double, EncryptionKey(b"k" * 32)) if encrypted else double
    parts = save(nodes, 1)
    sent = await send(nodes, parts, store)
    puts = Counter(double.puts(is_chunk))
    assert len(puts) == SHARED + WORLD * 5 and puts.total() <= 1.1 * len(puts)
    assert sum(result.sent for result in sent) == puts.total() * CHUNK
    assert max(result.sent for result in sent) < 2 * min(result.sent for result in sent)
    for rank, which in enumerate(parts):
        homes = {chunk.home for chunk in (await manifest_on(store, which)).chunks()}
        assert homes == {None, 0}
        assert (await manifest_on(store, which)).directories == {
            chunk_directory(which.checkpoint, 0),
            chunk_directory(which.checkpoint, rank),
        }
    await check(nodes, parts, store, tmp_path)


@pytest.mark.parametrize("count", [2, 4])
async def test_nodes_together_put_chunks_once_that_are_fewer_than_they_have_in_transfer(nodes, tmp_path, count):
    store = Double()
    parts = save(nodes[:count], 1, random.Random(1).randbytes(9 * count * CHUNK))
    results = await send(nodes[:count], parts, store)
    assert Counter(store.puts(is_chunk)).total() == (9 + 5) * count
    assert [result.sent for result in results] == [(9 + 5) * CHUNK] * count


async def test_later_node_sends_only_its_own_chunks(nodes, tmp_path):
    store = Double()
    parts = save(nodes, 1)
    for rank in (2, 0, 3, 1):
        result = await flush(nodes[rank], parts[rank], TierUploadContext(store, timings=SOON))
        assert result.sent == (SHARED * (rank == 2) + 5) * CHUNK and result.stored == (SHARED + 5) * CHUNK
    await check(nodes, parts, store, tmp_path)


async def test_node_that_waited_for_others_in_vain_waits_less_the_next_time(nodes, tmp_path):
    context = TierUploadContext(Double(), timings=SOON)
    await flush(nodes[0], save(nodes, 1)[0], context)
    assert context.silences == {"run": SOON.chunks_listed_s}
    parts = save(nodes, 2)
    await asyncio.gather(*(flush(nodes[rank], parts[rank], replace(context, silences={})) for rank in range(1, WORLD)))
    await flush(nodes[0], parts[0], context)
    assert context.silences == {"run": SOON.chunks_listed_s}, "nothing was missing, so nothing is known"


async def test_chunk_of_another_node_that_is_corrupt_is_sent_again(nodes, tmp_path):
    store = Double()
    parts = save(nodes, 1)
    await flush(nodes[0], parts[0], TierUploadContext(store, timings=SOON))
    shared = [chunk.stored.key for chunk in (await manifest_on(store, parts[0])).chunks() if chunk.home == 0]
    await flip(store.inner, f"run/{shared[7]}")
    assert (await flush(nodes[1], parts[1], TierUploadContext(store, timings=SOON))).sent == 6 * CHUNK
    await check(nodes[:2], parts[:2], store, tmp_path)


def arrives_before_the_put(store: Double, objects: dict[str, bytes]) -> None:
    """Have each of these objects put by another node when this node, whose listing does not show it, begins its put."""

    def before(operation: str, key: str) -> None:
        if operation == "put" and key in objects:
            insort(store.inner.keys, key)
            store.inner.objects[key] = objects.pop(key), 1

    store.before = before


TEXT = b"words " * (SHARED * CHUNK // 6)


@pytest.mark.parametrize("kind", ["the same", "another encoding", "wrong"])
async def test_flush_replaces_object_that_its_listing_lacked_only_if_it_is_wrong(nodes, tmp_path, kind):
    store, first, parts = Double(), Double(), save(nodes, 1, TEXT)
    await flush(nodes[0], parts[0], TierUploadContext(first, timings=SOON))
    chunks = [chunk for chunk in (await manifest_on(first, parts[0])).chunks() if chunk.home == 0]
    pieces = {digest(piece): piece for at in range(0, len(TEXT), CHUNK) if (piece := TEXT[at : at + CHUNK])}
    packer = zstandard.ZstdCompressor(level=19, write_checksum=True)
    objects = {
        f"run/{chunk.stored.key}": {
            "the same": first.inner.objects[f"run/{chunk.stored.key}"][0],
            "another encoding": packer.compress(pieces[chunk.xxh3_128]),
            "wrong": b"spoiled on its way",
        }[kind]
        for chunk in chunks
        if chunk.stored.codec == "zst"
    }
    arrived = dict(objects)
    arrives_before_the_put(store, objects)
    sent = await flush(nodes[1], parts[1], TierUploadContext(store, timings=SOON))
    assert not objects and len(arrived) >= 2
    for key, data in arrived.items():
        assert (store.inner.objects[key][0] == data) is (kind != "wrong")
    replaced = sum(len(store.inner.objects[key][0]) for key in arrived) if kind == "wrong" else 0
    assert sent.sent == 5 * CHUNK + replaced
    await flush(nodes[0], parts[0], TierUploadContext(store, timings=SOON))
    await check(nodes, parts[:2], store, tmp_path, TEXT)


async def test_flush_does_not_replace_object_that_it_cannot_read(nodes, tmp_path):
    """Manifests of other nodes may name it in their own encoding."""
    store, first, parts = Double(), Double(), save(nodes, 1)
    await flush(nodes[0], parts[0], TierUploadContext(first, timings=SOON))
    key = f"run/{next(chunk.stored.key for chunk in (await manifest_on(first, parts[0])).chunks() if chunk.home == 0)}"

    def before(operation: str, called: str) -> None:
        if (operation, called) == ("get", key):
            raise StoreUnavailable("this object is slow")

    await store.inner.put(key, right := first.inner.objects[key][0])
    store.before = before
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="slow"):
            await flush(nodes[1], parts[1], TierUploadContext(store, timings=SOON))
    assert key not in store.puts() and store.inner.objects[key][0] == right
    store.before = None
    for rank in (1, 0):
        await flush(nodes[rank], parts[rank], TierUploadContext(store, timings=SOON))
    await check(nodes, parts[:2], store, tmp_path)


async def test_put_whose_answer_was_lost_is_verified(nodes, tmp_path):
    async def at_once(_: float) -> None: ...

    def before(operation: str, key: str) -> None:
        if operation == "put" and is_chunk(key) and key not in lost:
            lost.append(key)
            double.lose = 1

    double, parts, lost = Double(), save(nodes, 1), list[str]()
    double.before = before
    sent = await flush(nodes[0], parts[0], TierUploadContext(RetryingStore(double, sleep=at_once), timings=SOON))
    assert len(lost) == SHARED + 5 and sent.sent == 5 * CHUNK
    await check(nodes[:1], parts[:1], double, tmp_path)


async def test_object_that_another_encoder_has_replaced_is_kept_and_each_manifest_describes_it(nodes, tmp_path):
    """Two nodes with different versions of zstd put one chunk at the same time, and the last put remains."""
    store, text = Double(), b"words " * (SHARED * CHUNK // 6)
    parts = save(nodes, 1, text)
    await send(nodes, parts, store)
    before = await manifest_on(store, parts[0])
    chunk = next(chunk for chunk in before.chunks() if chunk.stored.codec == "zst")
    places = [where for where, same in before.places() if same == chunk]
    pieces = (text[at : at + CHUNK] for at in range(0, len(text), CHUNK))
    raw = next(piece for piece in pieces if digest(piece) == chunk.xxh3_128)
    other = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(raw)
    await store.put(f"run/{chunk.stored.key}", other)
    store.calls.clear()
    for rank, which in enumerate(parts):
        repairer = TierRepairer(nodes[rank], {"tier": store}, "tier", which, MemoryBudget())
        await repairer.repair(await manifest_on(store, which), places)
        assert (await verify_part(store, which, lambda size: None))[1] == []
    assert not store.puts(is_chunk)
    await check(nodes, parts, store, tmp_path, text)


async def test_shared_patches_are_put_once_too(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(flush_order, "SMALLEST_SHARED_BYTES", 1)
    store, first = Double(), files(1, 0)["shared"]
    second = b"".join(bytes(BLOCK) + first[at + BLOCK : at + CHUNK] for at in range(0, len(first), CHUNK))
    await send(nodes, save(nodes, 1), store)
    store.calls.clear()
    parts = save(nodes, 2, second)
    for rank, which in enumerate(parts):
        base = await manifest_on(store, part(1, rank=rank, world=WORLD))
        await flush(nodes[rank], which, TierUploadContext(store, timings=SOON), base=base)
    patches = Counter(key for key in store.puts(is_chunk) if ".patch" in key)
    assert len(patches) == patches.total() == SHARED
    await check(nodes, parts, store, tmp_path, second)


@pytest.mark.parametrize("is_right", [True, False])
async def test_flush_replaces_patch_that_its_listing_lacked_only_if_it_is_wrong(nodes, tmp_path, monkeypatch, is_right):
    monkeypatch.setattr(flush_order, "SMALLEST_SHARED_BYTES", 1)
    store, first, text = Double(), Double(), files(1, 0)["shared"]
    older = save(nodes, 1)
    for place in (store, first):
        await send(nodes, older, place)
    parts = save(nodes, 2, bytes(BLOCK) + text[BLOCK:])
    base = await manifest_on(first, part(1, rank=0, world=WORLD))
    await flush(nodes[0], parts[0], TierUploadContext(first, timings=SOON), base=base)
    (key,) = [key for key in first.puts() if ".patch" in key]
    patch = first.inner.objects[key][0]
    arrives_before_the_put(store, {key: patch if is_right else patch[:-1] + bytes([patch[-1] ^ 1])})
    base = await manifest_on(store, part(1, rank=1, world=WORLD))
    store.calls.clear()
    await flush(nodes[1], parts[1], TierUploadContext(store, timings=SOON), base=base)
    assert store.puts().count(key) == (1 if is_right else 2)
    assert store.inner.objects[key][0] == patch
    assert (await verify_part(store, parts[1], lambda size: None))[1] == []


async def test_equal_chunks_of_an_older_checkpoint_are_named_by_all_ranks(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(flush_order, "SMALLEST_SHARED_BYTES", 1)
    store, frozen = Double(), files(1, 0)["shared"]
    await send(nodes, save(nodes, 1), store)
    store.calls.clear()
    parts = save(nodes, 2, frozen)
    await send(nodes, parts, store, base=1)
    assert len(store.puts(is_chunk)) == WORLD * 5
    assert (await prune(store, [part(1).checkpoint])).freed_bytes == WORLD * 5 * CHUNK
    owners = Counter(owner_name(key) for key in await contents(store) if is_chunk(key))
    assert owners == {part(1).checkpoint.name: SHARED, part(2).checkpoint.name: WORLD * 5}
    await check(nodes, parts, store, tmp_path, frozen)
    assert (await prune(store, [part(2).checkpoint])).freed_bytes == (SHARED + WORLD * 5) * CHUNK
    assert not [key for key in await contents(store) if is_chunk(key)]


async def test_sizes_count_each_object_once(nodes, monkeypatch):
    """Half of the ranks name the shared chunks of an older checkpoint, and the others put them again."""
    monkeypatch.setattr(flush_order, "SMALLEST_SHARED_BYTES", 1)
    store, frozen, own = Double(), files(1, 0)["shared"], WORLD * 5 * CHUNK
    await send(nodes, save(nodes, 1), store)
    for rank, which in enumerate(save(nodes, 2, frozen)):
        base = await manifest_on(store, part(1, rank=rank, world=WORLD)) if rank % 2 else None
        await flush(nodes[rank], which, TierUploadContext(store, timings=SOON), base=base)
    place = await TierObserver(store).observe({"run"}, spare_reads=1000)
    copies = [place.checkpoints[part(step).checkpoint] for step in (1, 2)]
    assert [total_stored_size(copy.facts) for copy in copies] == [SHARED * CHUNK + own, 2 * SHARED * CHUNK + own]
    stored = sum(len(data) for key, data in (await contents(store)).items() if is_chunk(key))
    assert most_freed_size(copies, place.checkpoints) == stored == 2 * (SHARED * CHUNK + own)
    assert most_freed_size(copies[1:], place.checkpoints) == SHARED * CHUNK + own
    assert most_freed_size(copies[1:], {part(2).checkpoint}) == 2 * SHARED * CHUNK + own, "what a pruned one left"


async def test_quarantine_of_a_part_leaves_the_chunks_that_other_ranks_name(nodes, tmp_path):
    store = Double()
    parts = save(nodes, 1)
    await send(nodes, parts, store)
    assert await quarantine(store, parts[0])
    for which in parts[1:]:
        assert (await verify_part(store, which, lambda size: None))[1] == []
    assert (await flush(nodes[0], parts[0], TierUploadContext(store, timings=SOON))).sent == 0
    await check(nodes, parts, store, tmp_path)


async def test_flush_whose_chunks_are_pruned_meanwhile_puts_no_manifest(nodes, tmp_path):
    """Another node's retention deletes the checkpoint while this node compares the chunks that lie there."""
    store = Double()
    parts = save(nodes, 1)
    await flush(nodes[0], parts[0], TierUploadContext(store, timings=SOON))
    begun = asyncio.Event()
    store.before = lambda operation, key: begun.set() if operation == "put" and is_chunk(key) else None
    work = asyncio.ensure_future(flush(nodes[1], parts[1], TierUploadContext(store, timings=SOON)))
    await begun.wait()
    store.before = None
    assert (await prune(store, [parts[0].checkpoint])).deleted
    with pytest.raises(StoreUnavailable, match="were deleted while it was being flushed"):
        await work
    assert parts[1].manifest_key not in await contents(store)
    await flush(nodes[1], parts[1], TierUploadContext(store, timings=SOON))
    assert (await verify_part(store, parts[1], lambda size: None))[1] == []


async def test_prune_keeps_a_checkpoint_of_which_another_node_puts_a_manifest(nodes):
    store = Double()
    parts = save(nodes, 1)
    await flush(nodes[0], parts[0], TierUploadContext(store, timings=SOON))
    pruned = []

    def before(operation: str, key: str) -> None:
        if (operation, key) == ("put", parts[1].manifest_key):
            pruned.append(asyncio.ensure_future(prune(store, [parts[0].checkpoint])))

    store.before = before
    await flush(nodes[1], parts[1], TierUploadContext(store, timings=SOON))
    (result,) = [await work for work in pruned]
    for which in parts[:2]:
        key = which.manifest_key
        assert (key in await contents(store)) is not bool(result.deleted)
        if not result.deleted:
            assert (await verify_part(store, which, lambda size: None))[1] == []


async def test_relay_keeps_the_homes_and_puts_each_chunk_once(nodes, tmp_path):
    near, far = Double(), Double()
    parts = save(nodes, 1)
    await send(nodes, parts, near)
    for which in parts:
        await relay({"near": near}, which, TierUploadContext(far))
    puts = Counter(far.puts(is_chunk))
    assert len(puts) == puts.total() == SHARED + WORLD * 5
    assert await contents(far) == await contents(near)


def chunk_gets(store: Double) -> Counter[str]:
    return Counter(key for operation, key in store.calls if operation == "get" and is_chunk(key))


async def tier_of(nodes: list[Spool]) -> Double:
    """A tier with one checkpoint of all nodes, of which no request is counted yet."""
    store = Double()
    await send(nodes, save(nodes, 1), store)
    store.calls.clear()
    return store


async def test_copy_reads_and_sends_each_chunk_once(nodes, tmp_path):
    store, target = await tier_of(nodes), Double()
    copied = await copy_run(store, target, "run", "run", None, None, Progress())
    puts = Counter(target.puts(is_chunk))
    assert len(puts) == puts.total() == SHARED + WORLD * 5
    assert chunk_gets(store) == puts
    forecast = await copy_run(store, Double(), "run", "run", None, None, Progress(), dry_run=True)
    assert [checkpoint.sent for checkpoint in forecast.checkpoints] == [puts.total() * CHUNK]
    assert [checkpoint.sent for checkpoint in copied.checkpoints] == [puts.total() * CHUNK]
    await check(nodes, [part(1, rank=rank, world=WORLD) for rank in range(WORLD)], target, tmp_path)


async def test_copy_that_failed_at_a_shared_chunk_sends_the_rest_once(nodes, tmp_path):
    store, target = await tier_of(nodes), Double()

    def before(operation: str, key: str) -> None:
        if operation == "put" and len(target.puts(is_chunk)) > SHARED // 2:
            raise StoreUnavailable("the link went down")

    target.before = before
    with pytest.raises(StoreUnavailable):
        await copy_run(store, target, "run", "run", None, None, Progress())
    target.before = None
    await copy_run(store, target, "run", "run", None, None, Progress())
    await check(nodes, [part(1, rank=rank, world=WORLD) for rank in range(WORLD)], target, tmp_path)


async def test_verifying_all_parts_of_a_checkpoint_reads_each_chunk_once(nodes):
    store = await tier_of(nodes)
    shared = next(c for c in (await manifest_on(store, part(1, world=WORLD))).chunks() if c.home == 0)
    await flip(store.inner, f"run/{shared.stored.key}")
    defects = {}
    for rank in range(WORLD):
        _, wrong = await verify_part(store, part(1, rank=rank, world=WORLD), lambda size: None, defects)
        assert len(wrong) == 1 and shared.stored.key in wrong[0], "each part that names the chunk is wrong"
    gets = chunk_gets(store)
    assert len(gets) == SHARED + WORLD * 5
    assert {key for key, count in gets.items() if count > 1} == {f"run/{shared.stored.key}"}, "read again as a proof"


async def test_restore_of_all_ranks_to_a_directory_reads_each_chunk_once(nodes, tmp_path):
    store = await tier_of(nodes)
    out = tmp_path / "out"
    await restore_to_directory({"tier": store}, "run", out, None, None, Progress())
    gets = chunk_gets(store)
    assert len(gets) == gets.total() == SHARED + WORLD * 5
    for rank in range(WORLD):
        home = out / part(1, rank=rank, world=WORLD).name
        assert {path.name: path.read_bytes() for path in home.iterdir() if path.suffix != ".json"} == files(1, rank)


async def test_content_at_two_homes_and_at_none_is_stored_under_the_lowest(nodes):
    store, zeros = Double(), bytes(2 * CHUNK)
    which = part(1, rank=2, world=WORLD)
    commit(nodes[0], which, {"a": zeros, "b": zeros, "c": zeros}, homes={"b": 2, "c": 1})
    await flush(nodes[0], which, TierUploadContext(store, timings=SOON))
    assert (await manifest_on(store, which)).directories == {chunk_directory(which.checkpoint, 1)}
    (key,) = store.puts(is_chunk)
    assert (await manifest_on(store, which)).stored_size == len((await contents(store))[key])
