"""The control socket: connections of trainers and of the command line to the spool's unix socket.

`daemon/request_handler.py` does what their requests ask for.

Invariants:

- The daemon continues after any bytes from a peer and after any disconnection.
- It has at most `MAX_CONTROL_CONNECTIONS`, so that no number of them takes the descriptors that its work needs.
- The socket is for its owner alone (mode 0600); only its owner and root get answers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tierd.core.errors import DaemonUnavailable, RequestUnknown, TierdError
from tierd.core.ids import PartId
from tierd.daemon import client_connections
from tierd.daemon.client_connections import DAEMON_PEER, ControlConnection, PeerLog, unknown_request
from tierd.daemon.daemon_status import Status, make_status
from tierd.daemon.handoff_socket import HandoffServer
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.request_handler import RequestHandler
from tierd.daemon.transfer.slot_fills import SharedReads, SlotFills, SlotSession
from tierd.events.notifier import Notifier
from tierd.ipc import message_codec, messages
from tierd.spool.spool_access import bind_private_socket, foreign_peer_uid, peer_pid

log = logging.getLogger("tierd.daemon")

_ROOM = 15.0  # seconds that a thread waits for disk space to be freed, which takes less


class ControlServer:
    """Read requests from the control socket, and write their answers."""

    def __init__(self, reconciler: Reconciler, handoff: HandoffServer, notifier: Notifier | None = None) -> None:
        self._reconciler = reconciler
        self.notifier = notifier or Notifier()
        self.working: set[asyncio.Future[dict[str, Any]]] = set()
        self._handoff = handoff
        self._connections: set[ControlConnection] = set()
        self._peers = PeerLog("control")
        self._shared_reads = SharedReads(reconciler.repairs.repairer.budget)
        self.handler = RequestHandler(reconciler, handoff, self.status)
        self.trainers = 0
        self.had_trainer = False
        reconciler.requests.attended = lambda: self.trainers > 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen on the spool's socket while the context lasts."""
        spool = self._reconciler.spool
        # A socket that is there may be replaced, because the spool's lock excludes another daemon.
        listener, remove = bind_private_socket(spool.socket, socket.SOCK_STREAM)
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=messages.MAX_REQUEST)
        loop = asyncio.get_running_loop()
        self._handoff.room = functools.partial(self._make_room, loop)
        self._handoff.open_slots = functools.partial(self._open_slots, loop)
        try:
            yield
        finally:
            # The loop ends, so a thread that asks would wait in vain.
            self._handoff.room = self._handoff.open_slots = None
            server.close()
            tasks = [line.task for line in self._connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            remove()

    def status(self) -> Status:
        """Describe the daemon."""
        handed_over, notified = self._handoff.handed_over_bytes(), self.notifier.status()
        return make_status(self._reconciler, self.trainers, handed_over, notified)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        line = ControlConnection(task, writer)
        try:
            if (uid := foreign_peer_uid(writer.get_extra_info("socket"))) is not None:
                log.warning("control: turned away a peer of uid %d", uid)
            elif client_connections.has_control_room(self._connections):
                self._connections.add(line)
                await self._converse(line, reader)
            else:
                self._refuse(line)
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: a line beyond the limit
            if isinstance(error, msgspec.DecodeError):
                self._turn_down(line, f"refuses this request, because it is not valid: {error}")
            log.warning("control: dropped a connection that sent no request: %s", error)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._ended(line)

    async def _converse(self, line: ControlConnection, reader: asyncio.StreamReader) -> None:
        pid = peer_pid(line.writer.get_extra_info("socket"))
        while text := await reader.readline():
            line.working = True
            try:
                request: messages.Hello | messages.AnyRequest | RequestUnknown = message_codec.decode_request(text)
            except message_codec.UnknownRequest as error:
                request = unknown_request(error)
            if isinstance(request, messages.Attach) and line.attached is None:
                line.attached, self.had_trainer = request, True
                self.trainers += 1
                self._reconciler.requests.trainer_activity.trainer_attached(request.run)
            match request:
                case RequestUnknown():
                    reply = message_codec.error_reply(request)
                case messages.Hello():
                    reply, line.greeted = self._peers.answer(pid, request), True
                case _:
                    # Allowed to every version without a greeting.
                    if not line.greeted and not isinstance(request, messages.StatusRequest):
                        self._peers.log_unnamed(pid)
                    reply = await self._answer(request, line.writer, line.held_parts)
            line.writer.write(messages.encode_line(reply))
            await line.writer.drain()
            if isinstance(request, messages.Hello) and not reply["ok"]:
                break
            line.answered_at, line.working = time.monotonic(), False

    def _refuse(self, line: ControlConnection) -> None:
        """Send the reason in place of the answer to the first request. The caller closes the connection."""
        why = client_connections.explain_full(client_connections.MAX_CONTROL_CONNECTIONS, "hold some and ask nothing")
        self._turn_down(line, f"refuses this connection: {why}")
        self._peers.log_refusal(why)

    def _turn_down(self, line: ControlConnection, why: str) -> None:
        """Send the last answer on a connection. It has the greeting's members, because it may answer a greeting."""
        error = DaemonUnavailable(f"the daemon of spool {self._reconciler.spool.root} {why}")
        line.writer.write(
            messages.encode_line(message_codec.greeting(DAEMON_PEER.version) | message_codec.error_reply(error))
        )

    def _ended(self, line: ControlConnection) -> None:
        self._connections.discard(line)
        if line.attached is not None:
            self.trainers -= 1
            self._reconciler.requests.trainer_activity.trainer_detached(line.attached.run)
        for part in line.held_parts:
            self._reconciler.repairs.release(part)
        if line.attached or line.held_parts:
            self._reconciler.wake()
        line.writer.close()

    async def _answer(
        self, request: messages.AnyRequest, writer: asyncio.StreamWriter, held_parts: set[PartId]
    ) -> dict[str, Any]:
        work = asyncio.ensure_future(self.handler.handle(request, held_parts))
        self.working.add(work)
        work.add_done_callback(self.working.discard)
        beat_s = min(
            messages.BEAT if isinstance(request, messages.MakeRoom | messages.CandidatesRequest) else math.inf,
            messages.HEARTBEAT,
        )
        try:
            while True:
                done, _ = await asyncio.wait([work], timeout=beat_s)
                if done:
                    return {"ok": True, **work.result()}
                writer.write(messages.encode_line({"working": True, **self.handler.progress(request)}))
                await writer.drain()
        except ConnectionError:
            raise
        except Exception as error:
            # A fault of this daemon is an answer, too: a closed connection would not say what is wrong.
            if not isinstance(error, TierdError | TimeoutError | OSError):
                log.exception("control: the request %s failed", type(request).__name__)
            return message_codec.error_reply(error)
        finally:
            work.cancel()

    def _open_slots(
        self,
        loop: asyncio.AbstractEventLoop,
        part: PartId,
        memory: memoryview,
        reply: Callable[[dict[str, object]], None],
    ) -> SlotSession:
        stores = self._reconciler.repairs.repairer.stores
        return SlotSession(loop, SlotFills(part, stores, self._shared_reads, memory), reply)

    def _make_room(self, loop: asyncio.AbstractEventLoop, part: PartId, size_bytes: int, quota: bool) -> bool:
        """Free disk space for a part. Called in a thread that persists the part and that waits only for this."""
        making = asyncio.run_coroutine_threadsafe(
            self._reconciler.room.make(part.checkpoint.run, size_bytes, quota=quota), loop
        )
        try:
            return making.result(_ROOM).enough
        except (TierdError, OSError, TimeoutError, concurrent.futures.CancelledError) as error:
            making.cancel()
            log.warning("control: no room was made for %s: %s", part, error or type(error).__name__)
            return False
