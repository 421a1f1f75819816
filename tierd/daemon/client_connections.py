"""Connections of clients to the daemon's two sockets: their number, which one is closed for a new one, their versions.

Invariant: a connection that is closed for a new one is still read to its end, so every request or packet sent over it
is processed. A trainer finds its hand-off connection closed at the next save, and connects anew.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from asyncio import StreamWriter, Task
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tierd import __version__
from tierd.core.errors import RequestUnknown, VersionMismatch
from tierd.core.ids import PartId
from tierd.daemon.transfer.slot_fills import SlotSession
from tierd.ipc import message_codec, messages
from tierd.ipc.message_codec import UnknownRequest, error_reply, greeting
from tierd.ipc.messages import Hello
from tierd.ipc.protocol import PROTOCOL, Peer, explain_outdated
from tierd.spool.arena import Arena

log = logging.getLogger("tierd.daemon")

DAEMON_PEER = Peer(PROTOCOL, __version__)
_MAX_LOGGED_PEERS = 1000  # peers that are remembered as logged
_REFUSAL_LOG_S = 60.0  # seconds between two log lines about refused connections

# Connections at once. A node has some 16 ranks. Each has a few connections to the control socket: its trainer's, and
# those of a restore and of calls under way. To the hand-off socket, where a connection has a thread, it has one or two,
# because a trainer of the launch before may still hold one. Both leave a process with 1,024 descriptors enough for
# tiers.
MAX_CONTROL_CONNECTIONS = 256
MAX_HANDOFF_CONNECTIONS = 128
# Seconds without a request after which a connection may be closed for a new one, if there are as many as allowed.
CONTROL_IDLE_S = 30.0
HANDOFF_IDLE_S = 30.0


@dataclass(slots=True, eq=False, kw_only=True)
class _ClientConnection:
    greeted: bool = False
    working: bool = False  # one of its requests is being answered
    answered_at: float = field(default_factory=time.monotonic)  # when its last request had been answered
    ending: bool = False  # it is being closed for another connection, and does not count any more

    def was_idle_for(self, seconds: float) -> bool:
        return not self.working and self.answered_at <= time.monotonic() - seconds

    def _end(self, connection: socket.socket) -> None:
        """Read what was already sent, then close."""
        self.ending = True
        with suppress(OSError):  # the peer has already disconnected
            connection.shutdown(socket.SHUT_RD)


@dataclass(slots=True, eq=False)
class ControlConnection(_ClientConnection):
    """One client's connection."""

    task: Task[None]
    writer: StreamWriter
    held_parts: set[PartId] = field(default_factory=set)
    attached: messages.Attach | None = None

    def give_way(self) -> None:
        self._end(self.writer.get_extra_info("socket"))


def has_control_room(connections: Iterable[ControlConnection]) -> bool:
    """Whether one more connection is allowed. At the limit, the idle one that was silent for longest is closed.

    A trainer's is never idle, because it shows that the trainer lives.
    """
    counted = [connection for connection in connections if not connection.ending]
    if len(counted) < MAX_CONTROL_CONNECTIONS:
        return True
    unattached = [connection for connection in counted if not (connection.held_parts or connection.attached)]
    idle = [connection for connection in unattached if connection.was_idle_for(CONTROL_IDLE_S)]
    if idle:
        min(idle, key=lambda connection: connection.answered_at).give_way()
    return bool(idle)


@dataclass(frozen=True, slots=True, eq=False)
class HandedOverSnapshot:
    """The last snapshot of a connection: the packet that described it, and the memory that holds it."""

    message: message_codec.PersistSnapshot
    arena: Arena
    box: Arena


@dataclass(slots=True, eq=False)
class TrainerConnection(_ClientConnection):
    """One trainer's connection and the arenas that it handed over."""

    socket: socket.socket
    arenas: dict[int, Arena] = field(default_factory=dict)
    last_snapshot: HandedOverSnapshot | None = None
    writer: str = ""
    has_detached: bool = False  # the trainer lives on and will not recall its arenas
    expires: float = 0.0  # monotonic seconds, set when its trainer dies
    thread: threading.Thread | None = None
    slots: SlotSession | None = None  # of a restore

    @property
    def hung_up(self) -> bool:
        """Whether the trainer is gone. Packets that it had sent may still be in process."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def give_way(self) -> None:
        self.has_detached = True  # the trainer lives, so no successor may recall its memory
        self._end(self.socket)

    def close(self) -> None:
        if self.slots is not None:
            self.slots.close()
        last = self.last_snapshot
        for arena in {*self.arenas.values(), *((last.arena, last.box) if last else ())}:
            arena.close()
        self.arenas, self.last_snapshot = {}, None


def has_handoff_room(connections: Iterable[TrainerConnection]) -> bool:
    """Whether one more connection is allowed.

    At the limit, an idle one is closed: first one without arenas, and among equals the one silent for longest.
    """
    counted = [connection for connection in connections if not connection.ending]
    if len(counted) < MAX_HANDOFF_CONNECTIONS:
        return True
    idle = [connection for connection in counted if connection.was_idle_for(HANDOFF_IDLE_S)]
    if idle:
        min(idle, key=lambda connection: (bool(connection.arenas), connection.answered_at)).give_way()
    return bool(idle)


def explain_full(limit: int, remedy: str) -> str:
    """Say why a connection beyond the limit is refused."""
    return f"it has {limit} connections, as many as it takes, and none of them is idle; end processes that {remedy}"


def unknown_request(error: UnknownRequest) -> RequestUnknown:
    """Return the error that answers a request of a newer client; the connection continues after it."""
    return RequestUnknown(f"{error}: the daemon ({DAEMON_PEER}) is older than the client; upgrade the daemon")


class PeerLog:
    def __init__(self, where: str) -> None:
        self._where = where
        self._logged: set[tuple[int, Peer]] = set()
        self._refused, self._refusal_logged_at = 0, -_REFUSAL_LOG_S  # since the last log line; its time, monotonic

    def answer(self, pid: int, hello: Hello) -> dict[str, Any]:
        """Answer a greeting with this daemon's versions, and with an error if it does not work with the client's."""
        why = explain_outdated(hello.peer, DAEMON_PEER)
        if not why:
            return greeting(DAEMON_PEER.version)
        self._log(pid, hello.peer, f"turned away pid {pid}: {why}")
        return greeting(DAEMON_PEER.version) | error_reply(VersionMismatch(why))

    def log_unnamed(self, pid: int) -> None:
        """Log a client that sent a request before any greeting, and so is older than protocol numbers.

        Such a client gets answers, because the requests that it knows have kept their form.
        """
        client = Peer(None, "")
        self._log(pid, client, f"answered pid {pid}, although {explain_outdated(client, DAEMON_PEER)}")

    def log_refusal(self, why: str) -> None:
        """Count a connection that was refused, and log the count now and then."""
        self._refused += 1
        if time.monotonic() - self._refusal_logged_at >= _REFUSAL_LOG_S:
            log.warning("%s: refused %d connections, because %s", self._where, self._refused, why)
            self._refused, self._refusal_logged_at = 0, time.monotonic()

    def _log(self, pid: int, client: Peer, text: str) -> None:
        if (pid, client) in self._logged:
            return
        if len(self._logged) >= _MAX_LOGGED_PEERS:
            self._logged.clear()
        self._logged.add((pid, client))
        log.warning("%s: %s", self._where, text)
