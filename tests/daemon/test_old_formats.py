"""Tiers and spools of formats 1 and 3: they are read, continued with shared chunks, pruned, repaired and copied."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest
from support.chunk_keys import owner_name
from support.doubles import contents, flip, is_chunk
from support.world import converge, described, manifest_on, read

from tierd.codec import chunk_codec
from tierd.core.ids import CheckpointId, ChunkName, PartId
from tierd.core.manifest import FIRST, PATCHED, VERSION, WITH_DELTAS, Manifest
from tierd.core.manifest_codec import decode
from tierd.core.planning import flush_order
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.scrub.tier_repair import TierRepairer
from tierd.daemon.tiers.tier_objects import verify_part
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.tiers.tier_prune import prune
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.run_copy import copy_run
from tierd.daemon.transfer.tier_fetch import fetch, relay
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.memory_store import MemoryStore

FORMATS = Path(__file__).parents[1] / "format"
TIERS = {"1": FORMATS / "v1/tier", "3": FORMATS / "v3-patches", "4": FORMATS / "v4/tier", "5": FORMATS / "v5-deltas"}


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(flush_order, "SMALLEST_SHARED_BYTES", 1)


@pytest.fixture(params=TIERS)
def store(request) -> Store:
    return tier_of(request.param)


def tier_of(name: str) -> Store:
    """A tier of this format, in memory."""
    store = MemoryStore()

    async def work() -> None:
        for path in (path for path in TIERS[name].rglob("*") if path.is_file()):
            await store.put(path.relative_to(TIERS[name]).as_posix(), path.read_bytes())

    asyncio.run(work())
    return store


def version_beside(base: Manifest) -> int:
    """The version of what is written now and names chunks of `base`."""
    return max(base.version, VERSION)


async def parts_on(store: Store) -> list[PartId]:
    place = await TierObserver(store).observe({"demo"}, spare_reads=100)
    return sorted(part for copy in place.checkpoints.values() for part in copy.facts)


def follow(spool: Spool, last: PartId) -> PartId:
    """Save the same files again, a step later, cut as before."""
    checkpoint = last.checkpoint
    which = PartId(CheckpointId("demo", checkpoint.attempt, checkpoint.step + 100), last.rank, last.world)
    files = []
    with spool.stage(which) as stage:
        for file in spool.manifest(last).files:
            shutil.copyfile(spool.path(last) / file.path, stage.path / file.path)
            chunks = tuple(msgspec.structs.replace(chunk, stored=None) for chunk in file.chunks)
            files.append(msgspec.structs.replace(file, chunks=chunks))
        stage.commit(described(which, files=tuple(files)))
    return which


async def test_every_part_is_verified_and_restored(store, tmp_path):
    parts = await parts_on(store)
    assert parts
    for number, part in enumerate(parts):
        assert (await verify_part(store, part, lambda size: None))[1] == []
        spool = Spool(tmp_path / f"{number}")
        await fetch(spool, part, {"tier": store})
        assert sum(map(len, read(spool, part).values())) == (await manifest_on(store, part)).size


async def test_new_checkpoint_names_old_chunks_and_a_prune_keeps_exactly_these(store, tmp_path):
    spool, last = Spool(tmp_path / "spool"), (await parts_on(store))[-1]
    ranks = [part for part in await parts_on(store) if part.checkpoint == last.checkpoint]
    newer = []
    for part in ranks:
        await fetch(spool, part, {"tier": store})
        newer.append(follow(spool, part))
        base = await manifest_on(store, part)
        result = await flush(spool, newer[-1], TierUploadContext(store), base=base)
        manifest = await manifest_on(store, newer[-1])
        assert result.sent < manifest.size / 3 and manifest.version == version_beside(base)
        assert base.owners & manifest.owners
    await store.delete([key for key in await contents(store) if "/pins/" in key])
    old = {part.checkpoint for part in await parts_on(store)} - {newer[0].checkpoint}
    assert (await prune(store, old)).deleted == old
    for part in newer:
        assert (await verify_part(store, part, lambda size: None))[1] == []
    names = {f"demo/{stored.key}" for part in newer for stored in (await manifest_on(store, part)).objects()}
    assert {key for key in await contents(store) if is_chunk(key)} == names
    owners = await TierObserver(store).observe({"demo"})
    assert {owner.name for owner in owners.owners} == set(map(owner_name, names))
    await prune(store, {newer[0].checkpoint})
    assert not [key for key in await contents(store) if is_chunk(key)]


async def test_daemon_continues_an_old_spool_and_tier(tmp_path):
    store = await asyncio.to_thread(tier_of, "1")
    shutil.copytree(FORMATS / "v1/spool", tmp_path / "spool")
    spool = Spool(tmp_path / "spool")
    (last,) = spool.parts()
    newer = follow(spool, last)
    await store.delete(["demo/pins/" + last.checkpoint.name])
    await converge(spool, {"tier": store}, keep=1)
    assert await parts_on(store) == [newer] and spool.manifest(newer).version == VERSION
    assert (await verify_part(store, newer, lambda size: None))[1] == []
    assert {owner.step for owner in (await manifest_on(store, newer)).owners} >= {100, 200}


async def test_old_part_of_a_spool_is_sent_in_the_new_form(tmp_path):
    shutil.copytree(FORMATS / "v1/spool", tmp_path / "spool")
    spool, store = Spool(tmp_path / "spool"), MemoryStore()
    (part,) = spool.parts()
    assert spool.manifest(part).version == FIRST
    await flush(spool, part, TierUploadContext(store))
    manifest = await manifest_on(store, part)
    assert manifest.version == VERSION and manifest.same_content(spool.manifest(part))
    assert not any(ChunkName.parse(stored.key).is_old for stored in manifest.objects())


@pytest.mark.parametrize("same_encoder", [True, False])
async def test_corrupt_chunk_of_an_old_tier_is_repaired(store, tmp_path, monkeypatch, same_encoder):
    """Where it lies; or raw under a new key, if the encoder gives other bytes now."""
    spool, part = Spool(tmp_path / "spool"), (await parts_on(store))[-1]
    await fetch(spool, part, {"tier": store})
    pristine, manifest = await contents(store), await manifest_on(store, part)
    where, chunk = next(
        ((where, chunk) for where, chunk in manifest.places() if chunk.stored.codec != "raw"),
        next(iter(manifest.places())),
    )
    await flip(store, f"demo/{chunk.stored.key}")
    if not same_encoder:
        monkeypatch.setattr(chunk_codec, "encode_patch", lambda *_: None)
        monkeypatch.setattr("tierd.daemon.scrub.tier_repair.encode_patch", lambda *_: None)
        monkeypatch.setattr("tierd.daemon.scrub.tier_repair.encode", lambda *_, **__: None)
    repairer = TierRepairer(spool, {"tier": store}, "tier", part, MemoryBudget())
    await repairer.repair(manifest, [where])
    assert repairer.repaired == 1 and not repairer.lost_reasons
    assert (await verify_part(store, part, lambda size: None))[1] == []
    if same_encoder:
        assert await contents(store) == pristine
        return
    repaired = await manifest_on(store, part)
    assert repaired.version == version_beside(manifest) and repaired.same_content(manifest)
    name = ChunkName.parse(repaired.chunk(where).stored.key)
    assert (name.is_old, name.codec, name.rank) == (False, "raw", part.rank if chunk.home is None else chunk.home)


async def test_copy_and_relay_of_an_old_tier_write_the_new_form(store, tmp_path):
    copied, relayed = MemoryStore(), MemoryStore()
    parts = await parts_on(store)
    await copy_run(store, copied, "demo", "other", None, None, Progress())
    for part in parts:
        await relay({"near": store}, part, TierUploadContext(relayed))
    for target, run in ((copied, "other"), (relayed, "demo")):
        for part in parts:
            which = PartId(CheckpointId(run, part.checkpoint.attempt, part.checkpoint.step), part.rank, part.world)
            assert (await verify_part(target, which, lambda size: None))[1] == []
            manifest = decode(bytes(await target.get(which.manifest_key)), which)
            assert manifest.version == VERSION
            assert not any(ChunkName.parse(stored.key).is_old for stored in manifest.objects())


def test_fixtures_are_of_the_formats_that_they_claim():
    versions = {
        name: {decode(path.read_bytes()).version for path in tier.glob("demo/manifests/*/*")}
        for name, tier in TIERS.items()
    }
    assert versions == {"1": {FIRST}, "3": {PATCHED}, "4": {FIRST, VERSION}, "5": {WITH_DELTAS}}
