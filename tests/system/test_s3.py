"""S3Store against a real S3 server: the contract, what errors mean, and what a damaged connection does.

`eval "$(tests/system/s3server.sh env)"` after `tests/system/s3server.sh start` names the server to use.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from aiobotocore.session import get_session
from stores.conformance import Conformance, keys

from tierd.core.errors import ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.urls import StoreUrl, parse_url
from tierd.stores.base import Store
from tierd.stores.open import open_store
from tierd.stores.s3 import checksums, s3_store
from tierd.stores.s3.checksums import CHECKSUMS, MD5, Checksum
from tierd.stores.s3.http1 import DEFAULT_LIMITS, S3Limits
from tierd.stores.s3.http_exchanges import RequestBody
from tierd.stores.s3.s3_store import S3Store

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

VARIABLES = ("TIERD_TEST_S3_ENDPOINT", "TIERD_TEST_S3_ACCESS_KEY", "TIERD_TEST_S3_SECRET_KEY")


@pytest.fixture(scope="session")
def server() -> dict[str, str]:
    """The server's endpoint and keys."""
    if missing := [name for name in VARIABLES if name not in os.environ]:
        pytest.fail(f"{', '.join(missing)} not set: see tests/system/s3server.sh")
    return {name: os.environ[name] for name in VARIABLES}


@pytest.fixture(autouse=True)
def credentials(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server["TIERD_TEST_S3_ACCESS_KEY"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server["TIERD_TEST_S3_SECRET_KEY"])
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # loopback only
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")


@pytest.fixture
def url(server: dict[str, str], credentials: None) -> Iterator[StoreUrl]:
    """A prefix in a fresh bucket, which is emptied and removed afterwards."""
    endpoint, bucket = server["TIERD_TEST_S3_ENDPOINT"], f"tierd-test-{uuid.uuid4().hex[:12]}"
    asyncio.run(_admin(endpoint, lambda client: client.create_bucket(Bucket=bucket)))
    yield parse_url(f"s3://{bucket}/a/prefix?endpoint={endpoint}&addressing=path&region=us-east-1")

    async def remove(client: Any) -> None:
        async for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for item in page.get("Contents", ()):
                await client.delete_object(Bucket=bucket, Key=item["Key"])
        await client.delete_bucket(Bucket=bucket)

    asyncio.run(_admin(endpoint, remove))


async def _admin(endpoint: str, do: Callable[[Any], Awaitable[Any]]) -> None:
    from botocore.config import Config

    key, secret = os.environ[VARIABLES[1]], os.environ[VARIABLES[2]]
    async with get_session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(s3={"addressing_style": "path"}),
    ) as client:
        await do(client)


class TestS3Store(Conformance):
    many, operations = 1100, 120  # two batches of a delete, and pages of a listing
    verifies = CHECKSUMS[0].name

    @pytest.fixture
    def make(self, url: StoreUrl) -> Callable[[], Store]:
        return lambda: S3Store(url)


class TestS3StoreWithoutPrefix(Conformance):
    many, operations, size = 60, 60, 100_000
    verifies = CHECKSUMS[0].name

    @pytest.fixture
    def make(self, url: StoreUrl) -> Callable[[], Store]:
        return lambda: open_store(replace(url, prefix=""))


def on(url: StoreUrl, use: Callable[[S3Store], Awaitable[None]], limits: S3Limits = DEFAULT_LIMITS) -> None:
    async def whole() -> None:
        store = S3Store(url, limits)
        try:
            await use(store)
        finally:
            await store.aclose()

    asyncio.run(whole())


async def failing_calls(store: S3Store, expected: type[Exception]) -> list[Exception]:
    """Every method fails as expected; returns how."""
    caught = []
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.put("k", b"1"),
        lambda: store.get("k"),
        lambda: store.delete(["k"]),
        lambda: keys(store),
    ]
    for call in calls:
        with pytest.raises(expected) as info:
            await call()
        caught.append(info.value)
    return caught


def test_chunk_of_64_mib_is_returned_whole(url: StoreUrl) -> None:
    data = random.Random(6).randbytes(64 << 20)

    async def use(store: S3Store) -> None:
        assert await store.put("k", memoryview(bytearray(data))) == CHECKSUMS[0].name
        assert await store.get("k") == data
        into = memoryview(bytearray(len(data) + 1))
        assert await store.get("k", into) == data

    on(url, use)


