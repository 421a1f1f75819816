"""Taking over what trainers lend: their arenas, and the snapshots in them.

Law: once a `Persist` message is in this socket, its snapshot needs its trainer no more: it is committed whether or not
anybody is left to be told. A trainer that dies leaves its arena here for a while, so that its successor restores from
memory. Blocking work in threads of its own, one a trainer; nothing here touches the event loop. Who is refused is told
why, and writes its checkpoints itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import msgspec

from tierd.arena import Arena
from tierd.commit import Room, Written, write_part, write_with_room
from tierd.core import wire
from tierd.core.errors import DaemonUnavailable, ObjectNotFound, StepRefused, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE, decode
from tierd.daemon import lines
from tierd.daemon.lines import Line, Snapshot
from tierd.daemon.peers import THIS, Peers, unknown
from tierd.spool import Spool, condition
from tierd.trust import listen, peer_pid, stranger

log = logging.getLogger("tierd.daemon")

_ORPHAN = 30.0  # seconds that a dead trainer's memory waits for its successor
_TICK = 0.5  # seconds
_SAID = 60.0  # seconds between two lines of the log about connections that were refused


class HandOff:
    """The daemon's side of the hand-off socket.

    Args:
        told: called, in a thread, with every part that was committed from a trainer's memory, or why it was not.
    """

    def __init__(self, spool: Spool, told: Callable[[PartId, Written | Exception], None]) -> None:
        self._spool = spool
        self._told = told
        self._changed = threading.Condition()
        self._lines: list[Line] = []
        self._orphans: dict[str, Line] = {}
        self._peers = Peers("hand-off")
        self._pool = ThreadPoolExecutor(64, thread_name_prefix="tierd-persist")
        self._waiters = ThreadPoolExecutor(8, thread_name_prefix="tierd-settle")
        self._stopping = False
        self._refused, self._said = 0, -_SAID  # connections since the log said so, at what monotonic second
        self.room: Room | None = None  # asked where a commit meets a full disk

    # -- for the rest of the daemon ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a trainer is there, or a dead one's memory waits for its successor."""
        with self._changed:
            return bool(self._lines or self._orphans)

    def lanes(self) -> frozenset[str]:
        """`PartId.lane` of everybody who will write again: whose pruned files are worth keeping."""
        with self._changed:
            return frozenset(line.lane for line in (*self._lines, *self._orphans.values()) if line.lane)

    def lent_bytes(self) -> int:
        """Memory that trainers, living and dead, share with this daemon."""
        with self._changed:
            lines = (*self._lines, *self._orphans.values())
            return sum(arena.size for line in lines for arena in line.arenas.values())

    async def settled(self) -> None:
        """Return when all that trainers who died had handed over is committed, or has failed."""
        await asyncio.get_running_loop().run_in_executor(self._waiters, self._settle)

    def _settle(self) -> None:
        with self._changed:
            dead = [line for line in self._lines if line.hung_up]
            while not self._stopping and any(line in self._lines for line in dead):
                self._changed.wait(_TICK)

    @contextmanager
    def listening(self, drain: float) -> Iterator[None]:
        """Take snapshots while the context lasts; its end waits `drain` seconds for what is in hand."""
        path = self._spool.handoff_socket
        self._tidy()
        listener = listen(path, socket.SOCK_SEQPACKET)
        listener.listen(128)
        listener.setblocking(False)
        wake = os.eventfd(0, os.EFD_CLOEXEC)
        accepting = threading.Thread(target=self._accept, args=(listener, wake), name="tierd-handoff", daemon=True)
        accepting.start()
        try:
            yield
        finally:
            self._stopping = True
            os.eventfd_write(wake, 1)  # because shutting a listening socket down wakes nobody who polls it
            accepting.join()
            listener.close()
            os.close(wake)
            with suppress(OSError):  # a disk that fails must not keep what is in hand from its end
                path.unlink(missing_ok=True)
            self._stop(drain)

    def _stop(self, drain: float) -> None:
        with self._changed:
            lines = list(self._lines)
        for line in lines:
            try:
                line.socket.shutdown(socket.SHUT_RD)  # what was sent is still read, and then the end
            except OSError:
                pass
        end = time.monotonic() + drain
        for line in lines:
            if line.thread is not None:
                line.thread.join(max(0.0, end - time.monotonic()))
        self._pool.shutdown(wait=False)
        self._waiters.shutdown(wait=False)

    # -- one trainer ------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, wake: int) -> None:
        ready = select.poll()
        ready.register(listener, select.POLLIN)
        ready.register(wake, select.POLLIN)
        while not self._stopping:
            self._expire()
            ready.poll(_TICK * 1000)
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                if not self._stopping:
                    log.warning("hand-off: %s", error)
                    time.sleep(_TICK)
                continue
            if (uid := stranger(connection)) is not None:
                connection.close()  # and with it what was sent already, descriptors included
                log.warning("hand-off: turned away a peer of uid %d", uid)
                continue
            connection.setblocking(True)
            self._take(Line(connection))

    def _take(self, line: Line) -> None:
        line.thread = threading.Thread(target=self._serve, args=(line,), name="tierd-line", daemon=True)
        with self._changed:
            has_room = lines.has_room(self._lines)
            if has_room:
                self._lines.append(line)
        if not has_room:
            many = f"it has {lines.MOST} connections, as many as it takes, and none of them is idle"
            self._refuse(line, f"{many}; end processes that hold some and save nothing")
            return
        try:
            line.thread.start()
        except RuntimeError as error:  # no more threads for this process
            with self._changed:
                self._lines.remove(line)
            self._refuse(line, f"it gets no thread for one more ({error}); raise its limit (TasksMax=, ulimit -u)")

    def _refuse(self, line: Line, why: str) -> None:
        """Say so in the place of the greeting, and end the connection."""
        error = DaemonUnavailable(f"the daemon of spool {self._spool.root} refuses this connection: {why}")
        self._reply(line, wire.error_reply(error))
        line.socket.close()
        self._refused += 1
        if time.monotonic() - self._said >= _SAID:
            log.warning("hand-off: refused %d connections, because %s", self._refused, why)
            self._refused, self._said = 0, time.monotonic()

    def _expire(self) -> None:
        with self._changed:
            expired = [lane for lane, line in self._orphans.items() if line.expires <= time.monotonic()]
            gone = [self._orphans.pop(lane) for lane in expired]
        for line in gone:  # without the lock, because unmapping much memory takes long, and other lines have to beat
            line.close()
        if gone:
            self._tidy()

    def _tidy(self) -> None:
        """Delete the pruned files that waited for writers who are gone."""
        try:
            self._spool.drop_recycled(self.lanes())
        except OSError as error:
            log.warning("spool %s: %s", self._spool.root, error)

    def _serve(self, line: Line) -> None:
        self._reply(line, wire.greeting(THIS.version))  # and somebody is awake here
        try:
            while True:
                packet, fds = _received(line.socket)
                line.working = True
                if not packet or not self._answer(line, packet, fds):
                    break
                line.heard, line.working = time.monotonic(), False
        except ConnectionError:
            pass
        except (OSError, ValueError, MemoryError, msgspec.DecodeError, TierdError) as error:
            log.warning("hand-off: dropped a trainer's connection: %s", str(error))
            line.left = True  # it lives, and will use its arenas
        finally:
            self._ended(line)

    def _ended(self, line: Line) -> None:
        with self._changed:
            self._lines.remove(line)
            gone: Line | None = line
            if not (line.left or line.last is None or self._stopping):
                gone = self._orphans.pop(line.lane, None)
                line.expires = time.monotonic() + _ORPHAN
                self._orphans[line.lane] = line
            line.socket.close()
            self._changed.notify_all()
        if gone:
            gone.close()
        self._tidy()

    def _answer(self, line: Line, packet: bytes, fds: list[int]) -> bool:
        """Do as one packet says; whether the connection goes on."""
        arenas: list[Arena] = []
        try:
            message = wire.decode_handed(packet)
            while fds:
                arenas.append(Arena.received(fds.pop(0)))
        except wire.UnknownKind as error:
            self._reply(line, wire.error_reply(unknown(error)))
            return True
        finally:
            for fd in fds:
                os.close(fd)
        if not line.greeted and not isinstance(message, wire.Hello):
            self._peers.unnamed(peer_pid(line.socket))
        line.greeted = True
        match message, arenas:
            case wire.Hello(), []:
                return bool(self._peers.answer(peer_pid(line.socket), message)["ok"])
            case wire.Lend(slot=slot), [arena]:
                former = line.arenas.pop(slot, None)
                if former:
                    former.close()
                line.arenas[slot] = arena
            case wire.Persist(), [box]:
                self._reply(line, self._persist(line, message, box))
            case wire.Recall(part=part), []:
                self._recall(line, part)
            case wire.Leave(), []:
                line.left = True
            case _:
                raise ValueError("a message with the wrong number of descriptors")
        return True

    def _persist(self, line: Line, message: wire.Persist, box: Arena) -> dict[str, object]:
        part, arena = message.part, line.arenas.get(message.slot)
        if arena is None or message.tensors > arena.size or message.manifest + message.tree > box.size:
            raise ValueError(f"{part}: its snapshot lies outside what was lent")
        manifest = decode(bytes(box.view[: message.manifest]), part)
        tree = box.view[message.manifest : message.manifest + message.tree]
        with self._changed:
            line.lane = part.lane
            former = self._orphans.pop(part.lane, None)
            line.last = None
        if former:
            self._pool.submit(former.close)  # not here, because unmapping much memory takes long
        del former
        files = {TENSORS: arena.view[: message.tensors], TREE: tree}
        work = self._pool.submit(
            write_with_room, lambda: write_part(self._spool, manifest, files), part, files, self.room
        )
        while not concurrent.futures.wait([work], timeout=wire.BEAT).done:
            self._beat(line)
        # Not raised here: a traceback through this frame would be a cycle, and keep the arena mapped for long.
        if isinstance(raised := work.exception(), Exception):  # told to the trainer, if there is one, as what it is
            error = condition(raised, f"spool {self._spool.root}") if isinstance(raised, OSError) else raised
            if not isinstance(error, StepRefused) and not self._spool.has(part):
                self._told(part, error)
            return wire.error_reply(error)
        written = work.result()
        line.last = Snapshot(message, arena, box)
        self._told(part, written)
        return {"ok": True, "direct": written.direct, "recycled": written.recycled}

    def _recall(self, line: Line, part: PartId) -> None:
        with self._changed:
            orphan = self._orphans.get(part.lane)
            if orphan is None or orphan.last is None or orphan.last.message.part != part:
                self._reply(line, wire.error_reply(ObjectNotFound(f"no trainer left {part} in memory")))
                return
            last = orphan.last
            del self._orphans[part.lane]
            for arena in orphan.arenas.values():
                if arena is not last.arena:
                    arena.close()
            line.arenas, line.last, line.lane = {0: last.arena}, last, part.lane
        found = last.message
        sizes = {"tensors": found.tensors, "manifest": found.manifest, "tree": found.tree}
        self._reply(line, {"ok": True, **sizes}, [last.arena.fd, last.box.fd])

    def _reply(self, line: Line, reply: dict[str, object], fds: list[int] | None = None) -> None:
        try:
            socket.send_fds(line.socket, [msgspec.json.encode(reply)], fds or [], socket.MSG_NOSIGNAL)
        except OSError:
            pass  # nobody is left to be told; what was sent before is still done

    def _beat(self, line: Line) -> None:
        """Show that this daemon works; without waiting, because a trainer that reads nothing must not hold it up."""
        try:
            line.socket.send(msgspec.json.encode({"working": True}), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError:
            pass  # nobody is left to be told, or a trainer that is busy has as much to read as the socket holds


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The next packet; empty at the end. Of a peer that died with answers unread, the system says so once, as a reset,
    before it gives what was sent: that is read all the same."""
    for _ in range(2):
        try:
            packet, fds, _, _ = socket.recv_fds(connection, wire.MAX_PACKET, 8, socket.MSG_CMSG_CLOEXEC)
            return packet, fds
        except ConnectionResetError:
            continue
    return b"", []
