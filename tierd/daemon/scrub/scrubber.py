"""Scrubbing: read every copy again periodically, and repair corrupt copies while another copy can still repair them.

Invariant: no request waits for scrubbing. The scrub reads one chunk at a time in each place, at a configured rate. It
runs concurrently with the tier workers and never while the daemon is paused or drains. A copy that could not be read or
repaired is skipped for hours, so that it does not delay other copies.

The module is longer than 300 lines because the schedule and the reading change each other: what a read finds makes
copies due, puts them off, or shows that others are right.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from tierd.core.config import Config
from tierd.core.errors import ObjectNotFound, StoreRefused, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.background_schedule import (
    DueScrub,
    ScrubbedCopy,
    base_copies,
    count_overdue,
    reschedule,
    scrub_agenda,
)
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Place
from tierd.core.retention.policy import parse_duration, parse_rate
from tierd.core.storage_faults import UnstableRead
from tierd.daemon.component_status import ScrubStatus
from tierd.daemon.concurrency import thread_uncancelled
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.reconciling.tier_worker import TierWorker
from tierd.daemon.scrub.copy_verifier import CopyVerifier
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.scrub.scrub_history import ScrubHistory
from tierd.daemon.tiers.tier_pauses import TierPause

log = logging.getLogger("tierd.daemon")

_AHEAD = 86_400.0  # seconds ahead for which scheduled scrubs are kept in memory
_LATEST = 86_400.0  # seconds at most for which a copy that could not be read or repaired is skipped


@dataclass(slots=True)
class _Schedule:
    """The schedule of one place. It is valid while the place is unchanged."""

    observed: tuple[Place, Place | None]  # the observed spool and tier from which the schedule was built
    doubts: int  # the value of `Scrubber._doubts` at that time
    begins_s: float
    ends_s: float
    scrubs: list[DueScrub]  # the scrubs from `begins_s` to `ends_s`, as a heap
    oldest: float  # the oldest verification of all other copies, seconds since 1970


class Scrubber:
    """Reads copies again when they are due, and repairs corrupt ones.

    Args:
        held: checkpoints that must not be deleted during a repair.
    """

    def __init__(
        self,
        config: Config,
        repairer: Repairer,
        *,
        inventory: Callable[[], Inventory],
        pause: TierPause,
        held: Counter[CheckpointId],
        wake: Callable[[], None],
        timings: DaemonTimings,
        jitter: random.Random,
    ) -> None:
        self._inventory, self._pause, self._wake, self._timings = inventory, pause, wake, timings
        self._spool, self._journal, self._repairer = repairer.spool, repairer.journal, repairer
        self._period = parse_duration(config.scrub)
        self._reader = CopyVerifier(repairer, parse_rate(config.scrub_rate), self._pause_before_chunk, held)
        self._reader.on_doubt = self._expedite_copies
        self._remembered = ScrubHistory(self._spool.control / "scrubbed.json")
        self._workers = {name: TierWorker(name, timings) for name in (SPOOL, *repairer.stores)}
        self._verified_parts: set[PartId] = set()  # parts whose copies in the spool this daemon has verified
        self._suspected: set[ScrubbedCopy] = set()  # copies that a reader reported as possibly wrong
        # By copy, until when it is skipped in monotonic seconds, and how often that has happened.
        self._postponed: dict[ScrubbedCopy, tuple[float, int]] = {}
        self._schedules: dict[str, _Schedule] = {}
        self._doubts = 0  # how often `_expedite_copies` made copies due at once
        self._random = jitter
        self.resting = False  # True while the daemon drains, so that no scrub begins

    # -- schedule ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Scrub until cancelled. If the configuration disables scrubbing, only suspect copies are read."""
        if self._period:
            await thread_uncancelled(self._remembered.load)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers.values():
                    group.create_task(self._run_worker(worker))
                group.create_task(self._remember())
        finally:
            if self._period:
                await self._remembered.save(self._inventory())

    async def _remember(self) -> None:
        while True:
            await asyncio.sleep(self._timings.scrub_rest_s)
            self._postponed = {
                copy: postponed
                for copy, postponed in self._postponed.items()
                if postponed[0] + _LATEST > time.monotonic()
            }
            self._verified_parts = {part for part in self._verified_parts if self._inventory().spool.has(part)}
            self._end_alerts()
            if self._period:
                await self._remembered.save(self._inventory())

    def _end_alerts(self) -> None:
        """End the alerts about copies that were deleted, because nobody reads these again."""
        for name, place in self._inventory().places.items():
            for part in self._journal.unstable_parts(name):
                if not place.has(part):
                    self._journal.record_stable_read(name, part)

    async def _run_worker(self, worker: TierWorker) -> None:
        while True:
            copy = None
            worker.wake.clear()
            try:
                copy = await self.next(worker.name)
                if copy is not None:
                    worker.doing = f"scrubbing {copy.part}"
                    await self.scrub(copy)
                worker.note_success()
            except UnstableRead as error:  # the place answers, so its other copies are read without a delay
                self._journal.counters["errors"] += 1
                log.warning("%s: scrubbing %s: again later: %s", worker.name, copy, error)
            except Exception as error:  # as a tier worker of the reconciler, this loop never ends
                self._journal.counters["errors"] += 1
                delay = worker.note_failure(error, self._random, long=isinstance(error, StoreRefused))
                is_expected = isinstance(error, TierdError | OSError)
                log.warning(
                    "%s: scrubbing %s: again in %.0f s: %s", worker.name, copy, delay, error, exc_info=not is_expected
                )
            finally:
                worker.doing = None
            if copy is None or worker.last_error:
                await worker.wait(self._timings.scrub_rest_s)

    async def next(self, place: str) -> ScrubbedCopy | None:
        """Return the copy in a place that is due now; None if there is none."""
        if self.resting or self._pause.paused:
            return None
        if suspected := [copy for copy in self._suspected if copy.place == place and self._may_be_read(copy)]:
            return min(suspected)
        if not self._period:
            return None
        schedule = await asyncio.to_thread(self._build, place, self._inventory(), self._doubts, self._timings.now_s())
        self._schedules[place] = schedule
        inventory, now = self._inventory(), self._timings.now_s()
        waiting: list[DueScrub] = []
        copy = None
        while copy is None and schedule.scrubs and schedule.scrubs[0].due_at <= now:
            due_scrub = heapq.heappop(schedule.scrubs)
            rescheduled = reschedule(inventory, due_scrub.copy, self._remembered, self._period, now)
            if rescheduled is None:
                continue
            if rescheduled.due_at > now:  # verified since the schedule was built
                self._reschedule(schedule, rescheduled)
                continue
            waiting.append(rescheduled)
            if self._may_be_read(due_scrub.copy):
                copy = due_scrub.copy
        for due_scrub in waiting:
            heapq.heappush(schedule.scrubs, due_scrub)
        return None if self.resting or self._pause.paused else copy

    def _may_be_read(self, copy: ScrubbedCopy) -> bool:
        rests = self._postponed.get(copy, (0.0, 0))[0] > time.monotonic()
        return not rests and copy.part not in self._inventory().busy and copy.part not in self._repairer.running_fetches

    def _build(self, place: str, inventory: Inventory, doubts: int, now: float) -> _Schedule:
        """Build a place's schedule in a thread, because there may be half a million copies.

        The known schedule is returned if the place is unchanged.
        """
        built, observed = self._schedules.get(place), (inventory.spool, inventory.tiers.get(place))
        if built and built.doubts == doubts and built.begins_s <= now < built.ends_s and built.observed == observed:
            return built
        scrubs = scrub_agenda(inventory, self._remembered, self._period, now, place)
        first = bisect.bisect(scrubs, now + _AHEAD, key=lambda scrub: scrub.due_at)
        oldest = min((scrub.verified_at for scrub in scrubs[first:]), default=math.inf)
        return _Schedule(observed, doubts, now, now + _AHEAD, scrubs[:first], oldest)

    def _reschedule(self, agenda: _Schedule, scrub: DueScrub) -> None:
        if scrub.due_at <= agenda.ends_s:
            heapq.heappush(agenda.scrubs, scrub)
        else:
            agenda.oldest = min(agenda.oldest, scrub.verified_at)

    def note_verified(self, place: str, part: PartId, at: float | None = None) -> None:
        """Record that a copy was found right, now or at a given time, by a reader of the whole copy."""
        self._remembered[ScrubbedCopy(place, part)] = self._timings.now_s() if at is None else at
        self._postponed.pop(ScrubbedCopy(place, part), None)
        if place == SPOOL:
            self._verified_parts.add(part)

    def note_taken(self, part: PartId) -> None:
        """Record when a watched checkpoint was taken, because its manifest has the time of its files."""
        self._remembered[ScrubbedCopy(SPOOL, part)] = self._timings.now_s()

    def suspect(self, place: str, part: PartId) -> None:
        """Schedule a copy that may be wrong to be read at once, even if scrubbing is disabled."""
        self._suspected.add(ScrubbedCopy(place, part))
        if place == SPOOL:
            self._verified_parts.discard(part)
        self._workers[place].wake.set()

    def postponed_s(self, part: PartId) -> float:
        """Return the seconds for which the spool's suspect copy of a part is not read again."""
        copy = ScrubbedCopy(SPOOL, part)
        until = self._postponed.get(copy, (0.0, 0))[0] if copy in self._suspected else 0.0
        return max(0.0, until - time.monotonic())

    async def is_right(self, part: PartId) -> bool:
        """Whether the spool's copy of a part is right. It is read at once, if this daemon never verified it.

        A wrong copy is scrubbed at once, and this method does not read it again before that is done.
        """
        if part in self._verified_parts or ScrubbedCopy(SPOOL, part) in self._suspected:
            return part in self._verified_parts
        if await self._reader.is_right(part):
            self._verified_parts.add(part)
            return True
        if await thread_uncancelled(self._spool.has, part):  # else it was just quarantined: nothing is left to read
            self.suspect(SPOOL, part)
        return False

    def status(self) -> ScrubStatus:
        """Return the state of the scrub, from the schedules that were built last."""
        doing = [f"{name}: {worker.doing}" for name, worker in self._workers.items() if worker.doing]
        now = self._timings.now_s()
        scrubs = [scrub for built in self._schedules.values() for scrub in built.scrubs]
        oldest = min(
            [*(scrub.verified_at for scrub in scrubs), *(built.oldest for built in self._schedules.values()), math.inf]
        )
        return ScrubStatus(
            oldest=None if oldest == math.inf else datetime.fromtimestamp(oldest, UTC).isoformat(timespec="seconds"),
            due=count_overdue(scrubs, self._period, now),
            doing="; ".join(doing) or None,
        )

    # -- one copy ---------------------------------------------------------------------------------------------------

    async def scrub(self, copy: ScrubbedCopy) -> None:
        """Read a copy again and repair it.

        Raises:
            StoreUnavailable, StoreRefused, OSError: not all of the copy could be read or repaired; it is tried again
                later.
        """
        started_s = self._timings.now_s()
        times = self._postponed.get(copy, (0.0, 0))[1]
        self._postponed[copy] = (time.monotonic() + min(self._timings.scrub_later_s * 2**times, _LATEST), times + 1)
        try:
            is_right = await self._reader.read(copy)
        except ObjectNotFound:
            self._suspected.discard(copy)
            self._journal.record_stable_read(copy.place, copy.part)
            return  # pruned meanwhile; the next observation shows that
        except UnstableRead as error:
            self._journal.record_unstable_read(copy.place, copy.part, str(error))
            raise
        self._journal.record_stable_read(copy.place, copy.part)
        waited_for = copy in self._suspected
        self._suspected.discard(copy)
        self._journal.counters["scrubbed"] += 1
        if is_right:
            self.note_verified(copy.place, copy.part, started_s)
            self._remembered.update(dict.fromkeys(base_copies(self._inventory(), copy), started_s))
        if waited_for or not is_right:
            self._wake()

    def _expedite_copies(self, copy: ScrubbedCopy, owners: set[CheckpointId]) -> None:
        """Make other copies due at once if they name chunks of the checkpoints `owners`: those of the rank, and those
        of other ranks that name chunks of several ranks."""
        self._doubts += 1
        place, own_part = self._inventory().tiers[copy.place], copy.part
        for other_copy in place.copies(own_part.checkpoint.run) if place else ():
            parts = {part for part, facts in other_copy.facts.items() if facts.homed_sizes}
            parts |= {PartId(other_copy.id, own_part.rank, size) for size in other_copy.ranks}
            for part in parts - {own_part}:
                # None: the manifest was not read, so its chunks are not known.
                facts = other_copy.facts.get(part)
                if other_copy.has(part) and (facts is None or owners & {other_copy.id, *facts.bases}):
                    self._remembered[ScrubbedCopy(copy.place, part)] = 0.0

    async def _pause_before_chunk(self) -> None:
        while self.resting:
            await asyncio.sleep(1.0)
        await self._pause.wait()
