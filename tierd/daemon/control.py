"""The control socket: connections of trainers and of the command line to the spool's unix socket.

`daemon/request_handler.py` does what their requests ask for.

Invariants:

- The daemon continues after any bytes from a peer and after any disconnection.
- The socket is for its owner alone (mode 0600); only its owner and root get answers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tierd.core.errors import (
    RequestUnknown,
    TierdError,
)
from tierd.core.ids import PartId
from tierd.daemon.handoff import HandoffServer
from tierd.daemon.peers import Peers, unknown
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.request_handler import RequestHandler
from tierd.daemon.status import Status, status
from tierd.events.notifier import Notifier
from tierd.ipc import decoding, messages, replies
from tierd.spool.permissions import listen, peer_pid, stranger

log = logging.getLogger("tierd.daemon")

_ROOM = 15.0  # seconds that a thread waits for disk space to be freed, which takes less


class Control:
    """Read requests from the control socket, and write their answers.

    Attributes:
        trainers: how many trainers are attached.
        seen: whether a trainer ever attached.
        handler: does what requests ask for.
        notifier: the notifier whose receivers `status` shows.
        working: the requests under way.
    """

    def __init__(self, reconciler: Reconciler, handoff: HandoffServer, notifier: Notifier | None = None) -> None:
        self._reconciler = reconciler
        self.notifier = notifier or Notifier()
        self.working: set[asyncio.Future[dict[str, Any]]] = set()
        self._handoff = handoff
        self._connections: set[asyncio.Task[None]] = set()
        self._peers = Peers("control")
        self.handler = RequestHandler(reconciler, handoff, self.status)
        self.trainers = 0
        self.seen = False
        reconciler.requests.attended = lambda: self.trainers > 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen on the spool's socket while the context lasts."""
        spool = self._reconciler.spool
        # A socket that is there may be replaced, because the spool's lock excludes another daemon.
        listener, remove = listen(spool.socket, socket.SOCK_STREAM)
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=messages.MAX_REQUEST)
        self._handoff.room = functools.partial(self._make_room, asyncio.get_running_loop())
        try:
            yield
        finally:
            self._handoff.room = None  # the loop ends, so a thread that asks would wait in vain
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            remove()

    def status(self) -> Status:
        """Describe the daemon."""
        handed_over, notified = self._handoff.handed_over_bytes(), self.notifier.status()
        return status(self._reconciler, self.trainers, handed_over, notified)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        held: set[PartId] = set()
        attached: messages.Attach | None = None
        greeted = False
        try:
            if (uid := stranger(writer.get_extra_info("socket"))) is not None:
                log.warning("control: turned away a peer of uid %d", uid)
                return
            pid = peer_pid(writer.get_extra_info("socket"))
            while line := await reader.readline():
                try:
                    request: messages.Hello | messages.AnyRequest | RequestUnknown = decoding.decode_request(line)
                except decoding.UnknownKind as error:
                    request = unknown(error)
                if isinstance(request, messages.Attach) and attached is None:
                    attached, self.seen = request, True
                    self.trainers += 1
                    self._reconciler.requests.presence.came(request.run)
                match request:
                    case RequestUnknown():
                        reply = replies.error_reply(request)
                    case messages.Hello():
                        reply, greeted = self._peers.answer(pid, request), True
                    case _:
                        # Allowed to every version without a greeting.
                        if not greeted and not isinstance(request, messages.Status):
                            self._peers.unnamed(pid)
                        reply = await self._answer(request, writer, held)
                writer.write(messages.encode_line(reply))
                await writer.drain()
                if isinstance(request, messages.Hello) and not reply["ok"]:
                    break
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: a line beyond the limit
            log.warning("control: dropped a connection that sent no request: %s", error)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            if attached is not None:
                self.trainers -= 1
                self._reconciler.requests.presence.left(attached.run)
            for part in held:
                self._reconciler.repairs.release(part)
            if attached or held:
                self._reconciler.wake()
            writer.close()

    async def _answer(
        self, request: messages.AnyRequest, writer: asyncio.StreamWriter, held: set[PartId]
    ) -> dict[str, Any]:
        work = asyncio.ensure_future(self.handler.handle(request, held))
        self.working.add(work)
        work.add_done_callback(self.working.discard)
        beat_s = min(
            messages.BEAT if isinstance(request, messages.MakeRoom | messages.Candidates) else math.inf,
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
            return replies.error_reply(error)
        finally:
            work.cancel()

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
