"""Objects of other programs: any name is listed, and a range is that of the listed object or of none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from support.s3stub import Bucket, serving

from tierd.core.errors import ObjectNotFound, StoreUnavailable
from tierd.core.urls import parse_url
from tierd.stores.base import ObjectInfo
from tierd.stores.cloud.cloud_store import CloudStore
from tierd.stores.retry import ForeignStore, RetryingForeignStore
from tierd.stores.s3.s3_store import S3Store

NAMES = ("d/.metadata", "d/a b&c.bin", "d/epoch=0-step=10.ckpt", "d/ü.txt")
DATA = bytes(range(200))


@pytest.fixture(params=["s3", "gs"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple]:  # type: ignore[type-arg]
    with serving(Bucket()) as bucket:
        account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        endpoint = f"http://127.0.0.1:{bucket.port}"
        (tmp_path / "account.json").write_text(json.dumps({**account, "gcs_base_url": endpoint}))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        bucket.objects |= {f"p/{name}": DATA for name in NAMES}
        if request.param == "s3":
            yield bucket, lambda: S3Store(parse_url(bucket.url()))
        else:
            yield bucket, lambda: CloudStore(parse_url(f"gs://bucket/p?endpoint={endpoint}"))


def within(make: Callable[[], ForeignStore], use):  # type: ignore[no-untyped-def]
    async def main():  # type: ignore[no-untyped-def]
        store = make()
        try:
            return await use(store)
        finally:
            await store.aclose()

    return asyncio.run(main())


async def listed(store: ForeignStore) -> list[ObjectInfo]:
    async with aclosing(store.names("d/")) as names:
        return [one async for one in names]


async def ranged(store: ForeignStore, found: ObjectInfo, offset: int, length: int) -> bytes:
    data = bytearray(length)
    await store.get_range(found, offset, memoryview(data))
    return bytes(data)


def test_any_name_is_listed_and_read_by_range(place) -> None:  # type: ignore[no-untyped-def]
    _, make = place

    async def use(store: ForeignStore) -> None:
        found = await listed(store)
        assert [(one.key, one.size, one.modified_ns) for one in found] == [
            (name, len(DATA), 1_767_225_600_000_000_000) for name in NAMES
        ]
        for one in found:
            assert await ranged(store, one, 7, 100) == DATA[7:107]
            assert await ranged(store, one, 0, len(DATA)) == DATA
        assert [one async for one in store.scan("d/")] == [], "none of these names is a key"

    within(make, use)


@pytest.mark.parametrize("gone", [False, True])
def test_range_of_a_replaced_object_is_refused(gone: bool, place) -> None:  # type: ignore[no-untyped-def]
    bucket, make = place

    async def use(store: ForeignStore) -> None:
        found = (await listed(store))[0]
        bucket.objects[f"p/{found.key}"] = DATA[::-1]
        if gone:
            del bucket.objects[f"p/{found.key}"]
        with pytest.raises(ObjectNotFound):
            await ranged(store, found, 0, 10)

    within(make, use)


def test_a_server_that_ignores_ranges_is_not_believed(place) -> None:  # type: ignore[no-untyped-def]
    bucket, make = place

    async def use(store: ForeignStore) -> None:
        found = (await listed(store))[0]
        bucket.ignores_ranges = True
        with pytest.raises(Exception) as caught:  # as the library says it
            await ranged(store, found, 1, 199)
        assert not isinstance(caught.value, ObjectNotFound)

    within(make, use)


def test_a_read_is_tried_again(place) -> None:  # type: ignore[no-untyped-def]
    bucket, make = place

    async def use(store: ForeignStore) -> None:
        found = (await listed(store))[0]
        refusals = ["busy", "busy"]
        bucket.refusal = (503, "SlowDown")
        bucket.refuse = lambda headers: refusals.pop() if refusals else None
        assert await ranged(store, found, 5, 5) == DATA[5:10] and not refusals
        bucket.refuse = lambda headers: "busy"
        with pytest.raises(StoreUnavailable):
            await ranged(store, found, 5, 5)

    async def at_once(_: float) -> None:
        pass

    within(lambda: RetryingForeignStore(make(), sleep=at_once), use)
