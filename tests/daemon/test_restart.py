"""A daemon cut off at any point: the next one converges on what there would have been without the cut."""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from support.doubles import contents
from support.seeds import seeds
from support.world import RUN, commit, converge, listing, part, read, reconciler

from tierd.core.planning.place import SPOOL
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore


def history(spool: Spool, seed: int, *, upto: int, begin: int = 0) -> None:
    """Commit the steps `begin`..`upto` of a run with a rollback in it."""
    for step in range(begin, upto):
        launch = 1 if step < 4 else 2
        origin = part(1).checkpoint if launch == 2 else None
        commit(spool, part(step, launch), origin=origin)


def state(spool: Spool, stores) -> tuple:
    """What counts: the spool's parts with their bytes, what is beside them, and every object on every tier."""
    parts = {str(one): read(spool, one) for one in spool.parts()}
    return parts, listing(spool), [asyncio.run(contents(store)) for store in stores.values()]


async def cut_off(spool: Spool, stores, noise: random.Random) -> None:
    """A daemon that is killed at a random point."""
    work = asyncio.ensure_future(reconciler(spool, stores, keep=2).run())
    for _ in range(int(2 ** noise.uniform(0, 12))):
        await asyncio.sleep(0)
    if noise.random() < 0.5:
        await asyncio.sleep(noise.random() * 0.05)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


@pytest.mark.parametrize(("seed", "kind"), [(seed, ("memory", "file")[seed % 2]) for seed in seeds()])
def test_cut_off_at_any_point_it_converges_as_if_it_had_not_been(tmp_path, seed, kind):
    """Ten cuts a seed, between commits: the end is the same as without any."""

    def make(name: str):
        if kind == "memory":
            return {"first": MemoryStore(), "second": MemoryStore()}
        for tier in ("first", "second"):
            (tmp_path / name / tier).mkdir(parents=True)
        return {tier: FileStore(tmp_path / name / tier) for tier in ("first", "second")}

    calm, stores = Spool(tmp_path / "calm"), make("a")
    history(calm, seed, upto=7)
    asyncio.run(converge(calm, stores, keep=2))
    cut, others = Spool(tmp_path / "cut"), make("b")
    noise = random.Random(f"{seed} {kind}")
    done = 0
    for _ in range(10):
        if done < 7 and noise.random() < 0.6:
            more = min(7, done + noise.randrange(1, 4))
            history(cut, seed, begin=done, upto=more)
            done = more
        asyncio.run(cut_off(cut, others, noise))
        for one in cut.parts():
            assert read(cut, one), f"seed {seed}"  # whole, at every moment
    history(cut, seed, begin=done, upto=7)
    asyncio.run(converge(cut, others, keep=2))
    assert state(cut, others) == state(calm, stores), f"seed {seed}"
    assert {int(name[:12]) for name in os.listdir(cut.root / RUN)} >= {5, 6}
    assert SPOOL not in stores
