"""One socket to a server: connecting, TLS, sending, receiving and waiting.

Invariant: this object owns the socket from its creation on, before it is connected, so that `abort` and `close` always
reach it. Bytes move directly between a caller's buffer and the socket. After `abort` has returned, nothing touches the
buffer.

Every wait ends. `StallTimer` gives up if no byte has moved for a while, or if the average rate was too low. A byte has
moved when it was received, or when the peer has acknowledged it by the kernel's count. A large body on a slow link is
therefore not cut off while it progresses, however much of it waits in buffers.

Every connection performs a full handshake and verifies the certificate, without TLS session resumption. Measured on
loopback (TLS 1.3, P-256, a certificate signed by its authority), a resumed handshake took 0.63 ms of CPU instead of
0.86. It received 0.7 kB less. It saves no round trip, and a part's chunks share kept-alive connections. But resumption
would accept a certificate that has expired or was replaced since.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import SplitResult

from botocore import exceptions as botocore

from tierd.stores.s3.http1 import NoResponse

T = TypeVar("T")

SLOWEST_RATE = 5_000  # bytes/s: a transfer with a lower average rate is given up
_BUFFERED_S = 5.0  # seconds after which a sent byte shows that the server reads; before, buffers may have taken it
_PIECE = 1 << 20  # bytes: a cancelled call waits for at most one piece
_SINGLE_SEND = 1 << 14  # bytes: a body up to this size is sent together with its head
_DISCONNECTS = (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


class StallTimer:
    """A limit on the time to wait for a peer.

    The limit is `stall_s` seconds after the last byte, and in all `stall_s` and 1 s for each `SLOWEST_RATE` bytes.
    Times are monotonic seconds. `moved` counts bytes and never falls. `when` describes the current activity for error
    messages.
    """

    def __init__(self, stall_s: float, now: float, moved: int, when: str = "") -> None:
        self.stall_s, self._when = stall_s, when
        self._started_at, self._base = now, moved
        self._last, self._moved = now, moved

    def left_s(self, now: float, moved: int) -> float:
        """Return for how many more seconds the caller may wait. Raises `NoResponse` when the time is over."""
        if moved != self._moved:
            self._last, self._moved = now, moved
        stalled = self._last + self.stall_s - now
        slow = self._started_at + self.stall_s + (moved - self._base) / SLOWEST_RATE - now
        if stalled <= 0:
            raise NoResponse(f"stalled: no byte for {self.stall_s:g} s {self._when}")
        if slow <= 0:
            moved -= self._base
            raise NoResponse(f"stalled: no more than {moved} bytes in {now - self._started_at:.1f} s {self._when}")
        return min(stalled, slow)


class Connection:
    """A TCP connection, with TLS if the URL says https. Every method but `abort` blocks, and one thread at a time calls
    it.

    Every method but `abort` blocks, and one thread at a time calls it.

    Attributes:
        moved_bytes: bytes sent and received, without TLS overhead; the caller that sums them up resets it to 0.
        signs_of_life: receptions and sends that show that the server lives; reset as `moved_bytes`.
        aborted: whether the connection must not be used any more.
    """

    def __init__(self, url: SplitResult, tls: Callable[[], ssl.SSLContext], connect_timeout_s: float) -> None:
        self.moved_bytes = self.signs_of_life = 0
        self.aborted = False
        self._place = f"{url.scheme}://{url.netloc}"
        self._is_tls, self._tls = url.scheme == "https", tls
        self._address = url.hostname or "", url.port or (443 if self._is_tls else 80)
        self._connect_timeout_s = connect_timeout_s
        self._sock: socket.socket | None = None
        self._moving = threading.Lock()  # held while bytes move between a buffer and the socket
        self._watch = StallTimer(connect_timeout_s, 0.0, 0)
        self._watched_at = 0.0  # when the current wait began, monotonic seconds

    @property
    def sock(self) -> socket.socket:
        """The socket, which exists from `connect` on."""
        assert self._sock is not None
        return self._sock

    # -- connecting -------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, and do the TLS handshake.

        All addresses share one connect timeout; the handshake has another of the same length. Raises Unanswered or
        `botocore.HTTPClientError` if the connection failed.
        """
        try:
            self._reach()
        except TimeoutError as error:
            raise botocore.ConnectTimeoutError(endpoint_url=self._place, error=error) from error
        except OSError as error:
            raise botocore.EndpointConnectionError(endpoint_url=self._place, error=error) from error
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._is_tls:
            self.start_stall_timer(self._connect_timeout_s, "in the TLS handshake")
            self._shake_hands()

    def _reach(self) -> None:
        addresses = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        end = time.monotonic() + self._connect_timeout_s
        for remaining, (family, kind, protocol, _, address) in zip(
            range(len(addresses), 0, -1), addresses, strict=True
        ):
            sock = self._adopt(socket.socket(family, kind, protocol))
            sock.settimeout(max(0.1, (end - time.monotonic()) / remaining))
            try:
                sock.connect(address)
                return
            except OSError:
                sock.close()
                if remaining == 1 or self.aborted:
                    raise

    def _shake_hands(self) -> None:
        try:
            context = self._tls()
        except OSError as error:
            raise NoResponse(
                f"the certificates to verify by cannot be read: {safe_error_text(error)}", refused=True
            ) from error
        try:
            tls = context.wrap_socket(self.sock, server_hostname=self._address[0], do_handshake_on_connect=False)
            self._adopt(tls)
            self._retry_when_ready(tls.do_handshake, select.POLLIN)
        except ssl.SSLCertVerificationError as error:
            raise NoResponse(_distrust(error, self._address[0]), refused=True) from error
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise NoResponse(f"the TLS handshake was cut off: {safe_error_text(error)}") from error
        except ssl.SSLError as error:
            raise botocore.SSLError(endpoint_url=self._place, error=error) from error

    def _adopt(self, sock: socket.socket) -> socket.socket:
        self._sock = sock
        if self.aborted:  # `abort` ran before this socket existed
            raise ConnectionAbortedError("the call was cancelled")
        return sock

    # -- moving bytes -----------------------------------------------------------------------------------------------

    def start_stall_timer(self, stall_s: float, when: str) -> None:
        """Limit all further waits by a new `StallTimer`."""
        self._watched_at = time.monotonic()
        self._watch = StallTimer(stall_s, self._watched_at, acknowledged_bytes(self.sock), when)

    def send(self, head: bytes, body: memoryview) -> OSError | None:
        """Send a request, and return the error with which the server closed the connection before it had read all; else
        None.

        A server may do so and still respond.
        """
        parts = [memoryview(head + body)] if len(body) <= _SINGLE_SEND else [memoryview(head), body]
        try:
            for part in parts:
                for start in range(0, len(part), _PIECE):
                    self._send_piece(part[start : start + _PIECE])
        except _DISCONNECTS as error:
            return error
        return None

    def _send_piece(self, piece: memoryview) -> None:
        with self._moving:
            while piece:
                count = self._retry_when_ready(self.sock.send, select.POLLOUT, piece)
                self.moved_bytes += count
                self.signs_of_life += time.monotonic() > self._watched_at + _BUFFERED_S
                piece = piece[count:]

    def fill(self, view: memoryview, ahead: bytearray) -> int:
        """Fill `view`, at most 1 MiB per call, first from the bytes in `ahead` and then from the socket.

        Return the number of bytes; fewer than requested at the connection's end.
        """
        view = view[:_PIECE]
        at = min(len(view), len(ahead))
        with self._moving:
            self._check_aborted()
            view[:at] = ahead[:at]
            del ahead[:at]
            while at < len(view) and (count := self._retry_when_ready(self.sock.recv_into, select.POLLIN, view[at:])):
                self.moved_bytes += count
                self.signs_of_life += 1
                at += count
        return at

    def receive(self, max_bytes: int) -> bytes:
        """Receive at most `max_bytes` bytes; none at the connection's end."""
        data = self._retry_when_ready(self.sock.recv, select.POLLIN, max_bytes)
        self.moved_bytes += len(data)
        self.signs_of_life += bool(data)
        return data

    def _retry_when_ready(self, call: Callable[..., T], event: int, *args: Any) -> T:
        """Repeat a non-blocking call until it succeeds, and wait for the socket in between."""
        while True:
            self._check_aborted()
            try:
                return call(*args)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            except BlockingIOError:
                self._wait(event)

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self.sock, event)
        while not self.aborted:
            left_s = self._watch.left_s(time.monotonic(), acknowledged_bytes(self.sock))
            if poll.poll(1000 * min(left_s, self._watch.stall_s / 4) + 1):
                return

    def _check_aborted(self) -> None:
        if self.aborted:
            raise ConnectionAbortedError("the call was cancelled")

    # -- closing ----------------------------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Return whether the socket has nothing to read, not even its end. TLS session tickets do not count."""
        try:
            self.sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def abort(self) -> None:
        """End the current operation; when this returns, no buffer is read or written any more."""
        self.aborted = True
        if (sock := self._sock) is not None:
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # shut down below TLS, so that no TLS exchange is needed
            except OSError:  # not connected any more, or about to be wrapped: `_adopt` checks the flag
                pass
        with self._moving:  # waits until the current transfer has ended
            pass

    def close(self) -> None:
        """Close the socket; no thread may be using it."""
        if self._sock is not None:
            self._sock.close()


