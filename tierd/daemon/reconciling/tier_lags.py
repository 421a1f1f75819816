"""Whether the tiers are behind each run, for reports alone: a tier that does not answer counts as last observed."""

from __future__ import annotations

import time
from dataclasses import replace

from tierd.core.planning.flush_lag import FlushLag, flush_lags
from tierd.core.planning.place import Place
from tierd.core.planning.plan import Planner
from tierd.daemon.reconciling.flusher import Backlog
from tierd.daemon.reconciling.reconciler_context import LiveInventory
from tierd.events.save_history import SaveHistory


class TierLags:
    """Judges the runs of one configuration."""

    def __init__(self, live: LiveInventory, backlog: Backlog, saves: SaveHistory) -> None:
        self._live, self._backlog, self._saves = live, backlog, saves
        self._planner = Planner()  # its cached plans have silent tiers as last observed

    def judge(self) -> tuple[FlushLag, ...]:
        """Return for each run how far the tiers are behind."""
        inventory, last_known = self._live.inventory(), self._live.tiers.observed.last_known
        silent = [name for name, place in inventory.tiers.items() if place is None]
        if silent:
            tiers = {name: place or last_known.get(name, Place()) for name, place in inventory.tiers.items()}
            inventory = replace(inventory, tiers=tiers)
            plan = self._planner.flushes(inventory, self._live.config)
            planned = frozenset((flush.part, flush.tier) for flush in plan)
        else:
            planned = self._backlog.flushes(inventory)
            self._planner.adopt(self._live.planner)
        unknown = [name for name in silent if name not in last_known]
        return flush_lags(inventory, planned, unknown, self._saves.times_of, time.time())
