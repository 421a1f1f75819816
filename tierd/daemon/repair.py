"""Making copies whole again, and setting aside what no copy can heal.

Law: a copy is set aside only when it, and every copy that could heal it, is proven bad; while a place cannot be asked,
nothing is. What was set aside on one tier and is right in the spool is flushed there anew by the plan.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress

from tierd.core.errors import CorruptChunk, DeleteRefused, ManifestError, ObjectNotFound, StoreUnavailable, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import Manifest
from tierd.core.world import SPOOL
from tierd.daemon.budget import Budget
from tierd.daemon.download import Progress, Wanted
from tierd.daemon.fetch import Fetched, Partial, fetch
from tierd.daemon.journal import Journal
from tierd.daemon.mend import Mender, Where
from tierd.daemon.pause import Turn, at_once
from tierd.daemon.prune import quarantine
from tierd.spool import Spool
from tierd.stores.base import Store


class Repairer:
    """Heals the spool from the tiers, and each tier from the spool and the others."""

    def __init__(self, spool: Spool, stores: Mapping[str, Store], journal: Journal, budget: Budget) -> None:
        self._spool, self._stores, self._journal, self._budget = spool, stores, journal, budget
        self._turns: defaultdict[PartId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.fetching: dict[PartId, Progress] = {}  # what is being made whole now
        self.loose: set[str] = set()  # names of partials that were begun for some chunks: nobody makes them whole
        self._partials: dict[PartId, Partial] = {}
        self._readers: Counter[PartId] = Counter()

    def use(self, stores: Mapping[str, Store]) -> None:
        """Work with other stores from now on; what is under way ends with those that it began with."""
        self._stores = stores

    def hold(self, part: PartId) -> None:
        """Somebody reads what is brought of `part`: it stays until `release`."""
        self._readers[part] += 1

    def release(self, part: PartId) -> None:
        self._readers -= Counter([part])
        if not self._turns[part].locked():  # else whoever has the turn does it
            self._let_go(part)

    def _let_go(self, part: PartId) -> None:
        if not self._readers[part] and part in self._partials:
            self._partials.pop(part).leave()

    async def heal(self, part: PartId, *, counted: bool = False, wanted: Wanted | None = None) -> tuple[str, ...]:
        """Make the spool's copy of `part` whole, or bring what is `wanted` of it; the tiers that chunks came from.

        Args:
            counted: that it is corrupt was counted by whoever found out.
            wanted: as for `fetch`.

        Raises:
            CorruptChunk: every copy is proven bad; all are set aside.
            ObjectNotFound: no place has a copy, or none any more.
            StoreUnavailable: a copy that might be good could not be reached; nothing was set aside.
        """
        stores = self._stores
        try:
            fetched = await self._fetch(part, wanted, stores)
        except CorruptChunk as error:
            if stores is not self._stores:
                raise StoreUnavailable(f"{part}: the tiers changed while it was fetched: {error}") from error
            if await self._is_gone(part):
                raise ObjectNotFound(f"{part} was pruned while it was fetched") from error
            self._journal.counters["corruptions"] += not counted
            await asyncio.to_thread(self._spool.quarantine, part)
            self._told_aside(SPOOL, part, str(error))
            for name in self._stores:
                with suppress(DeleteRefused):  # whoever meets it there finds it corrupt again
                    await self.set_aside(name, part, str(error))
            raise
        # A copy is proven bad by one that was verified whole; of a few chunks' fetch, the liar may be the other.
        for name, reason in fetched.defects.items() if wanted is None else ():
            self._journal.counters["corruptions"] += 1
            self._journal.tell("corrupt", name, part, f"it will be flushed again: {reason}")
            with suppress(DeleteRefused):
                await quarantine(stores[name], part)
        if fetched.chunks:
            self._journal.counters["healed_chunks"] += fetched.chunks
            self._journal.tell(
                "healed", SPOOL, part, f"{fetched.chunks} chunks from {', '.join(fetched.tiers)}", chunks=fetched.chunks
            )
        return fetched.tiers

    async def _is_gone(self, part: PartId) -> bool:
        """Whether no place has a manifest of it, right or wrong: what then lacks was deleted, and is not corrupt."""
        if await asyncio.to_thread(self._spool.has, part):
            return False
        for store in self._stores.values():
            try:
                await store.get(part.manifest_key)
            except ObjectNotFound:
                continue
            except TierdError:
                pass
            return False
        return True

    async def _fetch(self, part: PartId, wanted: Wanted | None, stores: Mapping[str, Store]) -> Fetched:
        async with self._turns[part]:
            progress = self.fetching[part] = Progress()
            partial = self._partials.setdefault(part, Partial(self._spool, part))
            if wanted is None:
                self.loose.discard(partial.path.name)
            elif not partial.path.exists() and not self._spool.has(part):
                self.loose.add(partial.path.name)
            try:
                return await fetch(self._spool, part, stores, self._budget, progress, wanted, partial)
            finally:
                del self.fetching[part]
                self._let_go(part)

    async def repair(
        self, tier: str, part: PartId, manifest: Manifest, bad: Iterable[Where], turn: Turn = at_once
    ) -> Mender:
        """Put right what is proven bad of a tier's copy; how that went. What is lost for good sets the copy aside.

        Args:
            turn: awaited before each chunk.

        Raises:
            StoreUnavailable, StoreRefused: some place could not be asked; nothing was set aside.
        """
        mender = Mender(self._spool, self._stores, tier, part, self._budget, turn)
        try:
            await mender.mend(manifest, bad)
        finally:
            self._told_mended(tier, part, mender, "")
        if mender.lost:
            await self.set_aside(tier, part, mender.lost[0])
        return mender

    async def rebuild(self, tier: str, part: PartId, reason: str, turn: Turn = at_once) -> bool:
        """Put a tier's manifest right, which is proven bad, and what it should name; whether that could be. If not, it
        is set aside; so it is if the spool has the part, which is then flushed anew. Raises as `repair`."""
        silent: OSError | None = None  # a disk that does not answer proves nothing
        try:
            await asyncio.to_thread(self._spool.manifest, part)
            await quarantine(self._stores[tier], part)
            return False
        except OSError as error:
            silent = error
        except (ObjectNotFound, ManifestError):
            pass
        mender = Mender(self._spool, self._stores, tier, part, self._budget, turn)
        try:
            await mender.rebuild()
            self._told_mended(tier, part, mender, "its manifest, after another tier's; ")
        except CorruptChunk as error:
            if silent:
                raise StoreUnavailable(f"{SPOOL}: {silent}; {error}") from error
            mender.lost.append(str(error))
        if mender.lost:
            await self.set_aside(tier, part, f"{reason}; {mender.lost[0]}")
        return not mender.lost

    async def set_aside(self, tier: str, part: PartId, reason: str) -> None:
        """Quarantine a tier's copy, if it has one."""
        if await quarantine(self._stores[tier], part):
            self._told_aside(tier, part, reason)

    def _told_aside(self, place: str, part: PartId, reason: str) -> None:
        self._journal.counters["quarantined"] += 1
        self._journal.tell("quarantined", place, part, reason)

    def _told_mended(self, tier: str, part: PartId, mender: Mender, also: str) -> None:
        self._journal.counters["repaired_chunks"] += mender.mended
        if mender.mended or also:
            sources = f" from {', '.join(sorted(mender.sources))}" if mender.mended else ""
            self._journal.tell("repaired", tier, part, f"{also}{mender.mended} chunks{sources}", chunks=mender.mended)
