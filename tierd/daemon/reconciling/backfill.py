"""Which runs of the tiers this daemon observes although it never saved them, because a tier has `backfill`.

Such a run is observed until every tier with `backfill` has what it wants of it. The plan decides what that is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping

from tierd.core.config import Config
from tierd.core.errors import TierdError
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.left_to_others import LeftToNode, left_to_node
from tierd.daemon.tiers.observations import Observations
from tierd.daemon.tiers.observe import TierObserver
from tierd.daemon.timings import DaemonTimings
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

_AGAIN_S = 86_400.0  # seconds between two listings of all runs, because a listing asks a request or more for each run


class Backfill:
    """The runs to fill tiers with.

    Attributes:
        runs: the runs of which a tier may lack something, without those that the spool has.
        left: by run, what a tier lacked of it for longer than a node takes to send it, and is left to another node.

    Args:
        config: the configuration.
        stores: tier name -> open store.
        observed: the tiers, as last observed.
        timings: durations; `list_again_s` until a tier that could not be listed is tried again.
    """

    def __init__(
        self, config: Config, stores: Mapping[str, Store], observed: Observations, timings: DaemonTimings
    ) -> None:
        self._config, self._stores, self._observed, self._timings = config, stores, observed, timings
        self._is_enabled = any(tier.backfill for tier in config.tier)
        self._due = 0.0  # monotonic seconds
        self._listed = False  # whether every tier's runs were listed at least once
        self.runs: set[str] = set()
        self.left: dict[str, tuple[LeftToNode, ...]] = {}

    async def list_runs(self, own_runs: Collection[str]) -> bool:
        """List all runs of all tiers, if that is due; return whether there are others than before.

        A tier that does not answer is listed later.

        Args:
            own_runs: the runs that the spool has, which are observed anyway.
        """
        if not self._is_enabled or time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + self._timings.list_again_s  # workers of several tiers call this at once
        listed, failed = set[str](), False
        for name, store in self._stores.items():
            try:
                listed |= await TierObserver(store).runs()
            except TierdError as error:
                failed = True
                log.warning("%s: its runs cannot be listed, so none is copied from there yet: %s", name, error)
        if not failed:
            self._due, self._listed = time.monotonic() + _AGAIN_S, True
        before, self.runs = self.runs, self.runs | (listed - set(own_runs))
        return self.runs != before

    def settle(self, flushes: Collection[str], inventory: Inventory) -> None:
        """Forget the runs that every tier showed and of which nothing is left to send.

        Args:
            flushes: the runs of which parts are left to send.
            inventory: the places as observed now.
        """
        places = self._observed.places
        if None not in places.values():
            observed_runs = {run for run in self.runs if all(self._observed.knows(name, run) for name in places)}
            settled = observed_runs - set(flushes)
            for run in settled:
                unsent = [left_to_node(inventory, self._config, run, name) for name in places]
                latest_s = self._timings.now_s() - self._timings.left_undone_s
                self.left[run] = tuple(entry for entry in unsent if entry and entry.made_s <= latest_s)
            self.runs -= settled

    @property
    def settled(self) -> bool:
        """Whether every tier's runs were listed, and nothing is left to send of any."""
        return not self._is_enabled or (self._listed and not self.runs)

    def undone(self) -> list[LeftToNode]:
        """Return what other nodes were to send and have not sent."""
        return [entry for entries in self.left.values() for entry in entries]
