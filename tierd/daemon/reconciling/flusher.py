"""Flushes of the plan: the backlog of what tiers lack, each part's sending, and the records of the runs beside them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tierd.core.errors import (
    CorruptChunk,
    ManifestError,
    ObjectNotFound,
    SpoolUnusable,
    StoreRefused,
    StoreUnavailable,
    TierdError,
)
from tierd.core.event_kinds import metrics_of
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.flush_order import is_contended, is_newest_of_run, pending_run_parts
from tierd.core.planning.inventory import Inventory, LastSent
from tierd.core.planning.place import SPOOL, Place
from tierd.core.planning.plan import flushes
from tierd.core.planning.unflushed_parts import (
    TierReadiness,
    UnflushedPart,
    UnflushedParts,
    describe_unflushed,
    list_unflushed,
)
from tierd.core.units import format_size
from tierd.daemon.reconciling.reconciler_context import LiveInventory
from tierd.daemon.reconciling.repairs import Repairs
from tierd.daemon.reconciling.tier_worker import TierWorker
from tierd.daemon.scrub.scrubber import Scrubber
from tierd.daemon.tiers.tier_operations import TierOperations
from tierd.daemon.tiers.tier_pauses import FlushSpread
from tierd.daemon.tiers.tier_run_records import due_spool_head
from tierd.daemon.transfer.tier_flushes import TierFlushes
from tierd.events.journal import Journal
from tierd.events.save_events import SaveEvents
from tierd.spool.run_records import record_head

log = logging.getLogger("tierd.daemon")

S = TypeVar("S")


class Backlog:
    """What is left to flush and to prune under one configuration, as last observed."""

    def __init__(
        self, live: LiveInventory, tiers: TierOperations, flushes: TierFlushes, workers: Mapping[str, TierWorker]
    ) -> None:
        self._live, self._tiers, self._flushes, self._workers = live, tiers, flushes, workers
        # Caches, each with its inventory.
        self._planned: tuple[Inventory | None, frozenset[tuple[PartId, str]]] = None, frozenset()
        self._given_up: tuple[Inventory | None, dict[str, Counter[str]]] = None, {}

    def parts(self) -> set[PartId]:
        """Return the parts that some tier lacks and wants and that this daemon sends to it.

        While a tier does not answer, these are all parts that this daemon would send to it if it were empty.
        """
        return {entry.part for entry in self.remaining()} | set(self._live.busy)

    def remaining(self) -> tuple[UnflushedPart, ...]:
        """Return the parts of `parts`, newest first, each with the tiers that have it and the tiers that lack it."""
        inventory = self._live.inventory()
        unsent = set(self.flushes(inventory))
        if silent := {name for name, place in inventory.tiers.items() if place is None}:
            # Assume that a tier that does not answer is empty, because its contents are unknown.
            empty = replace(inventory, tiers={name: place or Place() for name, place in inventory.tiers.items()})
            sent = flushes(empty, self._live.config, {}, 0.0)
            unsent |= {(flush.part, flush.tier) for flush in sent if flush.tier in silent}
        return list_unflushed(inventory, unsent)

    def summary(self) -> UnflushedParts:
        """Return the parts that are left to flush, and for each tier whether it accepts them."""
        tiers = {}
        for name, place in self._tiers.observed.places.items():
            error = self._workers[name].blocking_error
            why, refused = (str(error), isinstance(error, StoreRefused)) if error else (None, False)
            tiers[name] = TierReadiness(reached=place is not None, error=why, refused=refused)
        moved = Counter[str]()
        for name, _, at in self._flushes.running_flushes():
            moved[name] += at.done
        until = self._live.run_mode.pause.until
        undone = tuple(f"{entry.tier}: {entry}" for entry in self._live.backfill.unsent())
        return UnflushedParts(
            left=self.remaining(), tiers=tiers, paused=until, moved_bytes=dict(moved), left_to_nodes=undone
        )

    def describe(self) -> str:
        """Describe `remaining` in one sentence."""
        silent = [name for name, place in self._tiers.observed.places.items() if place is None]
        return describe_unflushed(self.remaining(), silent)

    def flushes(self, inventory: Inventory) -> frozenset[tuple[PartId, str]]:
        """Return the parts that the plan would send, each with its tier; cached until the inventory changes."""
        if inventory != self._planned[0]:
            sent = self._live.planner.flushes(inventory, self._live.config)
            self._planned = inventory, frozenset((flush.part, flush.tier) for flush in sent)
        return self._planned[1]

    def is_retired(self, part: PartId, tier: str) -> bool:
        """Whether the tier, as last observed, lacks a part and will not get it because no place has or wants it."""
        live = self._live
        if self._tiers.observed.places[tier] is None or live.busy[part]:
            return False
        if live.place.lists(part) and not live.place.has(part):
            return False  # it is first repaired or quarantined
        return (part, tier) not in self.flushes(live.inventory())

    def prunes_by_run(self, tier: str) -> Counter[str]:
        """By run, how many copies retention has given up that are still on the tier."""
        inventory = self._live.inventory()
        if inventory != self._given_up[0]:
            names = self._tiers.observed.places
            counts = {name: Counter(prune.checkpoint.run for prune in self._live.retired(name)) for name in names}
            self._given_up = inventory, counts
        return self._given_up[1].get(tier, Counter())

    def pending_sizes(self, tier: str) -> dict[PartId, int]:
        """Return the parts that this daemon can send and that the tier lacks and wants, each with its size in bytes."""
        live, place = self._live, self._tiers.observed.places[tier]
        inventory = live.inventory()
        parts = {part for run in live.runs() for part in pending_run_parts(live.place, place or Place(), run)}
        if place is not None:
            sent = {part for part, name in self.flushes(inventory) if name == tier}
            parts = (parts & live.busy.keys()) | sent
        return {part: inventory.size_bytes(part) for part in parts}


class RunRecords:
    """Write the records of runs. A daemon that drains records no policies."""

    def __init__(self, live: LiveInventory, tiers: TierOperations, save_events: SaveEvents) -> None:
        self._live, self._tiers, self._save_events = live, tiers, save_events
        self._remembering = asyncio.Lock()  # each tier's worker adds to what the others wrote

    async def bring_up_to_date(self, tier: str) -> None:
        """Remove this node's leftovers from a tier, and record there the policies and heads of the runs that it saves.

        Of a run that was only restored here, or with which a tier is filled, this daemon deletes nothing.
        """
        live, tiers = self._live, self._tiers
        saved = sorted((live.runs() - live.place.restored) | live.place.launches.keys())
        await tiers.sweep_leftovers(tier, saved)
        for run in saved:  # before this node's own heads adopt the tier's state
            self._save_events.report_rollback(tier, run, await tiers.why_rolled_back(tier, run, live.place))
        if not live.run_mode.pause.paused:
            await self.write_heads(tier, saved)
            await self.remember(saved, {tier: live.config.tier_named(tier).url})
            if not live.run_mode.draining:
                await tiers.put_policies(tier, live.inventory(), live.config, [*saved, *sorted(live.backfill.runs)])
                with suppress(StoreUnavailable, StoreRefused):  # as for heads
                    await tiers.write_summaries(tier, live.inventory(), saved)

    async def write_heads(self, tier: str, runs: Iterable[str]) -> None:
        """Write the heads of `runs` to a tier, or leave it to the next observation if the tier refuses.

        The error is suppressed because a full tier accepts no objects, and this failure must not delay the prunes that
        empty it.
        """
        with suppress(StoreUnavailable, StoreRefused):
            await self._tiers.write_heads(tier, self._live.inventory(), runs)

    async def remember(self, runs: Iterable[str], urls: Mapping[str, str]) -> None:
        """Record in the spool the launches of `runs` that any place shows, and the last heads on tiers, by `urls`."""
        live = self._live
        async with self._remembering:
            inventory = live.inventory()
            for head in [head for run in runs if (head := due_spool_head(inventory, run, urls))]:
                try:
                    await asyncio.to_thread(record_head, live.spool.control, head)
                except (OSError, SpoolUnusable) as error:
                    # Not raised, because it would delay the flushes that empty a full disk.
                    log.warning("local: %s: where its launches came from is not remembered yet: %s", head.run, error)
                    return
                live.place = live.place.with_heads(head.run, (head,))


@dataclass(eq=False)
class Flusher:
    live: LiveInventory
    tiers: TierOperations
    flushes: TierFlushes
    workers: Mapping[str, TierWorker]
    scrubber: Scrubber
    journal: Journal
    save_events: SaveEvents
    backlog: Backlog
    records: RunRecords
    repairs: Repairs
    _sending: dict[str, tuple[PartId, asyncio.Future[Any]]] = field(default_factory=dict)  # by tier

    async def flush(self, part: PartId, tier: str, *, relayed: bool = False) -> None:
        """Send a part to a tier; a part that cannot be sent is put off, repaired or left to the next plan.

        Raises:
            OSError, StoreUnavailable, StoreRefused: the spool's disk or the tier failed.
        """
        live, tiers, journal = self.live, self.tiers, self.journal
        live.busy[part] += 1
        started_s, place = time.monotonic(), tiers.observed.places[tier]
        aloud = is_contended(live.inventory(), tier, part)
        flushes = self.flushes
        send = flushes.relay if relayed else flushes.flush_announced if aloud else flushes.flush
        # Before the flush, because newer checkpoints appear while the part is sent.
        leading = place is None or is_newest_of_run(part.checkpoint, live.place, place)
        if relayed:
            self.save_events.expect_relay(tier, part)
        try:
            flushed = await self._send(tier, part, send(part, tier, self._spread(part, tier)))
            if flushed is None:
                return
        except ObjectNotFound:
            if relayed:
                tiers.observed.list_all()
                self.workers[tier].defer(part)  # until the other tiers were observed again
            else:  # removed from the spool since the observation, perhaps by hand, which a sparing one does not see
                live.invalidate(part.checkpoint)
            return
        except (CorruptChunk, ManifestError) as error:
            if relayed:
                self._cannot_relay(part, tier, error)
                return
            journal.counters["corruptions"] += 1
            journal.record("corrupt", SPOOL, part, str(error))
            await self.repairs.repair(part, SPOOL, counted=True)
            return
        except (OSError, StoreRefused):  # this part's disk fails or the tier refuses it: send others first
            self.workers[tier].defer_stuck(part)
            raise
        finally:
            live.busy -= Counter([part])
        self.scrubber.note_verified(tier, part)
        journal.counters["flushed"] += 1
        journal.counters["flushed_raw_bytes"] += flushed.raw
        journal.counters["flushed_sent_bytes"] += flushed.sent
        journal.counters["flushed_shared_bytes"] += flushed.shared
        self._note_sent(tier, part.checkpoint, leads=leading)
        tiers.observed.note_flushed(tier, part, flushed.facts)
        how = ", from another tier" if relayed else ""
        sent = "" if flushed.sent == flushed.stored else f", {format_size(flushed.sent)} of it sent now"
        why = f"verified, {format_size(flushed.raw)} stored as {format_size(flushed.stored)}{sent}{how}"
        sizes = {"raw_bytes": flushed.raw, "stored_bytes": flushed.stored, "sent_bytes": flushed.sent}
        fields: dict[str, Any] = {**sizes, "metrics": metrics_of(flushed.facts.metrics)}
        journal.record("flushed", tier, part, why, **fields, seconds=round(time.monotonic() - started_s, 3))
        self.save_events.report_durable(tier, live.place, tiers.observed.places)
        await self.records.write_heads(tier, [part.checkpoint.run])

    async def _send(self, tier: str, part: PartId, sending: Coroutine[Any, Any, S]) -> S | None:
        """Return the result of `sending`; None if it gave way. The next try does not send again what is on the tier."""
        task = asyncio.ensure_future(sending)
        self._sending[tier] = part, task
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            log.info("%s: %s gives way to a newer checkpoint, because the node ends", tier, part)
            return None
        finally:
            self._sending.pop(tier, None)

    def yield_to_newer(self) -> None:
        """If the newest are sent first: end each flush of a checkpoint older than its run's newest in the spool."""
        if not self.live.run_mode.newest_first:
            return
        for tier, (part, task) in self._sending.items():
            run = part.checkpoint.run
            newest, tier_place = self.live.place.run(run).newest, self.tiers.observed.places[tier]
            waits = newest is not None and (tier_place is None or newest not in tier_place.run(run).usable)
            if newest is not None and waits and part.checkpoint < newest:
                task.cancel()

    def _spread(self, part: PartId, tier: str) -> FlushSpread:
        """Return the pauses of a flush: none if the tier lacks other parts too, because the tier would fall behind."""
        live, requests = self.live, self.live.requests

        def hurries() -> bool:
            newer = any(copy.id > part.checkpoint for copy in live.place.copies(part.checkpoint.run))
            awaited = requests.awaited_parts[part] or part.checkpoint in requests.needed_checkpoints
            ends = live.run_mode.is_hurried or not requests.attended()
            return newer or bool(awaited) or ends or live.is_disk_low

        lacking = sum(name == tier for _, name in self.backlog.flushes(live.inventory()))
        return FlushSpread(live.cadence.spread_s(part.checkpoint.run) if lacking <= 1 else 0.0, hurries)

    def _note_sent(self, tier: str, checkpoint: CheckpointId, *, leads: bool) -> None:
        live = self.live
        live.full_tiers.discard(tier)
        last = live.sent.get(tier)
        if last is None or last.last != checkpoint:
            live.sent[tier] = LastSent(checkpoint, 0 if leads or last is None else last.sent_since + 1)

    def _cannot_relay(self, part: PartId, tier: str, error: TierdError) -> None:
        """Put a relay off because no other tier has an intact copy of the whole part, and have those copies scrubbed.

        The scrub finds out which copies are corrupt, and repairs them.
        """
        self.workers[tier].defer(part)
        log.warning("%s: %s cannot be copied from another tier yet: %s", tier, part, error)
        for name in self.tiers.observed.places:
            if name != tier and self.tiers.observed.has(part, name):
                self.scrubber.suspect(name, part)
