"""Model test of the connection's life: whatever happens in whatever order, nothing is left of a call that has ended.

A server on loopback does to each request what the machine says. After each step `transport`'s invariant
holds: slots free, every socket ever made closed or parked IDLE, and nothing but tierd's own errors raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from stores.s3.test_s3_store import credentials
from stores.s3.test_tls import check_nothing_is_left
from support.tls import reset

from tierd.core.errors import StoreUnavailable, TierdError
from tierd.core.urls import parse_url
from tierd.stores.s3 import connection, http_exchanges
from tierd.stores.s3.http1 import DEFAULT_LIMITS, S3Limits
from tierd.stores.s3.http_exchanges import ExchangeState
from tierd.stores.s3.s3_store import S3Store
from tierd.stores.s3.transport import DirectSession

__all__ = ["credentials"]  # the fixture
_LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
_SLOTS = 3

# What the server does with a request. Those of `_RIGHT` are answers; after each other one the call must fail.
_RIGHT = ("answer", "in chunks", "interim first", "answer and close", "answer and hang up", "answer twice", "in drops")
_WRONG = (
    "reset at once",
    "reset after the request",
    "close",
    "half a head",
    "half a body",
    "reset in the body",
    "too long",
    "no length",
    "gzip",
    "no http",
    "bad header",
    "two lengths",
    "bad chunk",
    "stall",
    "stall in the body",
    "bad time",
)


class Server(threading.Thread):
    """Serves one request after another on each connection, as `script` says."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listener.getsockname()[1]
        self.script = "answer"
        self.over = threading.Event()
        self.hanging_up: set[socket.socket] = set()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client, client.makefile("rb") as file:
            while self._one(client, file):
                pass
        self.hanging_up.discard(client)

    def _one(self, client: socket.socket, file: Any) -> bool:
        first, size = file.readline(), 0
        if not first:
            return False
        if self.script == "reset at once":
            reset(client)
            return False
        while (text := file.readline()) not in (b"\r\n", b""):
            if text.lower().startswith(b"content-length:"):
                size = int(text.partition(b":")[2])
        file.read(size)
        body = _LISTING if b"list-type" in first else b"x" * 2000 if first.startswith(b"GET") else b""
        return self._answer(client, self.script, body)

    def _answer(self, client: socket.socket, how: str, body: bytes) -> bool:
        more = {
            "answer and close": b"Connection: close\r\n",
            "gzip": b"Content-Encoding: gzip\r\n",
            "bad header": b"no header\r\n",
            "two lengths": b"Content-Length: 7\r\n",
            "bad time": b"Last-Modified: never\r\nExpires: never\r\nx-amz-restore: no\r\n",
        }.get(how, b"")
        length = len(body) + (500 if how == "too long" else 0)
        framing = b"" if how == "no length" else b"Content-Length: %d\r\n" % length
        if how in ("in chunks", "bad chunk"):
            framing = b"Transfer-Encoding: chunked\r\n"
            sizes = b"zz" if how == "bad chunk" else b"%x" % len(body)
            body = (sizes + b"\r\n" + body + b"\r\n" if body or how == "bad chunk" else b"") + b"0\r\n\r\n"
        head = b'HTTP/1.1 200 OK\r\nETag: "e"\r\n' + more + framing + b"\r\n"
        whole = head + body
        if how == "answer and hang up":
            self.hanging_up.add(client)
        match how:
            case "reset after the request":
                reset(client)
            case "close":
                pass
            case "half a head":
                client.sendall(head[: len(head) // 2])
            case "half a body" | "reset in the body" | "stall in the body":
                # Where there is no body, the head breaks off instead: an answer that was whole would be right.
                client.sendall(whole[: len(head) + len(body) // 2] if body else head[:-2])
            case "no http":
                client.sendall(b"SSH-2.0-nothing\r\n")
            case "interim first":
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + whole)
            case "answer twice":
                client.sendall(whole + b"HTTP/1.1 500 Poison\r\nContent-Length: 0\r\n\r\n")
            case "in drops":
                for start in range(0, len(whole), 97):
                    client.sendall(whole[start : start + 97])
            case "stall":
                pass
            case _:
                client.sendall(whole)
        if how == "reset in the body":
            reset(client)
        if "stall" in how or how == "too long":
            self.over.wait(200)
        return how in ("answer", "in chunks", "interim first", "in drops", "answer twice")


class Shared:
    """What is slow to make, and has no part in what is tested: a loop, a server, and a client of the library's."""

    def __init__(self) -> None:
        self.server, self.loop = Server(), asyncio.new_event_loop()
        self.server.start()
        self.store = S3Store(parse_url(f"s3://bucket/p?endpoint=http://127.0.0.1:{self.server.port}&addressing=path"))
        self.store.probe.next_at = None
        self.loop.run_until_complete(self.store.get_client())

    def close(self) -> None:
        self.loop.run_until_complete(self.store.aclose())
        self.server.listener.shutdown(socket.SHUT_RDWR)
        self.server.listener.close()
        self.loop.close()


shared: Shared


class LineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sockets: list[socket.socket] = []
        self.lines: list[http_exchanges.HttpConnection] = []
        self.server, self.loop, self.store = shared.server, shared.loop, shared.store
        self.patches = contextlib.ExitStack()
        self._watch_sockets()
        # Not frozen, because they change while the session lives.
        self.limits: Any = SimpleNamespace(**asdict(S3Limits(connections=_SLOTS, connect_s=1.0)))
        self.session = DirectSession(self.limits)
        self.store._client._endpoint.http_session = self.session

    def _watch_sockets(self) -> None:
        made, lines = self.sockets, self.lines
        connect, begin = connection.Connection.connect, http_exchanges.HttpConnection.__init__

        def watched(self: connection.Connection) -> None:
            try:
                connect(self)
            finally:
                made.append(self.sock)

        def begun(self: http_exchanges.HttpConnection, *args: Any) -> None:
            lines.append(self)
            begin(self, *args)

        self.patches.enter_context(mock.patch.object(connection.Connection, "connect", watched))
        self.patches.enter_context(mock.patch.object(http_exchanges.HttpConnection, "__init__", begun))

    def teardown(self) -> None:
        self.server.over.set()
        self.loop.run_until_complete(self.session.close())
        assert self._settled([]), "sockets are open after the session was closed"
        self.patches.close()

    def _call(self, name: str) -> Coroutine[Any, Any, Any]:
        match name:
            case "get":
                return self.store.get("k")
            case "get into":
                return self.store.get("k", memoryview(bytearray(4000)))
            case "put":
                return self.store.put("k", b"y" * 30_000)
        return self._scan()

    async def _scan(self) -> list[Any]:
        return [info async for info in self.store.scan("")]

    calls = st.sampled_from(["get", "get into", "put", "scan"])

    @rule(name=calls, how=st.sampled_from(_RIGHT))
    def works(self, name: str, how: str) -> None:
        self._begin(how)
        result = self.loop.run_until_complete(self._call(name))
        if name.startswith("get"):
            assert bytes(result) == b"x" * 2000

    @rule(name=calls, how=st.sampled_from(_WRONG))
    def fails(self, name: str, how: str) -> None:
        self._begin(how)
        if how == "bad time" and name != "get":
            return
        try:
            self.loop.run_until_complete(asyncio.wait_for(self._call(name), 60))
        except TierdError as error:
            assert isinstance(error, StoreUnavailable), error
            assert str(error).startswith("s3://bucket/p")
        else:
            assert how == "bad time" or (how in ("half a body", "reset in the body", "gzip") and name == "put"), how

    @rule(names=st.lists(calls, min_size=4, max_size=8), how=st.sampled_from(_RIGHT + _WRONG))
    def many(self, names: list[str], how: str) -> None:
        self._begin(how)

        async def whole() -> list[Any]:
            return await asyncio.gather(*map(self._call, names), return_exceptions=True)

        found = self.loop.run_until_complete(asyncio.wait_for(whole(), 60))
        assert all(not isinstance(one, BaseException) or isinstance(one, StoreUnavailable) for one in found), found

    @rule(
        names=st.lists(calls, min_size=1, max_size=5),
        how=st.sampled_from(_RIGHT + _WRONG),
        after_ms=st.sampled_from([0, 0, 1, 3, 10, 50]),
    )
    def cancelled(self, names: list[str], how: str, after_ms: int) -> None:
        self._begin(how)

        async def whole() -> None:
            tasks = [asyncio.ensure_future(self._call(name)) for name in names]
            await asyncio.sleep(after_ms / 1000)
            for task in tasks:
                task.cancel()
            done, left = await asyncio.wait(tasks, timeout=60)
            assert not left
            for task in done:
                assert task.cancelled() or task.exception() is None or isinstance(task.exception(), StoreUnavailable)

        self.loop.run_until_complete(whole())

    @rule()
    def a_while_passes(self) -> None:
        self.limits.idle_s = -1
        try:
            self._begin("answer")
            self.loop.run_until_complete(self._call("get"))
        finally:
            self.limits.idle_s = DEFAULT_LIMITS.idle_s

    def _begin(self, how: str) -> None:
        self.server.over.set()  # a peer that stalls since an earlier step goes away
        self.server.over = threading.Event()
        end = time.monotonic() + 5
        while (
            self.server.hanging_up and time.monotonic() < end
        ):  # else the next request meets the end that is under way
            time.sleep(0.001)
        self.server.script = how
        # Only who is to be given up needs to be given up soon: the machine may be busy.
        self.limits.answer_s = self.limits.stall_s = 0.15 if "stall" in how or how == "too long" else 10.0

    @invariant()
    def nothing_is_left(self) -> None:
        check_nothing_is_left(self.session, _SLOTS)
        parked = [one for lines in self.session._parked.values() for one in lines]
        assert len(parked) == len(set(parked)) <= _SLOTS
        assert self._settled([one.connection._sock for one in parked])
        for one in self.lines:
            assert (one.state is ExchangeState.IDLE) == (one in parked), one.state

    def _settled(self, parked: list[socket.socket | None]) -> bool:
        """Whether all other sockets get closed: the thread of a cancelled call may take a moment."""
        for _ in range(300):
            if all(sock.fileno() == -1 or sock in parked for sock in self.sockets):
                self.sockets[:] = [sock for sock in self.sockets if sock in parked]
                return all(sock is not None and sock.fileno() >= 0 for sock in parked)
            threading.Event().wait(0.01)
        return False


@pytest.fixture
def machine(credentials: None) -> Iterator[None]:
    global shared
    shared = Shared()
    yield
    shared.close()


def test_nothing_is_left_of_a_call_that_has_ended(machine: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    run_state_machine_as_test(
        LineMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=10,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # what was found is found again, and to shrink it takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_line_whose_answer_broke_off_is_dead() -> None:
    """The model seldom sees the difference, because the one that gives the line back closes it as well."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = urlsplit(f"http://127.0.0.1:{server.getsockname()[1]}/k")
        one = http_exchanges.HttpConnection(
            url, ssl.create_default_context, S3Limits(connect_s=5.0, answer_s=5.0, stall_s=5.0)
        )

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")

        serving = threading.Thread(target=serve)
        serving.start()
        request = AWSRequest("GET", url.geturl()).prepare()
        assert one.exchange(url, request).size == 5 and one.state is ExchangeState.BUSY
        with pytest.raises(BotoCoreError, match="ended after 2 of the 5 bytes"):
            one.read(100)
        assert one.state is ExchangeState.DEAD
        serving.join()
        one.close()
