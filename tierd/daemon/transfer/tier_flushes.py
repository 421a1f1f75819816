"""The flushes of a daemon to its tiers, from the spool or from other tiers, and their announcements to other nodes.

Invariant: tiers share the encoding of chunks, and nothing else that one tier could block. So a slow tier delays only
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from tierd.core.config import Config
from tierd.core.errors import FormatTooNew, StoreRefused, TierdError, WrongKey
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.timeline.concurrent_launches import disown_advice
from tierd.daemon.concurrency import FLUSH_BYTES, MemoryBudget
from tierd.daemon.tiers.announcements import announcing, find_senders
from tierd.daemon.tiers.run_overview import check_encryption_key
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.daemon.tiers.tier_observer import find_base
from tierd.daemon.tiers.tier_operations import TierOperations
from tierd.daemon.tiers.tier_pauses import FlushSpread, TierPause
from tierd.daemon.transfer.chunk_source import FlushProgress, ReferenceCopy, TierUploadContext
from tierd.daemon.transfer.flush import FlushResult, flush
from tierd.daemon.transfer.shared_encoding import SharedEncoder, Throughput
from tierd.daemon.transfer.tier_fetch import relay
from tierd.spool.spool import Spool


class TierFlushes:
    """Sends parts to the tiers of a configuration."""

    def __init__(self, config: Config, spool: Spool, tiers: TierOperations, pause: TierPause) -> None:
        self._spool, self._stores, self._observed = spool, tiers.stores, tiers.observed
        self._identity, self._timings = tiers.identity, tiers.timings
        # Tiers and runs that are plain text there, or new on a plain tier.
        self._checked_runs: set[tuple[str, str]] = set()
        self.throughput = Throughput()
        encoding = SharedEncoder(self.throughput)
        self._routes = {
            name: TierUploadContext(
                store,
                name,
                self._identity.id,
                config.tier_named(name).verify == "read",
                # One budget for each tier, because chunks that wait for a slow tier must not take another's memory.
                MemoryBudget(FLUSH_BYTES // len(tiers.stores)),
                encoding,
                pause.wait,
                timings=self._timings,
            )
            for name, store in tiers.stores.items()
        }

    async def flush(self, part: PartId, tier: str, spread: FlushSpread | None = None) -> FlushResult:
        """Flush a part to a tier as `flush.flush` does, using the copies on other tiers and the chunks already there.

        Raises:
            StoreRefused: the part does not fit to the objects on the tier: this node cannot read those, or their
                readers could not read the part.
        """
        await self._check_readable(part, tier)
        twin, (whose, worn_out) = await self._reference_copy(part, tier), await self._base(part, tier)
        return await flush(
            self._spool, part, self._route(tier), twin=twin, base=whose, worn_out=worn_out, spread=spread
        )

    def _route(self, tier: str) -> TierUploadContext:
        return replace(self._routes[tier], who=self._identity.id)

    def running_flushes(self) -> Iterator[tuple[str, PartId, FlushProgress]]:
        """Yield each flush under way: its tier, its part, and how far it is."""
        for tier, route in self._routes.items():
            for part, moved in route.progress_by_part.items():
                yield tier, part, moved

    async def observe_announcements(self, tier: str, run: str) -> None:
        """Ask a tier which checkpoints of a run other nodes announce that they send."""
        senders = await find_senders(self._stores[tier], run, self._identity.id, self._timings)
        self._observed.update(tier, lambda place: replace(place, announced=senders).with_values_of(place))

    async def flush_announced(self, part: PartId, tier: str, spread: FlushSpread | None = None) -> FlushResult:
        """Flush a part, and announce its checkpoint to other nodes meanwhile."""
        async with announcing(self._stores[tier], part.checkpoint, self._identity.id, self._timings):
            return await self.flush(part, tier, spread)

    async def relay(self, part: PartId, tier: str, _: FlushSpread | None = None) -> FlushResult:
        """Copy a part to a tier from the other tiers, as `relay.relay` does."""
        await self._check_readable(part, tier)
        sources = {
            name: store for name, store in self._stores.items() if name != tier and self._observed.has(part, name)
        }
        whose, worn_out = await self._base(part, tier)
        return await relay(sources, part, self._route(tier), base=whose, worn_out=worn_out)

    async def _check_readable(self, part: PartId, tier: str) -> None:
        place = self._observed.places[tier]
        for defective, why in place.defects() if place else ():
            alien = isinstance(why, WrongKey) and defective.checkpoint.run == part.checkpoint.run
            if alien or (isinstance(why, FormatTooNew) and defective == part):
                raise StoreRefused(
                    f"{tier}: {part} is not put beside what cannot be read here: {why}; "
                    f"{disown_advice(defective.checkpoint.run, defective.checkpoint.attempt)}"
                )

        if not self._stores[tier].is_authentic:
            await self._check_plain(part, tier)

    async def _check_plain(self, part: PartId, tier: str) -> None:
        """Raise `StoreRefused` if a run would begin in plain text beside encrypted runs: a `key_file` is missing."""
        place, run = self._observed.places[tier], part.checkpoint.run
        if (tier, run) not in self._checked_runs and not (
            place and any(checkpoint.run == run for checkpoint in place.checkpoints)
        ):
            try:
                await check_encryption_key(self._stores[tier], run)
            except StoreRefused as error:  # also if the tier does not show this node other runs, which proves nothing
                if isinstance(error.__cause__, WrongKey):
                    raise StoreRefused(f"{tier}: {part} is not put there in plain text: {error}") from error
        self._checked_runs.add((tier, run))

    async def _base(self, part: PartId, tier: str) -> tuple[Manifest | None, frozenset[CheckpointId]]:
        place = self._observed.places[tier]
        return (await find_base(self._stores[tier], place, part)) if place else (None, frozenset())

    async def _reference_copy(self, part: PartId, tier: str) -> ReferenceCopy | None:
        """Find another tier that, as last observed, holds the part, because a chunk is the same on every tier."""
        for name, store in self._stores.items():
            if name != tier and self._observed.has(part, name):
                try:
                    async with asyncio.timeout(self._timings.twin_s):
                        return ReferenceCopy(store, await read_manifest(store, part))
                except TimeoutError:
                    # So that not every part waits for it; its own worker observes it again.
                    self._observed.invalidate(name)
                except TierdError:
                    continue
        return None