def acknowledged_bytes(sock: socket.socket) -> int:
    """Return the kernel's count of bytes received on a socket, plus bytes sent and acknowledged by the peer.

    Source: `struct tcp_info` of linux/tcp.h, whose bytes 120 to 136 are `tcpi_bytes_acked` and `tcpi_bytes_received`.
    """
    sent, received = struct.unpack_from("QQ", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), 120)
    return int(sent + received)


def safe_error_text(error: BaseException) -> str:
    """Describe an error without any text that a server controls."""
    text = error.reason if isinstance(error, ssl.SSLError) else error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def error_origin(error: BaseException) -> str:
    """Return the class of an unexpected error and the function that raised it, because its text may quote a secret."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frames[-1].name}" if frames else type(error).__name__


def _distrust(error: ssl.SSLCertVerificationError, host: str) -> str:
    """Describe the fault of a server's certificate, and the remedy. Source: the codes of openssl/x509_vfy.h."""
    match error.verify_code:
        case 9:
            return f"the certificate of {host} is not valid yet: set this node's clock, or wait"
        case 10:
            return (
                f"the certificate of {host} has expired: renew it on the server; if it has not, set this node's clock"
            )
        case 62 | 64:
            return f"the server's certificate is not for {host}: write an endpoint with a name that the certificate has"
    why = error.verify_message
    return f"the certificate of {host} is not trusted ({why}): name the file of its authority in AWS_CA_BUNDLE"
