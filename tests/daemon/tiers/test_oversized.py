"""Who may write to a tier may put objects there of any size: none is read that is larger than any of tierd's."""

from __future__ import annotations

import asyncio
import os
import resource

import pytest
from support.doubles import Double
from support.s3stub import Bucket, serving
from support.world import commit, converge, part, read, reconciler

from tierd.core.errors import CorruptChunk, ManifestError, StoreRefused
from tierd.core.manifest import StoredChunk
from tierd.core.manifest_codec import MAX_MANIFEST_SIZE, decode
from tierd.core.urls import parse_url
from tierd.daemon.tiers.tier_objects import get_object, read_manifest
from tierd.spool.spool import Spool
from tierd.stores.base import LARGEST
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore
from tierd.stores.s3.s3_store import S3Store


@pytest.mark.parametrize("size", [MAX_MANIFEST_SIZE + 1, LARGEST + 1, 1 << 40])
async def test_manifest_of_any_size_is_unusable_and_takes_little_memory(spool, tmp_path, size):
    root = tmp_path / "tier"
    root.mkdir()
    for step in (1, 2):
        commit(spool, part(step))
    store = FileStore(root)
    await converge(spool, {"tier": store})
    os.truncate(root / part(2).manifest_key, size)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fresh = Spool(tmp_path / "fresh")
    daemon = reconciler(fresh, {"tier": store})
    await daemon.observe("tier")
    with pytest.raises(CorruptChunk):  # proven, by every copy that there is
        await daemon.repairs.fetch(part(2))
    await daemon.repairs.fetch(part(1))
    assert read(fresh, part(1)) == read(spool, part(1))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 << 10  # kB
    await converge(spool, {"tier": store})  # quarantined, and put anew from the spool
    assert decode(bytes(await store.get(part(2).manifest_key)), part(2)).step == 2
    await store.aclose()


async def test_error_of_a_manifest_is_kept_without_the_bytes_that_were_read(spool):
    commit(spool, part(1))
    store = MemoryStore()
    daemon = await converge(spool, {"tier": store})
    await store.put(part(1).manifest_key, bytes(1000))
    await daemon.observe("tier")
    [(_, why)] = daemon.tiers.observed.places["tier"].defects()
    assert type(why) is ManifestError and why.__traceback__ is why.__context__ is why.__cause__ is None


@pytest.mark.parametrize("repaired", [True, False])
def test_an_object_that_is_repaired_between_its_read_and_the_listing_is_read_again(repaired):
    data = b"right"
    stored = StoredChunk(key="chunks/x", size=len(data), codec="raw", xxh3_128="")
    double = Double()

    def before(operation: str, _: str) -> None:
        if operation == "scan" and repaired:
            double.inner.objects["run/x"] = data, 2
        elif operation == "get" and not repaired:
            raise StoreRefused("AccessDenied")

    async def work() -> bytes:
        await double.inner.put("run/x", data + b", and more" if repaired else data)
        double.before = before
        return bytes(await get_object(double, "run/x", stored))

    if repaired:
        assert asyncio.run(work()) == data
    else:
        with pytest.raises(StoreRefused, match="AccessDenied"):
            asyncio.run(work())
    assert [operation for operation, _ in double.calls] == ["get", "scan", "get"]


def test_an_object_that_is_deleted_before_it_is_read_again_leaves_the_refusal():
    stored, double = StoredChunk(key="chunks/x", size=5, codec="raw", xxh3_128=""), Double()

    def before(operation: str, _: str) -> None:
        if operation == "get" and len(double.calls) > 2:
            del double.inner.objects["run/x"]

    async def work() -> None:
        await double.inner.put("run/x", b"wrong")
        double.before = before
        await get_object(double, "run/x", stored, into=memoryview(bytearray(4)))

    with pytest.raises(StoreRefused):
        asyncio.run(work())
    assert [operation for operation, _ in double.calls] == ["get", "scan", "get"]


async def test_an_object_larger_than_any_of_tierds_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("tierd.stores.base.LARGEST", 1000)
    (tmp_path / "large").write_bytes(bytes(1001))
    (tmp_path / "small").write_bytes(bytes(1000))
    with serving(Bucket()) as bucket:
        bucket.objects = {"p/large": bytes(1001), "p/small": bytes(1000)}
        for store in (FileStore(tmp_path), S3Store(parse_url(bucket.url()))):
            assert len(await store.get("small")) == 1000
            with pytest.raises(CorruptChunk, match="1001 bytes"):
                await store.get("large")
            with pytest.raises(ManifestError, match="1001 bytes"):
                await read_manifest(store, None, "large")
            assert len(await store.get("large", memoryview(bytearray(1001)))) == 1001  # by who said how much
            await store.aclose()
