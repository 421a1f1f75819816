"""HTTP/1.1 as a client needs it, without I/O: a request's head out, an answer's head in.

Law: strict. A head that is not whole, sizes that contradict each other, a body that nothing delimits or that is encoded
as nobody asked: each is `Unanswered`, and says what was wrong. Nothing of a body is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult

from botocore import exceptions as botocore

LONGEST_HEAD = 1 << 16  # bytes of an answer's head, and of a chunk's size line
_STATUS = re.compile(r"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*?)[ \t]*")
_SIZE = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_TLS_ALERT = b"\x15\x03"  # what a server that speaks TLS answers to plain HTTP
_PLAIN = {"", "identity", "aws-chunked"}  # Content-Encodings of bytes that are what was put


class Unanswered(botocore.HTTPClientError):  # type: ignore[misc]
    """There was no answer, or none that can be used. `said` tells why in words of this package: it holds no secret.

    `refused`: trying again cannot help before somebody changes something.
    """

    fmt = "{said}"

    def __init__(self, said: str, *, refused: bool = False) -> None:
        super().__init__(said=said)
        self.said, self.refused = said, refused


@dataclass(frozen=True, slots=True)
class Head:
    """An answer's head.

    Attributes:
        headers: by lower-case name.
        size: bytes of the body; None where it comes in chunks, which say when it ends.
        keeps: whether the connection can serve another request.
        opaque: the body of an error that cannot be read: nobody should try.
    """

    status: int
    headers: dict[str, str]
    size: int | None
    keeps: bool
    opaque: bool = False


def request_head(method: str, url: SplitResult, headers: Mapping[str, Any]) -> bytes:
    """The head of a request, as bytes. `Expect` is left out: botocore gives it to every body, and it is not signed."""
    target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
    fields = {name: value.decode() if isinstance(value, bytes) else str(value) for name, value in headers.items()}
    known = {name.lower() for name in fields}
    fields = ({} if "host" in known else {"Host": url.netloc}) | fields
    if "accept-encoding" not in known:
        fields["Accept-Encoding"] = "identity"
    lines = [f"{method} {target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items() if name.lower() != "expect"]
    if any(mark in line for line in lines for mark in "\r\n\0") or " " in target:
        raise ValueError("a line break in a request's head")
    return "\r\n".join([*lines, "", ""]).encode()


def check_begin(data: bytes | bytearray) -> None:
    """Raise `Unanswered` as soon as what comes cannot be an answer's beginning."""
    if data.startswith(_TLS_ALERT):
        raise Unanswered("the server speaks TLS on this port; write endpoint=https://…", refused=True)
    if not b"HTTP/1.".startswith(bytes(data[:7])):
        raise Unanswered(f"what came is no HTTP: it begins with {bytes(data[:16])!r}")


def parse_head(raw: bytes, method: str) -> Head:
    """An answer's head, without the empty line behind it.

    Raises:
        Unanswered: it is none, or does not say where the body ends, or the body is encoded.
    """
    first, *lines = raw.decode("latin-1").split("\r\n")
    match = _STATUS.fullmatch(first)
    if not match:
        raise Unanswered(f"what came is no answer: {first[:40]!r}")
    status, fields = int(match[2]), _fields(lines)
    tokens = {token.strip().lower() for token in fields.get("connection", "").split(",")}
    keeps = "close" not in tokens if match[1] == "1" else "keep-alive" in tokens
    size, coding = _size(fields), fields.get("transfer-encoding", "").lower()
    if method == "HEAD" or status < 200 or status in (204, 304):
        return Head(status, fields, 0, keeps)
    encoding = fields.get("content-encoding", "").lower()
    if status >= 300 and (encoding not in _PLAIN or (size is None and coding != "chunked")):
        return Head(status, fields, 0, keeps=False, opaque=True)  # what it means stands in the status
    if encoding not in _PLAIN:
        raise Unanswered(
            f"a body with Content-Encoding {encoding[:40]!r}, which nobody asked for: something between here and the "
            "server changes what it carries"
        )
    if coding == "chunked":
        return Head(status, fields, None, keeps and size is None)
    if coding or size is None:
        raise Unanswered("an answer that does not say where it ends")
    return Head(status, fields, size, keeps)


def _fields(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if not match:
            raise Unanswered(f"an answer with a header that is none: {line[:40]!r}")
        name, value = match[1].lower(), match[2]
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _size(fields: dict[str, str]) -> int | None:
    said = {one.strip() for one in fields["content-length"].split(",")} if "content-length" in fields else set()
    if not said:
        return None
    if len(said) > 1 or not _SIZE.fullmatch(one := said.pop()):
        raise Unanswered(f"an answer whose Content-Length is {fields['content-length'][:40]!r}")
    return int(one)


def chunk_size(line: bytes) -> int:
    """The size of a body's next chunk, by the line before it; 0: that was the last.

    Raises:
        Unanswered: the line says none.
    """
    match = _CHUNK.fullmatch(line)
    if not match:
        raise Unanswered(f"a body in chunks, one of which has no size but {line[:20]!r}")
    return int(match[1], 16)
