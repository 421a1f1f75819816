"""The records of runs that this node saves: policies and heads on the tiers, and heads in the spool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from tierd.core.errors import SpoolUnusable, StoreRefused, StoreUnavailable
from tierd.daemon.reconciling.setup import ReconcilerContext
from tierd.daemon.tiers.heads import remembering
from tierd.spool.records import remember

log = logging.getLogger("tierd.daemon")


class RunRecords:
    """Write the records of runs. A daemon that drains records no policies."""

    def __init__(self, setup: ReconcilerContext) -> None:
        self._setup = setup
        self._remembering = asyncio.Lock()  # each tier's worker adds to what the others wrote

    async def bring_up_to_date(self, tier: str) -> None:
        """Remove this node's leftovers from a tier, and record there the policies and heads of the runs that it saves.

        Of a run that was only restored here, or with which a tier is filled, this daemon deletes nothing.
        """
        setup, live, tiers = self._setup, self._setup.live, self._setup.tiers
        saved = sorted((live.runs() - live.place.restored) | live.place.launches.keys())
        await tiers.tidy(tier, saved)
        for run in saved:  # before this node's own heads adopt the tier's state
            setup.save_events.rolled_back(tier, run, await tiers.rolled_back(tier, run, live.place))
        if not setup.pause.paused:
            await self.write_heads(tier, saved)
            await self._remember(tier, saved)
            if not setup.phase.draining:
                await tiers.record(tier, live.inventory(), setup.config, [*saved, *sorted(setup.backfill.runs)])

    async def write_heads(self, tier: str, runs: Iterable[str]) -> None:
        """Write the heads of `runs` to a tier, or leave it to the next observation if the tier refuses.

        The error is suppressed because a full tier accepts no objects, and this failure must not delay the prunes that
        empty it.
        """
        with suppress(StoreUnavailable, StoreRefused):
            await self._setup.tiers.write_heads(tier, self._setup.live.inventory(), runs)

    async def _remember(self, tier: str, runs: Iterable[str]) -> None:
        """Record in the spool the launches of `runs` that any place shows, and the last heads on `tier`."""
        live, urls = (
            self._setup.live,
            {tier_config.name: tier_config.url for tier_config in self._setup.config.tier if tier_config.name == tier},
        )
        async with self._remembering:
            inventory = live.inventory()
            for head in [head for run in runs if (head := remembering(inventory, run, urls))]:
                try:
                    await asyncio.to_thread(remember, self._setup.spool.control, head)
                except (
                    OSError,
                    SpoolUnusable,
                ) as error:  # not raised: it would delay the flushes that empty a full disk
                    log.warning("local: %s: where its launches came from is not remembered yet: %s", head.run, error)
                    return
                live.place = live.place.with_heads(head.run, (head,))