@pytest.mark.parametrize("checksum", CHECKSUMS, ids=lambda checksum: checksum.name)
def test_server_refuses_every_wrong_checksum(
    url: StoreUrl, checksum: Checksum, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "CHECKSUMS", [checksum])

    async def use(store: S3Store) -> None:
        assert await store.put("k", b"data") == checksum.name
        client = await store.get_client()
        listed = await client.list_objects_v2(Bucket=url.bucket)
        assert [item["Key"] for item in listed["Contents"]] == ["a/prefix/k"]  # and no probe

    on(url, use)


@pytest.mark.parametrize("checksum", [*CHECKSUMS, MD5], ids=lambda checksum: checksum.name)
def test_the_server_refuses_damaged_uploads(url: StoreUrl, checksum: Checksum, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is of the bytes that the caller gave: what changes on the way is not stored."""
    monkeypatch.setattr(checksums, "CHECKSUMS", [] if checksum is MD5 else [checksum])

    async def use(store: S3Store) -> None:
        for data in (b"bytes", random.Random(7).randbytes(3 << 20)):
            await store.put("right", data)
            flipped = bytearray(data)
            flipped[len(data) // 2] ^= 1
            with monkeypatch.context() as patch:
                patch.setattr(s3_store, "RequestBody", lambda view, flipped=flipped: RequestBody(memoryview(flipped)))
                with pytest.raises((StoreUnavailable, StoreRefused)):
                    await store.put("k", data)
            with pytest.raises(ObjectNotFound):
                await store.get("k")
            assert await store.get("right") == data

    on(url, use)


def test_keys_that_are_not_tierds_are_not_shown(url: StoreUrl) -> None:
    async def use(store: S3Store) -> None:
        await store.put("run/f", b"1")
        client = await store.get_client()
        for name in (
            "a/prefix/",
            "a/prefix/run/",
            "a/prefix/white space",
            "a/prefix/.hidden",
            "a/prefix2/x",
            "a/prefix/ü",
        ):
            await client.put_object(Bucket=url.bucket, Key=name, Body=b"")
        assert await keys(store) == ["run/f"]

    on(url, use)


def test_more_calls_than_connections(url: StoreUrl) -> None:
    async def use(store: S3Store) -> None:
        await asyncio.gather(*(store.put(f"k{n}", bytes([n]) * 10_000) for n in range(100)))
        missing = asyncio.gather(*(store.get(f"none{n}") for n in range(50)), return_exceptions=True)
        found = await asyncio.gather(*(store.get(f"k{n}") for n in range(100)))
        assert [data[0] for data in found] == list(range(100))
        assert {type(error) for error in await missing} == {ObjectNotFound}

    on(url, use, S3Limits(connections=4))


def test_a_missing_bucket_is_refused_by_name(url: StoreUrl) -> None:
    async def use(store: S3Store) -> None:
        for error in await failing_calls(store, StoreRefused):
            assert "tierd-no-such-bucket" in str(error)
            assert "no such bucket" in str(error)

    on(replace(url, bucket="tierd-no-such-bucket"), use)


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_refused_and_not_repeated(
    url: StoreUrl, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "canaryCanary0123456789/secret+canary"
    monkeypatch.setenv(wrong, "AKIDUNKNOWN" if wrong == "AWS_ACCESS_KEY_ID" else canary)
    if wrong == "AWS_ACCESS_KEY_ID":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", canary)
    caplog.set_level(logging.DEBUG)

    async def use(store: S3Store) -> None:
        for error in await failing_calls(store, StoreRefused):
            assert url.bucket in str(error)
            assert "credentials" in str(error)
            assert canary not in "".join(traceback.format_exception(error)) + repr(error) + repr(store)

    on(url, use)
    assert caplog.records
    assert canary not in caplog.text


def test_a_session_token_is_not_repeated(
    url: StoreUrl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "tokenCanary0123456789/token+canary"
    caplog.set_level(logging.DEBUG)
    for library in ("botocore", "aiobotocore"):
        caplog.set_level(logging.INFO, logger=library)  # tierd has them at WARNING

    async def use(store: S3Store) -> None:
        for call in (lambda: store.get("k"), lambda: store.put("k", b"1"), lambda: keys(store)):
            try:
                await call()  # whether a server takes a token that it did not give differs
            except Exception as error:
                assert canary not in "".join(traceback.format_exception(error)) + repr(error)

    with monkeypatch.context() as patch:
        patch.setenv("AWS_SESSION_TOKEN", canary)
        on(url, use)
    assert "Found credentials" in caplog.text  # the library's logs are caught here
    assert canary not in caplog.text


def test_no_credentials_are_refused_with_the_way_out(url: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    async def use(store: S3Store) -> None:
        for error in await failing_calls(store, StoreRefused):
            assert "AWS_ACCESS_KEY_ID" in str(error)

    on(url, use)


def test_an_unknown_profile_is_refused(url: StoreUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(store: S3Store) -> None:
        await failing_calls(store, StoreRefused)

    with monkeypatch.context() as patch:
        patch.setenv("AWS_PROFILE", "no-such-profile")
        on(url, use)


def test_a_closed_port_is_unavailable(url: StoreUrl) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def use(store: S3Store) -> None:
        for error in await failing_calls(store, StoreUnavailable):
            assert f"127.0.0.1:{port}" in str(error)

    on(replace(url, endpoint=f"http://127.0.0.1:{port}"), use)


@dataclass
class Proxy:
    """A TCP proxy that lets `limit` bytes of an answer pass, then closes, resets or stalls the connection."""

    server: str
    port: int = 0
    limit: int | None = None
    end: str = "close"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks: set[asyncio.Task[None]] = set()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(task := asyncio.current_task())  # type: ignore[arg-type]
            try:
                await self._connect(reader, writer)
            except (ConnectionError, asyncio.CancelledError):
                pass
            finally:
                writer.close()
                tasks.discard(task)

        listener = await asyncio.start_server(connect, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        yield
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.server.rpartition("/")[2].partition(":")
        upstream, up = await asyncio.open_connection(host, int(port))

        async def forward() -> None:
            while data := await reader.read(1 << 16):
                up.write(data)
                await up.drain()

        forwarding = asyncio.create_task(forward())
        try:
            passed = 0
            while data := await upstream.read(1 << 16):
                if self.limit is not None and passed + len(data) > self.limit:
                    writer.write(data[: self.limit - passed])
                    await writer.drain()
                    if self.end == "stall":
                        await asyncio.sleep(3600)
                    if self.end == "reset":
                        await asyncio.sleep(0.1)
                        writer.transport.abort()
                    return
                passed += len(data)
                writer.write(data)
                await writer.drain()
        finally:
            forwarding.cancel()
            await asyncio.wait([forwarding])
            up.close()


@pytest.mark.parametrize("end", ["close", "reset", "stall"])
@pytest.mark.parametrize("limit", [0, 100, 5_000, 1_000_000])
async def test_an_answer_that_breaks_off_is_unavailable(url: StoreUrl, end: str, limit: int) -> None:
    data = random.Random(8).randbytes(2 << 20)
    proxy = Proxy(str(url.endpoint))
    async with proxy.running():
        limits = S3Limits(connections=2, answer_s=1, stall_s=1)
        store = S3Store(replace(url, endpoint=f"http://127.0.0.1:{proxy.port}"), limits)
        await store.put("k", data)
        proxy.limit, proxy.end = limit, end
        for _ in range(3):  # more often than the pool has connections: none may stay taken
            with pytest.raises(StoreUnavailable):
                await asyncio.wait_for(store.get("k"), 60)
        proxy.limit = None
        assert await asyncio.wait_for(store.get("k"), 60) == data
        await store.aclose()


def test_cancelled_gets_give_their_connections_back(url: StoreUrl) -> None:
    data = random.Random(9).randbytes(8 << 20)

    async def use(store: S3Store) -> None:
        await store.put("k", data)
        for number in range(12):
            task = asyncio.create_task(store.get("k"))
            await asyncio.sleep(0.003 * number)
            task.cancel()
            await asyncio.wait([task])
        assert await asyncio.wait_for(store.get("k"), 60) == data

    on(url, use, S3Limits(connections=2))
