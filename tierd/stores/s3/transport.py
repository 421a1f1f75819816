"""HTTP/1.1 for the S3 client: each exchange runs in a thread, on a connection that no other exchange uses meanwhile.

Through a proxy, or with a client certificate, aiohttp has the connections.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.httpsession import get_cert_path

from tierd.core.errors import StoreRefused, StoreUnavailable
from tierd.stores.s3.connection import StallTimer
from tierd.stores.s3.http1 import LONGEST_REPLY, MessageHead, NoResponse, S3Limits, check_xml
from tierd.stores.s3.http_exchanges import HttpConnection
from tierd.threads import PriorityPools


class ProxiedSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore's own session, with the limits of `DirectSession` on responses that are not objects.

    The limits are on bytes, and on time by a `StallTimer`.
    """

    def __init__(self, limits: S3Limits, **options: Any) -> None:
        super().__init__(**options)
        self._stall_s = limits.stall_s

    async def send(self, request: Any) -> AioAWSResponse:
        """Send one of botocore's prepared requests. Raises `botocore.HTTPClientError` if no response can be used."""
        if request.stream_output:
            return await super().send(request)
        request.stream_output = True  # so that aiohttp reads nothing of the body yet
        try:
            response = await super().send(request)
        finally:
            request.stream_output = False
        try:
            response._content = body = await _reply(response.raw, self._stall_s)
        except BaseException:
            response.raw.close()
            raise
        if body and response.status_code == 200:
            check_xml(body)
        return response


async def _reply(raw: Any, stall_s: float) -> bytes:
    """Read through aiohttp the body of a response that is not an object."""
    if (size := raw.content_length or 0) > LONGEST_REPLY:
        raise NoResponse(f"an answer of {size} bytes, where no more than {LONGEST_REPLY} make sense")
    loop, data = asyncio.get_running_loop(), bytearray()
    watch = StallTimer(stall_s, loop.time(), 0, "in the middle of an answer")
    while len(data) <= LONGEST_REPLY:
        try:
            async with asyncio.timeout(watch.left_s(loop.time(), len(data))):
                piece = await raw.content.read(LONGEST_REPLY + 1 - len(data))
        except TimeoutError:
            continue  # the timer raises with the reason
        if not piece:
            return bytes(data)
        data += piece
    raise NoResponse(f"an answer without an end, of which {LONGEST_REPLY} bytes were read")


T = TypeVar("T")


_call_answers: ContextVar[list[HttpResponse] | None] = ContextVar("answers of this call", default=None)


class HttpResponse:
    """The body of one response; aiobotocore calls it the raw response. It owns a slot and a line until `close`."""

    def __init__(self, session: DirectSession) -> None:
        self._session: DirectSession | None = session
        self.line: HttpConnection | None = None
        self.head: MessageHead | None = None
        if (answers := _call_answers.get()) is not None:
            answers.append(self)

    async def readinto(self, view: memoryview) -> int:
        """Fill `view` from the body, close the answer, and return the number of bytes; fewer if the body ends first."""
        assert self._session is not None and self.line is not None
        try:
            return await self._session.run(self.line, self.line.readinto, view)
        finally:
            self.close()

    async def read(self, max_bytes: int | None = None) -> bytes:
        """Read the whole body, or its first `max_bytes` bytes, and close the answer.

        Raises `NoResponse` if `max_bytes` was not given and the body is longer than `LONGEST_REPLY`.
        """
        if self._session is None or self.line is None or self.head is None or self.head.opaque or self.line.is_idle():
            self.close()
            return b""
        try:
            size = self.head.size or 0
            if max_bytes is None and size > LONGEST_REPLY:
                raise NoResponse(f"an answer of {size} bytes, where no more than {LONGEST_REPLY} make sense")
            limit = LONGEST_REPLY + 1 if max_bytes is None else max_bytes
            data = await self._session.run(self.line, self.line.read, limit)
            if max_bytes is None and len(data) > LONGEST_REPLY:
                raise NoResponse(f"an answer without an end, of which {LONGEST_REPLY} bytes were read")
            return bytes(data)
        finally:
            self.close()

    def close(self) -> None:
        """Return the slot and the line. The line is reused if the body has been read to its end."""
        session, self._session = self._session, None
        if session is not None:
            session.free(self.line)


