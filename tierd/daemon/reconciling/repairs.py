"""Repair and fetch copies, for the plan and for clients, and judge quarantined copies before a prune deletes them.

Invariant: no quarantined copy is deleted before its bytes were proven corrupt once more, after its quarantine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tierd.core.errors import CorruptChunk, DeleteRefused, FormatTooNew, ObjectNotFound, TierdError
from tierd.core.ids import PartId
from tierd.core.planning.place import SPOOL, Place, Prune
from tierd.daemon.concurrency import thread_uncancelled
from tierd.daemon.reconciling.reconciler_context import LiveInventory
from tierd.daemon.reconciling.tier_worker import TierWorker
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.tiers.tier_operations import TierOperations
from tierd.daemon.tiers.tier_probes import QuarantinedCopy
from tierd.daemon.transfer.download import ChunkRuns, Progress
from tierd.daemon.transfer.tier_fetch import FetchResult
from tierd.events.journal import Journal
from tierd.events.save_events import SaveEvents
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

REFUSED_S = 3600.0  # until a quarantine is tried again on a tier that refuses deletions, or is full
_VERIFYING_S = 10.0  # for which copies are read in a row, because flushes to their tier wait meanwhile


@dataclass(eq=False)
class Repairs:
    live: LiveInventory
    workers: Mapping[str, TierWorker]
    repairer: Repairer
    save_events: SaveEvents

    async def repair(self, part: PartId, tier: str, *, counted: bool = False) -> None:
        """Repair a part's copy in a place; a copy that cannot be repaired yet is put off.

        Args:
            counted: the caller has counted the corruption already.

        Raises:
            TierdError: the spool's copy cannot be repaired yet.
        """
        try:
            if tier == SPOOL:
                await self.fetch(part, counted=counted)
            else:
                await self.repairer.rebuild(tier, part, "its manifest is corrupt")
        except (CorruptChunk, ObjectNotFound):
            pass  # reported and quarantined by `fetch`; or deleted meanwhile
        except TierdError as error:
            # Put the part off so that the worker acts on others first.
            if isinstance(error, DeleteRefused):
                self.workers[tier].defer(part, REFUSED_S)
            else:
                self.workers[tier].defer_stuck(part)
            if tier == SPOOL:
                raise
            log.warning("%s: %s cannot be repaired yet: %s", tier, part, error)  # the other tier's worker backs off

    async def unquarantine(self, name: str) -> bool:
        """Move a part of the spool out of quarantine if it proves right, because it is about to be deleted.

        Args:
            name: the name of the object to delete (`Spool.discard`); nothing is done unless it is a quarantined part.

        Raises:
            OSError, TierdError: nothing is known about its bytes, so it must not be deleted.
        """
        room, *pieces = name.split("/")
        part = PartId.parse(*pieces) if room == "quarantine" and len(pieces) == 3 else None
        if part is None or not await thread_uncancelled(self.live.spool.unquarantine, part):
            return False
        self.repairer.journal.record_release(SPOOL, part)
        self.live.invalidate(part.checkpoint)
        return True

    async def fetch(self, part: PartId, *, counted: bool = False, chunk_runs: ChunkRuns | None = None) -> FetchResult:
        """Repair the spool's copy of `part`, or fetch some of it, by `Repairer`; then observe the spool."""
        self.save_events.expect_fetch(part)
        try:
            return await self.repairer.repair_spool(part, counted=counted, chunk_runs=chunk_runs)
        except ObjectNotFound:
            self.live.tiers.observed.list_all()
            raise
        finally:
            self.live.invalidate(part.checkpoint)  # its manifest may have been replaced
            # A restore fetches several times; if that changes the spool, its observation wakes the tiers' workers.
            self.workers[SPOOL].wake.set()

    @property
    def running_fetches(self) -> Mapping[PartId, Progress]:
        """By part, the progress of repairs and fetches that run now."""
        return self.repairer.running_fetches

    def hold(self, part: PartId) -> None:
        """Keep all parts of the part's checkpoint in the spool until `release`, for a restore from the part."""
        self.live.requests.held_checkpoints[part.checkpoint] += 1
        self.repairer.hold(part)

    def release(self, part: PartId) -> None:
        """End a `hold`."""
        self.live.requests.held_checkpoints -= Counter([part.checkpoint])
        self.repairer.release(part)


@dataclass(eq=False)
class QuarantineReview:
    """The quarantined copies on tiers that are being verified once more."""

    tiers: TierOperations
    stores: Mapping[str, Store]
    workers: Mapping[str, TierWorker]
    journal: Journal
    _copies: dict[tuple[str, PartId], QuarantinedCopy] = field(default_factory=dict)

    async def proven_corrupt(self, prunes: Sequence[Prune], place: Place | None) -> list[Prune]:
        """Return the prunes of a tier that delete no quarantined copy, or only such as were proven corrupt once more.

        If a copy proves right, it is used again and no prune is returned, because the plan did not count it. A prune
        whose copies were not all read yet is due again, and then goes on reading.

        Raises:
            TierdError, OSError: a copy could not be judged. Its checkpoint was put off, so that others go first.
        """
        if place is None or not place.quarantined or not prunes:
            return list(prunes)
        quarantined = [part for part in place.quarantined if not place.has(part)]
        tier, ends_s, going = prunes[0].tier, time.monotonic() + _VERIFYING_S, list[Prune]()
        self._copies = {
            key: copy for key, copy in self._copies.items() if key[0] != tier or key[1] in place.quarantined
        }
        for prune in prunes:
            own_parts = [part for part in quarantined if part.checkpoint == prune.checkpoint]
            verdict = await self._verify_quarantined(prune, own_parts, ends_s)
            if verdict is True:
                return []
            if verdict is False:
                going.append(prune)
        return going

    async def _verify_quarantined(self, prune: Prune, parts: Iterable[PartId], ends_s: float) -> bool | None:
        """Verify a checkpoint's quarantined parts. Returns whether one is used again; None if that is not known yet."""
        tier = prune.tier
        worker, released = self.workers[tier], False
        for part in parts:
            store, who, timings = self.stores[tier], self.tiers.who, self.tiers.timings
            copy = self._copies.setdefault((tier, part), QuarantinedCopy(store, part, who, timings))
            try:
                verdict = await copy.release(ends_s)
            except FormatTooNew as error:  # a newer tierd, or one with the key, can judge it
                log.warning("%s: %s is kept, because its quarantined copy cannot be read: %s", tier, part, error)
                worker.defer(prune.checkpoint)
                return None
            except (TierdError, OSError):
                worker.defer_stuck(prune.checkpoint)
                raise
            if verdict is None:
                return released or None
            if verdict:
                self.journal.record_release(tier, part)
                self.tiers.observed.invalidate(tier)
                released = True
        return released
