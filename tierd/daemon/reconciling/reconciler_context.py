"""What the parts of the reconciler share: its mode, and the live inventory of all places under a configuration."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from tierd.core.config import Config
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import CheckpointCopy, changed_checkpoints
from tierd.core.planning.inventory import Inventory, LastSent
from tierd.core.planning.place import Place, Prune
from tierd.core.planning.plan import Planner
from tierd.core.retention.policy import parse_duration
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.reconciling.client_requests import ClientRequests
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.spool_observer import SpoolObserver
from tierd.daemon.tiers.tier_observations import Backfill
from tierd.daemon.tiers.tier_operations import TierOperations
from tierd.daemon.tiers.tier_pauses import SaveCadence, TierPause
from tierd.spool.spool import Spool

log = logging.getLogger("tierd.daemon")

_HURRY = 60.0  # seconds after `hurry` for which no flush pauses
_ENDING = 600.0  # seconds after `node_ends` for which the newest checkpoints are sent first
_RECENT = 600.0  # seconds for which a run counts as attended after its trainer left, because a crashed one restarts


class RunMode:
    """The phase of the reconciler. `pause` is a person's."""

    def __init__(self, pause: TierPause) -> None:
        self.pause = pause
        self.draining = False  # only flushes are begun, because the daemon ends
        self.halted = asyncio.Event()  # set while workers begin no further action, because the configuration changes
        self._hurried = self._ending = -math.inf  # monotonic seconds

    def hurry(self) -> None:
        """Let flushes make no pauses for the next `_HURRY` seconds."""
        self._hurried = time.monotonic()

    def note_node_ending(self) -> bool:
        """Let flushes make no pauses and send the newest first for the next `_ENDING` seconds; return whether they did
        not before.
        """
        before, self._ending = self.newest_first, time.monotonic()
        return not before

    @property
    def newest_first(self) -> bool:
        """Whether the newest checkpoints are sent first, whatever else tiers lack."""
        return time.monotonic() - self._ending < _ENDING

    @property
    def is_ending(self) -> bool:
        """Whether the daemon, the node or this configuration ends soon, so that no long action may go on."""
        return self.draining or self.halted.is_set() or self.newest_first

    @property
    def is_hurried(self) -> bool:
        """Whether flushes make no pauses."""
        return self.is_ending or time.monotonic() - self._hurried < _HURRY


