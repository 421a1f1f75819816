"""Handing a snapshot to the daemon: the arena's descriptor crosses a unix socket, not one byte of the state does.

Law: what was sent is the daemon's, whatever becomes of this process; what was not answered is this process's still. A
daemon that is absent, full or dead costs a call that fails at once.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
import weakref
from dataclasses import dataclass
from typing import Any

import msgspec

from tierd.arena import Arena
from tierd.commit import Written
from tierd.core.errors import DaemonUnavailable, ObjectNotFound, VersionMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE, Manifest, encode
from tierd.core.protocol import explain
from tierd.core.wire import HEARTBEAT, MAX_PACKET, AnyHanded, Leave, Lend, Persist, Recall, greeted, raise_error
from tierd.link import HELLO, THIS, connect
from tierd.spool import Spool

log = logging.getLogger("tierd")

_SILENCE = 6 * HEARTBEAT  # seconds without a packet after which a daemon counts as hung, and is then left alone
_GREETING = 0.5  # seconds that a daemon has to greet who connects

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget_in_child() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True, slots=True)
class Given:
    """A snapshot that the daemon was told of, and the connection that its answer comes over."""

    connection: socket.socket
    size: int


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a trainer that died had handed over last, still in memory: its arena, and the part's files in it."""

    arena: Arena
    files: dict[str, memoryview]


