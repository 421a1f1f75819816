"""A strict HTTP/1.1 proxy between an S3 client and a real S3 server, which does harm on the way.

Invariant: what is no proper S3 request is a complaint; a request without a fault passes as it is, byte for byte; a
fault counts as injected only when it was. The Host header stays the client's, since it is signed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import unescape

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter

# Answers that the server never gave: status, code.
REFUSALS = {
    "500": (500, "InternalError"),
    "503": (503, "ServiceUnavailable"),
    "slow down": (503, "SlowDown"),
    "429": (429, "TooManyRequests"),
    "skew": (403, "RequestTimeTooSkewed"),
    "denied": (403, "AccessDenied"),
    "bad gateway": (502, ""),
}
# What an ingress says of a get while the server behind it starts again: no word on the object.
PAGES = {"empty 404": b"", "page 404": b"404 page not found"}
# The server gets nothing, or not all.
UNHEARD = ("answer before the body", "reset in request", "reset after request", "close after request")
UNHEARD += ("stall in request", "stall before answer", "cut upload")
# The server did it.
LOST = ("lost answer", "reset of answer", "500 after success")
# And some of its answer comes.
BROKEN = ("reset in answer", "close in answer", "stall in answer", "endless drip")
HARMLESS = ("slow drip", "garbage behind", "answer twice")
DAMAGED = ("flipped request", "wrong checksum sent", "flipped answer", "wrong checksum answered")
SAID = ("error in 200", "refused keys", "denied keys", "hollow 200", "stale")

_HEAD = 1 << 16
_REQUEST = re.compile(r"(GET|PUT|POST|HEAD|DELETE) (/[^\s#]*) HTTP/1\.1")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\x20-\x7e]*)")


@dataclass(frozen=True)
class Fault:
    """`at`, from 0 to 1, says where: in which byte, which key."""

    name: str
    at: float = 0.5


@dataclass(frozen=True)
class Request:
    """What a client asks for. `name` is the key, or a listing's prefix; `keys` are those that are to be deleted."""

    operation: str
    bucket: str
    name: str
    target: str
    head: bytes
    headers: dict[str, str]
    body: bytes = b""

    @property
    def size(self) -> int:
        return int(self.headers.get("content-length", "0"))

    @property
    def keys(self) -> tuple[str, ...]:
        found = re.findall(rb"<Key>([^<]*)</Key>", self.body)
        return tuple(unescape(key.decode()) for key in found)


@dataclass(frozen=True)
class Answer:
    """`raw` is all of it as it came; `payload` the body without the framing of chunks."""

    status: int
    head: bytes
    raw: bytes
    payload: bytes

    def with_payload(self, payload: bytes) -> bytes:
        """As bytes, with another body."""
        lines = [line for line in self.head.split(b"\r\n") if line and not _frames(line)]
        return b"\r\n".join([*lines, b"Content-Length: %d" % len(payload), b"", b""]) + payload


class Complaint(Exception):
    """The client sent what is no request to S3."""


class Proxy:
    """Listens on loopback while `running`.

    Args:
        server: `host:port` of the real one.
        judge: what is to go wrong with a request of which the head has come; None: nothing.
        heard: told of every request that the server has answered, and of its answer.
        delete: deletes keys of a bucket on the server, past this proxy.

    Attributes:
        injected: told of every fault that was done.
        complaints: what was wrong with requests.
        busy: by bucket, how many requests are being served.
    """

    def __init__(
        self,
        server: str,
        judge: Callable[[Request], Fault | None],
        heard: Callable[[Request, Answer], None],
        injected: Callable[[Request, Fault], None],
        delete: Callable[[str, list[str]], Awaitable[None]],
    ) -> None:
        self._server, self._judge, self._heard = server, judge, heard
        self._injected, self._delete = injected, delete
        self._listings: defaultdict[str, list[bytes]] = defaultdict(list)  # by target: the bodies that were shown
        self.complaints: list[str] = []
        self.busy: Counter[str] = Counter()
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        tasks: set[asyncio.Task[None]] = set()

        async def connect(reader: Reader, writer: Writer) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await _Line(self, reader, writer).serve()
            except Complaint as complaint:
                self.complaints.append(str(complaint))
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                writer.close()
                tasks.discard(task)

        listener = await asyncio.start_server(connect, "127.0.0.1", 0, limit=_HEAD)
        self.port = listener.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            listener.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def forget(self, bucket: str) -> None:
        """Listings of a bucket that were shown so far are not shown again."""
        for target in [one for one in self._listings if one.startswith(f"/{bucket}?")]:
            del self._listings[target]