class LiveInventory:
    """Observe the spool, and make one inventory of it and of the tiers' latest observations.

    Args:
        on_observed: called after each observation of the spool, with whether it has other parts than before.
    """

    def __init__(
        self,
        spool: Spool,
        requests: ClientRequests,
        repairer: Repairer,
        run_mode: RunMode,
        on_observed: Callable[[bool], None],
        timings: DaemonTimings,
    ) -> None:
        self.spool, self.requests, self.run_mode, self.planner = spool, requests, run_mode, Planner()
        self._repairer, self._on_observed = repairer, on_observed
        self.place = Place()  # the spool, as last observed, without the checkpoints of launches that name no tier
        # The copies of these, which nothing but a report counts.
        self.local_only: dict[CheckpointId, CheckpointCopy] = {}
        self.free = 1.0  # the free share of the spool's disk, 0..1
        self.busy: Counter[PartId] = Counter()  # the parts that are being flushed
        self.full_tiers: set[str] = set()  # the tiers that were full, and from which nothing was deleted since
        self.sent: dict[str, LastSent] = {}
        self.cadence = SaveCadence()
        self.changed_at = time.monotonic()  # when a tier's inventory last changed, monotonic seconds
        self._timings = timings
        self._observer = SpoolObserver(spool, timings)
        self._leftovers: tuple[str, ...] = ()
        self._unlocked: dict[str, float] = {}
        self._observing = asyncio.Lock()
        self._observations_started = self._last_completed = 0  # observations of the spool
        self._thorough = False  # whether a caller of the next observation needs one that is not sparing

    def configure(self, config: Config, tiers: TierOperations, backfill: Backfill) -> None:
        """Use another configuration and its tiers from now on."""
        self.config, self.backfill, self.tiers = config, backfill, tiers
        self.full_tiers, self.sent = set(), {}

    @property
    def is_disk_low(self) -> bool:
        """Whether less of the spool's disk is free than the configuration demands."""
        return self.free * 100 < self.config.min_free_percent

    def inventory(self) -> Inventory:
        """Return the inventory: the latest observation of all places, with holds, writers and busy parts."""
        requests, touched, finished_s = self.requests, self._observer.touched, parse_duration(self.config.finished)
        writers = requests.writers()
        return Inventory(
            self.place,
            dict(self.tiers.observed.places),
            self.free,
            self._leftovers,
            frozenset(requests.held_checkpoints),
            frozenset(requests.needed_checkpoints),
            frozenset(self.busy),
            requests.trainer_activity.quiet_runs(touched, writers, min(_RECENT, finished_s)),
            requests.trainer_activity.finished_runs(touched, writers, finished_s),
            silent=frozenset(
                name for name, place in self.tiers.observed.places.items() if place is None and self._is_silent(name)
            ),
            full=frozenset(self.full_tiers),
            append_only=self.tiers.append_only,
            sent=dict(self.sent),
            filling=frozenset(self.backfill.runs),
            node_ends=self.run_mode.newest_first,
            node_id=self.tiers.who,
        )

    def retired(self, tier: str) -> list[Prune]:
        """Return what retention has given up on a tier, as `Planner.retired` does."""
        return self.planner.retired(self.inventory(), self.config, tier)

    def report_inventory(self) -> Inventory:
        """Return the inventory with the checkpoints of launches that name no tier, for a report."""
        inventory = self.inventory()
        if not self.local_only:
            return inventory
        place = inventory.spool
        return replace(inventory, spool=replace(place, checkpoints={**place.checkpoints, **self.local_only}))

    def _is_silent(self, tier: str) -> bool:
        return self.tiers.observed.unanswered_s.get(tier, -math.inf) >= parse_duration(self.config.hold_for)

    @property
    def was_observed(self) -> bool:
        """Whether the spool was observed at least once."""
        return self._last_completed > 0

    @property
    def odd_places(self) -> Mapping[CheckpointId, str]:
        """The checkpoints of which something other than a directory lies in the spool, with details."""
        return self._observer.odd_places

    def runs(self) -> set[str]:
        """Return the runs that the spool has, or that were saved there."""
        return self.place.runs.keys() | self.place.launches.keys()

    async def observe(self, *, sparing: bool = False) -> None:
        """Observe the spool afresh; callers that ask during an observation share the next one.

        Args:
            sparing: as for `SpoolObserver.observe`.
        """
        started_before = self._observations_started
        self._thorough |= not sparing
        async with self._observing:
            if self._last_completed > started_before:
                return
            self._observations_started += 1
            observation, before = self._observations_started, self.place
            thorough, self._thorough = self._thorough or not sparing, False
            try:
                place = await asyncio.to_thread(self._observer.observe, sparing=not thorough)
                free, total = self.spool.free()
                self.free = free / total if total else 1.0
                self._leftovers = self._aged(await asyncio.to_thread(self.spool.leftovers, self._observer.childless))
            except BaseException:
                self._thorough |= thorough  # for callers that share the next observation in place of this one
                raise
            self._set_local_only(place)
            self.place = place.managed  # assigned last, because every call before it may fail
            self._last_completed = observation
            self._on_observed(self._note_saves(before))

    def _set_local_only(self, place: Place) -> None:
        for run in sorted(place.local_only.keys() - self.place.local_only.keys()):
            log.info(
                "local: run %s: a launch that names no tier (to=[]) saves it: its checkpoints are neither sent nor "
                "deleted until a launch names tiers",
                run,
            )
        managed = place.managed.checkpoints
        self.local_only = {
            checkpoint: copy for checkpoint, copy in place.checkpoints.items() if checkpoint not in managed
        }

    def _note_saves(self, before: Place) -> bool:
        """Note when parts were committed; return whether the spool has other parts than before."""
        differ = changed_checkpoints(before.checkpoints, self.place.checkpoints)
        was, now = (
            {part for checkpoint in differ if (copy := place.checkpoints.get(checkpoint)) for part in copy.parts()}
            for place in (before, self.place)
        )
        if was != now:
            self.cadence.note_saves(now - was)
            self.cadence.keep_only(self.runs())
        return was != now

    def invalidate(self, checkpoint: CheckpointId) -> None:
        """Read a checkpoint's manifests again at the next observation, because they may have been replaced."""
        self._observer.invalidate(checkpoint)

    def _aged(self, names: list[str]) -> tuple[str, ...]:
        # A stage is unlocked for a moment after its creation, so it is left over only if it stays unlocked.
        now = time.monotonic()
        self._unlocked = {name: self._unlocked.get(name, now) for name in names}
        return tuple(name for name, since in self._unlocked.items() if now - since >= self._idle_limit_s(name))

    def _idle_limit_s(self, name: str) -> float:
        # An interrupted fetch is kept so that it can be continued, unless the disk needs its bytes.
        is_complete = name.startswith("fetch/") and any(
            name == f"fetch/{self.spool.fetch_directory(part).name}" for part in self.place.parts()
        )
        loose = name.removeprefix("fetch/") in self._repairer.partial_stages
        is_resumable = name.startswith("fetch/") and not self.is_disk_low and not is_complete and not loose
        return self._timings.taken_up_s if is_resumable else self._timings.abandoned_s
