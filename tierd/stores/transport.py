"""HTTP/1.1 for the S3 client: each exchange on a connection of its own, in a thread.

Law: a call that has ended, cancelled or not, has left its buffer alone for good, and its connection is used again only
if nothing of its answer can be left on it. See `line` for what a connection promises.

Why not aiohttp: it copies a large body twice on its way out and three times on its way in, on the one thread of the
loop. Blocking calls on large pieces cost what the kernel's copy costs, and run beside each other and the loop:
benchmarks/clients.md.
"""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from botocore import exceptions as botocore
from botocore.httpsession import get_cert_path

from tierd.priority import Pools
from tierd.stores.line import Line

T = TypeVar("T")


class Answer:
    """What aiobotocore calls the raw response: the body of one answer, whose connection it holds until `close`."""

    def __init__(self, session: DirectSession, line: Line) -> None:
        self._session = session
        self._line: Line | None = line

    async def readinto(self, view: memoryview) -> int:
        """Fill `view` from the body; the number of bytes, fewer than it has if the body ends. Ends the answer."""
        line = self._line
        assert line is not None
        try:
            return await self._session.run(line, line.readinto, view)
        finally:
            self.close()

    async def read(self) -> bytes:
        """All of the body. Ends the answer."""
        line = self._line
        if line is None:
            return b""
        try:
            return await self._session.run(line, line.read)
        finally:
            self.close()

    def close(self) -> None:
        """Give the connection back: to be used again if the body has been read to its end."""
        line, self._line = self._line, None
        if line is not None:
            self._session.put_back(line)


class DirectSession:
    """An HTTP session as `AioConfig(http_session_cls=...)` takes one. Timeouts are (connect, read) in seconds."""

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

    async def __aenter__(self) -> DirectSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every call, and let go of all connections."""
        for line in self._busy:
            line.abort()
        for parked in self._parked.values():
            for line in parked:
                line.close()
        self._parked.clear()
        self._threads.shutdown()

    async def send(self, request: Any) -> AioAWSResponse:
        """Send a prepared request of botocore's. At most `max_pool_connections` at once; others wait."""
        url = urlsplit(request.url)
        await self._slots.acquire()
        answer = Answer(self, line := self._take(url))
        try:
            got: http.client.HTTPResponse = await self.run(line, line.exchange, url, request)
            headers = {name.lower(): value for name, value in got.getheaders()}
            response = AioAWSResponse(request.url, got.status, headers, answer)
            if not request.stream_output:
                await response.content
            return response
        except BaseException:
            answer.close()
            raise

    async def run(self, line: Line, call: Callable[..., T], *args: Any) -> T:
        """`call` in a thread. A cancelled one ends before the cancellation is raised, as far as buffers go."""
        job = self._threads.here().submit(call, *args)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            line.abort()
            line.used_by(job)
            task = asyncio.current_task()
            if job.cancelled() and not (task and task.cancelling()):  # the session was closed before it began
                raise botocore.ConnectionClosedError(endpoint_url="/".join(line.place)) from None
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

    def put_back(self, line: Line) -> None:
        """Let others have the connection's place, and the connection too, unless it was left in mid-answer."""
        self._busy.discard(line)
        self._slots.release()
        if line.park():
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


def http_session(**options: Any) -> DirectSession | AIOHTTPSession:
    """The session for a client: aiobotocore's own where there is a proxy, or a certificate of the client's."""
    if options.get("proxies") or options.get("client_cert"):
        return AIOHTTPSession(**options)
    return DirectSession(**options)
