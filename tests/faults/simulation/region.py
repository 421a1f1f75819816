"""What a whole life happens in: tiers of different speed, and nodes whose daemons come, go and are configured or not.

Invariant: a daemon with a configuration is given the rules that the judge knows; one without is given URLs alone.
Nothing here says what may be deleted: the nodes only tell `Keeper` what is about to be.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.rounds import Lost
from faults.simulation.disk import Watch
from faults.simulation.keeper import Keeper, committed
from faults.simulation.loop import ProcessLife, SimLoop
from faults.simulation.node import Machine, WatchedSpool
from faults.simulation.rules import Rules, Which
from faults.simulation.store import Bucket, Line, Weather

from tierd.core.config import Config, TierConfig
from tierd.core.event_kinds import Event
from tierd.core.ids import CheckpointId, PartId
from tierd.core.retention.policy import Best, RetentionPolicy
from tierd.spool.spool import Spool

_WRONG_CLOCKS = 0.3  # probability that a launch has one, in a life that has any
_YEAR = 365 * 86400.0  # seconds


class Tier(Bucket):
    """A tier. `speed`: bytes a second that a node gets there. `down_until`: it answers nobody before that time."""

    def __init__(self, name: str, speed: float) -> None:
        super().__init__(name)
        self.speed, self.down_until = speed, 0.0


class Wire(Line):
    """One life's line to a tier: what it carries, it carries one after the other. A call that was cut off has no late
    effect: the other world of the simulation has those."""

    def __init__(self, tier: Tier, life: ProcessLife, region: Region) -> None:
        super().__init__(tier, life, region.weather, region.rng, region.count)
        self._tier, self._keeper, self._free_at = tier, region.keeper, 0.0

    def _fate(self, *kinds: str) -> str:
        self.until = self._tier.down_until
        if not self._life.dead:
            self._keeper.asked(self._life.name, self._tier.name, answers=self._loop.time() >= self.until)
        return super()._fate(*kinds)

    def _later(self, effects: dict[str, Callable[[], None]]) -> None: ...

    async def _carry(self, size: int) -> None:
        self._free_at = max(self._free_at, self._loop.time()) + size / self._tier.speed
        await asyncio.sleep(self._free_at - self._loop.time())

    async def _put(self, key: str, data: Any, *, replace: bool) -> bool:
        if self._loop.time() >= self._tier.down_until:
            await self._carry(memoryview(data).nbytes)
        return await super()._put(key, data, replace=replace)


@dataclass
class Region:
    """What all nodes of a life share."""

    loop: SimLoop
    rng: random.Random
    home: Path
    watch: Watch
    weather: Weather
    tiers: list[Tier]
    keeper: Keeper
    rescan: str
    clocks: random.Random | None = None  # draws the launches with a wrong clock; None if every clock is right
    launches: int = 0
    count: Counter[str] = field(default_factory=Counter)
    sites: list[Site] = field(default_factory=list)

    def clock_error_s(self) -> float:
        """How far ahead the clock of a new launch is; negative if it is behind."""
        if self.clocks is None or self.clocks.random() >= _WRONG_CLOCKS:
            return 0.0
        self.count["life: launches with a wrong clock"] += 1
        return self.clocks.choice((-_YEAR, _YEAR))


class _SiteSpool(WatchedSpool):
    machine: Site

    def discard(self, name: str, before_ns: int | None = None) -> None:
        room, _, rest = name.partition("/")
        if room == "saved" and not self.life.dead:  # the last that goes of a finished run
            self.machine.judged(lambda: self.machine.keeper.departs(self.machine.name, rest.partition("/")[0]))
        super().discard(name, before_ns)

    def manifest_stamp(self, part: PartId) -> int:
        """When the simulated clock first showed this manifest, in place of when this machine's did."""
        stamp = super().manifest_stamp(part)
        return self.machine.stamps.setdefault((part, stamp), time.time_ns()) if stamp else 0

    def saved_stamp(self, run: str, attempt: str) -> int:
        stamp = super().saved_stamp(run, attempt)
        return self.machine.stamps.setdefault((run, attempt, stamp), time.time_ns()) if stamp else 0


def which(part: PartId) -> Which:
    return part.checkpoint.run, int(part.checkpoint.attempt[-8:], 16), part.checkpoint.step


