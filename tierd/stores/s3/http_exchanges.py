"""HTTP/1.1 exchanges on one connection, one after another.

Invariant: a line (an `HttpConnection`) is in one of four states, with these transitions only:

    NEW ── exchange ──> BUSY ── the response's last byte was read, and none followed it ──> IDLE ── exchange ──> BUSY
    any ── any exception, `abort`, `close`, a response that ends with the connection ──> DEAD

Only an IDLE line may be used again. Every error is raised as one of botocore's, as its own sessions do.
"""

from __future__ import annotations

import io
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum
from typing import Any
from urllib.parse import SplitResult

from botocore import exceptions as botocore

from tierd.stores.s3.connection import Connection, error_origin, safe_error_text
from tierd.stores.s3.http1 import (
    LONGEST_HEAD,
    MessageHead,
    NoResponse,
    S3Limits,
    check_begin,
    chunk_size,
    parse_head,
    request_head,
)

_AHEAD = 1 << 16  # bytes that are received at once before the body's size is known
_PIECE = 1 << 20  # bytes that are read at once of a body of unknown size
_INTERIM = 8  # interim responses before the final one, such as "100 Continue"


class RequestBody(io.RawIOBase):
    """A caller's bytes as a file, because botocore's signer copies a body that is bytes, and never sends the copy."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._at = 0

    def __len__(self) -> int:
        return len(self.view)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        piece = self.view[self._at : self._at + len(into)]
        into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self.view)}[whence]
        return self._at


class ExchangeState(Enum):
    NEW = "not connected yet"
    BUSY = "an exchange is under way"
    IDLE = "all of the last answer was read"
    DEAD = "not to be used again"


class HttpConnection:
    """One connection, and the state of its exchanges. Methods but `abort` block; one thread at a time calls them."""

    def __init__(self, url: SplitResult, tls: Callable[[], ssl.SSLContext], limits: S3Limits) -> None:
        self.place = url.scheme, url.netloc
        self.state = ExchangeState.NEW
        self.connection = Connection(url, tls, limits.connect_s)
        self._limits = limits
        self._job: Future[Any] | None = None  # a cancelled call that may still be running
        self._ahead = bytearray()  # received, and not yet parsed
        self._head: MessageHead | None = None
        self._remaining = self._received = 0  # bytes of the body, or of its chunk, to be read; and bytes read so far
        self._has_more_chunks = False  # whether further chunks follow
        self._idle_since = 0.0

    # -- exchanges --------------------------------------------------------------------------------------------------

    def exchange(self, url: SplitResult, request: Any) -> MessageHead:
        """Send a request, and read the response up to its body. Raises `botocore.HTTPClientError` if no response can be
        used.
        """
        with self._fatal():
            if self.state is ExchangeState.NEW:
                self.connection.connect()
            elif self.state is not ExchangeState.IDLE:
                raise NoResponse(f"a line that is {self.state.name} was taken for another exchange")
            self.state, self._received = ExchangeState.BUSY, 0
            self.connection.start_stall_timer(self._limits.stall_s, "while the request was sent")
            cut = self.connection.send(request_head(request.method, url, request.headers), _view(request.body))
            self.connection.start_stall_timer(self._limits.answer_s, "before the answer began")
            self._head = head = self._read_answer(request.method, cut)
            self._remaining, self._has_more_chunks = head.size or 0, head.size is None
            if not self._remaining and not self._has_more_chunks:
                self._end()
            return head

    def _read_answer(self, method: str, cut: OSError | None) -> MessageHead:
        """Read the response's head. `cut` is the error with which the server stopped reading the request, if it did."""
        try:
            head = self._read_head(method)
        except (NoResponse, OSError):
            if cut and not self.connection.aborted:
                raise NoResponse(f"the connection broke while the request was sent: {safe_error_text(cut)}") from cut
            raise
        if cut and head.status < 300:
            raise NoResponse("a success before the end of what was sent") from cut
        if cut or head.opaque:
            self.state = ExchangeState.DEAD
        return head

    def _read_head(self, method: str) -> MessageHead:
        for _ in range(_INTERIM):
            while (end := self._ahead.find(b"\r\n\r\n")) < 0:
                check_begin(self._ahead)
                if len(self._ahead) > LONGEST_HEAD:
                    raise NoResponse(f"an answer's head of more than {LONGEST_HEAD} bytes")
                if not self._receive():
                    where = "within its answer's head" if self._ahead else "before it answered"
                    raise NoResponse(f"the server ended the connection {where}")
            head = parse_head(bytes(self._ahead[:end]), method)
            del self._ahead[: end + 4]
            if head.status >= 200:
                return head
        raise NoResponse("one interim answer after another")

    def readinto(self, view: memoryview) -> int:
        """Fill `view` with the response's body, and return the number of bytes; fewer if the body ends first."""
        at = 0
        with self._fatal():
            self.connection.start_stall_timer(self._limits.stall_s, "in the answer's body")
            while at < len(view) and (count := self._read_some(view[at:])):
                at += count
            if not self._remaining and not self._has_more_chunks:
                self._end()
        return at

    def read(self, max_bytes: int) -> bytearray:
        """Read the response's body, or its first `max_bytes` bytes."""
        data = bytearray()
        with self._fatal():
            self.connection.start_stall_timer(self._limits.stall_s, "in the answer's body")
            while len(data) < max_bytes:
                piece = memoryview(bytearray(min(max_bytes - len(data), self._remaining or _AHEAD, _PIECE)))
                count = self._read_some(piece)
                if not count:
                    break
                data += piece[:count]
            if not self._remaining and not self._has_more_chunks:
                self._end()
        return data

    def _read_some(self, view: memoryview) -> int:
        """Read some of the body into `view`, and return the number of bytes; 0 at the body's end."""
        if not self._remaining and self._has_more_chunks:
            self._begin_chunk()
        piece = view[: self._remaining]
        count = self._fill(piece) if piece else 0
        if self._has_more_chunks and not self._remaining and count and self._text_line():
            raise NoResponse("a body in chunks, one of which is longer than it says")
        return count

    def _fill(self, piece: memoryview) -> int:
        size = self._head.size if self._head else None
        of = f" of the {size} bytes that were announced" if size is not None else " bytes, without their end"
        before = self.connection.moved_bytes - min(len(piece), len(self._ahead))
        try:
            count = self.connection.fill(piece, self._ahead)
        except NoResponse as stall:
            raise NoResponse(
                f"{stall.said}, after {self._received + self.connection.moved_bytes - before}{of}"
            ) from stall
        self._remaining -= count
        self._received += count
        if not count:
            raise NoResponse(f"the connection ended after {self._received}{of}")
        return count

    def _begin_chunk(self) -> None:
        self._remaining = chunk_size(self._text_line())
        if not self._remaining:
            while self._text_line():  # trailers, which are not used
                pass
            self._has_more_chunks = False

    def _text_line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            if len(self._ahead) > LONGEST_HEAD or not self._receive():
                raise NoResponse(f"a body in chunks broke off after {self._received} bytes")
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line

    def _receive(self) -> int:
        data = self.connection.receive(_AHEAD)
        self._ahead += data
        return len(data)

    def _end(self) -> None:
        """Mark the end of the body, and decide whether the line may be used again."""
        if self.state is ExchangeState.BUSY:
            keeps = self._head is not None and self._head.keeps and not self._ahead
            self.state, self._idle_since = ExchangeState.IDLE if keeps else ExchangeState.DEAD, time.monotonic()

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Mark the line DEAD for any exception inside the block."""
        try:
            yield
        except botocore.BotoCoreError:
            self.state = ExchangeState.DEAD
            raise
        except Exception as error:
            self.state = ExchangeState.DEAD
            why = (
                safe_error_text(error) if isinstance(error, OSError) else f"tierd's own mistake: {error_origin(error)}"
            )
            raise NoResponse(f"the connection broke: {why}") from error

    # -- closing ----------------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Return whether the line may be used again."""
        return self.state is ExchangeState.IDLE and not self.connection.aborted

    def is_fresh(self) -> bool:
        """Return whether a parked line is still usable: not idle for long, still connected, and without an unrequested
        byte.
        """
        idle_s = time.monotonic() - self._idle_since
        return self.is_idle() and idle_s <= self._limits.idle_s and self.connection.is_quiet()

    def abort(self) -> None:
        """End the current operation; when this returns, no buffer is read or written any more."""
        self.connection.abort()

    def close_after(self, job: Future[Any]) -> None:
        """Defer `close` until `job` has ended, because another connection could reuse the descriptor before."""
        self._job = job

    def close(self) -> None:
        """Close the connection, now or as soon as the job that uses it has ended."""
        self.state = ExchangeState.DEAD
        if self._job is not None:
            self._job.add_done_callback(lambda _: self.connection.close())
        else:
            self.connection.close()


def _view(body: Any) -> memoryview:
    data = body.view if isinstance(body, RequestBody) else body.read() if hasattr(body, "read") else body
    return memoryview(data.encode() if isinstance(data, str) else data or b"")
