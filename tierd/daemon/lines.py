"""Trainers' connections to the hand-off socket: what each lent, how many there are, and which gives way to another.

Invariant: a connection that gives way is still read to its end, so what was sent over it is done. Its trainer finds it
ended at the next save, and connects anew.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierd.arena import Arena
from tierd.core import wire

# Connections at once. Each has a thread, and a node has some 16 ranks, each with one or two: a trainer of the launch
# before may still hold one.
MOST = 128
QUIET = 30.0  # seconds without a packet after which a connection gives way to a new one, where there are `MOST`


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The last snapshot of a line: the packet that described it, and where it lies."""

    message: wire.Persist
    arena: Arena
    box: Arena


@dataclass(slots=True, eq=False)
class Line:
    """One trainer's connection and what it lent.

    Attributes:
        left: its trainer lives on and comes for nothing that it lent.
        working: a packet of it is being answered.
        heard: when its last packet had been answered, monotonic seconds.
        ending: it gives way to another, and is not counted any more.
    """

    socket: socket.socket
    arenas: dict[int, Arena] = field(default_factory=dict)
    last: Snapshot | None = None
    lane: str = ""
    greeted: bool = False
    left: bool = False
    expires: float = 0.0  # monotonic seconds, once it is an orphan
    thread: threading.Thread | None = None
    working: bool = False
    heard: float = field(default_factory=time.monotonic)
    ending: bool = False

    @property
    def hung_up(self) -> bool:
        """Whether the trainer is gone. What it had sent may still be in hand."""
        look = select.poll()
        look.register(self.socket, select.POLLRDHUP)
        return bool(look.poll(0))

    def give_way(self) -> None:
        """Read what was sent, and then end. The trainer lives, so nobody may take its memory for a dead one's."""
        self.left = self.ending = True
        try:
            self.socket.shutdown(socket.SHUT_RD)
        except OSError:
            pass  # it has gone by itself

    def close(self) -> None:
        for arena in {*self.arenas.values(), *((self.last.arena, self.last.box) if self.last else ())}:
            arena.close()
        self.arenas, self.last = {}, None


def has_room(lines: Iterable[Line]) -> bool:
    """Whether there may be one more connection beside these. Where there are `MOST`, one that is idle gives way: one
    that lent nothing before one that did, and of those the one that was silent for longest."""
    counted = [line for line in lines if not line.ending]
    if len(counted) < MOST:
        return True
    latest = time.monotonic() - QUIET
    idle = [line for line in counted if not line.working and line.heard <= latest]
    if not idle:
        return False
    min(idle, key=lambda line: (bool(line.arenas), line.heard)).give_way()
    return True
