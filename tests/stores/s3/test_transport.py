"""The transport on plain sockets: connections are used again, waits end, and an ended call leaves its buffer alone."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain, repeat
from pathlib import Path

import pytest
from aiobotocore.httpsession import AIOHTTPSession
from stores.s3.test_s3_store import credentials

from tierd.core.errors import StoreRefused, StoreUnavailable
from tierd.core.urls import parse_url
from tierd.stores.s3 import transport
from tierd.stores.s3.http1 import DEFAULT_LIMITS, S3Limits
from tierd.stores.s3.http_exchanges import RequestBody
from tierd.stores.s3.s3_store import S3Store
from tierd.stores.s3.transport import DirectSession, http_session

__all__ = ["credentials"]  # the fixture
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
BIG = 8 << 20  # bytes: more than fits into the buffers of a connection
BEHIND = "s3://bucket/p?endpoint=http://example.invalid&addressing=path"  # a server that only a proxy reaches


async def head(reader: Reader) -> tuple[str, int]:
    """The request line, and the size of the body that follows."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    sizes = [int(line.partition(": ")[2]) for line in lines if line.lower().startswith("content-length")]
    return lines[0], sizes[0] if sizes else 0


class Server:
    """Speaks HTTP on loopback; `serve(number, reader, writer)` has one connection, which is closed after it."""

    def __init__(self, serve: Callable[[int, Reader, Writer], Awaitable[None]]) -> None:
        self.serve, self.connections, self.url = serve, 0, ""

    def use(
        self,
        use: Callable[[S3Store], Awaitable[None]],
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        limits: S3Limits = DEFAULT_LIMITS,
        url: str | None = None,
    ) -> None:
        """`url`: the store's, if it is not the server's own."""

        async def connect(reader: Reader, writer: Writer) -> None:
            self.connections += 1
            try:
                await self.serve(self.connections, reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        async def whole() -> None:
            server = await asyncio.start_server(connect, "127.0.0.1", 0, ssl=tls)
            port = server.sockets[0].getsockname()[1]
            scheme = "https" if tls else "http"
            self.url = f"{scheme}://{host}:{port}"
            store = S3Store(parse_url(url or f"s3://bucket/p?endpoint={self.url}&addressing=path"), limits)
            store.probe.next_at = None  # no puts but the test's
            try:
                await use(store)
            finally:
                await store.aclose()
                server.close()
                await asyncio.sleep(0.01)

        asyncio.run(whole())


async def answer(writer: Writer, body: bytes = b"", status: str = "200 OK") -> None:
    writer.write(f"HTTP/1.1 {status}\r\nETag: e\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


async def echo(_: int, reader: Reader, writer: Writer) -> None:
    """Takes every put, and answers every get with the same bytes."""
    while True:
        first, size = await head(reader)
        await reader.readexactly(size)
        await answer(writer, b"x" * BIG if first.startswith("GET") else b"")


def test_connection_is_used_again_unless_it_ended() -> None:
    async def serve(number: int, reader: Reader, writer: Writer) -> None:
        for _ in range(3):
            _, size = await head(reader)
            await reader.readexactly(size)
            await answer(writer)

    server = Server(serve)

    async def use(store: S3Store) -> None:
        for number in range(9):
            await store.put(f"k{number}", b"data")
            await asyncio.sleep(0.02)

    server.use(use)
    assert server.connections == 3


def test_a_connection_that_was_idle_for_long_is_not_used_again() -> None:
    server = Server(echo)

    async def use(store: S3Store) -> None:
        for _ in range(3):
            await store.put("k", b"data")

    server.use(use, limits=S3Limits(idle_s=0))
    assert server.connections == 3


def test_no_more_connections_than_allowed() -> None:
    server = Server(echo)

    async def use(store: S3Store) -> None:
        await asyncio.gather(*(store.put(f"k{number}", b"data" * 1000) for number in range(30)))
        assert {len(data) for data in await asyncio.gather(*(store.get("k") for _ in range(9)))} == {BIG}

    server.use(use, limits=S3Limits(connections=3))
    assert server.connections <= 3


def test_an_answer_before_the_end_of_the_body_is_heard() -> None:
    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        await head(reader)
        body = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"
        await answer(writer, body, "503 Slow Down")
        await asyncio.sleep(0.1)

    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable):
            await store.put("k", bytes(BIG))
        with pytest.raises(StoreUnavailable, match="SlowDown"):
            await store.put("k", b"small")

    Server(serve).use(use)


def test_success_before_the_end_of_the_body_is_none() -> None:
    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        await head(reader)
        await answer(writer)

    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable):
            await store.put("k", bytes(BIG))

    Server(serve).use(use)


@pytest.mark.parametrize("where", ["body", "answer"])
def test_a_server_that_stalls_is_given_up(where: str) -> None:
    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        _, size = await head(reader)
        if where == "answer":
            await reader.readexactly(size)
        await asyncio.sleep(200)

    async def use(store: S3Store) -> None:
        for call in (store.put("k", bytes(BIG)), store.get("k")):
            with pytest.raises(StoreUnavailable, match=r"stalled: no byte for 0\.2 s"):
                await asyncio.wait_for(call, 60)

    Server(serve).use(use, limits=S3Limits(answer_s=0.2, stall_s=0.2))


