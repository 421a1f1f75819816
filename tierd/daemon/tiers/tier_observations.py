"""The last observation of each tier, how observations are shared, and which runs are observed to fill a tier.

Invariant: a place that did not answer is unknown, not empty, and of two observations the one that began later counts.
A run that this daemon never saved is observed until every tier with `backfill` has what it wants of it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from tierd.core.config import Config
from tierd.core.errors import StoreUnavailable, TierdError
from tierd.core.ids import PartId
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.planning.plan import ForeignRunBacklog, foreign_run_backlog
from tierd.daemon.concurrency import suspend_aware_timeout
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

Change: TypeAlias = Callable[[Place], Place]

_GAP = 600.0  # seconds; more than the longest backoff and `answers_s` together
_MAX_SHARE_WAIT_S = 5.0  # seconds at most that an observation waits for callers to share it
# An observation that took longer than `_QUICK` seconds is valid for `_PATIENT` times its duration.
_QUICK, _PATIENT = 1.0, 10.0
_AGAIN_S = 86_400.0  # seconds between two listings of all runs, because a listing asks a request or more for each run


class Observations:
    """The last observation of every tier."""

    def __init__(self, observers: Mapping[str, TierObserver], answers_s: float) -> None:
        self._answers_s = answers_s
        # Tier -> its inventory as last observed; None if the tier did not answer.
        self.places: dict[str, Place | None] = dict.fromkeys(observers)
        self.last_known: dict[str, Place] = {}  # of tiers that do not answer now, for reports alone
        # Tiers that do not answer -> the seconds from the first failure since the last answer to the last one. `_GAP`
        # seconds at most count between two failures, because the machine may have been frozen or the daemon paused in
        # between, so that nobody asked.
        self.unanswered_s: dict[str, float] = {}
        self._failed_at: dict[str, float] = {}  # tiers that do not answer -> the last failure, monotonic seconds
        self._observers = observers
        self._clock = itertools.count()
        self._shown_sequence = dict.fromkeys(observers, -1)  # tier -> start of the observation that `places` shows
        # Changes since then, each with its time.
        self._recent_changes: dict[str, list[tuple[int, Change]]] = {name: [] for name in observers}
        # The observation that has not begun yet; `_requested` has its runs and ranks.
        self._next: dict[str, asyncio.Task[None]] = {}
        self._requested: dict[str, tuple[set[str], dict[str, frozenset[int]]]] = {}
        self._observing: Counter[str] = Counter()
        # Runs that the last observation covered.
        self._observed_runs: dict[str, frozenset[str]] = dict.fromkeys(observers, frozenset())
        self._took = dict.fromkeys(observers, 0.0)  # seconds that the last observation took
        self._since = dict.fromkeys(observers, -math.inf)  # when it began, monotonic seconds

    def has(self, part: PartId, tier: str) -> bool:
        """Whether the latest observation found a usable manifest of `part` on `tier`, which means a verified copy."""
        place = self.places[tier]
        return bool(place and place.has(part))

    async def observe(self, tier: str, runs: set[str], own_ranks: Mapping[str, Collection[int]]) -> None:
        """Observe a tier afresh.

        Callers that ask during an observation wait a little and share the next one. That one begins after each of them
        asked, so it shows all that was there when they asked.

        Args:
            own_ranks: run -> the ranks of which the spool has parts.

        Raises:
            StoreUnavailable, StoreRefused: the tier did not answer; it is unknown now.
        """
        waiting = self._next.get(tier)
        if waiting is None:
            waiting = self._next[tier] = asyncio.ensure_future(self._observe(tier))
            waiting.add_done_callback(_retrieve_exception)
            self._requested[tier] = set(), {}
        asked_runs, ranks = self._requested[tier]
        asked_runs |= runs
        for run, run_ranks in own_ranks.items():
            ranks[run] = frozenset(run_ranks) | ranks.get(run, frozenset())
        await asyncio.shield(waiting)

    async def _observe(self, tier: str) -> None:
        if self._observing[tier]:
            await asyncio.sleep(min(self._took[tier] / 10, _MAX_SHARE_WAIT_S))
        del self._next[tier]
        runs, own_ranks = self._requested.pop(tier)
        sequence, at = next(self._clock), time.monotonic()
        self._observing[tier] += 1
        try:
            async with suspend_aware_timeout(self._answers_s) as begin_anew:
                place = await self._observers[tier].observe(runs, own_ranks, on_answer=begin_anew)
            if self._note_observation(tier, sequence, place):
                self._observed_runs[tier] = frozenset(runs)
                self._took[tier], self._since[tier] = time.monotonic() - at, at
        except TimeoutError as error:
            self._note_observation(tier, sequence, None)
            raise StoreUnavailable(f"{tier}: did not answer within {self._answers_s:.0f} s") from error
        except TierdError:
            self._note_observation(tier, sequence, None)
            raise
        finally:
            self._observing[tier] -= 1

    def send_validity_s(self, tier: str) -> float:
        """For how many seconds more the last observation suffices to send parts, and for nothing else.

        Zero unless an observation of that tier takes long.
        """
        took_s = self._took[tier]
        if self.places[tier] is None or took_s < _QUICK:
            return 0.0
        return max(0.0, self._since[tier] + _PATIENT * took_s - time.monotonic())

    def age_s(self, tier: str) -> float:
        """How long ago the last observation of a tier began, in seconds; infinite if the tier is unknown."""
        return math.inf if self.places[tier] is None else time.monotonic() - self._since[tier]

    def has_observed_run(self, tier: str, run: str) -> bool:
        return run in self._observed_runs[tier]

    def note_flushed(self, tier: str, part: PartId, facts: ManifestFacts) -> None:
        """Record that a part was just flushed, which observations that began earlier do not show.

        This does not count as an observation, because one under way is newer for everything else.
        """
        self.apply_change(tier, lambda place: place.adding(part, facts))

    def apply_change(self, tier: str, change: Change) -> None:
        """Record what an operation changed on a tier, which observations that began earlier do not show."""
        self._recent_changes[tier].append((next(self._clock), change))
        self.update(tier, change)

    def update(self, tier: str, change: Change) -> None:
        """Change the last observation alone, because every later one shows the change itself."""
        if place := self.places[tier]:
            self.places[tier] = change(place)

    def _note_observation(self, tier: str, sequence: int, place: Place | None) -> bool:
        # A worker and a request may observe at once: the observation that began later is newer, whichever ends first.
        if sequence < self._shown_sequence[tier]:
            return False
        self._recent_changes[tier] = [entry for entry in self._recent_changes[tier] if entry[0] > sequence]
        for _, change in self._recent_changes[tier]:
            place = place and change(place)
        before, self.places[tier], self._shown_sequence[tier] = self.places[tier], place, sequence
        if place is None:
            if before:
                self.last_known[tier] = before
            now = time.monotonic()
            gap_s = min(now - self._failed_at.get(tier, now), _GAP)
            self.unanswered_s[tier] = self.unanswered_s.get(tier, 0.0) + gap_s
            self._failed_at[tier] = now
        else:
            self.last_known.pop(tier, None)
            self.unanswered_s.pop(tier, None)
            self._failed_at.pop(tier, None)
        return True

    def invalidate(self, tier: str) -> None:
        """Discard the last observation of a tier, because it proved wrong."""
        self.places[tier] = None
        self._observers[tier].list_all()

    def list_all(self) -> None:
        """List every manifest at the next observation of each tier, because one that was expected is not there."""
        for observer in self._observers.values():
            observer.list_all()


def _retrieve_exception(observation: asyncio.Task[None]) -> None:
    """Retrieve the exception of an observation, because its callers may be gone before it fails."""
    if not observation.cancelled():
        observation.exception()


class Backfill:
    """The runs to fill tiers with."""

    def __init__(
        self, config: Config, stores: Mapping[str, Store], observed: Observations, timings: DaemonTimings
    ) -> None:
        self._config, self._stores, self._observed, self._timings = config, stores, observed, timings
        self._is_enabled = any(tier.backfill for tier in config.tier)
        self._due = 0.0  # monotonic seconds
        self._listed = False  # whether every tier's runs were listed at least once
        self.runs: set[str] = set()  # the runs of which a tier may lack something, without those that the spool has
        # By run, what a tier lacked of it for longer than a node takes to send it, and is left to another node.
        self.unsent_by_run: dict[str, tuple[ForeignRunBacklog, ...]] = {}

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

    def forget_filled(self, flushes: Collection[str], inventory: Inventory) -> None:
        """Forget the runs that every tier showed and of which nothing is left to send.

        Args:
            flushes: the runs of which parts are left to send.
        """
        places = self._observed.places
        if None not in places.values():
            observed_runs = {
                run for run in self.runs if all(self._observed.has_observed_run(name, run) for name in places)
            }
            settled = observed_runs - set(flushes)
            for run in settled:
                unsent = [foreign_run_backlog(inventory, self._config, run, name) for name in places]
                latest_s = self._timings.now_s() - self._timings.left_undone_s
                self.unsent_by_run[run] = tuple(entry for entry in unsent if entry and entry.made_s <= latest_s)
            self.runs -= settled

    @property
    def is_complete(self) -> bool:
        """Whether every tier's runs were listed, and nothing is left to send of any."""
        return not self._is_enabled or (self._listed and not self.runs)

    def unsent(self) -> list[ForeignRunBacklog]:
        """Return what other nodes were to send and have not sent."""
        return [entry for entries in self.unsent_by_run.values() for entry in entries]
