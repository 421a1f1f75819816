"""The HTTP server: a bounded number of short connections, each with one GET or HEAD; who may read; and the page.

Invariants: a client costs the daemon at most one of `_MOST` connections for `http_lifetime_s`, whatever it sends or
reads. What a client sent is never logged or sent back, because it may hold a token. On loopback only requests whose
`Host` names loopback are answered, because of DNS rebinding. A token is compared in constant time.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import re
import socket
import ssl
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from aiohttp import web

from tierd.core.config import HttpConfig
from tierd.core.errors import ConfigError
from tierd.core.event_kinds import Event
from tierd.daemon.daemon_status import Status
from tierd.daemon.http.openmetrics import CONTENT_TYPE, EventCounters, Exposition
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.runs_report import HttpAnswers
from tierd.stores.encryption_keys import read_private_file

log = logging.getLogger("tierd.daemon")

_LONGEST = 1024  # bytes of a token
_TOKEN = re.compile(rb"[\x21-\x7e]{16,1024}")
_MAKE = "; openssl rand -hex 32 > FILE makes one"
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::[0-9]{1,5})?", re.ASCII)
# For aiohttp's own lines, which quote requests.
_silent = logging.getLogger("tierd.daemon.http.requests")
_silent.disabled = True
_MOST = 32  # connections at a time; further ones wait in the kernel's queue
_LINGER_S = 1.0  # for a body, which nobody reads
_LONGEST_LINE = 2048  # bytes of a request line; a header line may have 8 KiB, because browsers send cookies
_REBIND_S = 30.0  # seconds until a port that was taken is tried again
_OPEN = ("/healthz", "/readyz")  # tell nothing of any run, and probes have no token
_PATHS = ("/", "/metrics", "/status", "/runs", *_OPEN)


class Access:
    """Decides which requests are answered."""

    def __init__(self, token: bytes | None, *, loopback: bool) -> None:
        self._token, self._loopback = token, loopback

    def is_for_us(self, host: str | None) -> bool:
        """Whether a request with this `Host` header may be meant for this server."""
        if not self._loopback:
            return True  # TLS or the token keeps strangers' pages out
        match = _HOST.fullmatch(host or "")
        if match is None:
            return False
        name = match[1].strip("[]")
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return name.lower() == "localhost"

    def is_permitted(self, authorization: str | None) -> bool:
        """Whether this `Authorization` header has the token, as `Bearer` or as the password of `Basic`."""
        if self._token is None:
            return True
        return hmac.compare_digest(_presented_token(authorization or ""), self._token)


def _presented_token(authorization: str) -> bytes:
    """The token in an `Authorization` header; empty if there is none."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip().encode("utf-8", "replace")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def read_access(http: HttpConfig) -> Access:
    """Read the token. Raises `ConfigError`: the file cannot be read, is open to other users, or holds no token."""
    if http.token_file is None:
        return Access(None, loopback=http.is_loopback)
    path = Path(http.token_file)
    token = read_private_file(path, _LONGEST + 2, _MAKE).strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{path}: a token is 16 to {_LONGEST} visible ASCII characters on one line{_MAKE}")
    return Access(token, loopback=http.is_loopback)


def make_tls_context(http: HttpConfig) -> ssl.SSLContext | None:
    """Make the context for TLS; None without a certificate.

    Raises:
        ConfigError: the certificate or its key cannot be used, or the key is open to other users.
    """
    if http.cert_file is None or http.key_file is None:
        return None
    read_private_file(Path(http.key_file), 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(http.cert_file, http.key_file, password="")  # an encrypted key must not ask a terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{http.cert_file} with {http.key_file}: {error}") from error
    return context


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE, _SCRIPT = _file("page.css"), _file("page.charts.js") + _file("page.js")
PAGE = _file("page.html").replace("@STYLE@", _STYLE).replace("@SCRIPT@", _SCRIPT).encode()
POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
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
    """Serves one `[http]` table."""

    def __init__(self, http: HttpConfig) -> None:
        self._http, self._access, self._tls = http, read_access(http), make_tls_context(http)
        self.tally = EventCounters()
        self.address: tuple[str, int] | None = None
        self._views: HttpAnswers | None = None

    async def run(self, reconciler: Reconciler, status: Callable[[], Status]) -> None:
        """Listen and answer until cancelled. A port that is taken is tried again, because training matters more."""
        self._views = HttpAnswers(reconciler, status, Exposition(reconciler, self.tally).render)
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
        request.protocol.has_request = True
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

    def note_event(self, event: Event) -> None:
        """Add an event to the metrics."""
        self.tally.add(event)


async def _await_connection_end(serving: dict[asyncio.Task[None], _Connection], grace_s: float) -> None:
    """Wait until a connection has ended, or end the oldest one that has sent no request within its grace."""
    silent = next(((task, connection) for task, connection in serving.items() if not connection.has_request), None)
    left_s = max(0.0, silent[1].since_s + grace_s - asyncio.get_running_loop().time()) if silent else None
    done, _ = await asyncio.wait(serving, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    if silent and not done and not silent[1].has_request:
        silent[0].cancel()
        done = {silent[0]}
    for task in done:
        serving.pop(task, None)


class _Connection(web.RequestHandler):
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
        self.lifetime_s, self.since_s, self.has_request = lifetime_s, loop.time(), False
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if not self.ended.done():
            self.ended.set_result(None)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is no request, without a word of it."""
        return _text_response(status, "not understood")


def _text_response(status: int, text: str, **headers: str) -> web.Response:
    return _response(status, f"{text}\n".encode(), "text/plain; charset=utf-8", **headers)


def _response(status: int, body: bytes, content_type: str, **headers: str) -> web.Response:
    response = web.Response(status=status, body=body, headers={**_HEADERS, "Content-Type": content_type, **headers})
    response.force_close()
    return response