class DirectSession:
    """An HTTP session for `AioConfig(http_session_cls=...)`, of whose slots `in_use` are taken."""

    def __init__(self, limits: S3Limits, *, verify: bool | str | None = True, **_: Any) -> None:
        self._limits = limits
        self._verify = verify
        self._slots = asyncio.Semaphore(limits.connections)
        self._threads = PriorityPools(limits.connections, "tierd-s3")
        self._parked: dict[tuple[str, str], list[HttpConnection]] = {}
        self._busy: set[HttpConnection] = set()
        self._closed = False
        self._moved = self._signs = 0  # of exchanges that have ended
        self.in_use = 0

    async def __aenter__(self) -> DirectSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every call, and close all connections."""
        self._closed = True
        for line in self._busy:
            line.abort()
        for parked in self._parked.values():
            for line in parked:
                line.close()
        self._parked.clear()
        self._threads.shutdown()

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received so far by all exchanges, those in flight included."""
        return self._moved + sum(line.connection.moved_bytes for line in self._busy)

    @property
    def signs_of_life(self) -> int:
        """Signs of life so far, of exchanges in flight and ended; see `Store`."""
        return self._signs + sum(line.connection.signs_of_life for line in self._busy)

    async def send(self, request: Any) -> AioAWSResponse:
        """Send one of botocore's prepared requests. At most `S3Limits.connections` run at once; others wait.

        Raises `botocore.HTTPClientError` if no response can be used.
        """
        await self._slots.acquire()
        self.in_use += 1
        answer = HttpResponse(self)
        try:
            url = urlsplit(request.url)
            answer.line = line = self._take_line(url)
            answer.head = head = await self.run(line, line.exchange, url, request)
            response = AioAWSResponse(request.url, head.status, head.headers, answer)
            if not request.stream_output:
                body = await response.content
                if body and head.status == 200:
                    check_xml(body)
            return response
        except BaseException:
            answer.close()
            raise

    async def run(self, line: HttpConnection, call: Callable[..., T], *args: Any) -> T:
        """Run `call` in a thread. A cancelled call stops using its buffers before the cancellation is raised."""
        if self._closed:
            raise NoResponse("the store was closed")
        job = self._threads.current().submit(call, *args)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            line.abort()
            line.close_after(job)
            task = asyncio.current_task()
            if job.cancelled() and not (task and task.cancelling()):  # the session was closed before the call began
                raise NoResponse("the store was closed") from None
            raise

    def _take_line(self, url: SplitResult) -> HttpConnection:
        parked = self._parked.get((url.scheme, url.netloc), [])
        while parked:
            if (line := parked.pop()).is_fresh():
                break
            line.close()
        else:
            line = HttpConnection(url, lambda: self._tls, self._limits)
        self._busy.add(line)
        return line

    def free(self, line: HttpConnection | None) -> None:
        """Take back a slot, and its line if it has one."""
        self._slots.release()
        self.in_use -= 1
        if line is None:
            return
        self._busy.discard(line)
        connection = line.connection
        self._moved, connection.moved_bytes = self._moved + connection.moved_bytes, 0
        self._signs, connection.signs_of_life = self._signs + connection.signs_of_life, 0
        if line.is_idle() and not self._closed:
            self._parked.setdefault(line.place, []).append(line)
        else:
            line.close()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The TLS context, made in a thread because that reads files.

        `verify` is True, False or the path of a CA bundle, as botocore passes it.
        """
        if not self._verify:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context
        return ssl.create_default_context(cafile=get_cert_path(self._verify))


@contextmanager
def response_scope(doing: str) -> Iterator[None]:
    """Wrap one call of a store: close every open answer at its end, and translate a missing response into an error.

    `doing` is the store and the call, for the message of StoreUnavailable or StoreRefused.
    """
    opened: list[HttpResponse] = []
    token = _call_answers.set(opened)
    try:
        yield
    except NoResponse as error:
        raise (StoreRefused if error.refused else StoreUnavailable)(f"{doing}: {error.said}") from error
    finally:
        _call_answers.reset(token)
        for answer in opened:
            answer.close()


def http_session(limits: S3Limits, **options: Any) -> DirectSession | ProxiedSession:
    """Create the session for a client: aiobotocore's own if it uses a proxy or a client certificate."""
    if options.get("proxies") or options.get("client_cert"):
        return ProxiedSession(limits, **options)
    return DirectSession(limits, **options)
