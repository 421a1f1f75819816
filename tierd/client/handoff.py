"""Handing a snapshot to the daemon: the arena's descriptor crosses a unix socket, not one byte of the state does.

Law: what was sent is the daemon's, whatever becomes of this process; what was not answered is this process's still. A
daemon that is absent, full or dead costs a call that fails at once.
"""

from __future__ import annotations

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
from tierd.core.errors import DaemonUnavailable, ObjectNotFound
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE, Manifest, encode
from tierd.core.wire import HEARTBEAT, MAX_PACKET, AnyHanded, Leave, Lend, Persist, Recall, raise_error
from tierd.link import connect
from tierd.spool import Spool

_SILENCE = 6 * HEARTBEAT  # seconds without a packet after which a daemon counts as hung

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
        self._connection: socket.socket | None = None
        self._lent: dict[int, Arena] = {}

    def renew(self) -> bool:
        """Connect, unless the connection stands; whether there is one."""
        if self._connection is not None:
            return True
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connect(connection, self._spool.handoff_socket)
        except OSError:
            connection.close()
            return False
        connection.setblocking(False)
        _open.add(connection)
        self._connection, self._lent = connection, {}
        return True

    def give(self, slot: int, arena: Arena, manifest: Manifest, tensors: int, tree: bytes) -> Given | None:
        """Tell the daemon of the snapshot in `arena`; None where there is no daemon, or it takes nothing.

        Args:
            manifest: without files.
            tensors: size of the tensor file that the arena begins with, bytes.
        """
        connection = self._connection
        if connection is None:
            return None
        try:
            if self._lent.get(slot) is not arena:
                _send(connection, Lend(slot=slot), arena.fd)
                self._lent[slot] = arena
            head = encode(manifest)
            box = Arena(len(head) + len(tree))
            box.view[: len(head) + len(tree)] = head + tree
            sizes = {"tensors": tensors, "manifest": len(head), "tree": len(tree)}
            _send(connection, Persist(part=manifest.part, slot=slot, **sizes), box.fd)
            box.close()
        except (OSError, MemoryError):
            self._drop(connection)
            return None
        return Given(connection, tensors + len(tree))

    def answer(self, given: Given) -> Written:
        """Wait until the daemon has committed what it was given.

        Raises:
            DaemonUnavailable: the connection ended or fell silent first: whether it was committed is not known.
            TierdError: it could not be; as the daemon says.
        """
        try:
            reply, _ = _receive(given.connection)
        except DaemonUnavailable:
            self._drop(given.connection)
            given.connection.close()
            raise
        return Written(size=given.size, direct=bool(reply["direct"]), recycled=bool(reply["recycled"]))

    def recall(self, part: PartId) -> Remembered | None:
        """Take `part` over from a trainer that died, if the daemon still has it in memory. Not verified."""
        if not self.renew():
            return None
        connection = self._connection
        assert connection is not None
        try:
            _send(connection, Recall(part=part))
            reply, fds = _receive(connection)
            arena, box = (Arena.received(fd) for fd in fds)
        except ObjectNotFound:
            return None
        except (OSError, ValueError, MemoryError, DaemonUnavailable):  # its files are in the spool all the same
            self._drop(connection)
            return None
        begin = reply["manifest"]
        self._lent[0] = arena
        tree = memoryview(bytes(box.view[begin : begin + reply["tree"]]))
        box.close()
        return Remembered(arena, {TENSORS: arena.view[: reply["tensors"]], TREE: tree})

    def close(self) -> None:
        """End in order: nobody will come for what was lent."""
        connection = self._connection
        if connection is not None:
            try:
                _send(connection, Leave())
            except OSError:
                pass
            self._drop(connection)
            connection.close()

    def _drop(self, connection: socket.socket) -> None:
        """Use it no more. Whoever waits for an answer on it is woken, and closes it."""
        if self._connection is connection:
            self._connection, self._lent = None, {}
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def _send(connection: socket.socket, message: AnyHanded, *fds: int) -> None:
    if connection.fileno() < 0:
        raise ConnectionError("the connection is closed")
    socket.send_fds(connection, [msgspec.json.encode(message)], fds, socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    ready = select.poll()
    try:
        ready.register(connection, select.POLLIN)
        end = time.monotonic() + _SILENCE
        while True:
            if not ready.poll(max(0.0, end - time.monotonic()) * 1000):
                raise DaemonUnavailable(f"the daemon was silent for {_SILENCE:.0f} s")
            packet, fds, _, _ = socket.recv_fds(connection, MAX_PACKET, 2, socket.MSG_CMSG_CLOEXEC)
            if not packet:
                raise DaemonUnavailable("the daemon closed the connection")
            reply = msgspec.json.decode(packet)
            if reply.get("working"):
                end = time.monotonic() + _SILENCE
                continue
            if not reply.get("ok"):
                raise_error(reply)
            return reply, fds
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise DaemonUnavailable(f"the daemon's connection broke: {error}") from error
