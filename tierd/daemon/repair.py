"""Making copies whole again, and setting aside what no copy can heal.

Law: a copy is set aside only when it, and every copy that could heal it, is proven bad; while a place cannot be asked,
nothing is. What was set aside on one tier and is right in the spool is flushed there anew by the plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tierd.core.errors import CorruptChunk
from tierd.core.ids import PartId
from tierd.core.world import SPOOL
from tierd.daemon.fetch import fetch
from tierd.daemon.journal import Journal
from tierd.daemon.prune import quarantine
from tierd.spool import Spool
from tierd.stores.base import Store


class Repairer:
    """Heals the spool from the tiers."""

    def __init__(self, spool: Spool, stores: Mapping[str, Store], journal: Journal) -> None:
        self._spool, self._stores, self._journal = spool, stores, journal
        self._fetching: dict[PartId, asyncio.Lock] = {}

    async def heal(self, part: PartId) -> tuple[str, ...]:
        """Make the spool's copy of `part` whole; the tiers that chunks came from.

        Raises:
            CorruptChunk: every copy is proven bad; all are set aside.
            StoreUnavailable: a copy that might be good could not be reached; nothing was set aside.
        """
        try:
            async with self._fetching.setdefault(part, asyncio.Lock()):
                fetched = await fetch(self._spool, part, self._stores)
        except CorruptChunk as error:
            self._journal.counters["corruptions"] += 1
            await asyncio.to_thread(self._spool.quarantine, part)
            self._told_aside(SPOOL, part, str(error))
            for name in self._stores:
                await self.set_aside(name, part, str(error))
            raise
        for name, reason in fetched.defects.items():
            self._journal.counters["corruptions"] += 1
            self._journal.tell("corrupt", name, part, f"it will be flushed again: {reason}")
            await quarantine(self._stores[name], part)
        if fetched.chunks:
            self._journal.counters["healed_chunks"] += fetched.chunks
            self._journal.tell("healed", SPOOL, part, f"{fetched.chunks} chunks from {', '.join(fetched.tiers)}")
        return fetched.tiers

    async def set_aside(self, tier: str, part: PartId, reason: str) -> None:
        """Quarantine a tier's copy, if it has one."""
        if await quarantine(self._stores[tier], part):
            self._told_aside(tier, part, reason)

    def _told_aside(self, place: str, part: PartId, reason: str) -> None:
        self._journal.counters["quarantined"] += 1
        self._journal.tell("quarantined", place, part, reason)
