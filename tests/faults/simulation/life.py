"""Whole lives: tiers of different speed and policy, job after job on small disks, readers beside writers, tiers that do
not answer for days, with holds that end sooner or later, and daemons that are killed and started again, with their
configuration or without one.

A trial is a small region of one to three nodes and one to three tiers. `keeper.Keeper` judges every deletion while it
happens; at the end faults stop, and everything must come to rest at what the rules want, with nothing left over.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from unittest import mock

from faults.rounds import Lost
from faults.simulation.disk import Watch, watched
from faults.simulation.keeper import FINISHED, HOLD_FOR, Keeper, committed
from faults.simulation.loop import SimLoop, clocked
from faults.simulation.loop import run as run_loop
from faults.simulation.node import tierd_here
from faults.simulation.region import Region, Site, Tier
from faults.simulation.rules import Rules
from faults.simulation.store import Weather
from faults.simulation.training import RESTORING, SIZE, Training, any_of, restored
from support.world import CHUNK

from tierd.core.errors import TierdError

_MOST = 500_000  # steps of a trial: more is a hang
_WRONG_CLOCKS = 0.2  # probability that launches of a life have clocks that are a year ahead or behind
_REST = 8 * 3600.0  # seconds in which everything comes to rest


class RegionLife:
    """One seed's region, from its first save to its rest."""

    def __init__(self, seed: int, home: Path) -> None:
        self.seed, self.rng, self.home = seed, random.Random(f"life {seed}"), home
        self.loop = SimLoop(self.rng, _MOST)
        self.faulty = 0  # steps while faults happened

    def run(self) -> tuple[int, Counter[str]]:
        watch = Watch()
        margin = mock.patch("tierd.daemon.reconciling.client_requests._MARGIN", CHUNK)  # as small as the disks are
        with clocked(self.loop), watched(watch), tierd_here(self.loop), margin:
            try:
                run_loop(self.loop, self._story(watch))
            except Lost as error:
                error.add_note(f"after {self.loop.steps} steps, {self.loop.now - 1000:.1f} simulated seconds")
                raise
        return self.faulty, self.region.count

    # -- the region -------------------------------------------------------------------------------------------------

    def _make(self, watch: Watch) -> None:
        rng = self.rng
        tiers = [Tier(name, rng.choice((100, 1000, 1e6))) for name in ("near", "far", "deep")[: rng.randint(1, 3)]]
        rules = {tier.name: self._rules() for tier in tiers}
        spool = self._rules(local=True)
        hold_for = random.Random(f"hold {self.seed}").choice((300.0, 3600.0, HOLD_FOR, HOLD_FOR))
        self.keeper = Keeper(self.loop.time, rules, spool, list(tiers), hold_for)
        self.keeper.awake = lambda: self.loop.now - self.loop.slept
        bad = rng.choice((0.0, 0.0, 0.01, 0.03))
        weather = Weather(fails=bad, lost=bad, partial=bad, slow=rng.choice((0.001, 0.02, 0.3)))
        rescan = rng.choice(("120s", "600s", "1800s"))
        clocks = random.Random(f"clock {self.seed}")  # a generator of its own, so that all else is as without it
        wrong = clocks if clocks.random() < _WRONG_CLOCKS else None
        self.region = Region(self.loop, rng, self.home, watch, weather, tiers, self.keeper, rescan, wrong)
        self.region.count["life: lives with wrong clocks"] += wrong is not None
        self.keeper.spools = lambda: {site.name: site.root for site in self.region.sites}
        for tier in tiers:
            tier.changed = lambda *change, tier=tier: self._changed(tier, *change)  # type: ignore[misc]
        room = spool.last + 2  # for what it keeps, what comes, and what has just left
        self.small = spool == Rules(spool.last) and rng.random() < 0.5
        for name in "ABC"[: rng.choice((1, 1, 2, 2, 3))]:
            Site(self.region, name, room * SIZE if self.small else None).start()

    def _rules(self, *, local: bool = False) -> Rules:
        rng = self.rng
        plain = rng.random() < (0.7 if local else 0.3)
        return Rules(
            last=rng.randint(1, 3 if local else 6),
            every_steps=None if plain else rng.choice((None, 5, 10)),
            within=None if plain else rng.choice((None, None, 100.0, 3600.0)),
            every=None if plain else rng.choice((None, None, 300.0, 7200.0)),
            best=None if plain else rng.choice((None, ("loss", True, rng.randint(1, 3)), ("loss", False, 1))),
        )

    def _changed(self, tier: Tier, key: str, old: bytes | None, new: bytes | None, who: str) -> None:
        try:
            self.keeper.changed(tier, key, old, new, who)
        except Exception as error:  # the judge's own too
            self.loop.lose(error)

    # -- the story --------------------------------------------------------------------------------------------------

    async def _story(self, watch: Watch) -> None:
        self._make(watch)
        chaos = [asyncio.ensure_future(one()) for one in (self._outages, self._restarts, self._readings)]
        jobs = [asyncio.ensure_future(self._jobs(site)) for site in self.region.sites]
        work = asyncio.gather(*jobs)
        try:
            done, _ = await asyncio.wait([work, *chaos], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (work, *chaos):
                task.cancel()
            await asyncio.wait([*jobs, *chaos], timeout=RESTORING)  # a job may wait for a node that nobody starts now
        await self._end()

    async def _jobs(self, site: Site) -> None:
        """One run after another on a node; some are taken up where they were, or where another node left them."""
        rng, region = self.rng, self.region
        for number in range(rng.randint(1, 3)):
            run = f"{site.name.lower()}{number}"
            others = sorted({one[0] for one in self.keeper.saved})
            if others and rng.random() < 0.3:
                run = rng.choice(others)
            if any(ended is None for (_, one), ended in self.keeper.ended.items() if one == run):
                continue  # another node trains it
            for _ in range(rng.choice((1, 1, 1, 2))):
                await self._launch(site, run)
            await self._pass(rng.choice((1.0, 600.0, 90_000.0)))
            region.count["life: jobs"] += 1

    async def _launch(self, site: Site, run: str) -> None:
        rng = self.rng
        while not site.up:
            await asyncio.sleep(10.0)
        job = Training(site, run)
        back = any_of(self.region, run, rng) if rng.random() < 0.15 else None
        if not await job.begin(back):
            await asyncio.sleep(60.0)
            return
        between = rng.choice((0.8, 5.0, 60.0, 900.0))
        for _ in range(rng.choice((2, 6, 14, 28))):
            if job.broken:
                break
            await job.save()
            await asyncio.sleep(between * rng.choice((0.5, 1.0, 1.0, 1.5)))
        job.end()

    async def _outages(self) -> None:
        """Tiers that do not answer for a while, or for longer than anything is held for them."""
        rng = self.rng
        while True:
            await self._pass(rng.choice((60.0, 600.0, 6000.0)))
            tier = rng.choice(self.region.tiers)
            if rng.random() < 0.6:
                await self._down(tier, rng.choice((30.0, 600.0, 6 * 3600.0)))
            elif len(self.region.tiers) > 1 and rng.random() < 0.15:
                await self._down(tier, HOLD_FOR * rng.choice((0.5, 1.5)))

    async def _down(self, tier: Tier, seconds: float) -> None:
        self.keeper.down(tier.name)
        tier.down_until = self.loop.now + seconds
        self.region.count["life: outages"] += 1
        self.region.count["life: outages longer than anything is held"] += seconds > self.keeper.hold_for
        await self._pass(seconds)
        self.keeper.up(tier.name)

    async def _pass(self, seconds: float) -> None:
        """Time passes, most of it at once, as on a machine that slept: nobody wants to simulate days."""
        end = self.loop.now + seconds
        while (left := end - self.loop.now) > 0.01:
            await asyncio.sleep(min(120.0, left))
            if left > 1000.0:
                self.loop.jump(min(left - 120.0, self.rng.choice((3000.0, 12_000.0, 40_000.0))))

    async def _restarts(self) -> None:
        rng = self.rng
        while True:
            await self._pass(rng.choice((5.0, 60.0, 600.0, 6000.0)))
            site = rng.choice(self.region.sites)
            if not site.up:
                continue
            if rng.random() < 0.3:
                site.crash()
            else:
                site.stop()
            site.configured = rng.random() < 0.7
            self.region.count["life: daemons without a configuration"] += not site.configured
            await asyncio.sleep(rng.choice((0.1, 5.0, 300.0)))
            site.start()

    async def _readings(self) -> None:
        """Restores where nobody trains that run."""
        rng = self.rng
        while True:
            await self._pass(rng.choice((30.0, 300.0, 6000.0)))
            site, runs = rng.choice(self.region.sites), sorted({one[0] for one in self.keeper.saved})
            if runs and site.up:
                await self._read(site, rng.choice(runs))

    async def _read(self, site: Site, run: str) -> None:
        if run in site.attached:
            return
        try:
            await restored(site, site.life, run)
            self.region.count["life: readings"] += 1
        except (TierdError, OSError, TimeoutError):
            self.region.count["life: readings that raised"] += 1

    # -- the end ----------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Faults stop, trainers are gone. Everything comes to hold what is wanted, and spools are left."""
        self.faulty = self.loop.steps
        self.region.weather.calm()
        self.keeper.down_since.clear()
        for tier in self.region.tiers:
            tier.down_until = 0.0
        for site in self.region.sites:
            if site.up and not site.configured:
                site.stop()
            site.configured = True
            if not site.up:
                site.start()
        for pause in (400.0, 7 * 3600.0, 25 * 3600.0, FINISHED + 3600.0):
            self.loop.jump(pause)
            await self._settle()
        end = self.loop.now + _REST
        while wrong := self.keeper.at_rest():
            if self.loop.now > end:
                raise Lost(f"at rest, {'; '.join(wrong)}")
            await self._settle()
        if dropped := self.keeper.dropped():
            raise Lost("; ".join(dropped))
        self.region.count.update(f"life: daemon: {what}" for what, _ in self.keeper.reported)

    async def _settle(self) -> None:
        """Until nothing has changed for a while."""
        end, quiet, before = self.loop.now + _REST, 0, self._lies()
        while quiet < 4:
            for site in self.region.sites:
                site.daemon.wake()
            await asyncio.sleep(61.0)
            now, busy = self._lies(), [site.name for site in self.region.sites if not site.is_quiet]
            if self.loop.now > end:
                raise Lost(f"no fixed point: busy: {busy}; in one minute: {_difference(before, now)}")
            quiet, before = (quiet + 1 if now == before and not busy else 0), now

    def _lies(self) -> set[tuple[str, str]]:
        """Every object, and every copy in a spool."""
        found = {(tier.name, key) for tier in self.region.tiers for key in tier.keys}
        return found | {(site.name, str(one)) for site in self.region.sites for one in committed(site.root)}


def _difference(before: set[tuple[str, str]], now: set[tuple[str, str]]) -> str:
    return f"gone {sorted(before - now)[:5]}, new {sorted(now - before)[:5]}"
