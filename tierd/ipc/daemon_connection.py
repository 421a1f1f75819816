"""The connection to the node's daemon, for the training process and the command line. Standard library only.

Invariant: a daemon that is absent, slow or dead costs its caller a bounded wait and an error, never more.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tierd import __version__
from tierd.core.errors import ConfigError, DaemonAbsent, DaemonSilent, DaemonUnavailable, TierdError, VersionMismatch
from tierd.ipc.message_codec import parse_greeting, raise_error
from tierd.ipc.messages import HEARTBEAT, MAX_REPLY, Hello, Request, StatusRequest, encode_line
from tierd.ipc.protocol import PROTOCOL, Peer, explain_outdated
from tierd.spool.file_io import open_own
from tierd.spool.spool import Spool
from tierd.spool.spool_access import account_name, foreign_peer_uid, peer_pid

UNIT_DIRECTORIES = tuple(Path(at, "systemd/system") for at in ("/etc", "/run", "/usr/local/lib", "/usr/lib"))


def ways_to_start(root: Path, directories: Sequence[Path] = UNIT_DIRECTORIES) -> str:
    """Name the ways to start a daemon on the spool in `root`, an installed unit first.

    A daemon beside that unit would take its spool. Whether the unit's tierd.toml names this spool is not known, because
    the caller may not be allowed to read it.
    """
    ways = [f"systemctl start {unit}" for unit in _units(root, directories)]
    ways.append(f"tierd run --config FILE or tierd run --spool {root} --to URL")
    return " or ".join(ways)


def _units(root: Path, directories: Sequence[Path]) -> list[str]:
    """Name tierd's installed units, with the spool's account as the template's instance."""
    installed = {
        name for name in ("tierd.service", "tierd@.service") if any((at / name).exists() for at in directories)
    }
    units = ["tierd"] if "tierd.service" in installed else []
    if "tierd@.service" in installed:
        units.append(f"tierd@{account_name(_owner(root))}")
    return units


def _owner(root: Path) -> int:
    try:
        return root.stat().st_uid
    except OSError:
        return os.geteuid()


OWN_PEER = Peer(PROTOCOL, __version__)
HELLO = Hello(protocol=str(PROTOCOL), version=__version__)

SILENCE_S = 6 * HEARTBEAT  # seconds without a byte after which a daemon counts as hung
GREETING_S = 5.0  # the same for the greeting, which a daemon sends at once even if it is busy
_QUEUE = 5.0  # seconds to wait for a place in the daemon's queue of callers
_PROBE = 5.0  # seconds in which a daemon that closed the connection at the greeting may answer `StatusRequest`
_ABSENT = (errno.ENOENT, errno.ECONNREFUSED)
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_child(connection: socket.socket) -> None:
    """Close a connection in forked children, because the daemon sees by its end that a trainer died."""
    _open.add(connection)


def _close_all() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_all)


