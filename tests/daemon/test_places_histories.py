"""Tiers by several names, in random histories: a place loses nothing to a name whose policy is poorer.

Judged by docs/reference/places.md: while two tiers of a configuration are one place, nothing is pruned there. A tier
that does not answer is compared later, and until then nothing is deleted that its policy keeps. A copy of a tier is a
place of its own, where each policy keeps what it says.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Sequence

import pytest
from support.world import RUN, commit, hurry, part, running, steps_on

from tierd.core.config import Config, TierConfig
from tierd.core.errors import StoreUnavailable
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.tiers.identity import read_identity
from tierd.spool.spool import Spool
from tierd.stores.base import Buffer, ObjectInfo
from tierd.stores.memory import MemoryStore

SEEDS = int(os.environ.get("TIERD_SEEDS", "8"))  # `make gate` takes a hundred


class Name:
    """One name of a place; its server may be silent under this name alone."""

    def __init__(self, place: MemoryStore) -> None:
        self.place, self.silent = place, False

    def _ask(self) -> MemoryStore:
        if self.silent:
            raise StoreUnavailable("no answer")
        return self.place

    async def put(self, key: str, data: Buffer) -> str:
        return await self._ask().put(key, data)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        return await self._ask().get(key, into)

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        async for info in self._ask().scan(prefix, after):
            yield info

    async def delete(self, keys: Sequence[str]) -> None:
        await self._ask().delete(keys)

    async def aclose(self) -> None:
        pass


async def copied(place: MemoryStore) -> MemoryStore:
    """A copy of a tier with all its objects, as by a tool of the server."""
    copy = MemoryStore()
    async for info in place.scan(""):
        await copy.put(info.key, await place.get(info.key))
    return copy


async def steps(place: MemoryStore) -> set[int]:
    return set(steps_on([info.key async for info in place.scan(f"{RUN}/manifests/")]))


def configured(spool: Spool, keeps: dict[str, int]) -> Config:
    tiers = (
        TierConfig(name=name, url=f"s3://bucket/p?endpoint=http://{name}", retention=RetentionPolicy(keep_last=keep))
        for name, keep in keeps.items()
    )
    # The spool keeps all, so that a step that is gone from a place can only have been pruned there.
    local = RetentionPolicy(keep_last=1000)
    return Config(spool=str(spool.root), tier=tuple(tiers), retention=local, min_free_percent=0.0, scrub="0s")


async def work(spool: Spool, keeps: dict[str, int], names: dict[str, Name], rng: random.Random, silence: float) -> None:
    """Run a daemon until little changes any more, while each name is silent for this share of the time."""
    daemon = Reconciler(configured(spool, keeps), spool, {name: names[name] for name in keeps})
    async with running(daemon):
        for _ in range(rng.randint(2, 6)):
            for name in names.values():
                name.silent = rng.random() < silence
            daemon.wake()
            await asyncio.sleep(rng.choice((0.01, 0.05, 0.1)))
        for name in names.values():
            name.silent = False
        for _ in range(8):
            daemon.wake()
            await asyncio.sleep(0.05)


async def history(spool: Spool, seed: int) -> int:
    """Play a history; return in how many rounds two tiers were one place."""
    rng = random.Random(seed)
    place, step, shared_rounds = MemoryStore(), 0, 0
    names = {"a": Name(place), "b": Name(place), "c": Name(MemoryStore())}
    for _ in range(4):
        if rng.random() < 0.3:
            names["c"] = Name(await copied(place))
        chosen = rng.sample(sorted(names), rng.randint(1, 3))
        keeps = {name: rng.randint(1, 4) for name in chosen}
        for _ in range(rng.randint(1, 4)):
            step += 1
            commit(spool, part(step))
        before = {name: await steps(names[name].place) for name in keeps}
        silence = rng.choice((0.0, 0.0, 0.3))
        await work(spool, keeps, names, rng, silence)
        is_shared = {"a", "b"} <= keeps.keys()
        shared_rounds += is_shared
        for name in keeps:
            held = await steps(names[name].place)
            keep = max(keeps[alias] for alias in keeps if names[alias].place is names[name].place)
            newest = set(range(1, step + 1)[-keep:])
            assert newest <= held, f"{name} holds {held} and lost some of {newest}"
            if is_shared and names[name].place is place and not silence:
                assert before[name] <= held, f"{name} was pruned: {before[name]} before, {held} now"
        if "c" in keeps and {"a", "b"} & keeps.keys():
            assert await read_identity(names["c"].place) != await read_identity(place)
    return shared_rounds


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_name_of_a_place_prunes_for_another_one(spool, monkeypatch, seed):
    hurry(monkeypatch)
    asyncio.run(history(spool, seed))


def test_histories_have_places_with_two_names(tmp_path, monkeypatch):
    hurry(monkeypatch)
    assert sum(asyncio.run(history(Spool(tmp_path / str(seed)), seed)) for seed in range(4)) > 1