class Site(Machine):
    """A machine of a `Region`.

    Attributes:
        configured: whether the next daemon has a configuration; without, it is given the tiers' URLs alone.
        attached: the runs whose trainers are attached, whichever daemon lives.
    """

    spool_type = _SiteSpool

    def __init__(self, region: Region, name: str, capacity: int | None) -> None:
        self.region, self.keeper = region, region.keeper
        self.configured = True
        self.attached: set[str] = set()
        self.stamps: dict[tuple[Hashable, ...], int] = {}
        super().__init__(region, name)
        self.disk.capacity = capacity
        region.sites.append(self)

    def stamp(self, spool: Spool, one: CheckpointId) -> None:
        """A save was begun, by the simulated clock: else it seems to have been when somebody first asks."""
        if stamp := spool.saved_stamp(one.run, one.attempt):
            self.stamps[one.run, one.attempt, stamp] = time.time_ns()

    def _start(self) -> None:
        self.keeper.started(self.name, configured=self.configured)
        super()._start()
        for run in sorted(self.attached):  # a trainer attaches again when its daemon went
            self.daemon.requests.trainer_activity.trainer_attached(run)

    def _made_lines(self) -> Iterable[Line]:
        return [Wire(one, self.life, self.region) for one in self.region.tiers]

    def may_go(self, one: PartId) -> None:
        self.keeper.leaves_spool(self.name, which(one))

    def may_be_quarantined(self, one: PartId) -> None:
        raise Lost(f"{self.name}: {one} is set aside, and nothing was hurt")

    def _config(self) -> Config:
        rules = self.keeper.rules if self.configured else {}
        own: dict[str, Any] = {}
        if self.configured:
            own = {"retention": policy(self.keeper.spool), "hold_for": f"{self.keeper.hold_for:.0f}s"}
        tiers = tuple(
            TierConfig(
                name=one.name,
                url=f"file:///{one.name}",
                **({"retention": policy(rules[one.name])} if one.name in rules else {}),
            )
            for one in self.region.tiers
        )
        return Config(
            spool=str(self.root),
            tier=tiers,
            rescan=self.region.rescan,
            min_free_percent=0.0,
            scrub="0s",
            **own,
        )

    def _heard(self, event: Event) -> None:
        self.keeper.reported.append((event.what, event.subject))

    def attach(self, run: str) -> None:
        """A trainer of this run comes."""
        self.attached.add(run)
        self.keeper.ended[self.name, run] = None
        if self.up:
            self.daemon.requests.trainer_activity.trainer_attached(run)

    def detach(self, run: str) -> None:
        """It goes."""
        self.attached.remove(run)
        self.keeper.ended[self.name, run] = self.region.loop.now
        if self.up:
            self.daemon.requests.trainer_activity.trainer_detached(run)

    def stop(self) -> None:
        """The daemon is killed; its disk stays as it is."""
        self.life.end()
        self.up = False
        self.region.count["life: daemons killed"] += 1

    def crash(self) -> None:
        """The power goes, and with it whatever was not made durable."""
        before = {one for one in committed(self.root) if one in self.keeper.acked}
        new = self.disk.cut()
        self.life.end()
        self.region.watch.leave(self.disk)
        self._use(new)
        self.up = False
        self.region.count["life: crashes"] += 1
        if lost := before - committed(self.root).keys():
            raise Lost(f"{self.name}: acknowledged, and lost in a power cut: {sorted(lost)}")

    @property
    def is_quiet(self) -> bool:
        """Whether its daemon does nothing at this moment. Raises `Lost` where it has ended by itself."""
        if self.up and self.work.done():
            raise Lost(f"{self.name}: its daemon has ended: {self.work}")
        lanes = self.daemon.workers.values()
        return self.up and not any(one.doing or one.wake.is_set() or one.last_error for one in lanes)


def policy(rules: Rules) -> RetentionPolicy:
    """The rules as a configuration says them."""
    best = rules.best and Best(metric=rules.best[0], mode="min" if rules.best[1] else "max", count=rules.best[2])
    return RetentionPolicy(
        keep_last=rules.last,
        keep_every_steps=rules.every_steps,
        keep_within=f"{rules.within:.0f}s" if rules.within else None,
        keep_every=f"{rules.every:.0f}s" if rules.every else None,
        keep_best=best or None,
    )
