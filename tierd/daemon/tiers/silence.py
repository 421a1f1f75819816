"""How long each tier has given no sign of life while requests to it were under way.

A hung server ends no request, so it would show as a failure only after several deadlines.

Invariant: time counts only while this process runs and a request waits. A daemon that was stopped, or a tier that
nobody asks, adds nothing. Any answer, and any byte that moves within a request, ends the silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from tierd.daemon.timings import DaemonTimings
from tierd.events.journal import Journal
from tierd.stores.base import Store


class _Tier:
    def __init__(self, store: Store) -> None:
        self.store, self.signs = store, store.signs_of_life
        self.silent_s = 0.0
        self.counted_at = 0.0  # wall clock, seconds
        self.reported = 0  # times `alert_s` has passed


class Silence:
    """The silence of every tier of a configuration.

    Args:
        stores: tier name -> open store.
        journal: gets the alerts.
        timings: when a silence is shown, is a problem, and is an alert.
    """

    def __init__(self, stores: Mapping[str, Store], journal: Journal, timings: DaemonTimings) -> None:
        self._tiers = {name: _Tier(store) for name, store in stores.items()}
        self._journal, self._timings = journal, timings
        self._checked_at = time.monotonic()

    async def run(self) -> None:
        """Check the tiers every `listen_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(self._timings.listen_s)
            self._check()

    def _check(self) -> None:
        now = time.monotonic()
        # A longer time between two checks is one in which this process did not run.
        passed_s = min(now - self._checked_at, 2 * self._timings.listen_s)
        self._checked_at = now
        for name, tier in self._tiers.items():
            count = tier.store.signs_of_life
            if count != tier.signs:
                tier.signs, tier.silent_s, tier.reported = count, 0.0, 0
                self._journal.answered(name)
            elif tier.store.is_waiting:
                tier.silent_s += passed_s
                tier.counted_at = time.time()
                if tier.silent_s >= (tier.reported + 1) * self._timings.unanswered_alert_s:
                    tier.reported += 1
                    self._journal.unanswered(name, self.words(name))

    def since(self, name: str) -> datetime | None:
        """Since when requests to a tier wait for an answer; None if the tier answered lately."""
        tier = self._tiers[name]
        if tier.silent_s < self._timings.unanswered_shown_s:
            return None
        return datetime.fromtimestamp(tier.counted_at, UTC) - timedelta(seconds=tier.silent_s)

    def is_problem(self, name: str) -> bool:
        """Whether a tier has been silent for so long that a person should know."""
        return self._tiers[name].silent_s >= self._timings.unanswered_problem_s

    def words(self, name: str) -> str:
        """Describe the silence of a tier for people."""
        return (
            f"no answer for {self._tiers[name].silent_s:.0f} s: the server, or a mount, accepts requests and does not "
            "answer them; they are sent again until it does"
        )
