"""The nodes that watch one directory in a trial: one alone, or two that share a tier and of which one may be killed.

The tier is simulated but for its announcements, which `IngestClaim` keeps in a real store. A killed node loses its
spool.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support.timed import Ticking
from support.watched import SETTLE_S, Files, World
from support.watched_run import observed
from support.world import read

from tierd.core.errors import CorruptChunk
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import UNIT_NAME
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.intake.unit_watch import UnitWatch, WatchReports
from tierd.daemon.tiers.announcements import IngestClaim
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore
from tierd.watching.checkpoint_names import KnownCheckpoints

RUN = "watched"
_TIMINGS = DaemonTimings(renew_s=6.0, silent_s=60.0, wall_ns=Ticking())
_OBSERVE = 20  # looks between two observations of the tier that nothing asks for


class Killed(Exception):
    """The node is gone."""


def content(spool: Spool, part: PartId) -> Files:
    """A part's files, verified; without the description."""
    return {path: data for path, data in read(spool, part).items() if path != UNIT_NAME}


@dataclass
class Tier:
    """What the nodes' flushes put on a tier, and the store for their announcements."""

    known: KnownCheckpoints = field(default_factory=KnownCheckpoints)
    parts: dict[PartId, Files] = field(default_factory=dict)
    store: MemoryStore = field(default_factory=MemoryStore)

    def put(self, spool: Spool, part: PartId) -> None:
        """Flush a part. One that a link let its program rewrite does not verify any more, and stays away."""
        try:
            self.parts[part] = content(spool, part)
        except CorruptChunk:
            return
        facts = observed(spool, RUN)
        one = part.checkpoint
        self.known = self.known.with_checkpoint(one, facts.created[one], facts.origins[one.attempt])


class Lone:
    """A node that watches alone."""

    def __init__(self, world: World, spool: Spool, reports: WatchReports) -> None:
        self.world, self.spool, self.reports, self.alive = world, spool, reports, True
        self.parts: list[PartId] = []
        self.known = KnownCheckpoints()
        self.watch = UnitWatch(spool, world.root, RUN, self, settle_s=SETTLE_S, going=self._meddle)

    def observe(self) -> None:
        self._observe(may_take=True)

    def _observe(self, *, may_take: bool) -> None:
        count = len(self.parts)
        self.watch.observe(self.known, self.world.now_s, may_take=may_take)
        if len(self.parts) > count:
            self.known = self.known.merge(observed(self.spool, RUN))

    def _meddle(self) -> None:
        steps = self.world.chance.randint(1, 5) if self.world.chance.random() < 0.05 else 0
        if steps and not self.world.over:
            self.world.acts["overtaken while it is taken"] += 1
        for _ in range(steps):
            self.world.step()

    def report_taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        self.parts.append(part)
        self.reports.report_taken(part, outcome)

    def report_refused(self, path: str, why: str) -> None:
        self.reports.report_refused(path, why)

    def report_doubt(self, path: str, checkpoint: CheckpointId) -> None:
        self.reports.report_doubt(path, checkpoint)


class Sharing(Lone):
    """A node that shares the directory and the tier; `chance` decides its pace and whether it is killed."""

    def __init__(
        self, world: World, home: Path, who: str, tier: Tier, judge: Callable[[Spool], WatchReports], mortal: bool
    ) -> None:
        spool = Spool(home / f"spool-{who}")
        self.chance = random.Random(f"{home.name} {who}")
        self.life = self.chance.choice((10**9, self.chance.randint(1, 60))) if mortal else 10**9
        super().__init__(world, spool, judge(spool))
        self.tier, self.flushed, self.observations = tier, 0, 0
        self.taker = IngestClaim(RUN, who * 8, lambda: tier.store, _TIMINGS)

    def observe(self) -> None:
        if not self.alive or self.chance.random() < 0.3:
            return
        try:
            asyncio.run(self._take_turns())
        except Killed:
            self.alive = False
            self.world.acts["a node killed"] += 1

    async def _take_turns(self) -> None:
        """As `Intake` does."""
        self.observations += 1
        if self.observations % _OBSERVE == 0:
            self.known = self.known.merge(self.tier.known)
        self._observe(may_take=self.taker.is_claimed)
        if self.watch.wanted_checkpoint and await self.taker.may_take(self.watch.wanted_checkpoint, self.world.now_s):
            self.known = self.known.merge(self.tier.known) if self.taker.is_claimed else self.known
            self._observe(may_take=True)
        elif self.watch.wanted_checkpoint:
            self.world.acts["left to the other node"] += 1
        self._live()
        if self.flushed < len(self.parts) and self.chance.random() < 0.3:
            self.tier.put(self.spool, self.parts[self.flushed])
            self.flushed += 1
        if self.flushed == len(self.parts):
            await self.taker.release()
        await self.taker.renew()

    def _live(self) -> None:
        self.life -= 1
        if self.life < 0:
            raise Killed

    def _meddle(self) -> None:
        self._live()
        super()._meddle()
