"""The daemon's side of the unix socket: it answers what trainers and the command line ask.

Law: a request changes nothing that reconciling would not, except pins and pauses; what trainers report is told on.
Whatever a peer sends or however it goes away, the daemon goes on; the socket is for its owner alone (0600), and only
its owner and root are answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from tierd.core import wire
from tierd.core.errors import CheckpointNotFound, ConfigError, StoreRefused, TierdError
from tierd.core.ids import CheckpointId, PartId, pin_key
from tierd.core.report import report
from tierd.core.sight import see
from tierd.core.world import SPOOL
from tierd.daemon.handoff import HandOff
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.status import status
from tierd.daemon.tell import Teller
from tierd.priority import hasten
from tierd.trust import listen, stranger

log = logging.getLogger("tierd.daemon")


class Control:
    """Answers requests. `trainers` counts the attached; `seen` says whether any ever was."""

    def __init__(self, reconciler: Reconciler, handoff: HandOff, teller: Teller | None = None) -> None:
        self._reconciler = reconciler
        self._teller = teller or Teller()
        self._handoff = handoff
        self._connections: set[asyncio.Task[None]] = set()
        self.trainers = 0
        self.seen = False

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen on the spool's socket while the context lasts."""
        spool = self._reconciler.spool
        listener = listen(spool.socket, socket.SOCK_STREAM)  # the spool's lock says that no other daemon lives
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=wire.MAX_REQUEST)
        try:
            yield
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            with suppress(OSError):  # a disk that fails must not keep a daemon from ending in order
                spool.socket.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        held: set[PartId] = set()
        attached = False
        try:
            if (uid := stranger(writer.get_extra_info("socket"))) is not None:
                log.warning("control: turned away a peer of uid %d", uid)
                return
            while line := await reader.readline():
                request = wire.decode_request(line)
                if isinstance(request, wire.Attach) and not attached:
                    attached = self.seen = True
                    self.trainers += 1
                writer.write(wire.encode_line(await self._answer(request, writer, held)))
                await writer.drain()
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: a line beyond the limit
            log.warning("control: dropped a connection that sent no request: %s", error)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            self.trainers -= attached
            for part in held:
                self._reconciler.release(part)
            if attached or held:
                self._reconciler.wake()
            writer.close()

    async def _answer(
        self, request: wire.AnyRequest, writer: asyncio.StreamWriter, held: set[PartId]
    ) -> dict[str, Any]:
        work = asyncio.ensure_future(self._do(request, held))
        try:
            while True:
                done, _ = await asyncio.wait([work], timeout=wire.HEARTBEAT)
                if done:
                    return {"ok": True, **work.result()}
                writer.write(wire.encode_line({"working": True, **self._progress(request)}))
                await writer.drain()
        except (TierdError, TimeoutError) as error:
            return wire.error_reply(error)
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            return wire.error_reply(error)
        finally:
            work.cancel()

    async def _do(self, request: wire.AnyRequest, held: set[PartId]) -> dict[str, Any]:
        hasten()  # this task's: somebody waits
        match request:
            case wire.Attach():
                self._reconciler.wake()
                return {"pid": os.getpid(), "tiers": {tier.name: tier.url for tier in self._reconciler.config.tier}}
            case wire.Status():
                lent, tell = self._handoff.lent_bytes(), self._teller.status()
                return {"status": status(self._reconciler, self.trainers, lent, tell)}
            case wire.Report(run=run):
                await self._look(run)
                return {"report": report(self._reconciler.world(), self._reconciler.config, run)}
            case wire.Candidates(run=run, metrics=metrics):
                await self._handoff.settled()  # what a trainer handed over before it died is seen, too
                await self._look(run)
                return {"sight": await asyncio.to_thread(see, self._reconciler.world(), run, metrics)}
            case wire.Fetch(part=part, wanted=wanted):
                if part not in held:
                    self._reconciler.hold(part)
                    held.add(part)
                return {"tiers": await self._reconciler.fetch(part, wanted=wanted)}
            case wire.Wait(part=part, tier=tier, timeout_s=timeout, needed=needed):
                self._reconciler.needed.update([part.checkpoint] * needed)
                try:
                    return await self._wait(part, tier, timeout)
                finally:
                    self._reconciler.needed -= Counter([part.checkpoint] * needed)
            case wire.Pin(checkpoint=checkpoint, pinned=pinned):
                return await self._pin(checkpoint, pinned)
            case wire.Failed(part=part, why=why):
                self._reconciler.notices.given_up(part, why)
                return {}
            case wire.FellBack(checkpoint=checkpoint, skipped=skipped):
                self._reconciler.journal.tell("fell back", SPOOL, checkpoint, f"passed over: {'; '.join(skipped)}")
                return {}
            case wire.Pause(for_s=for_s):
                return await self._pause(self._reconciler.pause.begin(for_s))
            case wire.Resume():
                return await self._pause(self._reconciler.pause.end())

    def _progress(self, request: wire.AnyRequest) -> dict[str, Any]:
        at = self._reconciler.fetching.get(request.part) if isinstance(request, wire.Fetch) else None
        return {"done": at.done, "total": at.total, "tiers": at.tiers} if at else {}

    async def _look(self, run: str | None) -> None:
        """A fresh look at everything. A tier that fails is unknown in the world, which is the answer."""
        if run is not None:
            self._reconciler.interest.add(run)
        names = list(self._reconciler.lanes)
        looks = await asyncio.gather(*(self._reconciler.look(name) for name in names), return_exceptions=True)
        for name, failed in zip(names, looks, strict=True):
            if isinstance(failed, TierdError) and name != SPOOL:
                log.warning("%s: cannot be asked: %s", name, failed)
            elif isinstance(failed, BaseException):
                raise failed

    async def _wait(self, part: PartId, tier: str, timeout: float | None) -> dict[str, Any]:
        if tier not in self._reconciler.stores:
            names = ", ".join([SPOOL, *self._reconciler.stores])
            raise ConfigError(f"tier {tier!r}: the daemon has no tier of that name; it has {names}")
        lane = self._reconciler.lanes[tier]
        await self._reconciler.look(SPOOL)
        self._reconciler.wake()
        try:
            async with asyncio.timeout(timeout), self._reconciler.moved:
                while not self._reconciler.tiers.has(part, tier):
                    if self._reconciler.is_retired(part, tier):
                        raise CheckpointNotFound(
                            f"{tier}: {part} is not there and will not come: newer ones have retired it, or it is gone"
                        )
                    if isinstance(lane.last_error, StoreRefused):
                        raise StoreRefused(f"{tier}: {part} is not there yet, and the tier refuses: {lane.last_error}")
                    await self._reconciler.moved.wait()
        except TimeoutError:
            why = f"; its last error: {lane.last_error}" if lane.last_error else ""
            why += f"; paused: {until}" if (until := self._reconciler.pause.until) else ""
            raise TimeoutError(f"{tier}: {part} is not verified there after {timeout:g} s{why}") from None
        return {}

    async def _pause(self, change: Coroutine[Any, Any, None]) -> dict[str, Any]:
        await asyncio.shield(change)  # file and memory agree, even where the asker goes away
        self._reconciler.wake()
        until = self._reconciler.pause.until
        log.info("paused: %s", until) if until else log.info("resumed")
        return {"paused": until}

    async def _pin(self, checkpoint: CheckpointId, pinned: bool) -> dict[str, Any]:
        await asyncio.to_thread(self._reconciler.spool.pin, checkpoint, pinned=pinned)
        for store in self._reconciler.stores.values():
            await (store.put(pin_key(checkpoint), b"") if pinned else store.delete([pin_key(checkpoint)]))
        self._reconciler.wake()
        return {}
