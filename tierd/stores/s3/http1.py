"""The client side of HTTP/1.1 without I/O: format request heads, parse response heads; and the client's limits.

Invariant: parsing is strict. It raises `NoResponse`, with the reason, for an incomplete head and for sizes that
contradict each other. It also raises for a body without a delimiter, or with an encoding that no request asked for. It
never guesses where a body ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult
from xml.parsers import expat

from botocore import exceptions as botocore

from tierd.stores.base import FIRST_PAGE

LONGEST_HEAD = 1 << 16  # bytes of a response's head, and of a chunk's size line
LONGEST_REPLY = 16 << 20  # bytes of a response that is not an object: a listing's page has at most 4 MB
_STATUS = re.compile(r"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*?)[ \t]*")
_SIZE = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_TLS_ALERT = b"\x15\x03"  # how a server that speaks TLS responds to plain HTTP
_PLAIN = {"", "identity", "aws-chunked"}  # Content-Encodings that leave the bytes as they were put


class NoResponse(botocore.HTTPClientError):  # type: ignore[misc]
    """There was no response, or none that can be used; `said` is the reason in tierd's own words, which hold no secret.

    `refused` says that no retry can help until the configuration or the server changes.
    """

    fmt = "{said}"

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(said=reason)
        self.said, self.refused = reason, refused


@dataclass(frozen=True, slots=True)
class MessageHead:
    """The head of a response."""

    status: int
    headers: dict[str, str]  # by lower-case name
    size: int | None  # bytes of the body; None for a chunked body, which marks its own end
    keeps: bool  # whether the connection can serve another request
    opaque: bool = False  # whether this is an error whose body cannot be read, so that the caller must not try


def request_head(method: str, url: SplitResult, headers: Mapping[str, Any]) -> bytes:
    """Format the head of a request, without `Expect`, because botocore adds it to every body and does not sign it."""
    target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
    fields = {name: value.decode() if isinstance(value, bytes) else str(value) for name, value in headers.items()}
    names = {name.lower() for name in fields}
    fields = ({} if "host" in names else {"Host": url.netloc}) | fields
    if "accept-encoding" not in names:
        fields["Accept-Encoding"] = "identity"
    lines = [f"{method} {target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items() if name.lower() != "expect"]
    if any(mark in line for line in lines for mark in "\r\n\0") or " " in target:
        raise ValueError("a line break in a request's head")
    return "\r\n".join([*lines, "", ""]).encode()


def check_begin(data: bytes | bytearray) -> None:
    """Raise `NoResponse` as soon as the received bytes cannot be the start of a response."""
    if data.startswith(_TLS_ALERT):
        raise NoResponse("the server speaks TLS on this port; write endpoint=https://…", refused=True)
    if not b"HTTP/1.".startswith(bytes(data[:7])):
        raise NoResponse(f"what came is no HTTP: it begins with {bytes(data[:16])!r}")


def parse_head(raw: bytes, method: str) -> MessageHead:
    """Parse a response's head, given without the empty line after it.

    Raises `NoResponse` for a head that is invalid, does not say where the body ends, or announces an encoded body.
    """
    first, *lines = raw.decode("latin-1").split("\r\n")
    match = _STATUS.fullmatch(first)
    if not match:
        raise NoResponse(f"what came is no answer: {first[:40]!r}")
    status, fields = int(match[2]), _fields(lines)
    tokens = {token.strip().lower() for token in fields.get("connection", "").split(",")}
    keeps = "close" not in tokens if match[1] == "1" else "keep-alive" in tokens
    size, coding = _size(fields), fields.get("transfer-encoding", "").lower()
    if method == "HEAD" or status < 200 or status in (204, 304):
        return MessageHead(status, fields, 0, keeps)
    encoding = fields.get("content-encoding", "").lower()
    if status >= 300 and (encoding not in _PLAIN or (size is None and coding != "chunked")):
        return MessageHead(status, fields, 0, keeps=False, opaque=True)  # the status alone gives the error's meaning
    if encoding not in _PLAIN:
        raise NoResponse(
            f"a body with Content-Encoding {encoding[:40]!r}, which nobody asked for: something between here and the "
            "server changes what it carries"
        )
    if coding == "chunked":
        return MessageHead(status, fields, None, keeps and size is None)
    if coding or size is None:
        raise NoResponse("an answer that does not say where it ends")
    return MessageHead(status, fields, size, keeps)


def _fields(lines: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if not match:
            raise NoResponse(f"an answer with a header that is none: {line[:40]!r}")
        name, value = match[1].lower(), match[2]
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


def _size(fields: dict[str, str]) -> int | None:
    lengths = {text.strip() for text in fields["content-length"].split(",")} if "content-length" in fields else set()
    if not lengths:
        return None
    if len(lengths) > 1 or not _SIZE.fullmatch(length := lengths.pop()):
        raise NoResponse(f"an answer whose Content-Length is {fields['content-length'][:40]!r}")
    return int(length)


def chunk_size(line: bytes) -> int:
    """Parse the size of a chunked body's next chunk; 0 marks the end. Raises `NoResponse` if the line holds none."""
    match = _CHUNK.fullmatch(line)
    if not match:
        raise NoResponse(f"a body in chunks, one of which has no size but {line[:20]!r}")
    return int(match[1], 16)


def check_xml(body: bytes) -> None:
    """Check that a successful response is XML, as all of S3's responses but objects are. Raises `NoResponse`.

    botocore would report any other body as the server's error 500.
    """
    try:
        expat.ParserCreate().Parse(body, True)
    except expat.ExpatError as error:
        raise NoResponse(
            f"answered 200 with {len(body)} bytes that are no XML ({expat.ErrorString(error.code)}) and begin with "
            f"{body[:24]!r}: something between here and the server may answer in its place, or cut its answers"
        ) from None


@dataclass(frozen=True)
class S3Limits:
    """How many connections the client has, and how long it waits."""

    connections: int = 32  # open at a time; further calls wait
    connect_s: float = 10.0  # for TCP and the TLS handshake
    answer_s: float = 60.0  # from a request's end until its response begins
    stall_s: float = 20.0  # within which a byte must move while a body is transferred
    # after which a server or a middlebox may have dropped an idle connection, so it is not used again
    idle_s: float = 12.0
    # between two searches of the AWS chain, because a link of it may run a program or ask the instance's metadata
    credentials_s: float = 3.0
    probe_s: float = 60.0  # after a probe of the server's checksums that had no usable response
    first_page: int = FIRST_PAGE  # keys in the first page of a listing, because `children` needs one key


DEFAULT_LIMITS = S3Limits()
