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
from dataclasses import dataclass, field
from typing import Any

from tierd import __version__
from tierd.core.errors import RequestUnknown, VersionMismatch
from tierd.core.ids import PartId
from tierd.ipc import message_codec, messages
from tierd.ipc.message_codec import UnknownRequest, error_reply, greeting
from tierd.ipc.messages import Hello
from tierd.ipc.protocol import PROTOCOL, Peer, explain_outdated
from tierd.spool.arena import Arena

# Connections at once. A node has some 16 ranks, each with a few connections: its trainer's, and those of a restore and
# of calls under way. Together with `MAX_HANDOFF_CONNECTIONS` these leave a process with 1,024 descriptors enough for
# tiers.
MAX_CONTROL_CONNECTIONS = 256
# A connection without a request for so long may be closed for a new one, if there is no room.
CONTROL_IDLE_S = 30.0


@dataclass(slots=True, eq=False)
class ControlConnection:
    """One client's connection."""

    task: Task[None]
    writer: StreamWriter
    held_parts: set[PartId] = field(default_factory=set)
    attached: messages.Attach | None = None
    greeted: bool = False
    working: bool = False
    answered_at: float = field(default_factory=time.monotonic)
    ending: bool = False

    @property
    def idle(self) -> bool:
        """Whether it may be closed for a new one. A trainer's may not, because it shows that the trainer lives."""
        return (
            not (self.working or self.held_parts or self.attached)
            and self.answered_at <= time.monotonic() - CONTROL_IDLE_S
        )

    def give_way(self) -> None:
        """Read what was already sent, then close."""
        self.ending = True
        try:
            self.writer.get_extra_info("socket").shutdown(socket.SHUT_RD)
        except OSError:
            pass  # the peer has already disconnected


def has_control_room(lines: Iterable[ControlConnection]) -> bool:
    """Whether one more connection is allowed. At the maximum, the idle one that was silent for longest is closed."""
    counted = [line for line in lines if not line.ending]
    if len(counted) < MAX_CONTROL_CONNECTIONS:
        return True
    longest = min((line for line in counted if line.idle), key=lambda line: line.answered_at, default=None)
    if longest is None:
        return False
    longest.give_way()
    return True


# Connections at once. Each has a thread. A node has some 16 ranks, each with one or two connections, because a trainer
# of the launch before may still hold one.
MAX_HANDOFF_CONNECTIONS = 128
# A connection without a packet for so long may be closed for a new one, if there is no room.
HANDOFF_IDLE_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class HandedOverSnapshot:
    """The last snapshot of a connection: the packet that described it, and the memory that holds it."""

    message: message_codec.PersistSnapshot
    arena: Arena
    box: Arena


@dataclass(slots=True, eq=False)
class TrainerConnection:
    """One trainer's connection and the arenas that it handed over."""

    socket: socket.socket
    arenas: dict[int, Arena] = field(default_factory=dict)
    last_snapshot: HandedOverSnapshot | None = None
    writer: str = ""
    greeted: bool = False
    has_detached: bool = False
    expires: float = 0.0  # monotonic seconds, set when its trainer dies
    thread: threading.Thread | None = None
    working: bool = False
    answered_at: float = field(default_factory=time.monotonic)
    ending: bool = False

    @property
    def hung_up(self) -> bool:
        """Whether the trainer is gone. Packets that it had sent may still be in process."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def give_way(self) -> None:
        """Read the packets already sent, then close. The trainer lives, so no successor may recall its memory."""
        self.has_detached = self.ending = True
        try:
            self.socket.shutdown(socket.SHUT_RD)
        except OSError:
            pass  # the peer has already disconnected

    def close(self) -> None:
        for arena in {
            *self.arenas.values(),
            *((self.last_snapshot.arena, self.last_snapshot.box) if self.last_snapshot else ()),
        }:
            arena.close()
        self.arenas, self.last_snapshot = {}, None


def has_handoff_room(lines: Iterable[TrainerConnection]) -> bool:
    """Whether one more connection is allowed.

    At the maximum, an idle one is closed: first one without arenas, and among equals the one silent for longest.
    """
    counted = [line for line in lines if not line.ending]
    if len(counted) < MAX_HANDOFF_CONNECTIONS:
        return True
    latest = time.monotonic() - HANDOFF_IDLE_S
    idle = [line for line in counted if not line.working and line.answered_at <= latest]
    if not idle:
        return False
    min(idle, key=lambda line: (bool(line.arenas), line.answered_at)).give_way()
    return True


log = logging.getLogger("tierd.daemon")

DAEMON_PEER = Peer(PROTOCOL, __version__)
_MAX_LOGGED_PEERS = 1000  # peers that are remembered as logged


def unknown_request(error: UnknownRequest) -> RequestUnknown:
    """Return the error that answers a request of a newer client; the connection continues after it."""
    return RequestUnknown(f"{error}: the daemon ({DAEMON_PEER}) is older than the client; upgrade the daemon")


class PeerLog:
    """The clients of one socket."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._logged: set[tuple[int, Peer]] = set()

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

    def _log(self, pid: int, client: Peer, text: str) -> None:
        if (pid, client) in self._logged:
            return
        if len(self._logged) >= _MAX_LOGGED_PEERS:
            self._logged.clear()
        self._logged.add((pid, client))
        log.warning("%s: %s", self._where, text)
