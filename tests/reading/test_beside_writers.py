"""Readers beside writers, over random histories: a tier is byte for byte what it is without them, and what a reader
loads is what was saved.

A history is saves by up to three launches of two ranks, flushed by the daemon's own code to two tiers, prunes, pins and
corruption. It is played twice. The second time, readers read between its operations; and a request of a reader may let
the writers go on before it is answered, so that what is being read is pruned, or comes to be there.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from support.doubles import contents, flipped, is_chunk
from support.saved import ReadOnly, files_of
from support.world import attempt, commit, part, steps_on

from tierd.core.errors import ManifestError, ObjectNotFound, StoreUnavailable, TierdError
from tierd.core.ids import PartId, pin_key
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.daemon.tiers.tier_prune import prune
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.reading import Reader
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.memory_store import MemoryStore

WORLD = 2
# launch -> its steps, and what it resumed from
LAUNCHES = {1: (range(1, 6), None), 2: (range(4, 8), (1, 3)), 3: (range(7, 10), (2, 6))}
PIECE = 10  # histories of one test
PIECES = int(os.environ.get("TIERD_HISTORIES", "10")) // PIECE  # `make gate` plays a thousand
PARTS = [(launch, step) for launch, (steps, _) in LAUNCHES.items() for step in steps]


def state_of(launch: int, step: int, rank: int) -> dict:
    return {
        "frozen": torch.arange(300),
        "model": torch.full((200,), launch * 1000.0 + step),
        "data": torch.full((9,), rank),
        "step": step,
    }


@pytest.fixture(scope="module")
def spool(tmp_path_factory) -> Spool:
    """Everything that any history saves, written once: a history says what of it gets to which tier, and when."""
    spool = Spool(tmp_path_factory.mktemp("spool"))
    for launch, step in PARTS:
        origin = LAUNCHES[launch][1]
        for rank in range(WORLD):
            commit(
                spool,
                part(step, launch, rank, WORLD),
                files_of(state_of(launch, step, rank)),
                origin=part(origin[1], origin[0]).checkpoint if origin else None,
                metrics={"loss": float(step % 4)},
            )
    return spool


class History:
    """Operations of writers on two tiers, all decided by the seed and by what lies there."""

    def __init__(self, spool: Spool, seed: int) -> None:
        self.spool, self.chance = spool, random.Random(seed)
        self.stores = {"one": MemoryStore(), "other": MemoryStore()}
        self._todo = self._plan()

    def _plan(self) -> Iterator[Callable[[], Coroutine[None, None, None]]]:
        stores = list(self.stores.values())
        for launch, step in [one for one in PARTS if self.chance.random() < 0.3]:
            for rank in range(WORLD if self.chance.random() < 0.9 else 1):
                for store in stores:
                    if self.chance.random() < 0.8:
                        yield partial(self._flush, part(step, launch, rank, WORLD), store)
            for harm, likely in ((self._prune, 0.4), (self._corrupt, 0.3), (self._pin, 0.1)):
                if self.chance.random() < likely:
                    yield partial(harm, self.chance.choice(stores))

    async def go_on(self) -> bool:
        """Do what is next; False when all is done."""
        act = next(self._todo, None)
        if act is None:
            return False
        with suppress(TierdError):  # a flush or a prune meets what is corrupt, say
            await act()
        return True

    async def _flush(self, which: PartId, store: Store) -> None:
        base = None
        for key in sorted((key for key in await contents(store) if "/manifests/" in key), reverse=True):
            other = PartId.parse_key(key)
            if other and other.rank == which.rank and other != which:
                with suppress(ManifestError, ObjectNotFound):
                    base = await read_manifest(store, other)
                    break
        await flush(self.spool, which, TierUploadContext(store), base=base)

    async def _prune(self, store: Store) -> None:
        there = sorted({key.split("/")[2] for key in await contents(store) if "/manifests/" in key})
        if len(there) > 1:
            step, _, launch = self.chance.choice(there[:-1]).partition(".")
            await prune(store, [part(int(step), int(launch[-8:])).checkpoint])

    async def _corrupt(self, store: Store) -> None:
        objects = await contents(store)
        keys = sorted(key for key in objects if is_chunk(key) or "/manifests/" in key)
        if keys:
            key = self.chance.choice(keys)
            if self.chance.random() < 0.3:
                await store.delete([key])
            else:
                await store.put(key, flipped(objects[key]))

    async def _pin(self, store: Store) -> None:
        launch, step = self.chance.choice(PARTS)
        await store.put(pin_key(part(step, launch).checkpoint), b"")


async def to_its_end(coroutine: Coroutine[None, None, object]) -> None:
    """Writers are others: they are not cut off where the reader's request is cancelled that they go on in."""
    task, cancelled = asyncio.ensure_future(coroutine), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


