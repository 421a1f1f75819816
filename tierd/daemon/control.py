"""The daemon's side of the unix socket: it answers what trainers and the command line ask.

Law: a request changes nothing that reconciling would not, except pins and pauses; what trainers report is told on.
Whatever a peer sends or however it goes away, the daemon goes on; the socket is for its owner alone (0600), and only
its owner and root are answered.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import msgspec

from tierd.core import wire
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    RequestUnknown,
    StoreRefused,
    StoreUnavailable,
    TierdError,
)
from tierd.core.head import newest
from tierd.core.ids import CheckpointId, PartId, pin_key
from tierd.core.launches import beside
from tierd.core.policies import policy_for
from tierd.core.report import report
from tierd.core.sight import see
from tierd.core.urls import parse_url
from tierd.core.world import SPOOL, World
from tierd.daemon.handoff import HandOff
from tierd.daemon.lane import Lane
from tierd.daemon.peers import Peers, unknown
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.remove import remove_from_spool
from tierd.daemon.status import status
from tierd.daemon.tell import Teller
from tierd.priority import hasten
from tierd.records import policies
from tierd.trust import listen, peer_pid, stranger

log = logging.getLogger("tierd.daemon")

_ROOM = 15.0  # seconds that a thread waits for room to be made, which takes fewer
_PATIENCE = 60.0  # seconds that a restore waits for a tier's answer, where it can do without
_FLUSHES = 600.0  # seconds that a removal waits for what was being flushed


class Control:
    """Answers requests.

    Attributes:
        trainers: how many are attached.
        seen: whether any ever was.
        teller: whose receivers `status` shows.
        working: the requests that are under way.
    """

    def __init__(self, reconciler: Reconciler, handoff: HandOff, teller: Teller | None = None) -> None:
        self._reconciler = reconciler
        self.teller = teller or Teller()
        self.working: set[asyncio.Future[dict[str, Any]]] = set()
        self._handoff = handoff
        self._connections: set[asyncio.Task[None]] = set()
        self._peers = Peers("control")
        self.trainers = 0
        self.seen = False
        reconciler.attended = lambda: self.trainers > 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen on the spool's socket while the context lasts."""
        spool = self._reconciler.spool
        listener = listen(spool.socket, socket.SOCK_STREAM)  # the spool's lock says that no other daemon lives
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=wire.MAX_REQUEST)
        self._handoff.room = functools.partial(self._make_room, asyncio.get_running_loop())
        try:
            yield
        finally:
            self._handoff.room = None  # from here on nothing answers a thread that asks
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
        attached: wire.Attach | None = None
        greeted = False
        try:
            if (uid := stranger(writer.get_extra_info("socket"))) is not None:
                log.warning("control: turned away a peer of uid %d", uid)
                return
            pid = peer_pid(writer.get_extra_info("socket"))
            while line := await reader.readline():
                try:
                    request: wire.Hello | wire.AnyRequest | RequestUnknown = wire.decode_request(line)
                except wire.UnknownKind as error:
                    request = unknown(error)
                if isinstance(request, wire.Attach) and attached is None:
                    attached, self.seen = request, True
                    self.trainers += 1
                    self._reconciler.presence.came(request.run)
                match request:
                    case RequestUnknown():
                        reply = wire.error_reply(request)
                    case wire.Hello():
                        reply, greeted = self._peers.answer(pid, request), True
                    case _:
                        if not greeted and not isinstance(request, wire.Status):  # every version may ask for that
                            self._peers.unnamed(pid)
                        reply = await self._answer(request, writer, held)
                writer.write(wire.encode_line(reply))
                await writer.drain()
                if isinstance(request, wire.Hello) and not reply["ok"]:
                    break
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: a line beyond the limit
            log.warning("control: dropped a connection that sent no request: %s", error)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            if attached is not None:
                self.trainers -= 1
                self._reconciler.presence.left(attached.run)
            for part in held:
                self._reconciler.release(part)
            if attached or held:
                self._reconciler.wake()
            writer.close()

    async def _answer(
        self, request: wire.AnyRequest, writer: asyncio.StreamWriter, held: set[PartId]
    ) -> dict[str, Any]:
        work = asyncio.ensure_future(self._do(request, held))
        self.working.add(work)
        work.add_done_callback(self.working.discard)
        beat_s = min(wire.BEAT if isinstance(request, wire.MakeRoom | wire.Candidates) else math.inf, wire.HEARTBEAT)
        try:
            while True:
                done, _ = await asyncio.wait([work], timeout=beat_s)
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
            case wire.Attach(run=run):
                self._reconciler.wake()
                tiers = {tier.name: tier.url for tier in self._reconciler.config.tier}
                return {"pid": os.getpid(), "tiers": tiers, "keep_last": await self._keep_last(run)}
            case wire.Status():
                lent, tell = self._handoff.lent_bytes(), self.teller.status()
                return {"status": status(self._reconciler, self.trainers, lent, tell)}
            case wire.Report(run=run):
                await self._look(run)
                return {"report": report(self._reconciler.world(), self._reconciler.config, run)}
            case wire.Candidates(run=run, metrics=metrics):
                await self._handoff.settled()  # what a trainer handed over before it died is seen, too
                slow, silent = await self._look(run, patient=False)
                world = self._reconciler.world()
                there = {name: None if name in slow else place for name, place in world.tiers.items()}
                world = replace(world, tiers=there)
                sight = await asyncio.to_thread(see, world, run, metrics)
                return {"sight": msgspec.structs.replace(sight, silent=self._located(silent, sight.unreached))}
            case wire.Fetch(part=part, wanted=wanted):
                if part not in held:
                    self._reconciler.hold(part)
                    held.add(part)
                try:
                    return {"tiers": await self._reconciler.fetch(part, wanted=wanted)}
                except (StoreUnavailable, StoreRefused) as error:
                    raise type(error)(f"node {socket.gethostname()}: {error}") from error
            case wire.Wait(part=part, tier=tier, timeout_s=timeout, needed=needed):
                self._reconciler.needed.update([part.checkpoint] * needed)
                try:
                    return await self._wait(part, tier, timeout)
                finally:
                    self._reconciler.needed -= Counter([part.checkpoint] * needed)
            case wire.Backlog(hurry=hurry, run=run):
                if hurry:
                    await self._handoff.settled()
                    self._reconciler.retry_now()
                    await self._look(run)
                return {"backlog": self._reconciler.backlog_now()}
            case wire.Pin(checkpoint=checkpoint, pinned=pinned):
                return await self._pin(checkpoint, pinned)
            case wire.Failed(part=part, why=why):
                self._reconciler.notices.given_up(part, why)
                return {}
            case wire.FellBack(checkpoint=checkpoint, skipped=skipped):
                self._reconciler.journal.tell("fell back", SPOOL, checkpoint, f"passed over: {'; '.join(skipped)}")
                return {}
            case wire.Launches(run=run):
                return {"launches": beside(self._reconciler.world(), run, time.time())}
            case wire.MakeRoom(run=run, size_bytes=size, quota=quota):
                return asdict(await self._reconciler.room.make(run, size, quota=quota))
            case wire.Remove(run=run):
                return await self._remove(run)
            case wire.Pause(for_s=for_s):
                return await self._pause(self._reconciler.pause.begin(for_s))
            case wire.Resume():
                return await self._pause(self._reconciler.pause.end())

    def _progress(self, request: wire.AnyRequest) -> dict[str, Any]:
        at = self._reconciler.fetching.get(request.part) if isinstance(request, wire.Fetch) else None
        return {"done": at.done, "total": at.total, "tiers": at.tiers} if at else {}

    async def _keep_last(self, run: str | None) -> int:
        """How many checkpoints of a run stay in the spool. Its trainer may just have said so, after the last look."""
        world, config = self._reconciler.world(), self._reconciler.config
        with suppress(OSError):
            given = await asyncio.to_thread(policies, self._reconciler.spool.control, [run] if run else [])
            world = replace(world, spool=replace(world.spool, policies={**world.spool.policies, **given}))
        return policy_for(world, config, run or "", SPOOL).keep_last

    def _located(self, silent: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
        """Of these tiers, where each does not answer, and why."""
        urls = {tier.name: str(parse_url(tier.url)) for tier in self._reconciler.config.tier}
        return {
            name: f"node {socket.gethostname()}: {urls[name]}: {silent[name]}"
            for name in names
            if name in silent and name in urls
        }

    async def _look(self, run: str | None, *, patient: bool = True) -> tuple[list[str], dict[str, str]]:
        """A fresh look at everything. A tier that fails is unknown in the world, which is the answer.

        Until every tier has answered, no look leaves the run out, because a restore would take that for a fresh start.

        Args:
            patient: wait for each tier's answer, however slow it is. Otherwise for `_PATIENCE` seconds, where the
                newest checkpoint that is known is whole in the spool.

        Returns:
            The tiers that were too slow, and of each that did not answer, why.
        """
        reconciler = self._reconciler
        if run is not None:
            reconciler.interest.add(run)
            reconciler.presence.asked(run)
            reconciler.asking[run] += 1
        looks = {name: asyncio.ensure_future(reconciler.look(name)) for name in reconciler.lanes}
        try:
            await asyncio.wait([looks[SPOOL]])
            local = run is not None and _is_whole_here(reconciler.world(), run)
            await asyncio.wait(looks.values(), timeout=None if patient or not local else _PATIENCE)
        finally:
            slow = [name for name, look in looks.items() if look.cancel()]  # it goes on for whoever else waits for it
            if run is not None:
                reconciler.asking -= Counter([run])
        for name in slow:
            log.warning(
                "%s: slow, not down: no answer within %.0f s; a restore of %s, whose newest checkpoint is whole in the "
                "spool, goes without it",
                name,
                _PATIENCE,
                run,
            )
        silent = dict.fromkeys(slow, f"slow, not down: no answer within {_PATIENCE:.0f} s")
        for name, look in looks.items():
            failed = None if name in slow else look.exception()
            if isinstance(failed, TierdError) and name != SPOOL:
                log.warning("%s: cannot be asked: %s", name, failed)
                silent[name] = str(failed)
            elif failed:
                raise failed
        return slow, silent

    def _make_room(self, loop: asyncio.AbstractEventLoop, part: PartId, size_bytes: int, quota: bool) -> bool:
        """Make room for a part; called in a thread that persists it, and waits for that alone."""
        making = asyncio.run_coroutine_threadsafe(
            self._reconciler.room.make(part.checkpoint.run, size_bytes, quota=quota), loop
        )
        try:
            return making.result(_ROOM).enough
        except (TierdError, OSError, TimeoutError, concurrent.futures.CancelledError) as error:
            making.cancel()
            log.warning("control: no room was made for %s: %s", part, error or type(error).__name__)
            return False

    async def _wait(self, part: PartId, tier: str, timeout: float | None) -> dict[str, Any]:
        lane = self._lane(tier)
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
                    lane = self._lane(tier)  # a reload may have changed it, or taken it out
        except TimeoutError:
            why = f"; its last error: {lane.last_error}" if lane.last_error else ""
            why += f"; paused: {until}" if (until := self._reconciler.pause.until) else ""
            # Without the time: what is asked for one part is what others have left of it, so the asker tells it.
            raise TimeoutError(f"{tier}: {part} is not verified there yet{why}") from None
        return {}

    async def _remove(self, run: str) -> dict[str, Any]:
        reconciler = self._reconciler
        if not reconciler.presence.trainerless([run], reconciler.writers()):
            raise ConfigError(f"run {run!r}: a trainer that saves it, or may, is attached to the daemon; end it first")
        if any(one.run == run for one in reconciler.held):
            raise ConfigError(f"run {run!r}: somebody is restoring it; try again when that has ended")
        await asyncio.to_thread(remove_from_spool, reconciler.spool, run)
        reconciler.interest.discard(run)
        await reconciler.look(SPOOL)
        log.warning("spool %s: run %s was deleted, as asked", reconciler.spool.root, run)
        async with asyncio.timeout(_FLUSHES), reconciler.moved:  # one may put a manifest still
            await reconciler.moved.wait_for(lambda: all(one.checkpoint.run != run for one in reconciler.world().busy))
        return {}

    def _lane(self, tier: str) -> Lane:
        if tier not in self._reconciler.stores:
            names = ", ".join([SPOOL, *self._reconciler.stores])
            raise ConfigError(f"tier {tier!r}: the daemon has no tier of that name; it has {names}")
        return self._reconciler.lanes[tier]

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


def _is_whole_here(world: World, run: str) -> bool:
    """Whether the newest checkpoint of a run that any place was seen to have, or remembers, is whole in the spool."""
    one = newest(world.remembered(run), run)
    last = max((*world.copies(run), *([one] if one else ())), default=None)
    seen = world.spool.checkpoints.get(last) if last else None
    return seen is not None and seen.usable
