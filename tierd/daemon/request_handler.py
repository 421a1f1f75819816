"""What the daemon does for each request of the control socket.

Invariants:

- A request changes nothing that reconciling would not change, except pins, pauses and the removal of a run.
- Reports of trainers are passed on as events.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import msgspec

from tierd.core.errors import CheckpointNotFound, ConfigError, StoreRefused, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.inventory import Inventory, policy_for
from tierd.core.planning.place import SPOOL
from tierd.core.run_report import make_report
from tierd.core.timeline.concurrent_launches import concurrent_launches
from tierd.core.timeline.launch_chain import newest_recorded
from tierd.core.timeline.run_view import run_view_of
from tierd.core.units import pause_text
from tierd.core.urls import parse_url
from tierd.daemon.concurrency import suspend_aware_timeout
from tierd.daemon.daemon_status import Status
from tierd.daemon.handoff_socket import HandoffServer
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.reconciling.tier_worker import TierWorker
from tierd.daemon.runs_report import report_runs
from tierd.daemon.tiers.intents import pin, unpin
from tierd.daemon.tiers.node_records import RankNotes
from tierd.daemon.tiers.run_removal import remove_from_spool
from tierd.ipc import messages
from tierd.spool.run_records import recorded_policies
from tierd.threads import mark_foreground

log = logging.getLogger("tierd.daemon")

_TIERS_S = 60.0  # seconds that a trainer which attaches waits until its tiers are taken up
_FLUSHES = 600.0  # seconds that a removal waits for flushes under way


class RequestHandler:
    def __init__(self, reconciler: Reconciler, handoff: HandoffServer, status: Callable[[], Status]) -> None:
        self._reconciler, self._handoff, self._status = reconciler, handoff, status
        self._rank_notes = RankNotes(reconciler.tiers.who, reconciler.timings.marked_s)
        # Takes up the tiers that a trainer names; None: this daemon's tiers are those of its configuration.
        self.add_tiers: Callable[[Sequence[str]], Awaitable[None]] | None = None

    async def handle(self, request: messages.AnyRequest, held_parts: set[PartId]) -> dict[str, Any]:
        """Do what a request asks for, and return the members of its answer.

        Args:
            held_parts: the parts that the connection holds; a `Fetch` adds its part.
        """
        mark_foreground()  # this task's threads do not yield to training, because a peer waits
        match request:
            case messages.Attach(run=run, to=to):
                refused = await self._take_tiers(to)
                self._reconciler.wake()
                tiers = {tier.name: tier.url for tier in self._reconciler.config.tier}
                answer = {"pid": os.getpid(), "tiers": tiers, "keep_last": await self._keep_last(run)}
                return answer | ({"refused": refused} if refused else {})
            case messages.StatusRequest():
                return {"status": self._status()}
            case messages.ReportRequest(run=run):
                await self._observe(run)
                return {"report": make_report(self._reconciler.report_inventory(), self._reconciler.config, run)}
            case messages.RunsRequest():
                return {"runs": await report_runs(self._reconciler)}
            case messages.CandidatesRequest(run=run, metrics=metrics):
                await self._handoff.settled()  # to include snapshots that a dead trainer handed over
                slow, silent = await self._observe(run, patient=False)
                inventory = self._reconciler.inventory()
                answered = {name: None if name in slow else place for name, place in inventory.tiers.items()}
                inventory = replace(inventory, tiers=answered)
                run_view = await asyncio.to_thread(run_view_of, inventory, run, metrics)
                return {"sight": msgspec.structs.replace(run_view, silent=self._located(silent, run_view.unreached))}
            case messages.Fetch(part=part, wanted=wanted):
                if part not in held_parts:
                    self._reconciler.repairs.hold(part)
                    held_parts.add(part)
                try:
                    fetched = await self._reconciler.repairs.fetch(part, chunk_runs=wanted)
                except (StoreUnavailable, StoreRefused) as error:
                    raise type(error)(f"node {socket.gethostname()}: {error}") from error
                for tier in fetched.defects if wanted is not None else ():
                    if tier in self._reconciler.stores:  # the configuration may have changed meanwhile
                        self._reconciler.scrubber.suspect(tier, part)
                defects = {"defects": list(fetched.defects.values())} if fetched.defects else {}
                return {"tiers": fetched.tiers, **defects}
            case messages.Wait(part=part, tier=tier, timeout_s=timeout, needed=needed):
                with self._reconciler.requests.awaiting_flush(part, needed=needed):
                    return await self._wait(part, tier, timeout)
            case messages.BacklogRequest(hurry=hurry, run=run, newest=newest):
                if newest:
                    self._reconciler.send_newest_first()
                if hurry:
                    await self._handoff.settled()
                    self._reconciler.retry_now()
                    await self._observe(run)
                return {"backlog": self._reconciler.backlog.summary()}
            case messages.Pin(checkpoint=checkpoint, pinned=pinned, note=note):
                return await self._pin(checkpoint, pinned, note)
            case messages.SaveGivenUp(part=part, why=why):
                self._reconciler.save_events.record_given_up(part, why)
                return {}
            case messages.DataLeakNotice(part=part, why=why):
                self._reconciler.journal.record("samples leaked", SPOOL, part, why)
                return {}
            case messages.PreemptionNotice(part=part, why=why):
                if self._reconciler.send_newest_first():  # the node's other ranks say the same
                    self._reconciler.journal.record("preempted", SPOOL, part, why)
                return {}
            case messages.FallbackNotice(checkpoint=checkpoint, skipped=skipped):
                self._reconciler.save_events.record_fallback(checkpoint, skipped)
                return {}
            case messages.RestoreFinished(part=part, place=place, seconds=took):
                source = place if place in self._reconciler.stores else SPOOL
                self._reconciler.save_events.record_restore(part, source, took)
                return {}
            case messages.LaunchesRequest(run=run):
                return {"launches": concurrent_launches(self._reconciler.inventory(), run, time.time())}
            case messages.NotesRequest():
                return await self._rank_notes.handle(request, self._reconciler.stores)
            case messages.MakeRoom(run=run, size_bytes=size, quota=quota):
                return asdict(await self._reconciler.room.make(run, size, quota=quota))
            case messages.RemoveRun(run=run):
                return await self._remove(run)
            case messages.Pause(for_s=for_s):
                return await self._pause(self._reconciler.pause.begin(for_s))
            case messages.Resume():
                return await self._pause(self._reconciler.pause.end())

    def progress(self, request: messages.AnyRequest) -> dict[str, Any]:
        """Return the members of a `working` line: how far the request is."""
        if isinstance(request, messages.Fetch) and (at := self._reconciler.repairs.running_fetches.get(request.part)):
            return {"done": at.done, "total": at.total, "tiers": at.tiers}
        if isinstance(request, messages.Wait):
            for tier, part, moved in self._reconciler.flushes.running_flushes():
                if (tier, part) == (request.tier, request.part):
                    return {"done": moved.done, "total": moved.total}
        return {}

    async def _take_tiers(self, to: Sequence[str]) -> str:
        """Take up the tiers that a trainer names; return why some are not taken up, with the way out, or nothing."""
        try:
            places = {str(parse_url(tier.url)) for tier in self._reconciler.config.tier}
            absent = [url for url in to if str(parse_url(url)) not in places]
            if to and self.add_tiers is not None:
                taking = asyncio.ensure_future(self.add_tiers(to))
                taking.add_done_callback(_log_failed)
                # Neither the timeout nor the end of this trainer ends it: the next one finds the tiers.
                done, _ = await asyncio.wait([taking], timeout=_TIERS_S)
                if not done:
                    return f"it still opens {', '.join(absent)} after {_TIERS_S:.0f} s, and goes on"
                taking.result()
            elif absent:
                return (
                    "no trainer started it, so its configuration alone names its tiers; add the tiers there and reload "
                    "it (`systemctl reload` or SIGHUP), or start it again with them, or leave `to` out"
                )
        except (TierdError, OSError) as error:
            return str(error)
        return ""

    async def _keep_last(self, run: str | None) -> int:
        """Return how many checkpoints of a run the spool keeps.

        The policies are read anew, because the run's trainer may have recorded its own after the last observation.
        """
        inventory, config = self._reconciler.inventory(), self._reconciler.config
        with suppress(OSError):
            requested = await asyncio.to_thread(recorded_policies, self._reconciler.spool.control, [run] if run else [])
            inventory = replace(
                inventory, spool=replace(inventory.spool, policies={**inventory.spool.policies, **requested})
            )
        return policy_for(inventory, config, run or "", SPOOL).keep_last

    def _located(self, silent: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
        """Say for each of these tiers that does not answer at which node and URL, and why."""
        urls = {tier.name: str(parse_url(tier.url)) for tier in self._reconciler.config.tier}
        return {
            name: f"node {socket.gethostname()}: {urls[name]}: {silent[name]}"
            for name in names
            if name in silent and name in urls
        }

    async def _observe(self, run: str | None, *, patient: bool = True) -> tuple[list[str], dict[str, str]]:
        """Observe all places afresh. A tier that fails becomes unknown in the inventory.

        Until every tier has answered, no observation leaves the run out, because a restore would take that for a fresh
        start.

        Args:
            run: the run that is asked for; None: all runs of the spool.
            patient: wait for each tier's answer, however slow it is. Otherwise wait `restore_s` seconds if the newest
                known checkpoint is complete in the spool.

        Returns:
            The tiers that were too slow, and the reason for each tier that did not answer.
        """
        reconciler = self._reconciler
        patience_s = reconciler.timings.restore_s
        with reconciler.requests.request_context(run):
            observations = {name: asyncio.ensure_future(reconciler.observe(name)) for name in reconciler.workers}
            try:
                await asyncio.wait([observations[SPOOL]])
                local = run is not None and _has_newest_in_spool(reconciler.inventory(), run)
                if patient or not local:
                    await asyncio.wait(observations.values())
                else:
                    with suppress(TimeoutError):
                        async with suspend_aware_timeout(patience_s):
                            await asyncio.wait(observations.values())
            finally:
                # Only this wait ends: other callers share the observation.
                slow = [name for name, observation in observations.items() if observation.cancel()]
        for name in slow:
            log.warning(
                "%s: slow, not down: no answer within %.0f s; a restore of %s, whose newest checkpoint is whole in the "
                "spool, goes without it",
                name,
                patience_s,
                run,
            )
        silent = dict.fromkeys(slow, f"slow, not down: no answer within {patience_s:.0f} s")
        for name, observation in observations.items():
            failed = None if name in slow else observation.exception()
            if isinstance(failed, TierdError) and name != SPOOL:
                log.warning("%s: cannot be asked: %s", name, failed)
                silent[name] = str(failed)
            elif failed:
                raise failed
        return slow, silent

    async def _wait(self, part: PartId, tier: str, timeout: float | None) -> dict[str, Any]:
        worker = self._worker(tier)

        def is_verified() -> bool:
            nonlocal worker
            worker = self._worker(tier)  # a reload may have replaced or removed it
            if self._reconciler.tiers.observed.has(part, tier):
                return True
            if self._reconciler.backlog.is_retired(part, tier):
                raise CheckpointNotFound(
                    f"{tier}: {part} is not there and will not come: newer ones have retired it, or it is gone"
                )
            if isinstance(worker.last_error, StoreRefused):
                raise StoreRefused(f"{tier}: {part} is not there yet, and the tier refuses: {worker.last_error}")
            return False

        await self._reconciler.observe(SPOOL)
        self._reconciler.wake()
        try:
            async with asyncio.timeout(timeout):
                await self._reconciler.until(is_verified)
        except TimeoutError:
            why = f"; its last error: {worker.last_error}" if worker.last_error else ""
            why += f"; {pause_text(until)}" if (until := self._reconciler.pause.until) else ""
            # The message omits the timeout, because the caller shares one timeout among several parts and reports it.
            raise TimeoutError(f"{tier}: {part} is not verified there yet{why}") from None
        return {}

    async def _remove(self, run: str) -> dict[str, Any]:
        reconciler = self._reconciler
        if reconciler.requests.is_trained(run):
            raise ConfigError(f"run {run!r}: a trainer that saves it, or may, is attached to the daemon; end it first")
        if any(part.run == run for part in reconciler.requests.held_checkpoints):
            raise ConfigError(f"run {run!r}: somebody is restoring it; try again when that has ended")
        existed = await asyncio.to_thread(remove_from_spool, reconciler.spool, run)
        reconciler.requests.requested_runs.discard(run)
        await reconciler.observe(SPOOL)
        if existed:
            log.warning("spool %s: run %s was deleted, as asked", reconciler.spool.root, run)
        async with asyncio.timeout(_FLUSHES):  # because one may still put a manifest
            await reconciler.until(lambda: all(part.checkpoint.run != run for part in reconciler.inventory().busy))
        return {}

    def _worker(self, tier: str) -> TierWorker:
        if tier not in self._reconciler.stores:
            names = ", ".join([SPOOL, *self._reconciler.stores])
            raise ConfigError(f"tier {tier!r}: the daemon has no tier of that name; it has {names}")
        return self._reconciler.workers[tier]

    async def _pause(self, change: Coroutine[Any, Any, None]) -> dict[str, Any]:
        await asyncio.shield(change)  # so that file and memory agree even if the peer disconnects
        self._reconciler.wake()
        until = self._reconciler.pause.until
        log.info("paused: %s", until) if until else log.info("resumed")
        return {"paused": until}

    async def _pin(self, checkpoint: CheckpointId, pinned: bool, note: str) -> dict[str, Any]:
        spool, stores = self._reconciler.spool, self._reconciler.stores.values()
        if pinned:
            await pin(spool, stores, checkpoint, self._reconciler.timings, note=note)
        else:
            await unpin(spool, stores, checkpoint)
        self._reconciler.wake()
        return {}


def _has_newest_in_spool(inventory: Inventory, run: str) -> bool:
    """Whether the spool has all of the newest checkpoint of a run that any place has, or remembers in a head."""
    remembered = newest_recorded(inventory.remembered(run), run)
    last = max((*inventory.copies(run), *([remembered] if remembered else ())), default=None)
    copy = inventory.spool.checkpoints.get(last) if last else None
    return copy is not None and copy.usable


def _log_failed(taking: asyncio.Future[None]) -> None:
    if not taking.cancelled() and (error := taking.exception()):
        log.error("a trainer's tiers are not taken up: %s", error)