class Beside(ReadOnly):
    """What a reader is given: writers may go on within its requests, and a tier may be silent."""

    def __init__(self, inner: Store, history: History, chance: random.Random, turn: asyncio.Lock) -> None:
        super().__init__(inner)
        self.history, self.chance, self.turn = history, chance, turn
        self.silent = chance.random() < 0.1

    async def _meanwhile(self) -> None:
        if self.chance.random() < 0.05:
            async with self.turn:
                await to_its_end(self.history.go_on())
        if self.silent:
            raise StoreUnavailable("no answer")

    async def get(self, key, into=None):
        await self._meanwhile()
        return await super().get(key, into)

    async def scan(self, prefix, after=""):
        await self._meanwhile()
        async for info in super().scan(prefix, after):
            yield info


def alone(spool: Spool, seed: int, loop: asyncio.AbstractEventLoop) -> list[dict[str, bytes]]:
    """What lies on the tiers after a history without readers."""
    history = History(spool, seed)
    while loop.run_until_complete(history.go_on()):
        pass
    return [loop.run_until_complete(contents(store)) for store in history.stores.values()]


def accompanied(spool: Spool, seed: int, loop: asyncio.AbstractEventLoop, room: Path) -> tuple[list, int]:
    """The same with readers, and how often one loaded or copied something."""
    history, chance, loaded = History(spool, seed), random.Random(f"reader {seed}"), 0
    more = True
    while more:
        for _ in range(chance.randrange(1, 5)):
            more = more and loop.run_until_complete(history.go_on())
        turn = asyncio.Lock()
        beside = {name: Beside(store, history, chance, turn) for name, store in history.stores.items()}
        names = chance.sample(list(beside), chance.randrange(1, 3))
        with Reader({name: beside[name] for name in names}, "run") as reader:
            loaded += read(reader, chance, room / f"{seed}-{chance.random()}")
        assert not [key for one in beside.values() for key in one.wrote]
    return [loop.run_until_complete(contents(store)) for store in history.stores.values()], loaded


def read(reader: Reader, chance: random.Random, room: Path) -> bool:
    """Read in one way or another; whether that gave a checkpoint, which has to be right."""
    options: dict = chance.choice([{}, {}, {"best": "loss", "mode": chance.choice(["min", "max"])}, {"step": 5}])
    rank = chance.choice([None, 0, 1])
    only = chance.choice([None, ("model", "frozen"), ("data",)]) if rank is not None else ("model", "frozen", "step")
    state: dict = dict.fromkeys(("frozen", "model", "data", "step"))
    try:
        if chance.random() < 0.3:
            reader.checkpoints()
            return False
        if chance.random() < 0.03:
            found = reader.download(room, rank=rank, **options)
            launch = int(found.attempt[-8:])
            for name, data in files_of(state_of(launch, found.step, rank or 0)).items():
                assert (Path(found.directories[0]) / name).read_bytes() == data
            return True
        found = reader.restore(state, only=only, rank=rank, **options)
    except TierdError:
        assert state == dict.fromkeys(state)
        return False
    launch = int(found.attempt[-8:])
    assert found.attempt == attempt(launch)
    expected = state_of(launch, found.step, found.rank)
    for name in only or expected:
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(expected[name]))
    return True


def play(spool: Spool, seeds: range, room: Path) -> None:
    loop, loaded, kept = asyncio.new_event_loop(), 0, 0
    try:
        for seed in seeds:
            without = alone(spool, seed, loop)
            beside, count = accompanied(spool, seed, loop, room)
            assert beside == without, f"history {seed}: readers changed a tier"
            loaded, kept = loaded + count, kept + sum(len(steps_on(one)) for one in without)
    finally:
        loop.close()
    assert loaded > len(seeds) / 4 and kept > len(seeds), "histories in which nothing happens"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("piece", range(PIECES))
def test_readers_change_nothing_over_many_histories(spool, tmp_path, piece):
    play(spool, range(1000 + PIECE * piece, 1000 + PIECE * (piece + 1)), tmp_path)
