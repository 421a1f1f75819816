"""Repair copies, and quarantine copies that no other copy can repair.

Invariant: a copy is quarantined only if it, and every copy that could repair it, is proven bad. While a place cannot be
asked, nothing is quarantined. A copy that is quarantined on a tier and right in the spool is flushed again by the plan.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from weakref import WeakValueDictionary

from tierd.core.errors import CorruptChunk, DeleteRefused, ManifestError, ObjectNotFound, StoreUnavailable, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import ChunkPlace, Manifest
from tierd.core.planning.place import SPOOL
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.scrub.tier_repair import TierRepairer
from tierd.daemon.tiers.tier_objects import reread_manifest
from tierd.daemon.tiers.tier_pauses import Pause, no_pause
from tierd.daemon.tiers.tier_prune import quarantine
from tierd.daemon.transfer.download import ChunkRuns, Progress
from tierd.daemon.transfer.tier_fetch import FetchResult, PartialFetch, fetch
from tierd.events.journal import Journal
from tierd.spool.spool import Spool
from tierd.stores.base import Store


class Repairer:
    """Repairs the spool from the tiers, and each tier from the spool and the other tiers."""

    def __init__(self, spool: Spool, stores: Mapping[str, Store], journal: Journal, budget: MemoryBudget) -> None:
        self.spool, self.stores, self.journal, self.budget = spool, stores, journal, budget
        # Weak, because a daemon meets many parts. The fetches that hold a lock or wait for it keep the lock.
        self._locks: WeakValueDictionary[PartId, asyncio.Lock] = WeakValueDictionary()
        self.running_fetches: dict[PartId, Progress] = {}  # parts that are fetched now
        self.partial_stages: set[str] = set()  # names of stages that were begun for some chunks only
        self._partials: dict[PartId, PartialFetch] = {}
        self._readers: Counter[PartId] = Counter()

    def use_stores(self, stores: Mapping[str, Store]) -> None:
        """Use other stores from now on. Work that runs already ends with its own stores."""
        self.stores = stores

    def hold(self, part: PartId) -> None:
        """Register a reader of fetched chunks of `part`. The chunks are kept until `release`."""
        self._readers[part] += 1

    def release(self, part: PartId) -> None:
        self._readers -= Counter([part])
        lock = self._locks.get(part)
        if lock is None or not lock.locked():  # otherwise the running fetch does it at its end
            self._let_go(part)

    def _let_go(self, part: PartId) -> None:
        if not self._readers[part] and part in self._partials:
            self._partials.pop(part).leave()

    async def repair_spool(
        self, part: PartId, *, counted: bool = False, chunk_runs: ChunkRuns | None = None
    ) -> FetchResult:
        """Make the spool's copy of `part` whole, or fetch the chunks in `chunk_runs`.

        Args:
            counted: the caller has counted the corruption already.
            chunk_runs: as for `fetch`.

        Raises:
            CorruptChunk: every copy is proven bad; those that no node has replaced since are quarantined.
            ObjectNotFound: no place has a copy, or none any more.
            StoreUnavailable: a copy that might be good could not be reached; nothing was quarantined.
        """
        stores, progress = self.stores, Progress()
        try:
            fetched = await self._fetch(part, chunk_runs, stores, progress)
        except CorruptChunk as error:
            if stores is not self.stores:
                raise StoreUnavailable(f"{part}: the tiers changed while it was fetched: {error}") from error
            if await self._is_pruned(part):
                raise ObjectNotFound(f"{part} was pruned while it was fetched") from error
            self.journal.counters["corruptions"] += not counted
            await asyncio.to_thread(self.spool.quarantine, part)
            self._report_quarantined(SPOOL, part, str(error))
            for name, store in stores.items():
                # If it is refused, a later reader will find the copy on that tier corrupt again.
                with suppress(DeleteRefused, ObjectNotFound):
                    if await _quarantine_as_read(store, part, progress.manifests.get(name)):
                        self._report_quarantined(name, part, str(error))
            raise
        # Only a copy that was verified whole proves another one bad. After a fetch of some chunks the caller has the
        # bad copies scrubbed.
        for name, reason in fetched.defects.items() if chunk_runs is None else ():
            try:
                with suppress(DeleteRefused):
                    await _quarantine_as_read(stores[name], part, progress.manifests.get(name))
            except ObjectNotFound:  # pruned there while it was fetched, so the missing chunks prove nothing
                continue
            self.journal.counters["corruptions"] += 1
            self.journal.record("corrupt", name, part, f"it will be flushed again: {reason}")
        if fetched.chunks:
            self.journal.counters["healed_chunks"] += fetched.chunks
            why = f"{_count(fetched.chunks)} from {', '.join(fetched.tiers)}"
            self.journal.record("repaired", SPOOL, part, why, chunks=fetched.chunks)
        return fetched

    async def _is_pruned(self, part: PartId) -> bool:
        """Whether no place has a manifest of the part, right or wrong.

        If so, missing chunks were pruned, not corrupted.
        """
        if await asyncio.to_thread(self.spool.has, part):
            return False
        for store in self.stores.values():
            try:
                await store.get(part.manifest_key)
            except ObjectNotFound:
                continue
            except TierdError:
                pass
            return False
        return True

    async def _fetch(
        self, part: PartId, chunk_runs: ChunkRuns | None, stores: Mapping[str, Store], progress: Progress
    ) -> FetchResult:
        lock = self._locks.setdefault(part, asyncio.Lock())
        async with lock:
            self.running_fetches[part] = progress
            partial = self._partials.setdefault(part, PartialFetch(self.spool, part))
            if chunk_runs is None:
                self.partial_stages.discard(partial.path.name)
            elif not partial.path.exists() and not self.spool.has(part):
                self.partial_stages.add(partial.path.name)
            try:
                return await fetch(self.spool, part, stores, self.budget, progress, chunk_runs, partial)
            finally:
                del self.running_fetches[part]
                self._let_go(part)

    async def repair(
        self, tier: str, part: PartId, manifest: Manifest, places: Iterable[ChunkPlace], pause: Pause = no_pause
    ) -> TierRepairer:
        """Repair the chunks of a tier's copy that are proven bad. If a chunk is lost for good, quarantine the copy.

        Raises:
            StoreUnavailable, StoreRefused: a place could not be asked; nothing was quarantined.
        """
        work = TierRepairer(self.spool, self.stores, tier, part, self.budget, pause)
        try:
            await work.repair(manifest, places)
        finally:
            self._report_repaired(tier, part, work, "")
        # The search for a lost chunk may take minutes, and another node may repair the chunk meanwhile.
        has_lost_chunks = work.lost_reasons and not await work.are_repaired()
        if has_lost_chunks and await _quarantine_as_read(self.stores[tier], part, manifest):
            self._report_quarantined(tier, part, work.lost_reasons[0])
        return work

    async def rebuild(self, tier: str, part: PartId, reason: str, pause: Pause = no_pause) -> bool:
        """Repair a tier's manifest that is proven bad, and the chunks that it should name.

        If the spool has the part, the bad manifest is quarantined instead, and the plan flushes the part again. If the
        manifest cannot be repaired, the copy is quarantined. Nothing is done if another node has replaced it meanwhile.

        Returns:
            Whether the tier's copy was repaired.

        Raises:
            ObjectNotFound: the copy was deleted meanwhile.
            StoreUnavailable, StoreRefused: as `repair`.
        """
        store, local = self.stores[tier], None
        silent: OSError | None = None  # a disk error proves nothing about the bytes
        try:
            local = await asyncio.to_thread(self.spool.manifest, part)
        except OSError as error:
            silent = error
        except (ObjectNotFound, ManifestError):
            pass
        judged, now = await reread_manifest(store, part)
        if now is not None and (local is None or now.same_content(local)):
            return False  # another node has replaced it; a later read tells whether the copy is right
        if local is not None:
            await quarantine(store, part, judged)
            return False
        work = TierRepairer(self.spool, self.stores, tier, part, self.budget, pause)
        try:
            await work.rebuild()
            self._report_repaired(tier, part, work, "its manifest, after another tier's; ")
        except CorruptChunk as error:
            if silent:
                raise StoreUnavailable(f"{SPOOL}: {silent}; {error}") from error
            work.lost_reasons.append(str(error))
        if work.lost_reasons:
            await self.quarantine(tier, part, f"{reason}; {work.lost_reasons[0]}", judged)
        return not work.lost_reasons

    async def quarantine(self, tier: str, part: PartId, reason: str, judged: bytes | None = None) -> None:
        """Quarantine a tier's copy, if it has one; with `judged`, only if its manifest is still these bytes."""
        if await quarantine(self.stores[tier], part, judged):
            self._report_quarantined(tier, part, reason)

    def _report_quarantined(self, place: str, part: PartId, reason: str) -> None:
        self.journal.counters["quarantined"] += 1
        self.journal.quarantined[place] += 1
        self.journal.record("quarantined", place, part, reason)

    def _report_repaired(self, tier: str, part: PartId, work: TierRepairer, also: str) -> None:
        self.journal.counters["repaired_chunks"] += work.repaired
        if work.repaired or also:
            sources = f" from {', '.join(sorted(work.sources))}" if work.repaired else ""
            self.journal.record("repaired", tier, part, f"{also}{_count(work.repaired)}{sources}", chunks=work.repaired)


async def _quarantine_as_read(store: Store, part: PartId, read: Manifest | None) -> bool:
    """Quarantine a tier's copy, unless another node has replaced its manifest since it was read; None if it was not
    readable. Return whether this call moved it. Raises as `quarantine`, and ObjectNotFound if there is none."""
    judged, now = await reread_manifest(store, part)
    return now == read and await quarantine(store, part, judged)


def _count(chunks: int) -> str:
    return "1 chunk" if chunks == 1 else f"{chunks} chunks"
