"""Carry out a flush of the plan: send a part to a tier, from the spool or from another tier, and report it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, TierdError
from tierd.core.event_kinds import metrics_of
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.flush_candidates import is_contended
from tierd.core.planning.inventory import Sent
from tierd.core.planning.order import leads
from tierd.core.planning.place import SPOOL
from tierd.daemon.reconciling.backlog import Backlog
from tierd.daemon.reconciling.records import RunRecords
from tierd.daemon.reconciling.repairs import Repairs
from tierd.daemon.reconciling.setup import ReconcilerContext
from tierd.daemon.transfer.flush_pacing import Spread

log = logging.getLogger("tierd.daemon")
S = TypeVar("S")


class Flusher:
    """Carry out flushes.

    Args:
        setup: what the parts of the reconciler share.
        backlog: tells whether a tier lacks other parts, too.
        records: writes a run's head after each flush.
        repairs: repairs the spool's copy of a part that proved corrupt.
    """

    def __init__(self, setup: ReconcilerContext, backlog: Backlog, records: RunRecords, repairs: Repairs) -> None:
        self._setup, self._backlog, self._records, self._repairs = setup, backlog, records, repairs
        self._sending: dict[str, tuple[PartId, asyncio.Future[Any]]] = {}  # by tier

    async def flush(self, part: PartId, tier: str, *, relayed: bool = False) -> None:
        """Send a part to a tier; a part that cannot be sent is put off, repaired or left to the next plan.

        Raises:
            OSError, StoreUnavailable, StoreRefused: the spool's disk or the tier failed.
        """
        setup, live, tiers, journal = self._setup, self._setup.live, self._setup.tiers, self._setup.journal
        live.busy[part] += 1
        started_s, place = time.monotonic(), tiers.observed.places[tier]
        aloud = is_contended(live.inventory(), tier, part)
        flushes = tiers.flushes
        send = flushes.relay if relayed else flushes.flush_aloud if aloud else flushes.flush
        # Before the flush, because newer checkpoints appear while the part is sent.
        leading = place is None or leads(part.checkpoint, live.place, place)
        if relayed:
            setup.save_events.relayed(tier, part)
        try:
            flushed = await self._send(tier, part, send(part, tier, self._spread(part, tier)))
            if flushed is None:
                return
        except ObjectNotFound:
            if relayed:
                setup.workers[tier].put_off(part)  # until the other tiers were observed again
            else:  # removed from the spool since the observation, perhaps by hand, which a sparing one does not see
                live.doubt(part.checkpoint)
            return
        except (CorruptChunk, ManifestError) as error:
            if relayed:
                self._cannot_relay(part, tier, error)
                return
            journal.counters["corruptions"] += 1
            journal.record("corrupt", SPOOL, part, str(error))
            await self._repairs.repair(part, SPOOL, counted=True)
            return
        except (OSError, StoreRefused):  # this part's disk fails or the tier refuses it: send others first
            setup.workers[tier].put_off_stuck(part)
            raise
        finally:
            live.busy -= Counter([part])
        setup.scrubber.verified(tier, part)
        journal.counters["flushed"] += 1
        journal.counters["flushed_raw_bytes"] += flushed.raw
        journal.counters["flushed_sent_bytes"] += flushed.sent
        journal.counters["flushed_shared_bytes"] += flushed.shared
        self._note_sent(tier, part.checkpoint, leads=leading)
        tiers.observed.put(tier, part, flushed.facts)
        how = ", from another tier" if relayed else ""
        why = f"verified, {flushed.raw} bytes as {flushed.stored}, {flushed.sent} of them sent{how}"
        sizes = {"raw_bytes": flushed.raw, "stored_bytes": flushed.stored, "sent_bytes": flushed.sent}
        fields: dict[str, Any] = {**sizes, "metrics": metrics_of(flushed.facts.metrics)}
        journal.record("flushed", tier, part, why, **fields, seconds=round(time.monotonic() - started_s, 3))
        setup.save_events.durable(tier, live.place, tiers.observed.places)
        await self._records.write_heads(tier, [part.checkpoint.run])

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

    def give_way(self) -> None:
        """If the newest are sent first: end each flush of a checkpoint older than its run's newest in the spool."""
        if not self._setup.phase.newest_first:
            return
        for tier, (part, task) in self._sending.items():
            run = part.checkpoint.run
            newest, tier_place = self._setup.live.place.run(run).newest, self._setup.tiers.observed.places[tier]
            waits = newest is not None and (tier_place is None or newest not in tier_place.run(run).whole)
            if newest is not None and waits and part.checkpoint < newest:
                task.cancel()

    def _spread(self, part: PartId, tier: str) -> Spread:
        """Return the pauses of a flush: none if the tier lacks other parts too, because the tier would fall behind."""
        live, requests = self._setup.live, self._setup.requests

        def hurries() -> bool:
            newer = any(copy.id > part.checkpoint for copy in live.place.copies(part.checkpoint.run))
            awaited = requests.awaited[part] or part.checkpoint in requests.needed
            ends = self._setup.phase.hurries or not requests.attended()
            return newer or bool(awaited) or ends or live.is_low

        lacking = sum(name == tier for _, name in self._backlog.flushes(live.inventory()))
        return Spread(live.cadence.spread_s(part.checkpoint.run) if lacking <= 1 else 0.0, hurries)

    def _note_sent(self, tier: str, checkpoint: CheckpointId, *, leads: bool) -> None:
        live = self._setup.live
        live.full.discard(tier)
        last = live.sent.get(tier)
        if last is None or last.last != checkpoint:
            live.sent[tier] = Sent(checkpoint, 0 if leads or last is None else last.others + 1)

    def _cannot_relay(self, part: PartId, tier: str, error: TierdError) -> None:
        """Put a relay off because no other tier has an intact copy of the whole part, and have those copies scrubbed.

        The scrub finds out which copies are corrupt, and repairs them.
        """
        self._setup.workers[tier].put_off(part)
        log.warning("%s: %s cannot be copied from another tier yet: %s", tier, part, error)
        for name in self._setup.stores:
            if name != tier and self._setup.tiers.observed.has(part, name):
                self._setup.scrubber.suspect(name, part)
