"""Trainers' connections to the hand-off socket: their arenas, their number, and which one is closed for a new one.

Invariant: a connection that is closed for a new one is still read to its end, so every packet sent over it is
processed. Its trainer finds it closed at the next save, and connects anew.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierd.ipc import handoff_messages
from tierd.spool.arena import Arena

# Connections at once. Each has a thread. A node has some 16 ranks, each with one or two connections, because a trainer
# of the launch before may still hold one.
MOST = 128
QUIET = 30.0  # seconds without a packet after which a connection may be closed for a new one, if there are `MOST`


@dataclass(frozen=True, slots=True, eq=False)
class HandedOverSnapshot:
    """The last snapshot of a connection: the packet that described it, and the memory that holds it."""

    message: handoff_messages.Persist
    arena: Arena
    box: Arena


@dataclass(slots=True, eq=False)
class TrainerConnection:
    """One trainer's connection and the arenas that it handed over.

    Attributes:
        left: the trainer lives on and will not recall its arenas.
        working: one of its packets is being answered.
        heard: when its last packet had been answered, monotonic seconds.
        ending: it is being closed for another connection, and does not count any more.
    """

    socket: socket.socket
    arenas: dict[int, Arena] = field(default_factory=dict)
    last: HandedOverSnapshot | None = None
    writer: str = ""
    greeted: bool = False
    left: bool = False
    expires: float = 0.0  # monotonic seconds, set when its trainer dies
    thread: threading.Thread | None = None
    working: bool = False
    heard: float = field(default_factory=time.monotonic)
    ending: bool = False

    @property
    def hung_up(self) -> bool:
        """Whether the trainer is gone. Packets that it had sent may still be in process."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def give_way(self) -> None:
        """Read the packets already sent, then close. The trainer lives, so no successor may recall its memory."""
        self.left = self.ending = True
        try:
            self.socket.shutdown(socket.SHUT_RD)
        except OSError:
            pass  # the peer has already disconnected

    def close(self) -> None:
        for arena in {*self.arenas.values(), *((self.last.arena, self.last.box) if self.last else ())}:
            arena.close()
        self.arenas, self.last = {}, None


def has_room(lines: Iterable[TrainerConnection]) -> bool:
    """Whether one more connection is allowed.

    At `MOST` connections, an idle one is closed: first one without arenas, and among equals the one silent for longest.
    """
    counted = [line for line in lines if not line.ending]
    if len(counted) < MOST:
        return True
    latest = time.monotonic() - QUIET
    idle = [line for line in counted if not line.working and line.heard <= latest]
    if not idle:
        return False
    min(idle, key=lambda line: (bool(line.arenas), line.heard)).give_way()
    return True