def test_a_cancelled_put_returns_at_once_and_its_buffer_is_not_read_any_more() -> None:
    got = bytearray()
    cancelled = asyncio.Event()

    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        await head(reader)
        got.extend(await reader.read(1 << 16))
        await cancelled.wait()
        while data := await reader.read(1 << 16):
            got.extend(data)

    async def use(store: S3Store) -> None:
        data = bytearray(b"a" * BIG)
        task = asyncio.create_task(store.put("k", data))
        while not got:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=60)
        assert done
        data[:] = b"!" * BIG
        cancelled.set()
        await asyncio.sleep(0.2)
        assert 0 < len(got) < BIG
        assert set(got) == set(b"a")

    Server(serve).use(use)


@pytest.mark.parametrize("part", [0, 100, 5_000, 3 << 20])
def test_a_cancelled_get_leaves_its_buffer_alone(part: int) -> None:
    cancelled = asyncio.Event()

    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        await head(reader)
        writer.write(f"HTTP/1.1 200 OK\r\nETag: e\r\nContent-Length: {BIG}\r\n\r\n".encode() + b"x" * part)
        await writer.drain()
        await cancelled.wait()
        writer.write(b"x" * (BIG - part))

    async def use(store: S3Store) -> None:
        buffer = bytearray(BIG)
        task = asyncio.create_task(store.get("k", memoryview(buffer)))
        await asyncio.sleep(0.1)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=60)
        assert done
        buffer[:] = b"!" * BIG
        cancelled.set()
        await asyncio.sleep(0.1)
        assert buffer == b"!" * BIG

    Server(serve).use(use)


def test_a_get_is_cancelled_at_once_where_the_server_says_that_it_will_close() -> None:
    """The HTTP client lets go of its socket then; the loop must not wait for what still comes through it."""

    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        await head(reader)
        writer.write(f"HTTP/1.1 200 OK\r\nETag: e\r\nContent-Length: {BIG}\r\nConnection: close\r\n\r\nxxx".encode())
        await asyncio.sleep(3)

    async def use(store: S3Store) -> None:
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(store.get("k", memoryview(bytearray(BIG))))
        await asyncio.sleep(0.3)
        work.cancel()
        begun = loop.time()
        await asyncio.gather(work, return_exceptions=True)
        assert loop.time() - begun < 1

    Server(serve).use(use)


def test_closing_ends_requests_under_way() -> None:
    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        await head(reader)
        await asyncio.sleep(200)

    async def use(store: S3Store) -> None:
        task = asyncio.create_task(store.get("k"))
        await asyncio.sleep(0.1)
        await store.aclose()
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(task, 60)

    Server(serve).use(use)


@pytest.mark.parametrize("sized", [True, False])
def test_an_answer_in_pieces_without_a_size_has_an_end(sized: bool) -> None:
    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        while True:
            await head(reader)
            writer.write(
                b"HTTP/1.1 200 OK\r\nETag: e\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
            )

    async def use(store: S3Store) -> None:
        for _ in range(3):
            into = memoryview(bytearray(8)) if sized else None
            assert bytes(await store.get("k", into)) == b"abcde"
        with pytest.raises(StoreRefused, match=r"5.*4"):
            await store.get("k", memoryview(bytearray(4)))

    server = Server(serve)
    server.use(use)
    assert server.connections == 1


@pytest.mark.parametrize(
    "said",
    [b"SSH-2.0-OpenSSH\r\n", b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 4\r\nLast-Modified: Sat, 21 N'],
    ids=["no HTTP", "a time that breaks off"],
)
def test_an_answer_that_is_none_is_unavailable(said: bytes) -> None:
    """Seed 10706 of `python -m faults s3`: botocore raises what is no error of its own over a time that is none."""

    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        await head(reader)
        writer.write(said)
        await writer.drain()

    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable):
            await store.get("k")

    Server(serve).use(use)


LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


@pytest.mark.parametrize("cut", [0, 5, 17, 28, 36, 60])
def test_an_answer_whose_head_breaks_off_is_none(cut: int) -> None:
    """Python's parser takes the end of the stream for the end of the head: an empty object, or an empty listing."""

    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        first, _ = await head(reader)
        body = LISTING if "list-type" in first else b"data"
        size = f"Content-Length: {len(body)}"
        whole = f'HTTP/1.1 200 OK\r\nETag: "e"\r\nServer: somebody\r\n{size}\r\n\r\n'.encode() + body
        writer.write(whole[:cut])
        await writer.drain()

    async def use(store: S3Store) -> None:
        for into in (None, memoryview(bytearray(10))):
            with pytest.raises(StoreUnavailable):
                await store.get("k", into)
        with pytest.raises(StoreUnavailable):
            _ = [info async for info in store.scan("")]

    Server(serve).use(use)