class _Line:
    """One connection of a client's, with one of its own to the server."""

    def __init__(self, proxy: Proxy, reader: Reader, writer: Writer) -> None:
        self._proxy, self._reader, self._writer = proxy, reader, writer
        self._up: tuple[Reader, Writer] | None = None

    async def serve(self) -> None:
        try:
            while not self._reader.at_eof():
                request = await self._request()
                self._proxy.busy[request.bucket] += 1
                try:
                    if not await self._answer(request):
                        return
                finally:
                    self._proxy.busy[request.bucket] -= 1
        finally:
            if self._up:
                self._up[1].close()

    async def _request(self) -> Request:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as error:
            raise Complaint("a head without end") from error
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        match = _REQUEST.fullmatch(first)
        if not match:
            raise Complaint(f"no request: {first[:100]}")
        headers: dict[str, str] = {}
        for line in lines:
            field = _HEADER.fullmatch(line)
            if not field or field[1].lower() in headers:
                raise Complaint(f"{first[:100]}: no header, or one twice: {line[:100]}")
            headers[field[1].lower()] = field[2]
        url = urlsplit(match[2])
        bucket, _, key = unquote(url.path)[1:].partition("/")
        query = parse_qs(url.query, keep_blank_values=True)
        operation = _operation(match[1], key, query)
        name = key or query.get("prefix", [""])[0]
        _check(operation, first, headers)
        return Request(operation, bucket, name, match[2], head, headers)

    async def _answer(self, request: Request) -> bool:
        """Serve a request; whether the connection goes on."""
        fault = self._proxy._judge(request)
        name, at = (fault.name, fault.at) if fault else ("", 0.0)
        if name in ("answer before the body", "reset in request", "stall in request") and fault:
            self._proxy._injected(request, fault)
            return await self._unread(request, name, at)
        body = await self._reader.readexactly(request.size)
        request = Request(**{**request.__dict__, "body": body})
        if request.operation == "DeleteObjects":
            digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            if request.headers.get("content-md5") != digest:
                raise Complaint("a DeleteObjects whose Content-MD5 is not that of its body")
        if not fault:
            return await self._pass_on(request)
        done = await self._harm(request, name, at)
        if done is None:
            return await self._pass_on(request)
        if isinstance(done, bytes):
            return await self._say(done)
        self._proxy._injected(request, fault)
        return await done()

    async def _unread(self, request: Request, name: str, at: float) -> bool:
        if name == "answer before the body":
            await self._send(_refusal(503, "SlowDown", close=True))
            await asyncio.sleep(0.01)
            return False
        await self._reader.readexactly(place(at, request.size))
        if name == "reset in request":
            return self._reset()
        return await self._stall()

    async def _harm(self, request: Request, name: str, at: float) -> Callable[[], Awaitable[bool]] | bytes | None:
        """What is still to be done to the client, the server's part being over; None where the fault does not apply,
        and the server's answer where it would not change that."""
        if name in REFUSALS:
            return lambda: self._say(_refusal(*REFUSALS[name], close=at < 0.5), keep=at >= 0.5)
        if name in PAGES:
            return lambda: self._say(_answer(404, "Not Found", PAGES[name]))
        if name in UNHEARD:
            if name == "cut upload":
                if not request.body:
                    return None
                await self._cut(request, place(at, len(request.body)))
            return {"stall before answer": self._stall, "close after request": self._close}.get(name, self._resets)
        if name in SAID:
            return await self._saying(request, name, at)
        changed = request
        if name == "flipped request":
            if not request.body:
                return None
            changed = Request(**{**request.__dict__, "body": flipped(request.body, at)})
        elif name == "wrong checksum sent":
            head = re.sub(rb"(?mi)^((?:x-amz-checksum-\w+|content-md5): *)(\S)", _other, request.head)
            if head == request.head:
                return None
            changed = Request(**{**request.__dict__, "head": head})
        answer = await self._ask(changed)
        self._note(request, answer)
        return self._with_answer(answer, name, at)

    def _with_answer(self, answer: Answer, name: str, at: float) -> Callable[[], Awaitable[bool]] | bytes:
        raw = answer.raw
        match name:
            case "flipped request" | "wrong checksum sent":
                return lambda: self._say(raw)
            case "lost answer":
                return self._close
            case "reset of answer":
                return self._resets
            case "500 after success":
                return lambda: self._say(_refusal(500, "InternalError"))
            case "flipped answer":
                if not answer.payload:
                    return raw
                changed = answer.with_payload(flipped(answer.payload, at))
                return lambda: self._say(changed)
            case "wrong checksum answered":
                changed = re.sub(rb"(?mi)^(x-amz-checksum-crc\w+: *)(\S)", _other, raw[: len(answer.head)])
                if changed == answer.head:
                    return raw
                return lambda: self._say(changed + raw[len(answer.head) :])
            case "garbage behind":
                return lambda: self._say(raw + b"HTTP/1.1 \0\xff garbage\r\n\r\n"[: 1 + int(at * 25)])
            case "answer twice":
                return lambda: self._say(raw + raw)
            case "slow drip" | "endless drip":
                return lambda: self._drip(raw, endless=name == "endless drip")
        end = {"reset in answer": self._resets, "close in answer": self._close, "stall in answer": self._stall}[name]
        reported = len(raw.removesuffix(b"\r\n0\r\n\r\n"))  # behind the last chunk nothing is missing any more
        return lambda: self._part(raw[: place(at, reported, len(answer.head))], end)

    async def _saying(self, request: Request, name: str, at: float) -> Callable[[], Awaitable[bool]] | bytes | None:
        keys = list(request.keys)
        if name == "stale":
            shown = self._proxy._listings.get(request.target, [])
            if request.operation != "ListObjectsV2" or not shown:
                return None
            old = shown[int(at * len(shown))]
            answer = await self._ask(request)
            self._note(request, answer)
            if answer.payload == old:
                return answer.raw
            return lambda: self._say(_answer(200, "OK", old))
        if name == "error in 200":
            if request.operation not in ("ListObjectsV2", "DeleteObjects"):
                return None
            return lambda: self._say(_answer(200, "OK", _error("InternalError")))
        if name == "hollow 200":
            return lambda: self._say(_answer(200, "OK", b""))
        if request.operation != "DeleteObjects" or not keys:
            return None
        chosen = keys[place(at, len(keys)) :] or keys[-1:]
        await self._proxy._delete(request.bucket, [key for key in keys if key not in chosen])
        code = "AccessDenied" if name == "denied keys" else "SlowDown" if at < 0.5 else "InternalError"
        errors = "".join(f"<Error><Key>{key}</Key><Code>{code}</Code><Message>no</Message></Error>" for key in chosen)
        return lambda: self._say(_answer(200, "OK", f"<DeleteResult>{errors}</DeleteResult>".encode()))

    # -- towards the server -----------------------------------------------------------------------------------------

    async def _pass_on(self, request: Request) -> bool:
        answer = await self._ask(request)
        self._note(request, answer)
        return await self._say(answer.raw)

    def _note(self, request: Request, answer: Answer) -> None:
        if request.operation == "ListObjectsV2" and answer.status == 200:
            self._proxy._listings[request.target].append(answer.payload)
        self._proxy._heard(request, answer)

    async def _ask(self, request: Request) -> Answer:
        if self._up and self._up[0].at_eof():
            self._up[1].close()
            self._up = None
        if not self._up:
            host, _, port = self._proxy._server.partition(":")
            self._up = await asyncio.open_connection(host, int(port))
        reader, writer = self._up
        writer.write(request.head + request.body)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        raw = payload = b""
        if request.operation.startswith("Head") or status in (204, 304):
            pass
        elif fields.get(b"transfer-encoding") == b"chunked":
            size = None
            while size != 0:
                line = await reader.readuntil(b"\r\n")
                size = int(line, 16)
                data = await reader.readexactly(size + 2)
                raw, payload = raw + line + data, payload + data[:-2]
        else:
            raw = payload = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        if fields.get(b"connection") == b"close":
            writer.close()
            self._up = None
        return Answer(status, head, head + raw, payload)

    async def _cut(self, request: Request, count: int) -> None:
        """Some of a request reaches the server, and then the line breaks."""
        host, _, port = self._proxy._server.partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request.head + request.body[: min(count, len(request.body) - 1)])
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.close()

    # -- towards the client -----------------------------------------------------------------------------------------

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def _say(self, data: bytes, *, keep: bool = True) -> bool:
        await self._send(data)
        return keep

    async def _part(self, data: bytes, end: Callable[[], Awaitable[bool]]) -> bool:
        await self._send(data)
        if data:
            await asyncio.sleep(0.01)
        return await end()

    async def _close(self) -> bool:
        return False

    def _reset(self) -> bool:
        sock: Any = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        return False

    async def _resets(self) -> bool:
        return self._reset()

    async def _stall(self) -> bool:
        """Nothing any more, until the client goes away."""
        self._writer.transport.set_write_buffer_limits(0)
        while not self._writer.transport.is_closing() and not self._reader.at_eof():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._reader.read(1 << 16)
        return False

    async def _drip(self, data: bytes, *, endless: bool) -> bool:
        """Piece by piece, each in time for the client's read timeout; endless: never all of it."""
        pieces = 600 if endless else 4
        size = max(1, len(data) // pieces)
        for at in range(0, size * pieces if endless else len(data), size):
            await self._send(data[at : at + size] if not endless else data[:-1][at : at + 1])
            await asyncio.sleep(0.05)
            if self._reader.at_eof():
                return False
        return not endless


def _operation(method: str, key: str, query: dict[str, list[str]]) -> str:
    if key and not set(query) & {"uploads", "uploadId", "partNumber", "acl", "tagging"}:
        found = {"GET": "GetObject", "PUT": "PutObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}.get(method)
    elif not key and method == "GET" and query.get("list-type") == ["2"]:
        found = "ListObjectsV2"
    elif not key and method == "POST" and "delete" in query:
        found = "DeleteObjects"
    else:
        found = "HeadBucket" if not key and method == "HEAD" else None
    if found is None:
        raise Complaint(f"an operation that tierd is not known to use: {method} {key[:50]} {sorted(query)}")
    return found


def _check(operation: str, first: str, headers: dict[str, str]) -> None:
    sends = operation in ("PutObject", "DeleteObjects")
    if not headers.get("host") or not headers.get("authorization", "").startswith("AWS4-HMAC-SHA256 "):
        raise Complaint(f"{first[:100]}: no host, or not signed")
    if "transfer-encoding" in headers or not re.fullmatch(r"\d+", headers.get("content-length", "-" if sends else "0")):
        raise Complaint(f"{first[:100]}: a body without a size")
    if sends and not any(name == "content-md5" or name.startswith("x-amz-checksum-") for name in headers):
        raise Complaint(f"{first[:100]}: sent without a checksum")


def _frames(line: bytes) -> bool:
    return line.lower().startswith((b"content-length:", b"transfer-encoding:"))


def _other(match: re.Match[bytes]) -> bytes:
    return match[1] + (b"B" if match[2] == b"A" else b"A")


def _error(code: str) -> bytes:
    more = "<AWSAccessKeyId>k</AWSAccessKeyId><StringToSign>AWS4-HMAC-SHA256 of what was signed</StringToSign>"
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>injected</Message>{more}</Error>'.encode()


def _refusal(status: int, code: str, *, close: bool = False) -> bytes:
    body = _error(code) if code else b"<html><body>an intermediary's page</body></html>"
    return _answer(status, "No", body, "Connection: close\r\n" if close else "")


def _answer(status: int, reason: str, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status} {reason}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def place(at: float, length: int, seam: int | None = None) -> int:
    """An index below `length`: in a third of all cases one at an edge."""
    if length <= 0:
        return 0
    edges = [0, 1, length - 1] if seam is None else [0, 1, seam - 1, seam, seam + 1, length - 1]
    found = edges[int(at * 3 * len(edges))] if at < 1 / 3 else int((at - 1 / 3) * 1.5 * length)
    return min(max(found, 0), length - 1)


def flipped(data: bytes, at: float) -> bytes:
    """`data` with one bit flipped."""
    changed = bytearray(data)
    changed[place(at, len(data))] ^= 1 << int(at * 977) % 8
    return bytes(changed)
