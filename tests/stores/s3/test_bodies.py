"""Bodies that are wrong, slow or endless: bounded in time and in bytes, and the error says what was wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest
from stores.s3.test_s3_store import credentials
from stores.s3.test_tls import check_nothing_is_left, session_of
from stores.s3.test_transport import LISTING, Reader, Server, Writer, head

from tierd.core.errors import StoreRefused, StoreUnavailable
from tierd.stores.s3 import s3_store
from tierd.stores.s3.connection import SLOWEST_RATE, StallTimer
from tierd.stores.s3.http1 import DEFAULT_LIMITS, NoResponse, S3Limits, chunk_size, parse_head, request_head
from tierd.stores.s3.s3_store import S3Store

__all__ = ["credentials"]  # the fixture


def against(
    respond: Callable[[str, Writer], Awaitable[None]],
    use: Callable[[S3Store], Awaitable[None]],
    limits: S3Limits = DEFAULT_LIMITS,
) -> None:
    """Use a store whose server answers the first request on each connection by `respond`, and closes."""

    async def serve(_: int, reader: Reader, writer: Writer) -> None:
        first, size = await head(reader)
        await reader.readexactly(size)
        with contextlib.suppress(ConnectionError):
            await respond(first, writer)

    async def whole(store: S3Store) -> None:
        await use(store)
        check_nothing_is_left(session_of(store), limits.connections)

    Server(serve).use(whole, limits=limits)


async def listed(store: S3Store) -> list[str]:
    return [info.key async for info in store.scan("")]


def test_a_size_that_is_too_long_is_given_up_and_named() -> None:
    async def respond(first: str, writer: Writer) -> None:
        body = LISTING if "list-type" in first else b"data"
        writer.write(b"HTTP/1.1 200 OK\r\nETag: e\r\nContent-Length: %d\r\n\r\n" % (len(body) + 500) + body)
        await asyncio.sleep(5)

    async def use(store: S3Store) -> None:
        with pytest.raises(
            StoreUnavailable, match=r"stalled: no byte for 0\.3 s in the answer.s body, after 4 of the 504 bytes"
        ):
            await store.get("k")
        with pytest.raises(StoreUnavailable, match=rf"after {len(LISTING)} of the {len(LISTING) + 500} bytes"):
            await listed(store)

    against(respond, use, S3Limits(stall_s=0.3))


def test_chunks_that_are_fewer_bytes_than_the_answer_says_are_no_object() -> None:
    async def respond(first: str, writer: Writer) -> None:
        lines = b"ETag: e\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + lines + b"4\r\ndata\r\n0\r\n\r\n")

    async def use(store: S3Store) -> None:
        for into in (None, memoryview(bytearray(20))):
            with pytest.raises(StoreUnavailable, match="get k: 4 of 9 bytes came"):
                await store.get("k", into)

    against(respond, use)


def test_gzip_that_nobody_asked_for_is_named_and_no_object() -> None:
    async def respond(first: str, writer: Writer) -> None:
        body = gzip.compress(LISTING)
        lines = b"ETag: e\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(b"HTTP/1.1 200 OK\r\n" + lines + body)

    async def use(store: S3Store) -> None:
        for call in (store.get("k"), listed(store), store.put("k", b"1")):
            with pytest.raises(StoreUnavailable, match="Content-Encoding 'gzip', which nobody asked for"):
                await call

    against(respond, use)


@pytest.mark.parametrize("status", [403, 404, 503])
def test_error_whose_body_cannot_be_read_is_judged_by_its_status(status: int) -> None:
    """Some gateways compress their error pages, and some say no size."""
    how = ["Content-Encoding: gzip\r\nContent-Length: 5\r\n", "Connection: close\r\n"]

    async def respond(first: str, writer: Writer) -> None:
        writer.write(f"HTTP/1.1 {status} No\r\n{how[0]}\r\nabcde".encode())

    async def use(store: S3Store) -> None:
        while how:
            with pytest.raises({403: StoreRefused, 404: StoreUnavailable, 503: StoreUnavailable}[status]) as caught:
                await store.get("k")
            assert str(status) in str(caught.value)
            how.pop(0)

    against(respond, use)


@pytest.mark.parametrize("into", [None, 4 << 20])
def test_a_body_without_an_end_is_bounded_in_bytes(into: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "LARGEST", 6 << 20)
    monkeypatch.setattr("tierd.stores.base.LARGEST", 6 << 20)
    monkeypatch.setattr("tierd.stores.s3.transport.LONGEST_REPLY", 6 << 20)
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"

    async def respond(first: str, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nETag: e\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.transport.set_write_buffer_limits(1 << 20)
        for _ in range(100):
            writer.write(chunk)
            await writer.drain()

    async def use(store: S3Store) -> None:
        tracemalloc.start()
        try:
            with pytest.raises((StoreUnavailable, StoreRefused), match=r"without an end|there is room|tierd puts none"):
                await store.get("k", memoryview(bytearray(into)) if into else None)
            with pytest.raises(StoreUnavailable, match="without an end"):
                await listed(store)
            assert tracemalloc.get_traced_memory()[1] < 40 << 20
        finally:
            tracemalloc.stop()

    against(respond, use)


def test_a_reply_that_says_that_it_is_huge_is_not_begun() -> None:
    async def respond(first: str, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nETag: e\r\nContent-Length: 999999999999\r\n\r\n")
        await asyncio.sleep(1)

    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable, match="an answer of 999999999999 bytes"):
            await listed(store)

    against(respond, use)


def test_a_drip_is_given_up() -> None:
    """A byte now and then is no progress: otherwise it would take the attempt's whole deadline, which is long."""

    async def respond(first: str, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nETag: e\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(100):
            await asyncio.sleep(0.1)
            writer.write(b".")
            await writer.drain()

    async def use(store: S3Store) -> None:
        for call in (lambda: store.get("k"), lambda: listed(store)):
            with pytest.raises(StoreUnavailable, match=r"stalled: no more than \d+ bytes in .* of the 100000 bytes"):
                await call()

    against(respond, use, S3Limits(stall_s=0.5))


@pytest.mark.parametrize("body", [b"<html>please log in</ht", LISTING[:30], b"no markup"])
def test_answer_200_that_is_no_xml_is_not_error_500(body: bytes) -> None:
    """Of a put: seed 74 of `python -m faults s3`."""

    async def respond(first: str, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async def use(store: S3Store) -> None:
        for call in (lambda: listed(store), lambda: store.delete(["k"]), lambda: store.put("k", b"1")):
            with pytest.raises(
                StoreUnavailable, match=rf"answered 200 with {len(body)} bytes that are no XML"
            ) as caught:
                await call()
            assert "answered 500" not in str(caught.value) and "Internal" not in str(caught.value)

    against(respond, use)


@pytest.mark.parametrize(
    "body",
    [
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Size>1</Size></Contents></ListBucketResult>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    ],
)
def test_answer_that_the_library_fails_to_parse_is_no_answer(body: bytes) -> None:
    async def respond(first: str, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async def use(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable, match="no answer of S3's"):
            await listed(store)

    against(respond, use)


# -- waits ------------------------------------------------------------------------------------------------------------


class Trickle:
    """A server whose kernel takes a request slowly: a small buffer, of which it reads `rate` bytes per second."""

    def __init__(self, rate: int) -> None:
        self.rate, self.listener = rate, socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        client, _ = self.listener.accept()
        with client, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                data += client.recv(1 << 12)
            text, _, body = data.partition(b"\r\n\r\n")
            size = int(text.lower().partition(b"content-length:")[2].split()[0])
            left = size - len(body)
            while left > 0:
                time.sleep(0.05)
                due = min(left, self.rate // 20)
                while due > 0:
                    count = len(client.recv(due))
                    due, left = due - count, left - count
            client.sendall(b"HTTP/1.1 200 OK\r\nETag: e\r\nContent-Length: 0\r\n\r\n")


def test_a_large_body_on_a_slow_link_is_not_cut_off_while_it_flows() -> None:
    """All of it fits into the kernel's buffer at once; the answer comes only when it has trickled out, long after the
    time in which an answer must begin."""
    from tierd.core.urls import parse_url

    server, limits = Trickle(600_000), S3Limits(answer_s=1.0, stall_s=1.0)

    async def whole() -> None:
        store = S3Store(parse_url(f"s3://bucket/p?endpoint={server.url}&addressing=path"), limits)
        store.probe.next_at = None
        began = time.monotonic()
        try:
            await store.put("k", bytes(2_000_000))
            assert time.monotonic() - began > 2
            assert session_of(store).moved_bytes > 2_000_000
        finally:
            await store.aclose()

    asyncio.run(whole())
    server.listener.close()


def test_how_long_a_watch_waits() -> None:
    watch = StallTimer(10.0, 100.0, 5, "in a test")
    assert watch.left_s(100.0, 5) == 10.0
    assert watch.left_s(105.0, 5 + SLOWEST_RATE) == pytest.approx(6.0)  # by the rate: 10 s and one more
    assert watch.left_s(109.0, 5 + 100 * SLOWEST_RATE) == 10.0  # since it moved
    assert watch.left_s(118.0, 5 + 100 * SLOWEST_RATE) == pytest.approx(1.0)
    with pytest.raises(NoResponse, match="no byte for 10 s in a test"):
        watch.left_s(119.0, 5 + 100 * SLOWEST_RATE)
    with pytest.raises(NoResponse, match="no more than 1 bytes"):
        StallTimer(10.0, 0.0, 0).left_s(11.0, 1)


def test_a_connection_is_not_closed_under_a_call_that_was_cancelled() -> None:
    """Its number could be another connection's by then, which the call would read from or shut down."""

    async def respond(first: str, writer: Writer) -> None:
        await asyncio.sleep(5)

    async def use(store: S3Store) -> None:
        await store.get_client()
        task = asyncio.create_task(store.get("k"))
        await asyncio.sleep(0.3)
        [busy] = session_of(store)._busy
        busy.connection.abort = lambda: setattr(busy.connection, "aborted", True)  # type: ignore[method-assign]
        task.cancel()
        await asyncio.wait([task])
        assert busy.connection.sock.fileno() >= 0  # the call's thread still waits there
        socket.socket.shutdown(busy.connection.sock, socket.SHUT_RDWR)
        for _ in range(200):
            if busy.connection.sock.fileno() < 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it was never closed")

    against(respond, use)


# -- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/2 200 OK\r\nContent-Length: 1",
        b"HTTP/1.1 200\r\nContent-Length: +1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\nX: y",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n folded: x",
        b"HTTP/1.1 200 OK\r\nContent-Length : 1",
    ],
)
def test_a_head_that_is_none(raw: bytes) -> None:
    with pytest.raises(NoResponse):
        parse_head(raw, "GET")


def test_heads() -> None:
    found = parse_head(b'HTTP/1.1 200 OK\r\nContent-Length:  5 \r\nContent-Length: 5\r\nETag: "e"\r\nX:', "GET")
    assert (found.status, found.size, found.keeps, found.headers["etag"], found.headers["x"]) == (
        200,
        5,
        True,
        '"e"',
        "",
    )
    assert parse_head(b"HTTP/1.0 200 OK\r\nContent-Length: 5", "GET").keeps is False
    assert parse_head(b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 5", "GET").keeps is False
    assert parse_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5", "GET").keeps is False
    assert parse_head(b"HTTP/1.1 204 No Content", "PUT").size == 0
    assert parse_head(b"HTTP/1.1 200 OK\r\nContent-Length: 5", "HEAD").size == 0
    assert chunk_size(b"1fF ; name=value") == 0x1FF
    for line_ in (b"", b"-1", b"0x1", b"1 2"):
        with pytest.raises(NoResponse):
            chunk_size(line_)


def test_no_header_can_begin_another() -> None:
    from urllib.parse import urlsplit

    url = urlsplit("http://host:1/a?b=c")
    assert request_head("GET", url, {"Expect": "100-continue", "A": b"b"}) == (
        b"GET /a?b=c HTTP/1.1\r\nHost: host:1\r\nA: b\r\nAccept-Encoding: identity\r\n\r\n"
    )
    with pytest.raises(ValueError, match="line break"):
        request_head("GET", url, {"A": "b\r\nC: d"})
