"""The watches of a daemon: one call at a time for each `[[watch]]`, in a thread that reads and copies at idle priority.

A directory that has units with and without a step has a second watch, which takes the latter into a run of their own.

A listing runs at normal priority, because it is short, and a thread at nice 19 waits minutes for a few tenths of a
second of a CPU that training fills.

Invariant: a watch that fails, or whose directory does not answer, delays nothing else. It is tried again. Its
thread has ended when `run` has, unless its call hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path

from msgspec import structs

from tierd.core.config import WatchConfig
from tierd.core.errors import ConfigError, StoreRefused, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId, pin_key
from tierd.core.manifest import UNIT_NAME
from tierd.core.planning.place import SPOOL, Place
from tierd.core.retention.policy import parse_duration
from tierd.daemon.component_status import nothing_taken
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.intake.active_watch import (
    SILENT_S,
    ActiveWatch,
    DirectoryAbsent,
    RunNotWatched,
    identify_directory,
    run_in_watch_thread,
)
from tierd.daemon.intake.series_restore import own_layout
from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.daemon.intake.watch_records import RunWatchClaim
from tierd.daemon.intake.watch_reports import ReconcilerReports, hide_watch, show_absent_directory, show_watch
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.tiers.announcements import IngestClaim
from tierd.daemon.tiers.tier_objects import first_manifest
from tierd.spool.commit import SpaceMaker
from tierd.stores.base import Store
from tierd.stores.mounted_directories import check_no_overlap
from tierd.threads import lower_priority
from tierd.watching.checkpoint_names import known_checkpoints, stepless_run

log = logging.getLogger("tierd.daemon")

# A listing takes at most one part in this many of the time, because it may be of a network file system. While a unit
# has yet to be taken, it takes at most half of the time.
_SHARE = 20
_PATIENCE_S = 60.0  # seconds for which a watch waits for the first observation of a tier
_RETRY_S = 30.0  # seconds until a directory that cannot be listed is tried again


def rest_until_next(timings: DaemonTimings, listing_s: float, *, is_waiting: bool) -> float:
    """Return the seconds between two listings of a directory, the last of which took `listing_s`.

    A unit that is not decided yet waits for `settle_s`, not for a share of the time.
    """
    rest_s = _SHARE * listing_s
    if is_waiting:
        rest_s = min(rest_s, max(timings.settle_s, listing_s))
    return max(timings.watch_s, rest_s)


class Intake:
    """Takes units from every directory that the reconciler's configuration names, which may change.

    `room` frees disk space when a commit finds the disk full, as for `HandoffServer`.
    """

    def __init__(self, reconciler: Reconciler, room: Callable[[], SpaceMaker | None]) -> None:
        self._reconciler, self._room = reconciler, room
        self._watching: dict[WatchConfig, ActiveWatch] = {}

    @property
    def busy(self) -> bool:
        """Whether a directory holds a unit that may still be taken."""
        appear_s = self._reconciler.timings.appear_s
        return any(
            watch not in self._watching or not self._watching[watch].is_at_rest(appear_s)
            for watch in self._watches_to_run()
        )

    def _watches_to_run(self) -> dict[WatchConfig, bool]:
        """Return the watches that are to be at work, and whether each takes only the units without a step."""
        watches = dict.fromkeys(self._reconciler.config.watch, False)
        for watch in self._reconciler.config.watch:
            if watch in self._watching and self._watching[watch].leaves_stepless:
                watches[structs.replace(watch, run=stepless_run(watch.run))] = True
        return watches

    @property
    def failure(self) -> TierdError | None:
        """Why a directory cannot be watched, after some tries; at once if its run is another program's."""
        for active_watch in self._watching.values():
            if isinstance(active_watch.error, RunNotWatched):
                return active_watch.error
            if active_watch.error is not None and active_watch.has_failed(self._reconciler.timings.appear_s):
                return StoreRefused(f"{active_watch.watch.directory}: it cannot be watched: {active_watch.error}")
        return None

    @property
    def refused(self) -> tuple[str, ...]:
        """The units that are not taken as they are, as paths."""
        return tuple(
            f"{active_watch.watch.directory}/{path}"
            for active_watch in self._watching.values()
            for path in active_watch.refused
        )

    @property
    def untaken(self) -> tuple[str, ...]:
        """The directories of which nothing was ever taken, in words that say why."""
        return tuple(
            nothing_taken(self._reconciler.watches[active_watch.watch.run])
            for active_watch in self._watching.values()
            if active_watch.is_untaken
        )

    async def run(self) -> None:
        asked_s = time.monotonic()
        try:
            while True:
                watches = self._watches_to_run()
                for watch in self._watching.keys() - watches.keys():
                    await self._end(self._watching.pop(watch))
                    self._reconciler.journal.record_success(("watch", watch.run))  # ends its alert
                for watch, stepless in watches.items():
                    if watch not in self._watching:
                        active_watch = self._watching[watch] = ActiveWatch(watch, stepless)
                        active_watch.task = asyncio.ensure_future(self._watch(active_watch))
                before_s, asked_s = asked_s, time.monotonic()
                for active_watch in self._watching.values():
                    if active_watch.has_hung(asked_s - before_s):
                        self._report_silence(active_watch)
                await asyncio.sleep(1.0)
        finally:
            await asyncio.gather(*(self._end(active_watch) for active_watch in self._watching.values()))

    async def _end(self, active_watch: ActiveWatch) -> None:
        active_watch.ending = True
        hide_watch(self._reconciler, active_watch)
        if active_watch.task is not None:
            active_watch.task.cancel()
            await asyncio.gather(active_watch.task, return_exceptions=True)

    async def _watch(self, active_watch: ActiveWatch) -> None:
        run = active_watch.watch.run
        await self._observe(run, list(self._reconciler.workers))
        who, timings = self._reconciler.tiers.who, self._reconciler.timings
        taker = IngestClaim(run, who, self._find_first, timings)
        other_watches = RunWatchClaim(run, who, self._reconciler.spool, self._find_first, timings)
        signs = (taker.keep_renewing(), other_watches.keep_renewing(lambda: active_watch.idle))
        renewing = [asyncio.ensure_future(sign) for sign in signs]
        try:
            await self._observe_for_ever(active_watch, taker, other_watches)
        finally:
            for task in renewing:
                task.cancel()
            await asyncio.gather(*renewing, return_exceptions=True)
            try:
                await taker.release()
            finally:
                await other_watches.end()

    async def _observe_for_ever(
        self, active_watch: ActiveWatch, taker: IngestClaim, other_watches: RunWatchClaim
    ) -> None:
        run = active_watch.watch.run
        reports = ReconcilerReports(self._reconciler, run)
        watch: UnitWatch | None = None
        log.info("watching %s as run %s", active_watch.watch.directory, run)
        while True:
            self._stay_interested(run)
            try:
                if watch is None:
                    await self._check_run(run)
                    watch = await run_in_watch_thread(active_watch, self._make, active_watch, reports)
                path = Path(active_watch.watch.directory)
                directory = await run_in_watch_thread(active_watch, identify_directory, path)
                await self._take_up_directory(active_watch)
                if alone := await other_watches.confirm_alone(directory, time.monotonic()):
                    await self._observe_watch(active_watch, watch, taker)
                    await self._share_pins(run, but=await watch.pins.share(*self._on_every_tier()))
                active_watch.idle = alone and not watch.is_waiting
                active_watch.failed_tries, active_watch.error = 0, None
                active_watch.leaves_stepless |= watch.leaves_stepless
                show_watch(self._reconciler, active_watch, watch, other_watches.awaited)
                rest_s = rest_until_next(self._reconciler.timings, watch.listing_s, is_waiting=watch.is_waiting)
            except DirectoryAbsent as error:
                rest_s = self._wait_for(active_watch, error, is_new=watch is None or watch.is_new)
            except Exception as error:  # also what nobody foresaw: a watch that ended would end without a word
                if not isinstance(error, OSError | StoreRefused | ConfigError):
                    log.exception("%s: a look failed", active_watch.watch.directory)
                rest_s = self._failed(active_watch, error)
            else:
                self._reconciler.journal.record_success(("watch", run))
            await asyncio.sleep(rest_s)

    async def _take_up_directory(self, active_watch: ActiveWatch) -> None:
        """Take up a directory that exists. One that appeared only now is compared with the spool and the tiers, as all
        are at the daemon's start, because it may be a link into one of them.
        """
        if active_watch.awaited_s is not None and not active_watch.directory_existed:
            await check_no_overlap(self._reconciler.config)
        if isinstance(active_watch.error, DirectoryAbsent):
            active_watch.awaited_s = time.monotonic()
            log.info("%s is there now, and is watched", active_watch.watch.directory)
        active_watch.directory_existed = True

    def _wait_for(self, active_watch: ActiveWatch, error: DirectoryAbsent, *, is_new: bool) -> float:
        """Wait for a directory, and return the seconds until the next try. One that existed before may be a mount that
        is missing, which is a failure; a program has yet to make any other.
        """
        fresh, active_watch.idle = not isinstance(active_watch.error, DirectoryAbsent), False
        if fresh:
            active_watch.awaited_s = time.monotonic()
        if active_watch.directory_existed or not is_new:
            return self._failed(active_watch, error)
        directory, timings = active_watch.watch.directory, self._reconciler.timings
        why = "it does not exist; name the directory that the program writes to, or make it"
        active_watch.error = DirectoryAbsent(why)
        show_absent_directory(self._reconciler, active_watch)
        if fresh:
            log.info("%s does not exist yet: waiting for it; --until-idle waits %g s", directory, timings.appear_s)
        return timings.watch_s

    def _failed(self, active_watch: ActiveWatch, error: Exception) -> float:
        active_watch.failed_tries, active_watch.error = active_watch.failed_tries + 1, error
        subject, directory = ("watch", active_watch.watch.run), active_watch.watch.directory
        self._reconciler.journal.record_failure(subject, "observe", SPOOL, directory, f"{directory}: {error}")
        log.warning("%s: it cannot be watched now: %s", directory, error)
        # Without a limit on the exponent, the product of a mount that is missing for hours is no float any more.
        return min(_RETRY_S, self._reconciler.timings.watch_s * 2.0 ** min(active_watch.failed_tries, 10))

    def _report_silence(self, active_watch: ActiveWatch) -> None:
        active_watch.silent_s, active_watch.idle = 0.0, False
        self._failed(active_watch, TimeoutError(f"it has not answered for {SILENT_S:g} s; look at its mount"))

    async def _observe_watch(self, active_watch: ActiveWatch, watch: UnitWatch, taker: IngestClaim) -> None:
        """Look once; take what is due if no other node does. What another node took is known only after it is done.

        An idle daemon lists its tiers seldom. So the first one is observed here while another node takes: retention may
        delete what that node took before this one has its turn, and this one would take it again.
        """
        run = active_watch.watch.run

        async def observe(may_take: bool) -> None:
            run_history = known_checkpoints(self._reconciler.inventory(), run)
            await run_in_watch_thread(active_watch, watch.observe, run_history, time.monotonic(), may_take=may_take)

        await observe(taker.is_claimed)
        if watch.wanted_checkpoint is not None and await taker.may_take(watch.wanted_checkpoint, time.monotonic()):
            if taker.is_claimed:
                await self._observe(run, self._first)
            await observe(True)
        elif watch.wanted_checkpoint is not None:
            await self._see_taken(run)
        if taker.is_claimed and not await self._is_sending(run):
            await taker.release()

    async def _see_taken(self, run: str) -> None:
        """Observe the first tier, at most once in `rescan`."""
        observed, rescan_s = self._reconciler.tiers.observed, parse_duration(self._reconciler.config.rescan)
        await self._observe(run, [name for name in self._first if observed.age_s(name) >= rescan_s])

    @property
    def _first(self) -> list[str]:
        return list(self._reconciler.stores)[:1]

    async def _is_sending(self, run: str) -> bool:
        """Whether the first tier still lacks checkpoints of a run that this node sends there."""
        await self._observe(run, [SPOOL])  # because what was taken just now may not have been observed yet
        inventory = self._reconciler.inventory()
        unsent = {part for part, tier in self._reconciler.backlog.flushes(inventory) if tier in self._first}
        return any(part.checkpoint.run == run for part in unsent | inventory.busy)

    def _find_first(self) -> Store | None:
        """Return the first tier's store; None if it did not answer when it was last observed, or is paused."""
        for name, store in self._reconciler.stores.items():
            is_reachable = self._reconciler.tiers.observed.places[name] is not None
            return store if is_reachable and not self._reconciler.pause.paused else None
        return None

    async def _check_run(self, run: str) -> None:
        """Raise `RunNotWatched` if a trainer saved the run's newest checkpoint: a watch would prune what it saves."""
        inventory = self._reconciler.inventory()
        parts = {part for place in inventory.places.values() for part in place.parts() if part.checkpoint.run == run}
        if not parts:
            return
        part = max(parts, key=lambda candidate: candidate.checkpoint)
        manifest = None
        with suppress(StoreUnavailable):  # as with a tier that cannot be observed
            manifest = await first_manifest(part, self._reconciler.spool, self._reconciler.stores)
        if manifest is not None and all(file.path != UNIT_NAME for file in manifest.files):
            raise RunNotWatched(f"run {run!r}: a trainer saved {part.checkpoint}; give --run another name")

    def _on_every_tier(self) -> tuple[Set[CheckpointId], Set[CheckpointId]]:
        """Return the checkpoints that every tier shows as pinned, and those that each has, as last observed."""
        places = [place or Place() for place in self._reconciler.inventory().tiers.values()] or [Place()]
        pinned = frozenset[CheckpointId].intersection(*(place.pins for place in places))
        usable = ({checkpoint for checkpoint, copy in place.checkpoints.items() if copy.usable} for place in places)
        return pinned, set[CheckpointId].intersection(*usable)

    async def _share_pins(self, run: str, but: Set[CheckpointId]) -> None:
        """Put the pins that only the spool has on every tier, because a spool may be lost."""
        local_pins = {pin for pin in self._reconciler.inventory().local_pins if pin.run == run} - but
        # The inventory may be from before a pin of `but` ended. Put on the tiers again, it would count as a person's.
        for checkpoint in local_pins & self._reconciler.spool.pins() if local_pins else local_pins:
            for name, store in self._reconciler.stores.items():
                try:
                    await store.put(pin_key(checkpoint), b"")
                except (StoreUnavailable, StoreRefused) as error:
                    log.info("%s: %s cannot be pinned there yet: %s", name, checkpoint, error)

    def _make(self, active_watch: ActiveWatch, reports: ReconcilerReports) -> UnitWatch:
        return UnitWatch(
            self._reconciler.spool,
            Path(active_watch.watch.directory),
            active_watch.watch.run,
            reports,
            settle_s=self._reconciler.timings.settle_s,
            own=own_layout(active_watch.watch),
            stepless=active_watch.stepless,
            most_series=active_watch.watch.series,
            room=self._find_room,
            going=active_watch.give_sign,
            writes=active_watch.allow_silence,
            reads=lower_priority,
            stores=lambda: self._reconciler.stores,
        )

    def _find_room(self, part: PartId, size_bytes: int, quota: bool) -> bool:
        room = self._room()
        return room is not None and room(part, size_bytes, quota)

    async def _observe(self, run: str, names: list[str]) -> None:
        """Wait for these tiers to be observed, because they show what is taken already, but not for a dead tier."""
        self._stay_interested(run)
        for name in names:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._reconciler.observe(name)
            except Exception as error:  # its worker reports it
                why = error or type(error).__name__
                log.info("%s does not answer: %s is watched without knowing what that tier has: %s", name, run, why)

    def _stay_interested(self, run: str) -> None:
        self._reconciler.requests.requested_runs.add(run)
        self._reconciler.requests.trainer_activity.note_request(run)