@pytest.mark.parametrize("body", [b"", b"<html><body>come back later</body></html>"])
def test_a_success_that_is_no_s3_servers_is_none(body: bytes) -> None:
    """Of a gateway on the way, say: nothing was put, and what it says is no object and no listing."""

    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        while True:
            _, size = await head(reader)
            await reader.readexactly(size)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async def use(store: S3Store) -> None:
        store.probe.next_at = 0.0
        for call in (store.put("k", b"data"), store.get("k"), anext(store.scan(""))):
            with pytest.raises(StoreUnavailable):
                await call
        assert store.probe.next_at > 0  # it is asked again: nothing is known of the server

    Server(serve).use(use)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for localhost, and its key, in one file."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run(
        [*command, "-keyout", tmp_path / "key", "-out", tmp_path / "cert"], check=True, capture_output=True, timeout=150
    )
    whole = tmp_path / "both.pem"
    whole.write_bytes((tmp_path / "cert").read_bytes() + (tmp_path / "key").read_bytes())
    return whole


def test_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def untrusted(store: S3Store) -> None:
        with pytest.raises(StoreRefused, match="AWS_CA_BUNDLE"):
            await store.get("k")

    Server(echo).use(untrusted, context, "localhost")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))

    async def trusted(store: S3Store) -> None:
        into = bytearray(BIG)
        for _ in range(3):
            await store.put("k", bytes(BIG))
            assert await store.get("k", memoryview(into)) == b"x" * BIG
        task = asyncio.create_task(store.put("k", bytes(BIG * 8)))
        await asyncio.sleep(0.02)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=60)
        assert done

    server = Server(echo)
    server.use(trusted, context, "localhost")
    assert server.connections <= 2
    Server(echo).use(lambda store: _refused(store), context, "127.0.0.1")  # another name than the certificate's


async def _refused(store: S3Store) -> None:
    with pytest.raises(StoreRefused, match="certificate"):
        await store.get("k")


def test_through_a_proxy_it_is_aiobotocores_own_session(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    async def proxy(_: int, reader: Reader, writer: Writer) -> None:
        while True:
            first, size = await head(reader)
            if size:  # aiohttp waits for it, as botocore asked it to
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await reader.readexactly(size)
            lines.append(f"{first} {len(body)}")
            await answer(writer, b"12345" if first.startswith("GET") else b"")

    async def use(store: S3Store) -> None:
        monkeypatch.setenv("http_proxy", server.url)
        into = memoryview(bytearray(8))
        await store.put("k", bytes(BIG))
        assert bytes(await store.get("k", into)) == b"12345" == into[:5]
        assert bytes(await store.get("k")) == b"12345"
        with pytest.raises(StoreRefused, match=r"5.*4"):
            await store.get("k", into[:4])

    server = Server(proxy)
    server.use(use, url=BEHIND)
    assert lines[0] == f"PUT http://example.invalid/bucket/p/k HTTP/1.1 {BIG}"
    assert isinstance(http_session(DEFAULT_LIMITS, timeout=(1, 1), proxies={"http": "x"}), AIOHTTPSession)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (lambda: repeat(b"x" * 65536, 1024), "without an end"),
        (lambda: repeat(b" ", 1), "stalled"),
        (lambda: chain([b"<L"], (b"" for _ in iter(int, 1))), "stalled"),
        (lambda: [b"<html>"], "no XML"),
    ],
    ids=["endless", "one byte", "silent", "html"],
)
def test_through_a_proxy_a_listing_is_bounded_in_bytes_and_time(
    monkeypatch: pytest.MonkeyPatch, pieces: Callable[[], Iterable[bytes]], says: str
) -> None:
    """aiohttp reads whatever comes, into memory, for as long as it comes."""
    monkeypatch.setattr(transport, "LONGEST_REPLY", 1 << 20)
    sent = 0

    async def proxy(_: int, reader: Reader, writer: Writer) -> None:
        nonlocal sent
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces():
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if piece else b"")
            await writer.drain()
            await asyncio.sleep(0 if piece else 0.05)
            sent += len(piece)
        if says == "stalled":
            await reader.read()  # until it is given up
        writer.write(b"0\r\n\r\n")

    async def use(store: S3Store) -> None:
        monkeypatch.setenv("http_proxy", server.url)
        with pytest.raises(StoreUnavailable, match=says):
            async with asyncio.timeout(60):
                _ = [info async for info in store.scan("")]

    server = Server(proxy)
    server.use(use, url=BEHIND, limits=S3Limits(stall_s=0.5))
    assert sent < 16 << 20


async def test_session_without_a_proxy_is_direct() -> None:
    session = http_session(DEFAULT_LIMITS, timeout=(1, 1), proxies={}, client_cert=None, connector_args={})
    assert isinstance(session, DirectSession)
    await session.close()


def test_a_body_is_a_file_without_a_copy() -> None:
    body = RequestBody(memoryview(b"0123456789"))
    assert (len(body), body.read(4), body.tell(), body.read(), body.read()) == (10, b"0123", 4, b"456789", b"")
    assert (body.seek(-3, 2), body.read()) == (7, b"789")
    assert (body.seek(2), body.seek(1, 1), body.read(1)) == (2, 3, b"3")
