"""Launches whose `to` changes between tiers that go away and return, in random histories.

Judged by docs/explanation/daemon.md, "The tiers of a new launch": the tiers that a launch names get its newest
checkpoints, although the daemon of an earlier launch runs; a tier that no launch names any more is sent what it wants
when it answers again; and nothing is deleted because a launch no longer names a tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest
from support.seeds import seeds
from support.timed import timed
from support.waiting import until
from support.world import RUN, commit, hurry, part, steps_in

from tierd.core.config import from_urls
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon import daemon_service
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Attach
from tierd.spool.spool import Spool


class Directory:
    """A directory tier that can be taken away and put back."""

    def __init__(self, path: Path) -> None:
        self.path, self._away = path, path.with_name(f"{path.name}-away")
        path.mkdir()

    @property
    def answers(self) -> bool:
        return self.path.exists()

    def turn(self) -> None:
        """Take it away, or put it back."""
        if self.answers:
            self.path.rename(self._away)
        else:
            self._away.rename(self.path)

    def steps(self) -> set[int]:
        home = self.path if self.answers else self._away
        walk = os.walk(home / RUN / "manifests")  # unlike glob, it goes on if a prune deletes a directory meanwhile
        return {int(Path(directory).name[:12]) for directory, _, names in walk if names}


@contextlib.asynccontextmanager
async def serving(spool: Spool, to: list[Directory], keep: int) -> AsyncIterator[None]:
    """The daemon that a trainer started for these tiers."""
    made = from_urls(str(spool.root), [f"file://{tier.path}" for tier in to], RetentionPolicy(keep_last=keep))
    config = msgspec.structs.replace(made, drain="1s", rescan="1s", min_free_percent=0.0)
    daemon = asyncio.ensure_future(daemon_service.serve(config, until_idle=True, await_trainer=True))
    await until(spool.socket.exists)
    try:
        yield
    finally:
        if not daemon.done():
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await daemon


async def history(spool: Spool, home: Path, seed: int) -> int:
    """Play a history; return how many launches met an earlier launch's daemon with other tiers than theirs."""
    rng = random.Random(seed)
    a, b = Directory(home / "a"), Directory(home / "b")
    keep, step, changes = rng.randint(1, 3), 0, 0
    to = rng.choice(([a], [b], [a, b]))
    named = list(to)  # by any launch of this daemon
    async with serving(spool, to, keep), contextlib.AsyncExitStack() as beside:
        if rng.random() < 0.3:  # another trainer of the spool, attached for the whole history
            trainer = beside.enter_context(contextlib.closing(DaemonConnection(spool)))
            await asyncio.to_thread(trainer.ask, Attach(run=RUN, to=urls(to)), 60.0)
        for launch in range(1, rng.randint(3, 6)):
            if launch > 1:
                to = rng.choice(([a], [b], [a, b]))
            changes += any(tier not in named for tier in to)
            for tier in to:
                if not tier.answers and tier not in named:
                    tier.turn()  # a launch begins with tiers that it can use
                if tier not in named:
                    named.append(tier)
            with contextlib.closing(DaemonConnection(spool)) as link:
                await asyncio.to_thread(link.ask, Attach(run=RUN, to=urls(to)), 60.0)
                for _ in range(rng.randint(1, 3)):
                    if rng.random() < 0.4:
                        rng.choice(named).turn()
                    step += 1
                    commit(spool, part(step, launch))
                    await asyncio.sleep(rng.choice((0.0, 0.02, 0.1)))
                newest = set(range(1, step + 1)[-keep:])
                present = [tier for tier in to if tier.answers]
                await until(lambda: all(newest <= tier.steps() for tier in present))  # noqa: B023
                lacking = [tier for tier in named if not newest <= tier.steps()]
                assert not lacking or newest <= set(steps_in(spool)), "a tier that is away wants them"
        for tier in named:
            if not tier.answers:
                tier.turn()
        newest = set(range(1, step + 1)[-keep:])
        await until(lambda: all(newest <= tier.steps() for tier in named))
    return changes


def urls(tiers: list[Directory]) -> tuple[str, ...]:
    return tuple(f"file://{tier.path}" for tier in tiers)


@pytest.mark.parametrize("seed", seeds(first=8))
def test_tiers_of_each_launch_get_its_newest_checkpoints(spool, tmp_path, monkeypatch, seed):
    hurry(monkeypatch)
    timed(monkeypatch, grace_s=60.0)  # the daemon lives on between two launches
    asyncio.run(history(spool, tmp_path, seed))


def test_histories_have_launches_that_name_a_new_tier(tmp_path, monkeypatch):
    hurry(monkeypatch)
    timed(monkeypatch, grace_s=60.0)  # the daemon lives on between two launches

    def changes(seed: int) -> int:
        home = tmp_path / str(seed)
        home.mkdir()
        return asyncio.run(history(Spool(home / "spool"), home, seed))

    assert any(changed > 1 for changed in accumulate(map(changes, range(8))))
