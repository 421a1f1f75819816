"""What the parts of the reconciler share under one configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tierd.core.config import Config
from tierd.core.planning.plan import Planner
from tierd.daemon.pause import TierPause
from tierd.daemon.reconciling.backfill import Backfill
from tierd.daemon.reconciling.live_inventory import LiveInventory
from tierd.daemon.reconciling.phase import RunMode
from tierd.daemon.reconciling.requests import ClientRequests
from tierd.daemon.scrub.scrubber import Scrubber
from tierd.daemon.tier_worker import TierWorker
from tierd.daemon.tiers.tiers import Tiers
from tierd.daemon.timings import DaemonTimings
from tierd.events.journal import Journal
from tierd.events.save_events import SaveEvents
from tierd.spool.spool import Spool
from tierd.stores.base import Store


@dataclass(frozen=True)
class ReconcilerContext:
    """The configuration, what was opened and made for it, and what outlives it.

    Attributes:
        stores: tier name -> open store, in order of preference.
        workers: by place, the state of its worker.
        live: the live inventory.
        backfill: the runs that are observed in order to fill tiers with them.
        requests: the requests of clients.
        wake: makes every worker observe its place again soon.
    """

    config: Config
    spool: Spool
    stores: Mapping[str, Store]
    tiers: Tiers
    scrubber: Scrubber
    workers: Mapping[str, TierWorker]
    live: LiveInventory
    backfill: Backfill
    requests: ClientRequests
    planner: Planner
    journal: Journal
    save_events: SaveEvents
    pause: TierPause
    phase: RunMode
    wake: Callable[[], None]
    timings: DaemonTimings
