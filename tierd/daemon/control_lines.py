"""Connections to the control socket: their number, and which one is closed for a new one.

Invariant: a connection that is closed for a new one is still read to its end, so every request sent over it is
answered.
"""

from __future__ import annotations

import socket
import time
from asyncio import StreamWriter, Task
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierd.core.ids import PartId
from tierd.ipc import messages

# Connections at once. A node has some 16 ranks, each with a few connections: its trainer's, and those of a restore and
# of calls under way. Together with `handoff_lines.MOST` these leave a process with 1,024 descriptors enough for tiers.
MOST = 256
QUIET = 30.0  # seconds without a request after which a connection may be closed for a new one, if there are `MOST`


@dataclass(slots=True, eq=False)
class ControlConnection:
    """One client's connection.

    Attributes:
        task: serves the connection.
        writer: its end of the socket.
        held: the parts that it holds.
        attached: the request by which its trainer attached.
        greeted: it has sent a greeting.
        working: one of its requests is being answered.
        heard: when its last request had been answered, monotonic seconds.
        ending: it is being closed for another connection, and does not count any more.
    """

    task: Task[None]
    writer: StreamWriter
    held: set[PartId] = field(default_factory=set)
    attached: messages.Attach | None = None
    greeted: bool = False
    working: bool = False
    heard: float = field(default_factory=time.monotonic)
    ending: bool = False

    @property
    def idle(self) -> bool:
        """Whether it may be closed for a new one. A trainer's may not, because it shows that the trainer lives."""
        return not (self.working or self.held or self.attached) and self.heard <= time.monotonic() - QUIET

    def give_way(self) -> None:
        """Read what was already sent, then close."""
        self.ending = True
        try:
            self.writer.get_extra_info("socket").shutdown(socket.SHUT_RD)
        except OSError:
            pass  # the peer has already disconnected


def has_room(lines: Iterable[ControlConnection]) -> bool:
    """Whether one more connection is allowed. At `MOST`, the idle one that was silent for longest is closed."""
    counted = [line for line in lines if not line.ending]
    if len(counted) < MOST:
        return True
    longest = min((line for line in counted if line.idle), key=lambda line: line.heard, default=None)
    if longest is None:
        return False
    longest.give_way()
    return True
