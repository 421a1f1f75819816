"""One connection to a server, blocking, for bytes in large pieces.

Law: bytes go straight between a buffer of the caller and the socket, and once `abort` has returned, nothing touches the
buffer any more. Every wait ends, by a timeout or by `abort`. What goes wrong is raised as botocore's sessions do it.
"""

from __future__ import annotations

import http.client
import io
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import SplitResult

from botocore import exceptions as botocore

T = TypeVar("T")

_PIECE = 1 << 20  # bytes: each has the read timeout for itself, and a cancelled call waits for no more than one
_LONGEST_IDLE_S = 12.0  # before a server or a middlebox forgets the connection


class Body(io.RawIOBase):
    """A caller's bytes as a file: botocore's signer copies bytes that are none, and sends the copy nowhere."""

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


class Line:
    """One connection to the server. Everything but `abort` blocks, and is called by one thread at a time."""

    def __init__(
        self, url: SplitResult, tls: Callable[[], ssl.SSLContext], connect_timeout_s: float, read_timeout_s: float
    ) -> None:
        self.place = url.scheme, url.netloc
        self._tls = tls
        self._connect_timeout_s, self._read_timeout_s = connect_timeout_s, read_timeout_s
        self._http: http.client.HTTPConnection = http.client.HTTPConnection(url.netloc)
        self._job: Future[Any] | None = None  # of a cancelled call that may not have ended
        self._sock: socket.socket | None = None
        self._moving = threading.Lock()  # held while bytes go between a buffer and the socket
        self._aborted = False
        self._answer: http.client.HTTPResponse | None = None
        self._spoiled = False
        self._idle_since = 0.0

    def exchange(self, url: SplitResult, request: Any) -> http.client.HTTPResponse:
        """Send a request, and read the answer up to its body."""
        with self._failures(request):
            if self._http.sock is None:
                self._connect()
            self._spoiled = True  # until all of the answer has been read
            target = url.path or "/"
            if url.query:
                target += f"?{url.query}"
            self._http.putrequest(request.method, target, skip_host="host" in request.headers)
            for name, value in request.headers.items():
                if name.lower() == "expect":
                    continue  # botocore gives it to every file; it is not signed
                self._http.putheader(name, value if isinstance(value, bytes) else str(value).encode())
            self._http.endheaders()
            cut = self._send(request.body)
            self._answer = self._http.getresponse()
            if self._answer.length is None and not self._answer.chunked:
                # The parser takes a head that breaks off for a whole one, and then all that came for all of the body.
                raise http.client.HTTPException("an answer that does not say where it ends")
            if cut and self._answer.status < 300:
                raise cut
            return self._answer

    def _connect(self) -> None:
        scheme, netloc = self.place
        if scheme == "https":
            self._http = http.client.HTTPSConnection(netloc, context=self._tls())
        self._http.timeout = self._connect_timeout_s
        try:
            self._http.connect()
        except ssl.SSLError:
            raise
        except TimeoutError as error:
            raise botocore.ConnectTimeoutError(endpoint_url=self._endpoint, error=error) from error
        except OSError as error:
            raise botocore.EndpointConnectionError(endpoint_url=self._endpoint, error=error) from error
        self._sock = self._http.sock
        self._sock.settimeout(self._read_timeout_s)
        if self._aborted:
            raise ConnectionAbortedError("the call was cancelled")

    def _send(self, body: Any) -> OSError | None:
        """Send a body. A server may answer before it has read it all, and hang up: returns how that showed."""
        data = body.view if isinstance(body, Body) else body.read() if hasattr(body, "read") else body
        view = memoryview(data or b"")
        try:
            for start in range(0, len(view), _PIECE):
                self._move(self._http.sock.sendall, view[start : start + _PIECE])
        except (BrokenPipeError, ConnectionResetError) as error:
            return error
        return None

    def readinto(self, view: memoryview) -> int:
        """Fill `view` with the answer's body; the number of bytes, fewer than it has if the body ends."""
        answer, at = self._answer, 0
        assert answer is not None
        with self._failures(None):
            while at < len(view) and (count := self._move(answer.readinto, view[at : at + _PIECE])):
                at += count
        self._see_end(answer)
        return at

    def read(self) -> bytes:
        """The rest of the answer's body, which is small or an error's."""
        answer = self._answer
        assert answer is not None
        with self._failures(None):
            try:
                data = answer.read()
            except http.client.IncompleteRead as error:
                raise botocore.ResponseStreamingError(error=error) from error
        self._see_end(answer)
        return data

    def _see_end(self, answer: http.client.HTTPResponse) -> None:
        if answer.length == 0:
            answer.read()  # marks it as read; there is nothing to wait for
        self._spoiled = not answer.isclosed() or answer.will_close

    def _move(self, call: Callable[[memoryview], T], view: memoryview) -> T:
        with self._moving:
            if self._aborted:
                raise ConnectionAbortedError("the call was cancelled")
            return call(view)

    def abort(self) -> None:
        """End whatever is being done; when this returns, no buffer is read or written any more."""
        self._aborted = True
        # After `Connection: close` the client lets go of its socket, and the answer's body still comes through it.
        if (sock := self._http.sock or self._sock) is not None:
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # below TLS, which has no say in this
            except OSError:  # not connected any more, or being wrapped: `_move` looks at the flag
                pass
        with self._moving:  # a call into the kernel that was under way has returned
            pass

    def park(self) -> bool:
        """Whether the connection can be used again."""
        self._answer, self._idle_since = None, time.monotonic()
        return not (self._spoiled or self._aborted or self._http.sock is None)

    def is_fresh(self) -> bool:
        """Whether a parked connection is still there: whatever can be read from it is its end."""
        if time.monotonic() - self._idle_since > _LONGEST_IDLE_S:
            return False
        poll = select.poll()
        poll.register(self._http.sock, select.POLLIN)
        return not poll.poll(0)

    def used_by(self, job: Future[Any]) -> None:
        """Don't close the connection before `job` has ended: its descriptor could be another's by then."""
        self._job = job

    def close(self) -> None:
        if self._job is not None:
            self._job.add_done_callback(lambda _: self._http.close())
        else:
            self._http.close()

    @property
    def _endpoint(self) -> str:
        return "://".join(self.place)

    @contextmanager
    def _failures(self, request: Any) -> Iterator[None]:
        """What goes wrong below, as botocore says it."""
        try:
            yield
        except ssl.SSLError as error:
            raise botocore.SSLError(endpoint_url=self._endpoint, error=error) from error
        except TimeoutError as error:
            raise botocore.ReadTimeoutError(endpoint_url=self._endpoint, error=error) from error
        except (OSError, http.client.HTTPException) as error:
            raise botocore.ConnectionClosedError(endpoint_url=self._endpoint, error=error, request=request) from error