class DaemonConnection:
    """One connection to the daemon.

    The daemon releases everything that it holds for the connection (a restored part, the attached trainer) at its end.

    Args:
        greet: exchange protocol numbers first. False is for a request whose form never changes.
        silence_s: seconds without a byte, or without a place in the daemon's queue, after which the daemon counts as
            stopped. Pass it only for requests to which `messages.BEAT` applies.

    Raises:
        DaemonAbsent: no process listens.
        DaemonSilent: no place is free in the daemon's queue.
        DaemonUnavailable: the listening process belongs to another user.
    """

    def __init__(
        self, spool: Spool, *, greet: bool = True, silence_s: float | None = None, greeting_s: float = GREETING_S
    ) -> None:
        self._spool = spool
        self._to_greet, self._greeting_s = greet, greeting_s
        self._silence_s = SILENCE_S if silence_s is None else silence_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(self._silence_s)
        self._buffer = b""
        close_in_child(self._socket)
        try:
            connect_to_daemon(self._socket, spool.socket, min(_QUEUE, self._silence_s))
        except OSError as error:
            self._socket.close()
            if isinstance(error, BlockingIOError):
                raise DaemonSilent(
                    f"spool {spool.root}: {describe_hung_daemon(spool_holder_pid(spool), 'takes no more callers')}"
                ) from error
            absent = error.errno in _ABSENT
            raise (DaemonAbsent if absent else DaemonUnavailable)(
                f"spool {spool.root}: no daemon answers ({'none is running' if absent else error.strerror or error}); "
                f"start one: {ways_to_start(spool.root)}"
            ) from error

    def ask(
        self,
        request: Request,
        timeout_s: float | None = None,
        on_progress: Callable[[dict[str, Any]], None] = lambda progress: None,
    ) -> dict[str, Any]:
        """Send a request, and return the members of its answer.

        Args:
            timeout_s: None waits for as long as the daemon shows that it works.
            on_progress: called with the daemon's progress messages, at least every `HEARTBEAT` seconds. If it raises,
                the connection cannot be used any more.

        Raises:
            TierdError: the condition that the daemon answered with, or as `greet`.
            TimeoutError: `timeout_s` is over, or the daemon answers that the request's own time is over.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        self._greet(end)
        with _broken_link():
            self._send(encode_line(request))
            while True:
                reply = self._reply(end, self._silence_s)
                if reply.get("working"):
                    on_progress(reply)
                    continue
                if not reply.get("ok"):
                    raise_error(reply)
                return reply

    def greet(self) -> None:
        """Exchange protocol numbers, unless that was done. `ask` does so by itself.

        Raises:
            VersionMismatch: the daemon is too old or too new for this client.
            DaemonSilent: the daemon did not answer within seconds.
            DaemonUnavailable: the connection broke.
        """
        self._greet(None)

    def _greet(self, end: float | None) -> None:
        if not self._to_greet:
            return
        with _broken_link():
            try:
                self._send(encode_line(HELLO))
                reply = self._reply(end, min(self._silence_s, self._greeting_s))
            except ConnectionError:
                if _is_older_than_numbers(self._spool):
                    self._check(Peer(None, ""))
                raise
        self._check(parse_greeting(reply))
        if not reply.get("ok"):
            raise_error(reply)
        self._to_greet = False

    def _check(self, daemon: Peer) -> None:
        if why := explain_outdated(OWN_PEER, daemon):
            raise VersionMismatch(f"spool {self._spool.root}: {why}")

    def _send(self, line: bytes) -> None:
        self._socket.settimeout(self._silence_s)
        try:
            self._socket.sendall(line)
        except TimeoutError:
            raise self._hung_error("took no request", self._silence_s) from None
        except ConnectionError:
            pass  # the daemon closed the connection; `_reply` reads the reason, if it sent one, or the end

    def _reply(self, end: float | None, silence_s: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            remaining_s = silence_s if end is None else end - time.monotonic()
            if remaining_s <= 0:
                raise _timed_out()
            self._socket.settimeout(min(remaining_s, silence_s))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                if end is not None and time.monotonic() >= end:
                    raise _timed_out() from None
                raise self._hung_error("was silent", silence_s) from None
            if not data:
                raise ConnectionResetError("the daemon closed the connection")
            self._buffer += data
            if len(self._buffer) > MAX_REPLY:
                raise DaemonUnavailable(f"the daemon's answer is longer than {MAX_REPLY} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return msgspec.json.decode(line, type=dict[str, Any])

    def _hung_error(self, did: str, silence_s: float) -> DaemonSilent:
        try:
            pid = peer_pid(self._socket)
        except OSError:
            pid = 0
        return DaemonSilent(describe_hung_daemon(pid, f"{did} for {silence_s:g} s"))

    def check_peer(self, check: Callable[[socket.socket], bool]) -> bool:
        return check(self._socket)

    def is_alive(self) -> bool:
        """Whether the daemon still holds the connection. Sends nothing."""
        self._socket.setblocking(False)
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def has_unread(self) -> bool:
        """Whether an answer, or the connection's end, is unread. Sends nothing."""
        try:
            self._socket.setblocking(False)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """End the connection, even if a forked child still has its descriptor."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def __enter__(self) -> DaemonConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _broken_link() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DaemonUnavailable(f"the daemon's connection broke: {error}") from error


def describe_hung_daemon(pid: int, does: str) -> str:
    """Describe a daemon that does not go on, and the ways out. `pid` is 0 if it is not known."""
    who, name = (f"the daemon, pid {pid},", str(pid)) if pid else ("the daemon", "PID")
    return f"{who} {does}; it may be stopped: let it go on (kill -CONT {name}), or end it (kill -KILL {name})"


def spool_holder_pid(spool: Spool) -> int:
    """Return the process that holds the spool by its lock file; 0 if the file does not name one."""
    try:
        with os.fdopen(open_own(spool.lock_path), "r") as file:
            text = file.read().strip()
    except (OSError, ConfigError, UnicodeDecodeError):
        return 0
    return int(text) if text.isascii() and text.isdecimal() else 0


def _timed_out() -> TimeoutError:
    return TimeoutError("the daemon did not answer in the time given")


def _is_older_than_numbers(spool: Spool) -> bool:
    """Whether the daemon answers requests and has no greeting. A daemon that is about to end answers neither."""
    try:
        with DaemonConnection(spool, greet=False) as link:
            return "protocol" not in link.ask(StatusRequest(), _PROBE)["status"]
    except (TierdError, TimeoutError):
        return False


def connect_to_daemon(connection: socket.socket, path: Path, patience_s: float = _QUEUE) -> None:
    """Connect an unconnected unix socket to one of the daemon's sockets.

    Args:
        patience_s: seconds to wait for a free place among the daemon's waiting callers.

    Raises:
        OSError: no process listens; no place became free; or the process belongs to another user than this one, root or
            the spool's owner.
    """
    # A socket's path is limited to 107 bytes and a spool's path is not, so a descriptor of the directory names it.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end = time.monotonic() + patience_s
    try:
        while True:
            try:
                connection.connect(f"/proc/self/fd/{directory}/{path.name}")
                break
            except BlockingIOError:  # the daemon listens, and its queue of waiting callers is full
                if time.monotonic() >= end:
                    raise
            time.sleep(0.02)
        if (uid := foreign_peer_uid(connection, os.fstat(directory).st_uid)) is not None:
            raise PermissionError(errno.EPERM, f"what listens there is another user's, uid {uid}")
    finally:
        os.close(directory)
