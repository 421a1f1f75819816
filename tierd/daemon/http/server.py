"""The HTTP server: a bounded number of short connections, each with one GET or HEAD.

Invariant: a client costs the daemon at most one of `_MOST` connections for `http_lifetime_s`, whatever it sends or does
not send, reads or does not read. While others wait, a client without a request has `http_grace_s` only, so that silent
clients do not block a probe. What a client sent is never logged or sent back, because it may hold a token.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from aiohttp import web

from tierd.core.config import HttpConfig
from tierd.core.event_kinds import Event
from tierd.daemon.http.access import access_of, tls_of
from tierd.daemon.http.metrics import CONTENT_TYPE, Exposition
from tierd.daemon.http.page import PAGE, POLICY
from tierd.daemon.http.tally import Tally
from tierd.daemon.http.views import Views
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.status import Status

log = logging.getLogger("tierd.daemon")
# For aiohttp's own lines, which quote requests.
_silent = logging.getLogger("tierd.daemon.http.requests")
_silent.disabled = True

_MOST = 32  # connections at a time; further ones wait in the kernel's queue
_LINGER_S = 1.0  # for a body, which nobody reads
_LONGEST_LINE = 2048  # bytes of a request line; a header line may have 8 KiB, because browsers send cookies
_REBIND_S = 30.0  # seconds until a port that was taken is tried again
_OPEN = ("/healthz", "/readyz")  # tell nothing of any run, and probes have no token
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Server": "tierd",
}


class HttpServer:
    """Serves one `[http]` table.

    Args:
        http: the table.

    Attributes:
        tally: gets every event.
        address: where the server listens; None: nowhere yet.

    Raises:
        ConfigError: the token, the certificate or its key cannot be used.
    """

    def __init__(self, http: HttpConfig) -> None:
        self._http, self._access, self._tls = http, access_of(http), tls_of(http)
        self.tally = Tally()
        self.address: tuple[str, int] | None = None
        self._views: Views | None = None

    async def run(self, reconciler: Reconciler, status: Callable[[], Status]) -> None:
        """Listen and answer until cancelled. A port that is taken is tried again, because training matters more."""
        self._views = Views(reconciler, status, Exposition(reconciler, self.tally).render)
        loop, manager, timings = asyncio.get_running_loop(), web.Server(self._handle), reconciler.timings
        serving: dict[asyncio.Task[None], _Connection] = {}  # oldest first
        listener = await self._bind()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # for example no descriptor is left
                    log.warning("http: %s", error)
                    await asyncio.sleep(1)
                    continue
                try:
                    while len(serving) >= _MOST:
                        await _await_connection_end(serving, timings.http_grace_s)
                except asyncio.CancelledError:
                    connection.close()
                    raise
                protocol = _Connection(manager, loop, timings.http_lifetime_s)
                task = loop.create_task(self._serve(connection, protocol))
                serving[task] = protocol
                task.add_done_callback(lambda task: serving.pop(task, None))
        finally:
            listener.close()
            for task in list(serving):
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    async def _bind(self) -> socket.socket:
        host, port = self._http.address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        logged = False
        while True:
            try:
                listener = socket.create_server((host, port), family=family, backlog=_MOST)
            except OSError as error:
                if not logged:
                    log.error("http: %s: %s; tried again every %.0f s", self._http.listen, error.strerror, _REBIND_S)
                logged = True
                await asyncio.sleep(_REBIND_S)
                continue
            listener.setblocking(False)
            self.address = listener.getsockname()[:2]
            display_host = f"[{self.address[0]}]" if ":" in host else self.address[0]
            log.info("http: %s://%s:%d/", "https" if self._tls else "http", display_host, self.address[1])
            return listener

    async def _serve(self, connection: socket.socket, protocol: _Connection) -> None:
        loop = asyncio.get_running_loop()
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(protocol.lifetime_s):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
                await protocol.ended
        except OSError:  # also a client that was too slow, or that speaks no TLS
            pass
        finally:
            if isinstance(transport, asyncio.Transport):
                transport.abort()
            else:
                connection.close()

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        assert isinstance(request.protocol, _Connection)
        request.protocol.asked = True
        try:
            return await self._answer(request)
        except Exception as error:  # a bug; the client learns nothing of it
            log.error("http: %s failed", request.path if request.path in _PATHS else "a request", exc_info=error)
            return _text_response(500, "internal error")

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if not self._access.is_for_us(request.headers.get("Host")):  # aiohttp refuses a second one
            return _text_response(421, "this server listens on loopback: name it 127.0.0.1 or localhost")
        if request.method not in ("GET", "HEAD"):
            return _text_response(405, "only GET and HEAD", Allow="GET, HEAD")
        if request.path not in _OPEN and not self._access.is_permitted(request.headers.get("Authorization")):
            return _text_response(
                401, "a token is needed", **{"WWW-Authenticate": 'Basic realm="tierd", charset="UTF-8"'}
            )
        assert self._views is not None
        match request.path:
            case "/":
                return _response(200, PAGE, "text/html; charset=utf-8", **{"Content-Security-Policy": POLICY})
            case "/metrics":
                return _response(200, await self._views.metrics.get(), CONTENT_TYPE)
            case "/status":
                return _response(200, await self._views.status.get(), "application/json")
            case "/runs":
                return _response(200, await self._views.runs.get(), "application/json")
            case "/healthz":
                return _text_response(200, "ok")
            case "/readyz":
                return _text_response(200, "ready") if self._views.is_ready else _text_response(503, "not ready")
        return _text_response(404, f"there are {', '.join(_PATHS)}")

    def heard(self, event: Event) -> None:
        """Add an event to the metrics."""
        self.tally.add(event)


_PATHS = ("/", "/metrics", "/status", "/runs", *_OPEN)


async def _await_connection_end(serving: dict[asyncio.Task[None], _Connection], grace_s: float) -> None:
    """Wait until a connection has ended, or end the oldest one that has sent no request within its grace."""
    silent = next(((task, connection) for task, connection in serving.items() if not connection.asked), None)
    left_s = max(0.0, silent[1].since_s + grace_s - asyncio.get_running_loop().time()) if silent else None
    done, _ = await asyncio.wait(serving, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    if silent and not done and not silent[1].asked:
        silent[0].cancel()
        done = {silent[0]}
    for task in done:
        serving.pop(task, None)


class _Connection(web.RequestHandler):
    """One connection.

    Attributes:
        lifetime_s: after which it is closed.
        since_s: when it was accepted, by the loop's clock.
        asked: whether a request has arrived.
        ended: done when the connection is closed.
    """

    def __init__(self, manager: web.Server, loop: asyncio.AbstractEventLoop, lifetime_s: float) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=lifetime_s,
            lingering_time=_LINGER_S,
            logger=_silent,
            access_log=_silent,
            max_line_size=_LONGEST_LINE,
        )
        self.lifetime_s, self.since_s, self.asked = lifetime_s, loop.time(), False
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if not self.ended.done():
            self.ended.set_result(None)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no request, without a word of it."""
        return _text_response(status, "not understood")


def _text_response(status: int, text: str, **headers: str) -> web.Response:
    return _response(status, f"{text}\n".encode(), "text/plain; charset=utf-8", **headers)


def _response(status: int, body: bytes, content_type: str, **headers: str) -> web.Response:
    response = web.Response(status=status, body=body, headers={**_HEADERS, "Content-Type": content_type, **headers})
    response.force_close()
    return response
