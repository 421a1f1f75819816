"""Hand a snapshot over to the daemon: the arena's descriptor crosses a unix socket, but no byte of the state does.

Invariant: a snapshot that was sent belongs to the daemon, whatever happens to this process. A snapshot without an
answer still belongs to this process. An absent, full or dead daemon costs one call that fails at once. A stopped daemon
is detected within a second. It then gets no arena until it has greeted again, and no save waits for that greeting.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass

from tierd.client.client_timings import USUAL_TIMINGS, ClientTimings
from tierd.client.saving.handoff_packets import (
    AnswerTimeout,
    ConnectionClosed,
    close_fds,
    open_packet_socket,
    receive_packet,
    send_packet,
)
from tierd.client.saving.save_jobs import Save
from tierd.core.errors import DaemonUnavailable, ObjectNotFound, TierdError, VersionMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE, Manifest
from tierd.core.manifest_codec import encode
from tierd.ipc.daemon_connection import HELLO, OWN_PEER, connect_to_daemon
from tierd.ipc.message_codec import DetachTrainer, LendArena, PersistSnapshot, RecallSnapshot, parse_greeting
from tierd.ipc.protocol import explain_outdated
from tierd.spool.arena import Arena
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool

log = logging.getLogger("tierd")

CALM_GREETING = 0.5  # seconds that a daemon has to greet where training is not delayed
_MOST_DOUBLED = 7  # doublings of `alone_s`: a daemon that falls silent repeatedly is finally left alone for an hour


@dataclass(frozen=True, slots=True)
class PendingHandoff:
    """A snapshot that was handed over, and after how many seconds of silence the daemon counts as stopped."""

    connection: socket.socket
    size: int
    silence_s: float


@dataclass(frozen=True, slots=True)
class OrphanedSnapshot:
    """The last snapshot that a dead trainer had handed over, still in memory."""

    arena: Arena
    files: dict[str, memoryview]


class HandoffClient:
    """This trainer's connection to the hand-off socket. One thread hands over, another waits for answers in that order.

    Attributes:
        line: the connection to a daemon that has greeted; None without one.
        not_before: no daemon is contacted before this time, monotonic seconds.
        silences: how often the daemon fell silent since its last answer.
    """

    def __init__(self, spool: Spool, timings: ClientTimings = USUAL_TIMINGS) -> None:
        self._spool, self.timings = spool, timings
        self.line: HandoffConnection | None = None
        self._ungreeted: _Ungreeted | None = None
        self._renewing = threading.Lock()
        self.not_before = 0.0
        self.silences = 0
        self._warned = ""  # the refusal that was last logged

    @property
    def is_backing_off(self) -> bool:
        return self.silences > 0 and time.monotonic() < self.not_before

    def renew(self, patience_s: float = 0.0) -> bool:
        """Connect unless connected, and check for a daemon's greeting; return whether one has greeted.

        A connection alone proves nothing, because the system accepts it for a stopped daemon. So an ungreeted
        connection is kept, and checked again the next time. A daemon that fell silent is not contacted for `alone_s`,
        and twice as long each further time. A daemon of an incompatible version is not contacted for `alone_s`.
        `patience_s` counts from the connection.
        """
        if self.line is not None:
            return True
        if time.monotonic() < self.not_before or not self._renewing.acquire(timeout=patience_s):
            return False
        try:
            # After one daemon ended, another one may listen by now. If both end at once, neither is contacted for a
            # while.
            if self.line is None and self._is_daemon_gone(patience_s) and self._is_daemon_gone(patience_s):
                self.not_before = time.monotonic() + self.timings.alone_s
            return self.line is not None
        finally:
            self._renewing.release()

    def _is_daemon_gone(self, patience_s: float) -> bool:
        """Whether the daemon ended before it greeted. After a greeting, `line` is set."""
        ungreeted = self._ungreeted = self._ungreeted or self._connect()
        if ungreeted is None:
            return False
        connection = ungreeted.connection
        try:
            greeting, _ = receive_packet(connection, max(0.0, ungreeted.since + patience_s - time.monotonic()))
            send_packet(connection, HELLO)  # also sent to an incompatible daemon, which then logs which side to upgrade
            daemon = parse_greeting(greeting)
            if why := explain_outdated(OWN_PEER, daemon):
                raise VersionMismatch(f"spool {self._spool.root}: {why}")
        except AnswerTimeout:
            return False
        except (OSError, TierdError) as error:
            self._ungreeted = None
            connection.close()
            if isinstance(error, ConnectionClosed | ConnectionError):
                return True
            self.not_before = time.monotonic() + self.timings.alone_s
            if isinstance(error, TierdError) and str(error) != self._warned:
                self._warned = str(error)
                log.warning("%s. Meanwhile training writes its checkpoints itself", error)
            return False
        self._ungreeted = None
        self.line = HandoffConnection(connection, {}, self.timings.silence_s)
        return False

    def _connect(self) -> _Ungreeted | None:
        try:
            connection = open_packet_socket()
        except OSError:  # no descriptor is available
            return None
        try:
            connect_to_daemon(connection, self._spool.handoff_socket, patience_s=0.0)
        except OSError as error:
            if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                self.not_before = time.monotonic() + self.timings.alone_s
            connection.close()
            return None
        return _Ungreeted(connection, time.monotonic())

    def hand_over(
        self, slot: int, arena: Arena, manifest: Manifest, tensors: int, tree: bytes, save: Save | None = None
    ) -> PendingHandoff | None:
        """Hand the snapshot in `arena` over to the daemon; None if there is no daemon, or it accepts nothing.

        `save` tells the daemon how long the save has taken so far, for its metrics.
        """
        try:
            head = encode(manifest)
            box = Arena(len(head) + len(tree))
        except MemoryError:
            return None
        box.view[: len(head) + len(tree)] = head + tree
        asked_s = None if save is None else time.perf_counter() - save.begun_s
        blocked_s = asked_s if save is None or save.blocked_s is None else save.blocked_s
        persist = PersistSnapshot(
            part=manifest.part,
            slot=slot,
            tensors=tensors,
            manifest=len(head),
            tree=len(tree),
            blocked_s=blocked_s,
            asked_s=asked_s,
        )
        try:
            for _ in range(2):  # the second time for a daemon that started after the first had ended
                patience_s = 0.0 if self.silences else self.timings.greeting_s
                if arena.shared or not self.renew(patience_s) or (line := self.line) is None:
                    break
                if self._send(line, slot, arena, persist, box):
                    return PendingHandoff(line.connection, tensors + len(tree), line.silence_s)
            return None
        finally:
            box.close()

    def _send(self, line: HandoffConnection, slot: int, arena: Arena, persist: PersistSnapshot, box: Arena) -> bool:
        try:
            if line.handed_over.get(slot) is not arena:
                send_packet(line.connection, LendArena(slot=slot), arena.fd)
                line.handed_over[slot] = arena
            send_packet(line.connection, persist, box.fd)
        except OSError as error:
            disconnected = isinstance(error, ConnectionError)
            if not disconnected:  # the daemon does not read, so it counts as stopped
                self._leave_alone()
            self._drop(line.connection, gone=disconnected)
            return False
        return True

    def answer(self, pending: PendingHandoff) -> CommittedPart:
        """Wait until the daemon has committed the snapshot; raises its error if it could not.

        `DaemonUnavailable`: the connection ended or fell silent, so it is not known whether the part was committed.
        """
        try:
            reply, _ = receive_packet(pending.connection, pending.silence_s)
        except DaemonUnavailable as error:
            disconnected = isinstance(error, ConnectionClosed)
            if not disconnected:
                self._leave_alone()
                self._let_go(pending.connection)
            self._drop(pending.connection, gone=disconnected)
            pending.connection.close()
            raise
        except TierdError:  # an error is also an answer
            self.silences = 0
            raise
        self.silences = 0
        return CommittedPart(size=pending.size, direct=bool(reply["direct"]), recycled=bool(reply["recycled"]))

    def _leave_alone(self) -> None:
        """Do not contact the daemon for a while, longer the more often it fell silent since its last answer."""
        self.not_before = time.monotonic() + self.timings.alone_s * 2 ** min(self.silences, _MOST_DOUBLED)
        self.silences += 1

    def recall(self, part: PartId) -> OrphanedSnapshot | None:
        """Take over `part`, unverified, from a trainer that died, if the daemon still has it in memory."""
        if not self.renew(CALM_GREETING) or (line := self.line) is None:
            return None
        try:
            send_packet(line.connection, RecallSnapshot(part=part))
            # The daemon only searches its memory, whatever its version.
            reply, fds = receive_packet(line.connection, self.timings.silence_s, most_fds=2)
            try:
                arenas = []
                while fds:
                    arenas.append(Arena.received(fds.pop(0)))
                arena, box = arenas
            finally:
                close_fds(fds)
        except ObjectNotFound:
            return None
        except (OSError, ValueError, MemoryError, DaemonUnavailable):  # the part's files are in the spool in any case
            self._drop(line.connection, gone=False)
            return None
        begin = reply["manifest"]
        line.handed_over.clear()
        line.handed_over[0] = arena
        tree = memoryview(bytes(box.view[begin : begin + reply["tree"]]))
        box.close()
        return OrphanedSnapshot(arena, {TENSORS: arena.view[: reply["tensors"]], TREE: tree})

    def close(self) -> None:
        """Close the connection in order: no successor will recall these arenas."""
        if self._ungreeted is not None:
            self._ungreeted.connection.close()
            self._ungreeted = None
        line = self.line
        if line is not None:
            self._let_go(line.connection)
            self._drop(line.connection, gone=True)
            line.connection.close()

    def _let_go(self, connection: socket.socket) -> None:
        """Have the daemon release this trainer's arenas after earlier requests, because nobody will recall them."""
        try:
            send_packet(connection, DetachTrainer())
        except OSError:
            pass

    def _drop(self, connection: socket.socket, *, gone: bool) -> None:
        """Stop using the connection. The thread that waits for an answer on it wakes up and closes it.

        If the daemon is not `gone`, it takes this trainer for dead and may give the arenas to a successor, so this
        process never writes to them again.
        """
        line = self.line
        if line is not None and line.connection is connection:
            self.line = None
            for arena in line.handed_over.values():
                arena.shared |= not gone
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


@dataclass(frozen=True, slots=True)
class HandoffConnection:
    """A connection, and the arenas handed over on it, by slot."""

    connection: socket.socket
    handed_over: dict[int, Arena]
    silence_s: float


@dataclass(frozen=True, slots=True)
class _Ungreeted:
    """A connection on which no daemon has greeted, and when it was made, in monotonic seconds."""

    connection: socket.socket
    since: float
