"""HTTP/1.1 for the S3 client: each exchange on a connection of its own, in a thread.

Law: who owns what, from the first moment to the last.

- A *slot* is the right to have one exchange under way; there are `max_pool_connections`. `send` takes one and gives
  it to an `Answer` at once, before anything that can fail. `Answer.close` gives it back, once, whatever happened.
- A *line* (see `line` for its states) belongs to the answer from `send` on. `Answer.close` parks it where it is IDLE,
  and closes it where it is anything else; where a cancelled call still runs on it, that call's thread closes it at
  its end.
- An *answer* belongs to the call of the store within which it came. `exchanges` closes, when the call ends, each
  answer that the call has left open: the client library drops one that it cannot parse, and closes nothing.

So after a call that has ended, cancelled or not, its slot is free, its buffer is left alone for good, and its
connection is closed, or parked with nothing of an answer left on it; and what it raises is tierd's own error, with
the reason.

Why not aiohttp: it copies a large body twice on its way out and three times on its way in, on the one thread of the
loop: 0.82 CPU-seconds per GB, where blocking calls on large pieces take 0.36 and run beside each other and the loop
(benchmarks/clients.md). Behind a proxy it is aiohttp still, with the same bounds on answers that are no object.
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
from xml.parsers import expat

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore.httpsession import get_cert_path

from tierd.core.errors import StoreRefused, StoreUnavailable
from tierd.priority import Pools
from tierd.stores.connection import Watch
from tierd.stores.http1 import Head, Unanswered
from tierd.stores.line import Line

T = TypeVar("T")

LONGEST_REPLY = 16 << 20  # bytes of an answer that is no object: a listing's page has at most 4 MB
_STALL_S = 20.0  # in which something of a proxied answer must come, as `line` has it of others

_mine: ContextVar[list[Answer] | None] = ContextVar("answers of this call", default=None)


class Answer:
    """What aiobotocore calls the raw response: the body of one answer. It has a slot, and a line, until `close`."""

    def __init__(self, session: DirectSession) -> None:
        self._session: DirectSession | None = session
        self.line: Line | None = None
        self.head: Head | None = None
        if (mine := _mine.get()) is not None:
            mine.append(self)

    async def readinto(self, view: memoryview) -> int:
        """Fill `view` from the body; the number of bytes, fewer than it has if the body ends. Ends the answer."""
        assert self._session is not None and self.line is not None
        try:
            return await self._session.run(self.line, self.line.readinto, view)
        finally:
            self.close()

    async def read(self, most: int | None = None) -> bytes:
        """All of the body; of one that is longer than `most` bytes, those. Ends the answer.

        Raises:
            Unanswered: the body is longer than any reply, and no `most` was given.
        """
        if self._session is None or self.line is None or self.head is None or self.head.opaque or self.line.is_idle():
            self.close()
            return b""
        try:
            size = self.head.size or 0
            if most is None and size > LONGEST_REPLY:
                raise Unanswered(f"an answer of {size} bytes, where no more than {LONGEST_REPLY} make sense")
            limit = LONGEST_REPLY + 1 if most is None else most
            data = await self._session.run(self.line, self.line.read, limit)
            if most is None and len(data) > LONGEST_REPLY:
                raise Unanswered(f"an answer without an end, of which {LONGEST_REPLY} bytes were read")
            return bytes(data)
        finally:
            self.close()

    def close(self) -> None:
        """Give back the slot, and the line: to be used again if the body has been read to its end."""
        session, self._session = self._session, None
        if session is not None:
            session.free(self.line)


class DirectSession:
    """An HTTP session as `AioConfig(http_session_cls=...)` takes one. Timeouts are (connect, read) in seconds; the
    latter is for the beginning of an answer, and within bodies something must move more often (`line`).

    Attributes:
        in_use: how many slots are taken.
    """

    def __init__(
        self,
        *,
        timeout: tuple[float, float],
        verify: bool | str | None = True,
        max_pool_connections: int = 10,
        **_: Any,
    ) -> None:
        self._connect_timeout_s, self._read_timeout_s = timeout
        self._verify = verify
        self._slots = asyncio.Semaphore(max_pool_connections)
        self._threads = Pools(max_pool_connections, "tierd-s3")
        self._parked: dict[tuple[str, str], list[Line]] = {}
        self._busy: set[Line] = set()
        self._closed = False
        self._moved = 0  # by exchanges that have ended
        self.in_use = 0

    async def __aenter__(self) -> DirectSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every call, and let go of all connections."""
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
        """What all exchanges have sent and received by now, those under way included. Read at two moments, it is the
        throughput in between."""
        return self._moved + sum(line.connection.moved for line in self._busy)

    async def send(self, request: Any) -> AioAWSResponse:
        """Send a prepared request of botocore's. At most `max_pool_connections` at once; others wait.

        Raises:
            botocore.HTTPClientError: there is no answer, or none that can be used.
        """
        await self._slots.acquire()
        self.in_use += 1
        answer = Answer(self)
        try:
            url = urlsplit(request.url)
            answer.line = line = self._take(url)
            answer.head = head = await self.run(line, line.exchange, url, request)
            response = AioAWSResponse(request.url, head.status, head.headers, answer)
            if not request.stream_output:
                body = await response.content
                if body and head.status == 200:
                    _check_xml(body)
            return response
        except BaseException:
            answer.close()
            raise

    async def run(self, line: Line, call: Callable[..., T], *args: Any) -> T:
        """`call` in a thread. A cancelled one ends before the cancellation is raised, as far as buffers go."""
        if self._closed:
            raise Unanswered("the store was closed")
        job = self._threads.here().submit(call, *args)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            line.abort()
            line.used_by(job)
            task = asyncio.current_task()
            if job.cancelled() and not (task and task.cancelling()):  # the session was closed before it began
                raise Unanswered("the store was closed") from None
            raise

    def _take(self, url: SplitResult) -> Line:
        parked = self._parked.get((url.scheme, url.netloc), [])
        while parked:
            if (line := parked.pop()).is_fresh():
                break
            line.close()
        else:
            line = Line(url, lambda: self._tls, self._connect_timeout_s, self._read_timeout_s)
        self._busy.add(line)
        return line

    def free(self, line: Line | None) -> None:
        """Take a slot back, and its line, if it came to have one."""
        self._slots.release()
        self.in_use -= 1
        if line is None:
            return
        self._busy.discard(line)
        self._moved, line.connection.moved = self._moved + line.connection.moved, 0
        if line.is_idle() and not self._closed:
            self._parked.setdefault(line.place, []).append(line)
        else:
            line.close()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """Made in a thread: it reads files. `verify` is True, False or a bundle's path, as botocore hands it on."""
        if not self._verify:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context
        return ssl.create_default_context(cafile=get_cert_path(self._verify))


