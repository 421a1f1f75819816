"""The daemon on encrypted tiers: everything works as on others, and a key that is not at hand harms nothing."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from support.doubles import Double, contents, flip, is_chunk, is_manifest
from support.waiting import until
from support.world import commit, content, converge, corrupt, manifest_on, part, read, reconciler, running, steps_in

from tierd.core.errors import FormatTooNew, ManifestError, StoreRefused, StoreUnavailable, WrongKey
from tierd.core.manifest_codec import seal
from tierd.daemon.tiers.run_overview import check_encryption_key
from tierd.daemon.tiers.tier_objects import verify_part
from tierd.daemon.tiers.tier_prune import prune, quarantine
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.restore_to_directory import restore_to_directory
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.spool.spool import Spool
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.memory_store import MemoryStore

KEY, OTHER = EncryptionKey(bytes(range(32))), EncryptionKey(bytes(32))
PART = part(7)


def tier(inner=None, key=KEY) -> EncryptedStore:
    return EncryptedStore(inner or MemoryStore(), key)


async def restored(spool: Spool, which=PART, **stores) -> dict[str, bytes]:
    shutil.rmtree(spool.path(which), ignore_errors=True)
    await fetch(spool, which, stores)
    return read(spool, which)


async def test_encrypted_flush_restores_to_the_same_files(spool):
    files = commit(spool, PART)
    store = tier()
    await flush(spool, PART, TierUploadContext(store))
    assert await restored(spool, tier=store) == files
    assert (await verify_part(store, PART, lambda size: None))[1] == []


async def test_each_tier_has_its_own_key_and_all_describe_the_same_stored_bytes(spool):
    files = commit(spool, PART)
    stores = {"a": tier(), "b": tier(key=OTHER), "plain": MemoryStore()}
    await converge(spool, stores)
    reported = [await manifest_on(store, PART) for store in stores.values()]
    assert reported[0] == reported[1] == reported[2]
    for chunk in reported[0].chunks():
        key = f"run/{chunk.stored.key}"
        assert len({bytes(await store.get(key)) for store in stores.values()}) == 1
    for name, store in stores.items():
        assert await restored(spool, **{name: store}) == files


async def test_unchanged_chunk_is_named_and_not_sent_again(spool):
    shared = content(1)["weights.bin"]
    commit(spool, part(1), {"weights.bin": shared})
    double = Double()
    store = tier(double)
    await converge(spool, {"tier": store})
    commit(spool, part(2), {"weights.bin": shared, "new": b"new"})
    await converge(spool, {"tier": store})
    assert len(double.puts(is_chunk)) == 4
    assert (await manifest_on(store, part(2))).owners == {part(1).checkpoint, part(2).checkpoint}
    assert (await prune(store, [part(1).checkpoint])).deleted
    assert await restored(spool, part(2), tier=store) == {"weights.bin": shared, "new": b"new"}
    assert (await prune(store, [part(2).checkpoint])).deleted
    assert [key for key in await contents(double) if key != "README.md"] == []


async def test_interrupted_flush_continues_with_the_chunks_that_lie_there(spool):
    files = commit(spool, PART)
    double = Double()
    store = tier(double)

    def fail(operation, key):
        if operation == "put" and is_manifest(key):
            raise StoreUnavailable("away")

    double.before = fail
    with pytest.raises(StoreUnavailable):
        await flush(spool, PART, TierUploadContext(store))
    there = set(double.puts(is_chunk))
    double.before, double.calls = None, []
    assert (await flush(spool, PART, TierUploadContext(store))).sent == 0
    assert there and not double.puts(is_chunk)
    assert await restored(spool, tier=store) == files


async def test_spool_is_repaired_from_an_encrypted_tier_and_that_tier_from_another(spool):
    files = commit(spool, PART)
    one, two = MemoryStore(), MemoryStore()
    stores = {"one": tier(one), "two": tier(two)}
    daemon = await converge(spool, stores)
    corrupt(spool.path(PART) / "weights.bin")
    await daemon._repairer.repair_spool(PART)
    assert read(spool, PART) == files
    victims = [key for key in await contents(one) if is_chunk(key)]
    for key in victims:
        await flip(one, key)
    bad = (await verify_part(stores["one"], PART, lambda size: None))[1]
    assert len(bad) == len(victims) and all("under this name" in why for why in bad)
    shutil.rmtree(spool.path(PART))
    manifest = await manifest_on(stores["one"], PART)
    places = [(n, i) for n, file in enumerate(manifest.files) for i, _ in enumerate(file.chunks)]
    work = await daemon._repairer.repair("one", PART, manifest, places)
    assert (work.repaired, work.lost_reasons) == (len(victims), [])
    assert (await verify_part(stores["one"], PART, lambda size: None))[1] == []


def forged(which=PART, run="run") -> bytes:
    """A manifest by somebody who can write to the bucket and has no key."""
    from tierd.core.manifest import VERSION, Manifest

    return seal(
        Manifest(
            version=VERSION,
            run=run,
            step=which.checkpoint.step,
            attempt=which.checkpoint.attempt,
            resumed_from=None,
            rank=0,
            world_size=1,
            created="2026-01-01T00:00:00+00:00",
            writer="evil",
            metrics={},
            files=(),
        )
    )


async def test_a_checkpoint_by_somebody_without_the_key_is_never_restored(spool):
    """It is the newest, and in one piece; it is neither loaded nor passed over in silence."""
    commit(spool, PART)
    inner = MemoryStore()
    store = tier(inner)
    await flush(spool, PART, TierUploadContext(store))
    later = part(8)
    await inner.put(later.manifest_key, forged(later))
    with pytest.raises(StoreUnavailable, match="is not encrypted, and could be anybody's"):
        await restore_to_directory({"tier": store}, "run", spool.root.parent / "out", None, None, Progress())
    found = await restore_to_directory({"tier": store}, "run", spool.root.parent / "out", 7, None, Progress())
    assert found.step == 7


async def test_manifest_moved_or_altered_is_proven_bad_and_quarantined(spool):
    files = commit(spool, PART)
    commit(spool, part(8))
    inner = MemoryStore()
    store = tier(inner)
    for which in (PART, part(8)):
        await flush(spool, which, TierUploadContext(store))
    moved = bytes(await inner.get(part(8).manifest_key))
    await inner.put(PART.manifest_key, moved)
    with pytest.raises(ManifestError, match="under this name"):
        await store.get(PART.manifest_key)
    assert await quarantine(store, PART)
    assert not bytes(await store.get(PART.quarantine_key))
    await converge(spool, {"tier": store})  # flushes it anew
    assert await restored(spool, tier=store) == files


async def test_a_damaged_manifest_is_rebuilt_after_another_tiers(spool):
    files = commit(spool, PART)
    inner = MemoryStore()
    stores = {"one": tier(inner), "two": tier(key=OTHER)}
    daemon = await converge(spool, stores)
    shutil.rmtree(spool.path(PART))
    await flip(inner, PART.manifest_key)
    assert await daemon._repairer.rebuild("one", PART, "damaged")
    assert await restored(spool, one=stores["one"]) == files


# -- the key is not at hand -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [lambda inner: inner, lambda inner: tier(inner, OTHER)], ids=["none", "another"])
async def test_without_the_key_nothing_is_restored_passed_over_quarantined_or_deleted(spool, view):
    commit(spool, PART)
    commit(spool, part(8))
    commit(spool, part(9))
    inner = MemoryStore()
    for which in (PART, part(8)):
        await flush(spool, which, TierUploadContext(tier(inner)))
        shutil.rmtree(spool.path(which))
    before = await contents(inner)
    store = view(inner)
    with pytest.raises(StoreUnavailable, match=f"encrypted with key {KEY.id}"):
        await fetch(spool, part(8), {"tier": store})
    with pytest.raises(StoreUnavailable, match=f"encrypted with key {KEY.id}"):
        await restore_to_directory({"tier": store}, "run", spool.root.parent / "out", None, None, Progress())
    with pytest.raises(FormatTooNew):
        await prune(store, [PART.checkpoint])
    async with running(reconciler(spool, {"tier": store}, keep=1, keep_local=1)) as daemon:
        await until(lambda: daemon.journal.counters["errors"])  # nor is anything put beside it
        assert isinstance(daemon.workers["tier"].last_error, StoreRefused)
        assert daemon.journal.counters["quarantined"] == daemon.journal.counters["corruptions"] == 0
    assert await contents(inner) == before


@pytest.mark.parametrize("hidden", [False, True], ids=["shown", "other runs are not shown"])
async def test_daemon_without_the_key_begins_no_plain_text_run_beside_an_encrypted_run(spool, tmp_path, hidden):
    commit(spool, PART)
    other = Spool(tmp_path / "other")
    new = part(7, run="new")
    commit(other, new)
    inner = MemoryStore()
    await flush(spool, PART, TierUploadContext(tier(inner)))
    before = await contents(inner)
    store = Double(inner)

    def refuse(operation, key):
        if hidden and operation == "scan" and not key:
            raise StoreRefused("AccessDenied")

    store.before = refuse
    async with running(reconciler(other, {"tier": store})) as daemon:
        await until(lambda: daemon.journal.counters["flushed" if hidden else "errors"])
        error = daemon.workers["tier"].last_error
    if not hidden:
        assert isinstance(error, StoreRefused) and "not put there in plain text" in str(error)
        assert f"run run there: manifest: encrypted with key {KEY.id}: name its file by" in str(error)
        assert await contents(inner) == before
        await converge(other, {"tier": tier(inner)})
        assert await restored(other, new, tier=tier(inner)) == content(7)


async def test_run_that_is_plain_text_on_the_tier_already_continues(spool):
    """Its tier may have become half encrypted before a daemon checked that."""
    commit(spool, PART)
    double = Double()
    await flush(spool, PART, TierUploadContext(double))
    await tier(double.inner).put(part(1, run="a").manifest_key, b"{}")
    commit(spool, part(8))
    await converge(spool, {"tier": double})
    assert part(8).manifest_key in double.puts(is_manifest)


async def test_the_check_for_a_key_ends_at_manifests_that_nobody_can_read():
    store = Double()
    for step in range(100):
        await store.inner.put(part(step).manifest_key, b"")
    await check_encryption_key(store, "new")
    assert sum(operation == "get" for operation, _ in store.calls) <= 2 * 16


@pytest.mark.parametrize("view", [lambda inner: inner, lambda inner: tier(inner, OTHER)], ids=["none", "another"])
async def test_unreadable_copy_lets_no_copy_of_the_spool_be_pruned(spool, view):
    for step in (1, 2, 3):
        commit(spool, part(step))
    inner = MemoryStore()
    for step in (1, 2, 3):
        await flush(spool, part(step), TierUploadContext(tier(inner)))
    double = Double(view(inner))

    def refuse(operation, key):
        if operation == "put":
            raise StoreUnavailable("away")

    double.before = refuse
    async with running(reconciler(spool, {"tier": double}, keep=1, keep_local=1)) as daemon:
        await until(lambda: daemon.tiers.observed.places["tier"] is not None)
        for _ in range(5):
            daemon.wake()
            await asyncio.sleep(0.05)
        assert steps_in(spool) == [1, 2, 3]
        assert [type(why) for _, why in daemon.tiers.observed.places["tier"].defects()] == [WrongKey] * 3
