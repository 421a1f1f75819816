"""What a sceptical reading of the daemon found; each of these was so once."""

from __future__ import annotations

import asyncio
import errno

import msgspec
import pytest
from support.doubles import Double, contents, is_manifest
from support.waiting import until
from support.world import commit, config, listing, part, reconciler, running, settle

from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.part_source import NodeSource
from tierd.client.restoring.restorer import Restorer
from tierd.core.errors import FormatTooNew, ManifestError, StoreUnavailable
from tierd.core.manifest_codec import decode, seal
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.eviction import judge_tier
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Place, Prune
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.timeline.run_view import run_view_of
from tierd.daemon.tiers.manifest_index import ManifestIndex
from tierd.daemon.transfer import chunk_source as source_module
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool


async def test_a_codec_that_is_not_known_is_no_corruption(spool, tmp_path):
    store = Double()
    commit(spool, part(1))
    await flush(spool, part(1), TierUploadContext(store))
    manifest = decode(bytes(await store.get(part(1).manifest_key)))
    file = manifest.files[-1]
    chunk = file.chunks[0]
    key = chunk.stored.key.rsplit(".", 1)[0] + ".bp1"
    odd = msgspec.structs.replace(chunk, stored=msgspec.structs.replace(chunk.stored, codec="bp1", key=key))
    await store.put(f"run/{key}", await store.get(f"run/{chunk.stored.key}"))
    await store.delete([f"run/{chunk.stored.key}"])  # or it would be found in this form
    files = (*manifest.files[:-1], msgspec.structs.replace(file, chunks=(odd, *file.chunks[1:])))
    await store.put(part(1).manifest_key, seal(msgspec.structs.replace(manifest, files=files)))
    fresh = Spool(tmp_path / "fresh")
    daemon = reconciler(fresh, {"tier": store})
    with pytest.raises(StoreUnavailable, match="bp1"):
        await daemon.repairs.fetch(part(1))
    assert [key async for key in _keys(store) if is_manifest(key)] == [part(1).manifest_key]


async def _keys(store):
    async for info in store.scan(""):
        yield info.key


def test_part_that_no_reader_would_accept_is_not_committed(spool):
    before = listing(spool)
    long = "/".join(["d" * 200] * 6)
    with pytest.raises(ManifestError, match="1024"):
        commit(spool, part(1), {long: b"x"})
    assert [name for name in listing(spool) if "run" in name.split("/")[0]] == [
        name for name in before if "run" in name.split("/")[0]
    ]


def test_little_room_takes_no_pinned_copy(spool):
    for step in (1, 2):
        commit(spool, part(step))
    held = {part(step): ManifestFacts.of(spool.manifest(part(step))) for step in (1, 2)}
    tier = Place.of(held)
    tight = config(spool, "tier", keep=5, min_free_percent=50.0)
    going = [
        a for a in plan(Inventory(Place.of(held), {"tier": tier}, free=0.1), tight, {}, 0.0) if isinstance(a, Prune)
    ]
    assert [(a.checkpoint.step, a.tier) for a in going] == [(1, SPOOL)]
    pinned = Place.of(held, pins=frozenset({part(1).checkpoint}))
    assert not plan(Inventory(pinned, {"tier": tier}, free=0.1), tight, {}, 0.0)


async def test_a_part_that_the_disk_does_not_give_holds_up_no_other(spool, monkeypatch):
    read = source_module.read_recent_chunk

    def failing(path, file, index, memory):
        if f"{4:012}" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return read(path, file, index, memory)

    monkeypatch.setattr(source_module, "read_recent_chunk", failing)
    store = Double()
    for step in (1, 2, 3, 4):
        commit(spool, part(step))
    async with running(reconciler(spool, {"tier": store})) as daemon:
        await until(lambda: all(daemon.tiers.observed.has(part(step), "tier") for step in (1, 2, 3)))
        assert not daemon.tiers.observed.has(part(4), "tier")
    assert not spool.quarantined()


async def test_part_that_is_deleted_while_it_is_flushed_is_not_called_corrupt(spool, monkeypatch):
    read = source_module.read_recent_chunk

    def racing(path, file, index, memory):
        spool.remove([part(1)])
        return read(path, file, index, memory)

    monkeypatch.setattr(source_module, "read_recent_chunk", racing)
    store = Double()
    commit(spool, part(1))
    daemon = reconciler(spool, {"tier": store})
    await daemon.observe("tier")
    await daemon._flusher.flush(part(1), "tier")
    assert not daemon.journal.counters["corruptions"]
    assert not [event for event in daemon.journal.events if event.what == "corrupt"]


