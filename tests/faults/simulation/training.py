"""Trainers and readers of a whole life: they restore by the client's own code, and save one part a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from faults.rounds import Lost
from faults.simulation.keeper import committed
from faults.simulation.loop import EPOCH, ProcessLife
from faults.simulation.node import Caller, _Board, _Ranks
from faults.simulation.region import Region, Site, which
from faults.simulation.rules import Saved, Which, is_on
from faults.simulation.truth import table
from support.world import CHUNK, commit, part

from tierd.client.ranks.attempts import RankClock
from tierd.client.restoring import part_source
from tierd.client.restoring import restorer as restore
from tierd.core.errors import SpoolFull, TierdError
from tierd.spool.spool import Spool

RESTORING = 60 * 86400.0  # seconds after which a restore hangs; most of them pass at once


@lru_cache(maxsize=4096)
def content(one: Which) -> dict[str, bytes]:
    """A checkpoint's files: one never changes, one sometimes, one always."""
    run, launch, step = one
    noise = random.Random(f"{run} {launch} {step}")
    return {
        "backbone": run.encode()[:1] * (2 * CHUNK),
        "head": bytes([step // 4 % 251]) * (CHUNK // 2) + bytes([launch % 251]) * (CHUNK // 2),
        "news": noise.randbytes(CHUNK // 2),
        "table": table(run, step, launch),
    }


SIZE = 6 * CHUNK  # bytes that one takes in a spool, with its manifest, and a little more


async def restored(site: Site, life: ProcessLife, run: str, asked: Which | None = None) -> Which | None:
    """What a restore on this node gives, verified; raises as the client does."""
    keeper = site.keeper
    begun, reach, passed = site.region.loop.now, keeper.reach(site.name), keeper.passed(site.name, run)

    def work() -> Which | None:
        spool = Spool(site.root, write=False)
        spool.node = site  # type: ignore[attr-defined]
        ranks: Any = _Ranks(0, 1, board)
        source = part_source.NodeSource(spool, run, tiers=True, keep=False)
        restorer = restore.Restorer(source, ranks, lambda: RankClock(0, "0" * 8, None))
        step, attempt = (asked[2], part(asked[2], asked[1], run=run).checkpoint.attempt) if asked else (None, None)
        found = restorer.restore(step, attempt)
        if found is None:
            return None
        one = which(found.part)
        for name, data in content(one).items():
            if (found.directory / name).read_bytes() != data:
                raise Lost(f"a restore of {one} gave wrong bytes of {name}")
        if found.hold:
            found.hold.close()
        return one

    board = _Board(1)
    task = life.spawn(Caller().run(work))
    await asyncio.wait([task], timeout=RESTORING)
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
        if not life.dead:
            raise Lost(f"a hang: a restore on {site.name} did not come back within 60 days")
        return None
    if task.cancelled() or life.dead:
        return None
    given = task.result()
    offered = keeper.offered(site.name, run, reach, begun) if asked is None else asked
    if offered is not None and (given is None or given[1:] < offered[1:]):
        raise Lost(f"a restore on {site.name} gave {given}, and {offered} was right there")
    if asked is None and given and not any(is_on(path, given) for path in (passed, keeper.passed(site.name, run))):
        raise Lost(f"a restore on {site.name} gave {given}, which was abandoned: {keeper.lie(run)}")
    return given


class Training:
    """One launch of a run on a node."""

    def __init__(self, site: Site, run: str) -> None:
        self.site, self.region, self.run = site, site.region, run
        self.life = site.life

    @property
    def broken(self) -> bool:
        """Whether the node went down; a daemon that was killed takes no trainer along."""
        return self.disk is not self.site.disk

    async def begin(self, asked: Which | None = None) -> bool:
        """Restore, and begin a launch; whether that went well."""
        region = self.region
        self.disk = self.site.disk
        self.site.attach(self.run)
        try:
            found = await restored(self.site, self.life, self.run, asked)
        except (TierdError, OSError, TimeoutError):
            region.count["life: restores that raised"] += 1
            self.end()
            return False
        if self.life.dead:
            self.end()
            return False
        region.launches += 1
        self.launch, self.origin, self.step = region.launches, found and found[1:], found[2] if found else 0
        self.clock_error_s = region.clock_error_s()
        region.count["life: launches"] += 1
        return True

    async def save(self) -> None:
        """One checkpoint. If the disk is full, the daemon is asked to make room, and it is tried once more."""
        region, site = self.region, self.site
        self.step += region.rng.choice((1, 1, 1, 2, 5))
        one: Which = (self.run, self.launch, self.step)
        saved = Saved(
            *one,
            self.origin,
            site.name,
            round(EPOCH + region.loop.now + self.clock_error_s, 3),
            region.loop.now,
            site.keeper.awake(),
            {"loss": float(region.rng.randint(0, 40))} if region.rng.random() < 0.8 else {},
        )
        site.keeper.begun(saved)
        asked = -1.0  # when the daemon was asked for room
        for again in (False, True):
            try:
                await asyncio.to_thread(self._commit, saved)
                break
            except (OSError, SpoolFull) as error:
                if isinstance(error, OSError) and error.errno != errno.ENOSPC:
                    raise
                region.count["life: saves that met a full disk"] += 1
                if not again:
                    asked = region.loop.now if await self._ask_for_room() else -1.0
                    continue
                at_once = region.loop.now - asked < 1.0  # else others may have filled the disk again
                fair = at_once and not region.weather.fails and region.weather.slow < 0.1
                flushed = {which(one) for one in site.daemon.inventory().busy}
                if fair and site.keeper.could_make_room(site.name, self.run, SIZE, flushed):
                    raise Lost(f"{site.name}: {one} met a full disk twice: {site.keeper.lie(self.run)}") from error
                return
        if self.broken or site.disk.cut_off is not None:
            return
        site.keeper.acked.add(one)
        region.count["life: saves"] += 1
        if site.up and region.rng.random() < 0.8:  # else the event is lost
            site.daemon.wake()

    def _commit(self, saved: Saved) -> None:
        origin = part(saved.origin[1], saved.origin[0], run=self.run).checkpoint if saved.origin else None
        created = datetime.fromtimestamp(saved.created, UTC).isoformat()
        spool = Spool(self.site.root)
        one = part(saved.step, saved.launch, run=self.run)
        try:
            commit(spool, one, content(saved.which), origin, saved.metrics, created)
        finally:
            self.site.stamp(spool, one.checkpoint)

    async def _ask_for_room(self) -> bool:
        """As the client and the daemon do it for a save that met a full disk; whether the daemon had time for it."""
        loop, pressed, name = self.region.loop, self.site.keeper.pressed, self.site.name
        begun, life = loop.now, self.site.life
        if not self.site.up:
            return False
        pressed[name] += 1
        with contextlib.suppress(TierdError, OSError, TimeoutError, asyncio.CancelledError):
            await life.spawn(self.site.daemon.room.make(self.run, SIZE))
        # By a timer: whatever its threads still do comes before, also when the machine sleeps now.
        loop.call_later(1.0, lambda: pressed.subtract((name,)))
        return not life.dead and loop.now - begun < 6.0  # else the machine slept meanwhile

    def end(self) -> None:
        """The trainer ends, or dies."""
        self.site.detach(self.run)


def any_of(region: Region, run: str, rng: random.Random) -> Which | None:
    """Some checkpoint of a run that lies somewhere."""
    there = sorted(one for site in region.sites for one in committed(site.root) if one[0] == run)
    there += sorted(one for tier in region.tiers for one in region.keeper.on_tier(tier) if one[0] == run)
    return rng.choice(there) if there else None
