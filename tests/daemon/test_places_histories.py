"""Tiers by several names, in random histories: a place loses nothing to a name whose policy is poorer.

Judged by docs/reference/places.md: while two tiers of a configuration are one place, nothing is pruned there. A tier
that does not answer is compared later, and until then nothing is deleted that its policy keeps. A copy of a tier is a
place of its own, where each policy keeps what it says.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import accumulate

import pytest
from support.seeds import seeds
from support.world import RUN, commit, hurry, part, running, steps_on

from tierd.core.config import Config, TierConfig
from tierd.core.errors import StoreUnavailable
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.reconciler import Reconciler
from tierd.spool.spool import Spool
from tierd.stores.base import Buffer, ObjectInfo, Store
from tierd.stores.memory_store import MemoryStore


class Place(MemoryStore):
    """A place that knows which steps nobody may delete now, and which ones were deleted all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted, self.lost = set[int](), set[int]()

    async def steps(self) -> set[int]:
        return set(steps_on([info.key async for info in self.scan(f"{RUN}/manifests/")]))

    async def delete(self, keys: Sequence[str]) -> None:
        self.lost |= self.wanted.intersection(steps_on(keys))
        await super().delete(keys)


class Name(Store):
    """One name of a place; its server may be silent under this name alone."""

    def __init__(self, place: Place) -> None:
        self.place, self.silent = place, False

    def _ask(self) -> Place:
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


async def copied(place: Place) -> Place:
    """A copy of a tier with all its objects, as by a tool of the server."""
    copy = Place()
    async for info in place.scan(""):
        await copy.put(info.key, await place.get(info.key))
    return copy


def configured(spool: Spool, keeps: dict[str, int]) -> Config:
    tiers = (
        TierConfig(name=name, url=f"s3://bucket/p?endpoint=http://{name}", retention=RetentionPolicy(keep_last=keep))
        for name, keep in keeps.items()
    )
    # The spool keeps all, so that a step that is gone from a place can only have been pruned there.
    local = RetentionPolicy(keep_last=1000)
    return Config(spool=str(spool.root), tier=tuple(tiers), retention=local, min_free_percent=0.0, scrub="0s")


async def work(spool: Spool, keeps: dict[str, int], names: dict[str, Name], rng: random.Random, silence: float) -> None:
    """Run a daemon until each place has what is wanted there, while each name is silent for this share of the time."""
    daemon = Reconciler(configured(spool, keeps), spool, {name: names[name] for name in keeps})
    async with running(daemon):
        for _ in range(rng.randint(2, 6)):
            for name in names.values():
                name.silent = rng.random() < silence
            daemon.wake()
            await asyncio.sleep(rng.choice((0.01, 0.05, 0.1)))
        for name in names.values():
            name.silent = False
        places, end_s = {names[name].place for name in keeps}, time.monotonic() + 60
        while [place for place in places if not place.wanted <= await place.steps()]:
            assert time.monotonic() < end_s, "what a policy keeps is not sent"
            daemon.wake()
            await asyncio.sleep(0.05)
        for _ in range(8):
            daemon.wake()
            await asyncio.sleep(0.05)


async def history(spool: Spool, seed: int) -> int:
    """Play a history; return in how many rounds two tiers were one place."""
    rng = random.Random(seed)
    place, step, shared_rounds = Place(), 0, 0
    names = {"a": Name(place), "b": Name(place), "c": Name(Place())}
    for _ in range(4):
        if rng.random() < 0.3:
            names["c"] = Name(await copied(place))
        keeps = {name: rng.randint(1, 4) for name in rng.sample(sorted(names), rng.randint(1, 3))}
        silence = rng.choice((0.0, 0.0, 0.3))
        for _ in range(rng.randint(1, 4)):
            step += 1
            commit(spool, part(step))
        for name in names.values():
            keep = max((keeps[alias] for alias in keeps if names[alias].place is name.place), default=0)
            name.place.wanted = set(range(1, step + 1)[-keep:]) if keep else set()
        if {"a", "b"} <= keeps.keys():
            shared_rounds += 1
            place.wanted |= set() if silence else await place.steps()
        await work(spool, keeps, names, rng, silence)
        assert {key: name.place.lost for key, name in names.items()} == {key: set() for key in names}
    return shared_rounds


@pytest.mark.parametrize("seed", seeds(first=4))
def test_no_name_of_a_place_prunes_for_another_place(spool, monkeypatch, seed):
    hurry(monkeypatch)
    asyncio.run(history(spool, seed))


def test_histories_have_places_with_two_names(tmp_path, monkeypatch):
    hurry(monkeypatch)
    counts = (asyncio.run(history(Spool(tmp_path / str(seed)), seed)) for seed in range(4))
    assert any(count > 1 for count in accumulate(counts))