async def test_part_that_is_committed_while_the_tiers_are_asked_is_kept(spool):
    """Nobody was asked about it: it may be nowhere else."""
    late = part(1, rank=1, world=2)
    store = Double()
    for step in (1, 2):
        commit(spool, part(step, world=2))
    daemon = reconciler(spool, {"tier": store}, keep=5, keep_local=1)
    for step in (2, 1):
        await daemon.observe("tier")
        await daemon._flusher.flush(part(step, world=2), "tier")
    await daemon.observe("tier")
    (prune,) = plan(daemon.inventory(), daemon.config, {}, 0.0)
    assert isinstance(prune, Prune) and (prune.tier, prune.checkpoint) == (SPOOL, late.checkpoint)

    def commit_late(operation, key):
        if operation == "get" and not spool.has(late):
            commit(spool, late)

    store.before = commit_late
    await daemon._loop.act(prune)
    assert spool.parts() == [late, part(2, world=2)] and spool.manifest(late).part == late
    assert daemon.journal.counters["pruned"] == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_a_flush_that_ends_during_a_look_takes_nothing_from_it(spool, tmp_path, fails):
    """The look saw what others flushed, or that the tier does not answer; and what was just flushed is not lost."""
    other, own = part(1, rank=1, world=2), part(2, world=2)
    store, gate = Double(), asyncio.Event()
    daemon = reconciler(spool, {"tier": store})
    commit(spool, part(1, world=2))
    await daemon.observe("tier")
    await daemon._flusher.flush(part(1, world=2), "tier")
    theirs = Spool(tmp_path / "other")
    commit(theirs, other)
    await flush(theirs, other, TierUploadContext(store.inner))
    commit(spool, own)
    await daemon.observe("local")
    real = daemon.tiers._observers["tier"].observe

    async def slow(*args, **options):
        place = await real(*args, **options)
        await gate.wait()
        if fails:
            raise StoreUnavailable("no route")
        return place

    daemon.tiers._observers["tier"].observe = slow
    asked = asyncio.ensure_future(daemon.observe("tier"))
    await until(lambda: sum(call == ("scan", "run/") for call in store.calls) == 2)
    await daemon._flusher.flush(own, "tier")
    assert daemon.tiers.observed.has(own, "tier")
    gate.set()
    if fails:
        with pytest.raises(StoreUnavailable):
            await asked
        assert daemon.tiers.observed.places["tier"] is None
    else:
        await asked
        assert daemon.tiers.observed.has(other, "tier") and daemon.tiers.observed.has(own, "tier")


async def test_a_look_that_is_passed_over_says_nothing_of_how_long_looks_take(spool):
    daemon = reconciler(spool, {"tier": Double()})
    await daemon.observe("tier")
    real, gates = daemon.tiers._observers["tier"].observe, [asyncio.Event(), asyncio.Event()]
    waiting = iter(gates)

    async def slow(*args, **options):
        await next(waiting).wait()
        return await real(*args, **options)

    daemon.tiers._observers["tier"].observe = slow
    older = asyncio.ensure_future(daemon.observe("tier"))
    await until(lambda: daemon.tiers.observed._observing["tier"] == 1)
    newer = asyncio.ensure_future(daemon.observe("tier"))
    await until(lambda: daemon.tiers.observed._observing["tier"] == 2)
    gates[1].set()
    await newer
    known = daemon.tiers.observed._took["tier"], daemon.tiers.observed._since["tier"]
    gates[0].set()
    await older
    assert (daemon.tiers.observed._took["tier"], daemon.tiers.observed._since["tier"]) == known


async def test_manifest_of_a_newer_tierd_in_a_prune_is_remembered_and_stops_the_prune(spool):
    """Else the same prune is planned, reads it, and fails, for ever."""
    odd = part(1, rank=1, world=2)
    store = Double()
    daemon = reconciler(spool, {"tier": store}, keep=1)
    for step in (1, 2):
        for rank in (0, 1):
            which = part(step, rank=rank, world=2)
            commit(spool, which)
            await flush(spool, which, TierUploadContext(store))
            if rank:  # another node saves it, whose manifests are read only by a prune
                spool.remove([which])
                (spool.control / "saved" / which.checkpoint.run / f"{which.checkpoint.attempt}.{which.name}").unlink()
    manifest = decode(bytes(await store.get(odd.manifest_key)))
    await store.put(odd.manifest_key, seal(msgspec.structs.replace(manifest, version=99)))
    before = await contents(store)
    await daemon.observe("tier")
    prune = next(action for action in plan(daemon.inventory(), daemon.config, {}, 0.0) if action.tier == "tier")
    assert isinstance(prune, Prune) and prune.checkpoint == odd.checkpoint
    await daemon._loop.act(prune)
    await daemon.observe("tier")
    assert [type(why) for _, why in daemon.tiers.observed.places["tier"].defects()] == [FormatTooNew]
    assert not [one for one in plan(daemon.inventory(), daemon.config, {}, 0.0) if one.tier == "tier"]
    assert await contents(store) == before


async def test_listing_that_ends_late_forgets_no_manifest_that_a_newer_listing_read(spool):
    store, gate = Double(), asyncio.Event()
    known = ManifestIndex(store)
    scan = store.scan

    async def slow(prefix, after=""):
        async for info in scan(prefix, after):
            yield info
        await gate.wait()

    store.scan = slow
    older = asyncio.ensure_future(known.observe("run", {0}))
    await until(lambda: ("scan", "run/manifests/") in store.calls)
    store.scan = scan
    commit(spool, part(1))
    await flush(spool, part(1), TierUploadContext(store))
    assert await known.observe("run", {0})
    gate.set()
    assert not await older
    store.calls.clear()
    assert await known.observe("run", {0})
    assert not [call for call in store.calls if call[0] == "get"], "what was read once is not read again"


