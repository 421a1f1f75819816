"""Scrubbing: every copy is read again from time to time, however long nobody asked for it, and put right in time.

Law: nobody waits for it. One chunk at a time in each place, at a configured rate, beside the lanes and never while the
daemon is paused or drains. What could not be read or mended rests for hours, so that it keeps nothing else waiting.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from tierd.core.config import Config
from tierd.core.errors import ObjectNotFound, StoreRefused, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.rate import rate
from tierd.core.retention import seconds
from tierd.core.scrub import Copy, Turn, again, agenda, lenders, overdue
from tierd.core.world import SPOOL, Place, World
from tierd.daemon.budget import Budget
from tierd.daemon.journal import Journal
from tierd.daemon.lane import Lane
from tierd.daemon.pause import Pause
from tierd.daemon.repair import Repairer
from tierd.daemon.reread import Reader
from tierd.daemon.scrubbed import Scrubbed
from tierd.daemon.together import to_the_end
from tierd.spool import Spool
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

_LOOK = 60.0  # seconds between two looks at whether a copy is due
_AHEAD = 86_400.0  # seconds ahead that turns are kept in memory
_LATER, _LATEST = 3600.0, 86_400.0  # seconds that a copy rests which could not be read or mended: longer each time


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """`oldest`: when the longest-ago verified copy was, RFC 3339; `due`: how many copies are past the period; `doing`:
    what is being read. None where there is nothing, or scrubbing is off."""

    oldest: str | None
    due: int
    doing: str | None


@dataclass(slots=True)
class _Agenda:
    """The turns in one place from `begun` on, up to `end`, as a heap; `oldest` of all others. It holds as long as what
    was seen is equal to `seen`."""

    seen: tuple[Place, Place | None]
    doubts: int
    begun: float
    end: float
    turns: list[Turn]
    oldest: float


class Scrubber:
    """Reads copies again when they are due, and has repaired what is wrong.

    Args:
        world: the latest look at everything.
        pause: nothing is read while it lasts.
        held: what must not be deleted meanwhile.
        wake: called when something was set aside, so that it may be flushed anew.

    Attributes:
        resting: whether nothing more may be begun: the daemon drains.
    """

    def __init__(
        self,
        config: Config,
        spool: Spool,
        stores: Mapping[str, Store],
        repairer: Repairer,
        journal: Journal,
        budget: Budget,
        *,
        world: Callable[[], World],
        pause: Pause,
        held: Counter[CheckpointId],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._world, self._pause, self._wake, self._clock = world, pause, wake, clock  # of seconds since 1970
        self._journal, self._repairer = journal, repairer
        self._period, self._rate = seconds(config.scrub), rate(config.scrub_rate)
        self._reader = Reader(spool, stores, repairer, journal, budget, self._rate, self._turn, held)
        self._reader.doubted = self._doubt
        self._remembered = Scrubbed(spool.control / "scrubbed.json")
        self._lanes = {name: Lane(name) for name in (SPOOL, *stores)}
        self._right: set[PartId] = set()  # whose copies in the spool were read right by this daemon
        self._doubtful: set[Copy] = set()  # which may be wrong, as whoever used them saw
        self._later: dict[Copy, tuple[float, int]] = {}  # until when it rests, monotonic seconds, for the n-th time
        self._agendas: dict[str, _Agenda] = {}
        self._doubts = 0  # how often copies were made due at once
        self._random = random.Random()  # noqa: S311  # jitter
        self.resting = False

    # -- when -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Scrub until cancelled; where the configuration has nothing read again, only what is in doubt."""
        if self._period:
            await to_the_end(self._remembered.load)
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self._lanes.values():
                    group.create_task(self._run_lane(lane))
                group.create_task(self._remember())
        finally:
            if self._period:
                await self._remembered.save(self._world())

    async def _remember(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            self._later = {copy: one for copy, one in self._later.items() if one[0] + _LATEST > time.monotonic()}
            self._right = {part for part in self._right if self._world().spool.has(part)}
            if self._period:
                await self._remembered.save(self._world())

    async def _run_lane(self, lane: Lane) -> None:
        while True:
            copy = None
            lane.wake.clear()
            try:
                copy = await self.next(lane.name)
                if copy is not None:
                    lane.doing = f"scrubbing {copy.part}"
                    await self.scrub(copy)
                lane.succeeded()
            except Exception as error:  # as a lane of the reconciler: it never ends
                self._journal.counters["errors"] += 1
                delay = lane.failed(error, self._random, long=isinstance(error, StoreRefused))
                known = isinstance(error, TierdError | OSError)
                log.warning("%s: scrubbing %s: again in %.0f s: %s", lane.name, copy, delay, error, exc_info=not known)
            finally:
                lane.doing = None
            if copy is None or lane.last_error:
                await lane.rest(_LOOK)

    async def next(self, place: str) -> Copy | None:
        """The copy in a place that is to be read again now."""
        if self.resting or self._pause.paused:
            return None
        if doubtful := [copy for copy in self._doubtful if copy.place == place and self._may_be_read(copy)]:
            return min(doubtful)
        if not self._period:
            return None
        found = await asyncio.to_thread(self._build, place, self._world(), self._doubts, self._clock())
        self._agendas[place] = found
        world, now = self._world(), self._clock()
        waiting: list[Turn] = []
        copy = None
        while copy is None and found.turns and found.turns[0].at <= now:
            turn = heapq.heappop(found.turns)
            anew = again(world, turn.copy, self._remembered, self._period, now)
            if anew is None:
                continue
            if anew.at > now:  # verified since
                self._keep(found, anew)
                continue
            waiting.append(anew)
            if self._may_be_read(turn.copy):
                copy = turn.copy
        for turn in waiting:
            heapq.heappush(found.turns, turn)
        return None if self.resting or self._pause.paused else copy

    def _may_be_read(self, copy: Copy) -> bool:
        rests = self._later.get(copy, (0.0, 0))[0] > time.monotonic()
        return not rests and copy.part not in self._world().busy and copy.part not in self._repairer.fetching

    def _build(self, place: str, world: World, doubts: int, now: float) -> _Agenda:
        """In a thread: there may be half a million copies. Nothing is built again before anything else is seen."""
        known, seen = self._agendas.get(place), (world.spool, world.tiers.get(place))
        if known and known.doubts == doubts and known.begun <= now < known.end and known.seen == seen:
            return known
        turns = agenda(world, self._remembered, self._period, now, place)
        first = bisect.bisect(turns, now + _AHEAD, key=lambda turn: turn.at)
        oldest = min((turn.verified for turn in turns[first:]), default=math.inf)
        return _Agenda(seen, doubts, now, now + _AHEAD, turns[:first], oldest)

    def _keep(self, agenda: _Agenda, turn: Turn) -> None:
        if turn.at <= agenda.end:
            heapq.heappush(agenda.turns, turn)
        else:
            agenda.oldest = min(agenda.oldest, turn.verified)

    def verified(self, place: str, part: PartId, at: float | None = None) -> None:
        """A copy was just found right, or was at a time, by whoever read all of it."""
        self._remembered[Copy(place, part)] = self._clock() if at is None else at
        self._later.pop(Copy(place, part), None)
        if place == SPOOL:
            self._right.add(part)

    def suspect(self, place: str, part: PartId) -> None:
        """A copy may be wrong: it is read again at once, whoever's duty that is else."""
        self._doubtful.add(Copy(place, part))
        if place == SPOOL:
            self._right.discard(part)
        self._lanes[place].wake.set()

    async def is_right(self, part: PartId) -> bool:
        """Whether the spool's copy of a part is right: read at once, if this daemon never did. One that is not is
        scrubbed at once, and not read here until that is done."""
        if part in self._right or Copy(SPOOL, part) in self._doubtful:
            return part in self._right
        if await self._reader.is_right(part):
            self._right.add(part)
            return True
        self.suspect(SPOOL, part)
        return False

    def status(self) -> ScrubStatus:
        """How scrubbing stands, by what was last built for it."""
        doing = [f"{name}: {lane.doing}" for name, lane in self._lanes.items() if lane.doing]
        now = self._clock()
        turns = [turn for built in self._agendas.values() for turn in built.turns]
        oldest = min(
            [*(turn.verified for turn in turns), *(built.oldest for built in self._agendas.values()), math.inf]
        )
        return ScrubStatus(
            oldest=None if oldest == math.inf else datetime.fromtimestamp(oldest, UTC).isoformat(timespec="seconds"),
            due=overdue(turns, self._period, now),
            doing="; ".join(doing) or None,
        )

    # -- what -------------------------------------------------------------------------------------------------------

    async def scrub(self, copy: Copy) -> None:
        """Read a copy again and have repaired what is wrong.

        Raises:
            StoreUnavailable, StoreRefused, OSError: not all of it could be read, or mended; it is tried again later.
        """
        begun = self._clock()
        times = self._later.get(copy, (0.0, 0))[1]
        self._later[copy] = (time.monotonic() + min(_LATER * 2**times, _LATEST), times + 1)
        try:
            whole = await self._reader.read(copy)
        except ObjectNotFound:
            self._doubtful.discard(copy)
            return  # pruned meanwhile; the next look finds out
        self._doubtful.discard(copy)
        self._journal.counters["scrubbed"] += 1
        if whole:
            self.verified(copy.place, copy.part, begun)
            self._remembered.update(dict.fromkeys(lenders(self._world(), copy), begun))
        else:
            self._wake()

    def _doubt(self, copy: Copy, owners: set[CheckpointId]) -> None:
        """Have others of the rank that name what lies under `owners` read again at once."""
        self._doubts += 1
        place, own = self._world().tiers[copy.place], copy.part
        for seen in place.copies(own.checkpoint.run) if place else ():
            for size, ranks in seen.ranks.items():
                part = PartId(seen.id, own.rank, size)
                if own.rank not in ranks or part == own or part in seen.defects:
                    continue
                facts = seen.facts.get(part)  # of one that was not read, it is not known what it names
                if facts is None or owners & {seen.id, *facts.borrowed}:
                    self._remembered[Copy(copy.place, part)] = 0.0

    async def _turn(self) -> None:
        while self.resting:
            await asyncio.sleep(1.0)
        await self._pause.wait()
