"""Handing a snapshot to the daemon: the arena's descriptor crosses a unix socket, not one byte of the state does.

Law: what was sent is the daemon's, whatever becomes of this process; what was not answered is this process's still. A
daemon that is absent, full or dead costs a call that fails at once. A daemon that is stopped is found out within a
second, and is then lent nothing until it has greeted anew, which no save waits for.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass

from tierd.arena import Arena
from tierd.client.packets import Ended, Silent, opened, receive, send
from tierd.commit import Written
from tierd.core.errors import DaemonUnavailable, ObjectNotFound, TierdError, VersionMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE, Manifest, encode
from tierd.core.protocol import BEATS, explain
from tierd.core.wire import HEARTBEAT, Leave, Lend, Persist, Recall, greeted
from tierd.link import HELLO, THIS, connect
from tierd.spool import Spool

log = logging.getLogger("tierd")

# Seconds without a packet after which a daemon counts as stopped. Beside the greeting it makes the one second that a
# stopped daemon may cost. A false alarm is harmless, because the client then writes the snapshot, too.
_SILENCE = 0.9
_LONG_SILENCE = 6 * HEARTBEAT  # the same for a daemon of before protocol 1.1, which beats every `HEARTBEAT`
_GREETING = 0.1  # seconds that a save gives a daemon to greet, from the connection on
CALM_GREETING = 0.5  # and who keeps no training waiting
_ALONE = 30.0  # seconds for which a daemon that cannot be used is left alone
_MOST_DOUBLED = 7  # times: who falls silent again and again is left alone for an hour in the end


@dataclass(frozen=True, slots=True)
class Given:
    """A snapshot that the daemon was told of, the connection that its answer comes over, and the seconds of silence
    there after which the daemon counts as stopped."""

    connection: socket.socket
    size: int
    silence_s: float


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
        self._ungreeted: _Ungreeted | None = None
        self._renewing = threading.Lock()
        self._not_before = 0.0  # monotonic seconds
        self._silences = 0  # since the daemon answered last
        self._warned = ""  # of which refusal the log was told

    @property
    def stopped(self) -> bool:
        """Whether the daemon was found silent, and is left alone since."""
        return self._silences > 0 and time.monotonic() < self._not_before

    def renew(self, patience_s: float = 0.0) -> bool:
        """Connect, unless that is done, and look whether a daemon has greeted; whether one has.

        A connection alone proves nothing, because the system accepts it for a daemon that is stopped. So it is kept,
        and looked at again the next time. A daemon that fell silent is left alone for `_ALONE` seconds, and twice as
        long each further time; one of a version too far from this one for `_ALONE` seconds.

        Args:
            patience_s: seconds that the daemon has for its greeting, from the connection on.
        """
        if self._line is not None:
            return True
        if time.monotonic() < self._not_before or not self._renewing.acquire(timeout=patience_s):
            return False
        try:
            # Where it has gone another one may listen by now; who goes each time is left alone.
            if self._line is None and self._has_gone(patience_s) and self._has_gone(patience_s):
                self._not_before = time.monotonic() + _ALONE
            return self._line is not None
        finally:
            self._renewing.release()

    def _has_gone(self, patience_s: float) -> bool:
        """Whether the daemon ended before it greeted. Once it has greeted, there is a line."""
        ungreeted = self._ungreeted = self._ungreeted or self._connect()
        if ungreeted is None:
            return False
        connection = ungreeted.connection
        try:
            greeting, _ = receive(connection, max(0.0, ungreeted.since + patience_s - time.monotonic()))
            send(connection, HELLO)  # also to a daemon that is too far apart: it then logs which side to upgrade
            daemon = greeted(greeting)
            if why := explain(THIS, daemon):
                raise VersionMismatch(f"spool {self._spool.root}: {why}")
        except Silent:
            return False
        except (OSError, TierdError) as error:
            self._ungreeted = None
            connection.close()
            if isinstance(error, Ended | ConnectionError):
                return True
            self._not_before = time.monotonic() + _ALONE
            if isinstance(error, TierdError) and str(error) != self._warned:
                self._warned = str(error)
                log.warning("%s. Meanwhile training writes its checkpoints itself", error)
            return False
        self._ungreeted = None
        beats = daemon.protocol is not None and daemon.protocol >= BEATS
        self._line = _Line(connection, {}, _SILENCE if beats else _LONG_SILENCE)
        return False

    def _connect(self) -> _Ungreeted | None:
        try:
            connection = opened()
        except OSError:  # no descriptor to be had
            return None
        try:
            connect(connection, self._spool.handoff_socket, patience_s=0.0)
        except OSError as error:
            if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                self._not_before = time.monotonic() + _ALONE
            connection.close()
            return None
        return _Ungreeted(connection, time.monotonic())

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
                patience_s = 0.0 if self._silences else _GREETING
                if arena.shared or not self.renew(patience_s) or (line := self._line) is None:
                    break
                if self._tell(line, slot, arena, persist, box):
                    return Given(line.connection, tensors + len(tree), line.silence_s)
            return None
        finally:
            box.close()

    def _tell(self, line: _Line, slot: int, arena: Arena, persist: Persist, box: Arena) -> bool:
        try:
            if line.lent.get(slot) is not arena:
                send(line.connection, Lend(slot=slot), arena.fd)
                line.lent[slot] = arena
            send(line.connection, persist, box.fd)
        except OSError as error:
            gone = isinstance(error, ConnectionError)
            if not gone:  # it takes nothing more, because it does not read: so it is stopped, or as good as that
                self._leave_alone()
            self._drop(line.connection, gone=gone)
            return False
        return True

    def answer(self, given: Given) -> Written:
        """Wait until the daemon has committed what it was given.

        Raises:
            DaemonUnavailable: the connection ended or fell silent first: whether it was committed is not known.
            TierdError: it could not be; as the daemon says.
        """
        try:
            reply, _ = receive(given.connection, given.silence_s)
        except DaemonUnavailable as error:
            gone = isinstance(error, Ended)
            if not gone:
                self._leave_alone()
                self._let_go(given.connection)
            self._drop(given.connection, gone=gone)
            given.connection.close()
            raise
        except TierdError:  # an answer, too
            self._silences = 0
            raise
        self._silences = 0
        return Written(size=given.size, direct=bool(reply["direct"]), recycled=bool(reply["recycled"]))

    def _leave_alone(self) -> None:
        """The daemon is not used for a while, the longer the more often that was so since it answered last."""
        self._not_before = time.monotonic() + _ALONE * 2 ** min(self._silences, _MOST_DOUBLED)
        self._silences += 1

    def recall(self, part: PartId) -> Remembered | None:
        """Take `part` over from a trainer that died, if the daemon still has it in memory. Not verified."""
        if not self.renew(CALM_GREETING) or (line := self._line) is None:
            return None
        try:
            send(line.connection, Recall(part=part))
            reply, fds = receive(line.connection, _SILENCE)  # it only looks, whatever its version
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
        if self._ungreeted is not None:
            self._ungreeted.connection.close()
            self._ungreeted = None
        line = self._line
        if line is not None:
            self._let_go(line.connection)
            self._drop(line.connection, gone=True)
            line.connection.close()

    def _let_go(self, connection: socket.socket) -> None:
        """Have the daemon release what was lent, once it has done what it was told before: nobody will recall it."""
        try:
            send(connection, Leave())
        except OSError:
            pass

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
    """A connection, the arenas that were lent over it, and the seconds of silence after which its daemon counts as
    stopped."""

    connection: socket.socket
    lent: dict[int, Arena]
    silence_s: float


@dataclass(frozen=True, slots=True)
class _Ungreeted:
    """A connection that no daemon has greeted on, and since when there is one, in monotonic seconds."""

    connection: socket.socket
    since: float
