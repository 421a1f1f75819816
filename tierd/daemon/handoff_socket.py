"""The hand-off socket: it takes over the arenas of trainers, and commits the snapshots in them.

Invariant: once a `PersistSnapshot` message is in this socket, the daemon commits its snapshot without the trainer. It
does so whether or not the trainer still lives to get the reply.

A dead trainer's arena is kept here for a while, so that its successor restores from memory. Each trainer has its own
thread, because persisting blocks; nothing here touches the event loop. A refused trainer gets the reason, and writes
its checkpoints itself.

The module is longer than 300 lines because the accepting thread and the trainers' threads share the connections and the
memory of dead trainers under one lock.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeAlias

import msgspec

from tierd.core.errors import DaemonUnavailable, ObjectNotFound, StepRefused, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE
from tierd.core.manifest_codec import decode, encode
from tierd.daemon import client_connections
from tierd.daemon.client_connections import DAEMON_PEER, HandedOverSnapshot, PeerLog, TrainerConnection, unknown_request
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.daemon.transfer.slot_fills import SlotSession
from tierd.ipc import message_codec, messages
from tierd.spool.arena import Arena
from tierd.spool.commit import CommittedPart, SpaceMaker, write_making_room, write_part
from tierd.spool.spool import Spool
from tierd.spool.spool_access import bind_private_socket, foreign_peer_uid, peer_pid, spool_error

log = logging.getLogger("tierd.daemon")

OpenSlots: TypeAlias = Callable[[PartId, memoryview, Callable[[dict[str, object]], None]], SlotSession]


class HandoffServer:
    """The daemon's side of the hand-off socket.

    Args:
        on_persisted: callback, run in a thread, for every part committed from a trainer's memory, or with the error.
        on_persisting: callback, run in a thread, before anything of a part is written, with True, and when its commit
            has ended in any way, after `on_persisted`, with False.
    """

    def __init__(
        self,
        spool: Spool,
        on_persisted: Callable[[PartId, CommittedPart | Exception], None],
        timings: DaemonTimings = USUAL,
        on_persisting: Callable[[PartId, bool], None] = lambda part, under_way: None,
    ) -> None:
        self._spool, self.timings = spool, timings
        self._on_persisted, self._on_persisting = on_persisted, on_persisting
        self._changed = threading.Condition()
        self.connections: list[TrainerConnection] = []
        # By writer, the connection of a dead trainer whose memory waits for a successor.
        self.orphans: dict[str, TrainerConnection] = {}
        self._peers = PeerLog("hand-off")
        self._pool = ThreadPoolExecutor(64, thread_name_prefix="tierd-persist")
        self._waiters = ThreadPoolExecutor(8, thread_name_prefix="tierd-settle")
        self._stopping = False
        self.room: SpaceMaker | None = None  # frees disk space when a commit finds the disk full
        # Begins to fetch chunks of a part into memory, with what sends the answers; None while there is no event loop.
        self.open_slots: OpenSlots | None = None

    # -- for the rest of the daemon ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a trainer is connected, or a dead trainer's memory waits for its successor."""
        with self._changed:
            return bool(self.connections or self.orphans)

    def writers(self) -> frozenset[str]:
        """`PartId.writer` of every rank that will write again, and whose pruned files are therefore worth keeping."""
        with self._changed:
            return frozenset(line.writer for line in (*self.connections, *self.orphans.values()) if line.writer)

    def handed_over_bytes(self) -> int:
        """The memory, in bytes, that trainers, living and dead, share with this daemon."""
        with self._changed:
            lines = (*self.connections, *self.orphans.values())
            return sum(arena.size for line in lines for arena in line.arenas.values())

    async def settled(self) -> None:
        """Return when every snapshot that dead trainers had handed over is committed, or has failed."""
        await asyncio.get_running_loop().run_in_executor(self._waiters, self._settle)

    def _settle(self) -> None:
        with self._changed:
            dead = [line for line in self.connections if line.hung_up]
            while not self._stopping and any(line in self.connections for line in dead):
                self._changed.wait(self.timings.tick_s)

    @contextmanager
    def listening(self, drain: float) -> Iterator[None]:
        """Accept snapshots while the context lasts; its exit waits `drain` seconds for snapshots in progress."""
        self._tidy()
        listener, remove = bind_private_socket(self._spool.handoff_socket, socket.SOCK_SEQPACKET)
        listener.listen(128)
        listener.setblocking(False)
        wake = os.eventfd(0, os.EFD_CLOEXEC)
        accepting = threading.Thread(target=self._accept, args=(listener, wake), name="tierd-handoff", daemon=True)
        accepting.start()
        try:
            yield
        finally:
            self._stopping = True
            os.eventfd_write(wake, 1)  # because shutdown of a listening socket does not wake a poll
            accepting.join()
            listener.close()
            os.close(wake)
            remove()
            self._stop(drain)

    def _stop(self, drain: float) -> None:
        with self._changed:
            lines = list(self.connections)
        for line in lines:
            try:
                line.socket.shutdown(socket.SHUT_RD)  # packets that were sent are still read, then EOF
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
            ready.poll(self.timings.tick_s * 1000)
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                if not self._stopping:
                    log.warning("hand-off: %s", error)
                    time.sleep(self.timings.tick_s)
                continue
            if (uid := foreign_peer_uid(connection)) is not None:
                connection.close()  # also closes descriptors that were already sent
                log.warning("hand-off: turned away a peer of uid %d", uid)
                continue
            connection.setblocking(True)
            self._take(TrainerConnection(connection))

    def _take(self, line: TrainerConnection) -> None:
        line.thread = threading.Thread(target=self._serve, args=(line,), name="tierd-line", daemon=True)
        with self._changed:
            has_room = client_connections.has_handoff_room(self.connections)
            if has_room:
                self.connections.append(line)
        if not has_room:
            limit = client_connections.MAX_HANDOFF_CONNECTIONS
            self._refuse(line, client_connections.explain_full(limit, "hold some and save nothing"))
            return
        try:
            line.thread.start()
        except RuntimeError as error:  # no more threads for this process
            with self._changed:
                self.connections.remove(line)
            self._refuse(line, f"it gets no thread for one more ({error}); raise its limit (TasksMax=, ulimit -u)")

    def _refuse(self, line: TrainerConnection, why: str) -> None:
        """Send the reason in place of the greeting, and close the connection."""
        error = DaemonUnavailable(f"the daemon of spool {self._spool.root} refuses this connection: {why}")
        self._reply(line, message_codec.error_reply(error))
        line.socket.close()
        self._peers.log_refusal(why)

    def _expire(self) -> None:
        with self._changed:
            expired = [writer for writer, line in self.orphans.items() if line.expires <= time.monotonic()]
            expired_lines = [self.orphans.pop(writer) for writer in expired]
        for line in expired_lines:  # without the lock: unmapping takes long, and other connections must send beats
            line.close()
        if expired_lines:
            self._tidy()

    def _tidy(self) -> None:
        """Delete the pruned files that were kept for writers that are gone."""
        try:
            self._spool.drop_recycled(self.writers())
        except OSError as error:
            log.warning("spool %s: %s", self._spool.root, error)

    def _serve(self, line: TrainerConnection) -> None:
        self._reply(line, message_codec.greeting(DAEMON_PEER.version))  # also shows that this daemon is awake
        try:
            while True:
                packet, fds = _receive_packet(line.socket)
                line.working = True
                if not self._answer(line, packet, fds):
                    break
                line.answered_at, line.working = time.monotonic(), False
        except ConnectionError:
            pass
        except (OSError, ValueError, MemoryError, msgspec.DecodeError, TierdError) as error:
            log.warning("hand-off: dropped a trainer's connection: %s", str(error))
            line.has_detached = True  # the trainer lives and will use its arenas, so they are not kept for a successor
        finally:
            self._ended(line)

    def _ended(self, line: TrainerConnection) -> None:
        with self._changed:
            self.connections.remove(line)
            released: TrainerConnection | None = line
            if not (line.has_detached or line.last_snapshot is None or self._stopping):
                released = self.orphans.pop(line.writer, None)
                line.expires = time.monotonic() + self.timings.orphan_s
                self.orphans[line.writer] = line
            line.socket.close()
            self._changed.notify_all()
        if released:
            released.close()
        self._tidy()

    def _answer(self, line: TrainerConnection, packet: bytes, fds: list[int]) -> bool:
        """Process one packet; return whether the connection stays open.

        Args:
            packet: empty at the connection's end, or if the peer sent an empty one, which ends the connection, too.
            fds: the descriptors that came with the packet. Each becomes an arena or is closed, whatever the packet is.
        """
        arenas: list[Arena] = []
        try:
            if not packet:
                return False
            message = message_codec.decode_handoff(packet)
            while fds:
                arenas.append(Arena.received(fds.pop(0)))
        except message_codec.UnknownRequest as error:
            self._reply(line, message_codec.error_reply(unknown_request(error)))
            return True
        finally:
            for fd in fds:
                os.close(fd)
        if not line.greeted and not isinstance(message, messages.Hello):
            self._peers.log_unnamed(peer_pid(line.socket))
        line.greeted = True
        match message, arenas:
            case messages.Hello(), []:
                return bool(self._peers.answer(peer_pid(line.socket), message)["ok"])
            case message_codec.LendArena(slot=slot), [arena]:
                former = line.arenas.pop(slot, None)
                if former:
                    former.close()
                line.arenas[slot] = arena
            case message_codec.PersistSnapshot(), [box]:
                self._reply(line, self._persist(line, message, box))
            case message_codec.RecallSnapshot(part=part), []:
                self._recall(line, part)
            case message_codec.LendSlots(part=part), [arena]:
                self._lend_slots(line, part, arena)
            case message_codec.FillSlot(), [] if line.slots is not None:
                line.slots.request(message)
            case message_codec.DetachTrainer(), []:
                line.has_detached = True
            case _:
                raise ValueError("a message with the wrong number of descriptors")
        return True

    def _persist(
        self, line: TrainerConnection, message: message_codec.PersistSnapshot, box: Arena
    ) -> dict[str, object]:
        self._on_persisting(message.part, True)
        try:
            return self._commit(line, message, box)
        finally:
            self._on_persisting(message.part, False)

    def _commit(self, line: TrainerConnection, message: message_codec.PersistSnapshot, box: Arena) -> dict[str, object]:
        began, part, arena = time.monotonic(), message.part, line.arenas.get(message.slot)
        if arena is None or message.tensors > arena.size or message.manifest + message.tree > box.size:
            raise ValueError(f"{part}: its snapshot lies outside what was lent")
        manifest = decode(bytes(box.view[: message.manifest]), part)
        tree = box.view[message.manifest : message.manifest + message.tree]
        with self._changed:
            line.writer = part.writer
            former = self.orphans.pop(part.writer, None)
            line.last_snapshot = None
        if former:
            self._pool.submit(former.close)  # in the pool, because unmapping much memory takes long
        del former
        files = {TENSORS: arena.view[: message.tensors], TREE: tree}
        work = self._pool.submit(
            write_making_room, lambda: write_part(self._spool, manifest, files), part, files, self.room
        )
        while not concurrent.futures.wait([work], timeout=messages.BEAT).done:
            self._beat(line)
        # Not raised, because a traceback through this frame would be a cycle and keep the arena mapped for long.
        if isinstance(raised := work.exception(), Exception):  # the trainer, if alive, gets the error's own type
            root, error = self._spool.root, raised
            if isinstance(raised, OSError):
                error = spool_error(raised, f"spool {root}", root)
            if not isinstance(error, StepRefused) and not self._spool.has(part):
                self._on_persisted(part, error)
            return message_codec.error_reply(error)
        committed = work.result()
        line.last_snapshot = HandedOverSnapshot(message, arena, box)
        durable_s = None if message.asked_s is None else message.asked_s + time.monotonic() - began
        on_persisted = replace(committed, metrics=manifest.numbers, blocked_s=message.blocked_s, durable_s=durable_s)
        self._on_persisted(part, on_persisted)
        return {"ok": True, "direct": committed.direct, "recycled": committed.recycled}

    def _recall(self, line: TrainerConnection, part: PartId) -> None:
        with self._changed:
            orphan = self.orphans.get(part.writer)
            if orphan is None or orphan.last_snapshot is None or orphan.last_snapshot.message.part != part:
                self._reply(line, message_codec.error_reply(ObjectNotFound(f"no trainer left {part} in memory")))
                return
            last = orphan.last_snapshot
            del self.orphans[part.writer]
            for arena in orphan.arenas.values():
                if arena is not last.arena:
                    arena.close()
            line.arenas, line.last_snapshot, line.writer = {0: last.arena}, last, part.writer
        message = last.message
        sizes = {"tensors": message.tensors, "manifest": message.manifest, "tree": message.tree}
        self._reply(line, {"ok": True, **sizes}, [last.arena.fd, last.box.fd])

    def _lend_slots(self, line: TrainerConnection, part: PartId, arena: Arena) -> None:
        if line.slots is not None or line.arenas or self.open_slots is None:
            raise ValueError("slots are lent once, on a connection of their own, to a daemon that runs")
        line.arenas[0] = arena
        line.slots = self.open_slots(part, arena.view, functools.partial(self._send_now, line))
        opening = line.slots.open()
        while not concurrent.futures.wait([opening], timeout=messages.BEAT).done:
            self._beat(line)
            if line.hung_up:
                opening.cancel()
        try:
            manifest = encode(opening.result())
        except (TierdError, OSError, concurrent.futures.CancelledError) as error:
            self._reply(line, message_codec.error_reply(error))
            return
        box = Arena(len(manifest))
        box.view[: len(manifest)] = manifest
        self._reply(line, {"ok": True, "manifest": len(manifest)}, [box.fd])
        box.close()

    def _send_now(self, line: TrainerConnection, reply: dict[str, object]) -> None:
        """Send an answer from the event loop. A trainer that leaves so many unread that one does not fit is left."""
        try:
            socket.send_fds(line.socket, [msgspec.json.encode(reply)], [], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError:
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_RDWR)

    def _reply(self, line: TrainerConnection, reply: dict[str, object], fds: list[int] | None = None) -> None:
        try:
            socket.send_fds(line.socket, [msgspec.json.encode(reply)], fds or [], socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the trainer is gone; its earlier requests are still completed

    def _beat(self, line: TrainerConnection) -> None:
        """Show that this daemon works.

        The send never waits, because a trainer that does not read must not block the daemon.
        """
        try:
            line.socket.send(msgspec.json.encode({"working": True}), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError:
            pass  # the trainer is gone, or busy with a full socket


def _receive_packet(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet; empty at the end.

    If a peer died with unread answers, the kernel first raises ConnectionResetError once, and then delivers the packets
    that it had sent. They are read all the same.
    """
    for _ in range(2):
        try:
            packet, fds, _, _ = socket.recv_fds(connection, message_codec.MAX_PACKET, 8, socket.MSG_CMSG_CLOEXEC)
            return packet, fds
        except ConnectionResetError:
            continue
    return b"", []