class HandOff:
    """This trainer's line to the daemon's hand-off socket. One thread gives, one waits for answers, in that order."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._line: _Line | None = None
        self._not_before = 0.0  # monotonic seconds
        self._warned = ""  # of which mismatch of versions the log was told

    def renew(self) -> bool:
        """Connect, unless the connection stands; whether there is one. A daemon that hangs, or that is of a version too
        far from this one, is left alone for `_SILENCE` seconds."""
        if self._line is not None:
            return True
        if time.monotonic() < self._not_before:
            return False
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # no descriptor to be had
            return False
        connection.setblocking(False)
        try:
            connect(connection, self._spool.handoff_socket, patience_s=0.0)
            # A connection alone proves nothing, because the system accepts it for a daemon that hangs.
            greeting, _ = _receive(connection, _GREETING)
            _send(connection, HELLO)  # also to a daemon that is too far apart: it then logs which side to upgrade
            if why := explain(THIS, greeted(greeting)):
                raise VersionMismatch(f"spool {self._spool.root}: {why}")
        except (OSError, DaemonUnavailable) as error:
            if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                self._not_before = time.monotonic() + _SILENCE
            if isinstance(error, VersionMismatch) and str(error) != self._warned:
                self._warned = str(error)
                log.warning("%s. Until then training writes its checkpoints itself", error)
            connection.close()
            return False
        _open.add(connection)
        self._line = _Line(connection, {})
        return True

    def give(self, slot: int, arena: Arena, manifest: Manifest, tensors: int, tree: bytes) -> Given | None:
        """Tell the daemon of the snapshot in `arena`; None where there is no daemon, or it takes nothing.

        Args:
            manifest: without files.
            tensors: size of the tensor file that the arena begins with, bytes.
        """
        try:
            head = encode(manifest)
            box = Arena(len(head) + len(tree))
        except MemoryError:
            return None
        box.view[: len(head) + len(tree)] = head + tree
        persist = Persist(part=manifest.part, slot=slot, tensors=tensors, manifest=len(head), tree=len(tree))
        try:
            for _ in range(2):  # the second time to a daemon that came after the first had gone
                if arena.shared or not self.renew() or (line := self._line) is None:
                    break
                if self._tell(line, slot, arena, persist, box):
                    return Given(line.connection, tensors + len(tree))
            return None
        finally:
            box.close()

    def _tell(self, line: _Line, slot: int, arena: Arena, persist: Persist, box: Arena) -> bool:
        try:
            if line.lent.get(slot) is not arena:
                _send(line.connection, Lend(slot=slot), arena.fd)
                line.lent[slot] = arena
            _send(line.connection, persist, box.fd)
        except OSError as error:
            self._drop(line.connection, gone=isinstance(error, ConnectionError))
            return False
        return True

    def answer(self, given: Given) -> Written:
        """Wait until the daemon has committed what it was given.

        Raises:
            DaemonUnavailable: the connection ended or fell silent first: whether it was committed is not known.
            TierdError: it could not be; as the daemon says.
        """
        try:
            reply, _ = _receive(given.connection, _SILENCE)
        except DaemonUnavailable as error:
            gone = isinstance(error, _Ended)
            if not gone:
                self._not_before = time.monotonic() + _SILENCE
            self._drop(given.connection, gone=gone)
            given.connection.close()
            raise
        return Written(size=given.size, direct=bool(reply["direct"]), recycled=bool(reply["recycled"]))

    def recall(self, part: PartId) -> Remembered | None:
        """Take `part` over from a trainer that died, if the daemon still has it in memory. Not verified."""
        if not self.renew() or (line := self._line) is None:
            return None
        try:
            _send(line.connection, Recall(part=part))
            reply, fds = _receive(line.connection, _SILENCE)
            arena, box = (Arena.received(fd) for fd in fds)
        except ObjectNotFound:
            return None
        except (OSError, ValueError, MemoryError, DaemonUnavailable):  # its files are in the spool all the same
            self._drop(line.connection, gone=False)
            return None
        begin = reply["manifest"]
        line.lent.clear()
        line.lent[0] = arena
        tree = memoryview(bytes(box.view[begin : begin + reply["tree"]]))
        box.close()
        return Remembered(arena, {TENSORS: arena.view[: reply["tensors"]], TREE: tree})

    def close(self) -> None:
        """End in order: nobody will come for what was lent."""
        line = self._line
        if line is not None:
            try:
                _send(line.connection, Leave())
            except OSError:
                pass
            self._drop(line.connection, gone=True)
            line.connection.close()

    def _drop(self, connection: socket.socket, *, gone: bool) -> None:
        """Use it no more. Whoever waits for an answer on it is woken, and closes it.

        Args:
            gone: the daemon has let go of what was lent. If not, it takes this trainer for dead, and may give its
                arenas to a successor: nobody here writes to them any more.
        """
        line = self._line
        if line is not None and line.connection is connection:
            self._line = None
            for arena in line.lent.values():
                arena.shared |= not gone
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


@dataclass(frozen=True, slots=True)
class _Line:
    """A connection, and the arenas that were lent over it."""

    connection: socket.socket
    lent: dict[int, Arena]


class _Ended(DaemonUnavailable):
    """The daemon closed the connection."""


def _send(connection: socket.socket, message: AnyHanded, *fds: int) -> None:
    if connection.fileno() < 0:
        raise ConnectionError("the connection is closed")
    socket.send_fds(connection, [msgspec.json.encode(message)], fds, socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket, silence: float) -> tuple[dict[str, Any], list[int]]:
    ready = select.poll()
    if connection.fileno() < 0:  # who waited for an earlier answer has found it ended, and closed it
        raise _Ended("the daemon closed the connection")
    try:
        ready.register(connection, select.POLLIN)
        end = time.monotonic() + silence
        while True:
            if not ready.poll(max(0.0, end - time.monotonic()) * 1000):
                raise DaemonUnavailable(f"the daemon was silent for {silence:g} s")
            packet, fds, _, _ = socket.recv_fds(connection, MAX_PACKET, 2, socket.MSG_CMSG_CLOEXEC)
            if not packet:
                raise _Ended("the daemon closed the connection")
            reply = msgspec.json.decode(packet)
            if reply.get("working"):
                end = time.monotonic() + silence
                continue
            if not reply.get("ok"):
                raise_error(reply)
            return reply, fds
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise DaemonUnavailable(f"the daemon's connection broke: {error}") from error
