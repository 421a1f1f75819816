"""Which runs of the tiers this daemon observes although it never saved them, because a tier has `backfill`.

Such a run is observed until every tier with `backfill` has what it wants of it. The plan decides what that is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping

from tierd.core.config import Config
from tierd.core.errors import TierdError
from tierd.daemon.tiers.observe import TierObserver
from tierd.daemon.tiers.tiers import Tiers
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

_AGAIN_S = 86_400.0  # seconds between two listings of all runs, because a listing asks a request or more for each run
_RETRY_S = 60.0  # seconds until a tier that could not be listed is tried again


class Backfill:
    """The runs to fill tiers with.

    Attributes:
        runs: the runs of which a tier may lack something, without those that the spool has.

    Args:
        config: the configuration.
        stores: tier name -> open store.
        tiers: the tiers, as last observed.
    """

    def __init__(self, config: Config, stores: Mapping[str, Store], tiers: Tiers) -> None:
        self._stores, self._tiers = stores, tiers
        self._wanted = any(tier.backfill for tier in config.tier)
        self._due = 0.0  # monotonic seconds
        self.runs: set[str] = set()

    async def list_runs(self, own: Collection[str]) -> bool:
        """List all runs of all tiers, if that is due; return whether there are others than before.

        A tier that does not answer is listed later.

        Args:
            own: the runs that the spool has, which are observed anyway.
        """
        if not self._wanted or time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + _RETRY_S  # workers of several tiers call this at once
        found, failed = set[str](), False
        for name, store in self._stores.items():
            try:
                found |= await TierObserver(store).runs()
            except TierdError as error:
                failed = True
                log.warning("%s: its runs cannot be listed, so none is copied from there yet: %s", name, error)
        if not failed:
            self._due = time.monotonic() + _AGAIN_S
        before, self.runs = self.runs, self.runs | (found - set(own))
        return self.runs != before

    def settle(self, flushes: Collection[str]) -> None:
        """Forget the runs that every tier showed and of which nothing is left to send.

        Args:
            flushes: the runs of which parts are left to send.
        """
        places = self._tiers.places
        if None not in places.values():
            seen = {run for run in self.runs if all(self._tiers.knows(name, run) for name in places)}
            self.runs -= seen - set(flushes)