@contextmanager
def exchanges(doing: str) -> Iterator[None]:
    """Around one call of a store: it ends with no answer open, and says why there was none.

    Args:
        doing: the place and the call, for the error.

    Raises:
        StoreUnavailable, StoreRefused: there was no answer, or none that can be used.
    """
    opened: list[Answer] = []
    token = _mine.set(opened)
    try:
        yield
    except Unanswered as error:
        raise (StoreRefused if error.refused else StoreUnavailable)(f"{doing}: {error.said}") from error
    finally:
        _mine.reset(token)
        for answer in opened:
            answer.close()


def _check_xml(body: bytes) -> None:
    """What S3 answers, beside objects, is XML; botocore calls whatever is none an error 500 of the server's.

    Raises:
        Unanswered: the body of a success is none.
    """
    try:
        expat.ParserCreate().Parse(body, True)
    except expat.ExpatError as error:
        raise Unanswered(
            f"answered 200 with {len(body)} bytes that are no XML ({expat.ErrorString(error.code)}) and begin with "
            f"{body[:24]!r}: something between here and the server may answer in its place, or cut its answers"
        ) from None


class ProxiedSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore's own session, which reads whatever comes, with the bounds of `DirectSession` for all that is no
    object: in bytes, and in time as a `Watch` has it."""

    async def send(self, request: Any) -> AioAWSResponse:
        """Send a prepared request of botocore's.

        Raises:
            botocore.HTTPClientError: there is no answer, or none that can be used.
        """
        if request.stream_output:
            return await super().send(request)
        request.stream_output = True  # then nothing of the body is read yet
        try:
            response = await super().send(request)
        finally:
            request.stream_output = False
        try:
            response._content = body = await _reply(response.raw)
        except BaseException:
            response.raw.close()
            raise
        if body and response.status_code == 200:
            _check_xml(body)
        return response


async def _reply(raw: Any) -> bytes:
    """The body of an answer that is no object, by aiohttp."""
    if (size := raw.content_length or 0) > LONGEST_REPLY:
        raise Unanswered(f"an answer of {size} bytes, where no more than {LONGEST_REPLY} make sense")
    loop, data = asyncio.get_running_loop(), bytearray()
    watch = Watch(_STALL_S, loop.time(), 0, "in the middle of an answer")
    while len(data) <= LONGEST_REPLY:
        try:
            async with asyncio.timeout(watch.left_s(loop.time(), len(data))):
                piece = await raw.content.read(LONGEST_REPLY + 1 - len(data))
        except TimeoutError:
            continue  # the watch says why
        if not piece:
            return bytes(data)
        data += piece
    raise Unanswered(f"an answer without an end, of which {LONGEST_REPLY} bytes were read")


def http_session(**options: Any) -> DirectSession | ProxiedSession:
    """The session for a client: aiobotocore's own where there is a proxy, or a certificate of the client's."""
    if options.get("proxies") or options.get("client_cert"):
        return ProxiedSession(**options)
    return DirectSession(**options)