async def test_listings_forget_deleted_manifests(spool):
    store = Double()
    for step in range(6):
        commit(spool, part(step))
    async with running(reconciler(spool, {"tier": store}, keep=2)) as daemon:
        await settle(daemon)
    assert len(daemon.tiers._observers["tier"].manifests._read) == 2


def test_nothing_is_pruned_where_a_newer_tierd_writes(spool):
    """By the plan, `ls` and `tierd prune` alike: they ask the same function."""
    for step in (1, 2, 3):
        commit(spool, part(step))
    parts = {part(step): ManifestFacts.of(spool.manifest(part(step))) for step in (1, 2, 3)}
    policy = RetentionPolicy(keep_last=1)
    assert [verdict.keep for verdict in judge_tier(Inventory(Place(), {}), Place.of(parts), policy, "run")] == [
        True,
        False,
        False,
    ]
    odd = Place.of({**parts, part(4): None}, defects={part(4): FormatTooNew("version 2")})
    assert all(verdict.keep for verdict in judge_tier(Inventory(Place(), {}), odd, policy, "run"))


def test_checkpoint_that_lacks_a_part_while_a_tier_is_silent_is_not_passed_over(spool, monkeypatch):
    """Step 3 may be whole on the tier that did not answer: stepping back to 2 would rest on its silence."""
    for rank in (0, 1):
        commit(spool, part(2, rank=rank, world=2))
    commit(spool, part(3, world=2))
    seen = Place.of({which: ManifestFacts.of(spool.manifest(which)) for which in spool.parts()})

    def restored(world: Inventory):
        monkeypatch.setattr(NodeSource, "run_view", lambda source: run_view_of(world, "run"))
        return Restorer(NodeSource(spool, "run", tiers=False), Ranks(0, 2)).restore(None, None)

    with pytest.raises(StoreUnavailable, match="s3 did not"):
        restored(Inventory(seen, {"s3": None}))
    assert restored(Inventory(seen, {"s3": Place()})).part == part(2, world=2)


def test_checkpoint_that_is_quarantined_here_while_a_tier_is_silent_is_not_passed_over(spool, monkeypatch):
    """The tier may have it right."""
    for step in (1, 2):
        commit(spool, part(step))
    spool.quarantine(part(2))
    found = {which: ManifestFacts.of(spool.manifest(which)) for which in spool.parts()}
    seen = Place.of(found, quarantined={part(2): None})

    def restored(world: Inventory):
        monkeypatch.setattr(NodeSource, "run_view", lambda source: run_view_of(world, "run"))
        return Restorer(NodeSource(spool, "run", tiers=False), Ranks(0, 1)).restore(None, None)

    with pytest.raises(StoreUnavailable, match=r"step 2.*s3 did not"):
        restored(Inventory(seen, {"s3": None}))
    spool_alone = Place.of(found, quarantined={part(2): found[part(1)]})
    assert restored(Inventory(spool_alone, {"s3": Place()})).part == part(1)


def test_parts_of_two_histories_under_one_attempt_are_no_checkpoint(spool):
    """As ranks leave them that cannot talk, and resumed from different steps under an attempt that they were given."""
    for rank in (0, 1):
        commit(spool, part(1, rank=rank, world=2))
        commit(spool, part(5, 2, rank=rank, world=2), origin=part(1).checkpoint if rank == 0 else None)
    assert Restorer(NodeSource(spool, "run", tiers=False), Ranks(0, 2)).restore(None, None).part.checkpoint.step == 5
    with pytest.raises(StoreUnavailable, match="do not belong together"):
        Restorer(NodeSource(spool, "run", tiers=False), Ranks(1, 2)).restore(None, None)


async def test_checkpoints_that_retire_a_last_copy_are_read_on_their_own_timeline_too(spool, monkeypatch):
    """Steps 2 and 3 retire step 1; the newest ones are another launch's that went another way."""
    asked = []

    async def are_usable(self, checkpoint):
        asked.append((int(checkpoint.attempt[-8:]), checkpoint.step))
        return True

    monkeypatch.setattr("tierd.daemon.tiers.manifest_index.ManifestIndex.are_usable", are_usable)
    commit(spool, part(1))
    daemon = reconciler(spool, {"tier": Double()}, keep=2)
    newer = [part(2), part(3), part(4, 2), part(5, 2)]
    daemon.tiers.observed.places["tier"] = Place.of(dict.fromkeys(newer, ManifestFacts.of(spool.manifest(part(1)))))
    assert await daemon.tiers.have_newer_copies(part(1).checkpoint, daemon.inventory())
    assert asked == [(1, 2), (1, 3), (2, 4), (2, 5)]
