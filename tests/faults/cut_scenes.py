"""What is being done when the power goes: the real code, on a spool and a tier, saying what it begins and has done.

Law: whatever is said to be done was answered by tierd's own call; nothing is said that a caller of it could not know.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from faults.cut_truth import (
    ASIDE,
    PAUSED,
    PINNED,
    SPOOL,
    TIER,
    TIER_ASIDE,
    TIER_PINNED,
    Sizes,
    Thing,
    Truth,
)
from faults.rounds import Lost
from support.nodes import Inline
from support.world import RUN, config, part

import tierd.daemon.reconcile
import tierd.daemon.together
import tierd.daemon.turns
import tierd.stores.file
from tierd.commit import Source, write_part
from tierd.core.errors import StepRefused
from tierd.core.ids import PartId, pins_prefix
from tierd.core.manifest import VERSION, Manifest, decode
from tierd.core.plan import plan
from tierd.core.resume import restore_candidates
from tierd.daemon.fetch import Partial, fetch
from tierd.daemon.flush import Way, flush
from tierd.daemon.observe import look_around
from tierd.daemon.pause import Pause
from tierd.daemon.prune import prune, quarantine
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.turns import node
from tierd.spool import Spool
from tierd.stage import describe_directory
from tierd.stores.file import FileStore

Things = Iterable[Thing]
_PAGE = 4096
_TURNS = 200  # of a daemon that should come to rest after some tens


@dataclass
class Ground:
    """Where a scene is played.

    Attributes:
        say: tells what is known outside, where no power is cut.
        again: it was played before, cut off anywhere: what is done already may be refused.
        pieces: saves come in pieces of so many pages; 0: as one.
    """

    spool: Path
    tier: Path
    sizes: Sizes
    say: Callable[[list[Any]], None]
    again: bool = False
    pieces: int = 0

    @contextmanager
    def change(self, adds: Things = (), drops: Things = ()) -> Iterator[None]:
        said = [list(adds), list(drops)]
        self.say(["begun", *said])
        yield
        self.say(["done", *said])

    def opened(self) -> tuple[Spool, FileStore]:
        return Spool(self.spool), FileStore(self.tier)

    def save(self, spool: Spool, which: PartId) -> None:
        with self.change([(SPOOL, which.path)]):
            try:
                write_part(spool, _manifest(which), self._sources(which), self.sizes.chunk)
            except StepRefused:
                if not (self.again and spool.has(which)):
                    raise

    def _sources(self, which: PartId) -> dict[str, Source]:
        files = self.sizes.files_of(which.path)
        return {name: _Pieces(data, self.pieces * _PAGE) if self.pieces else data for name, data in files.items()}

    async def flush(self, spool: Spool, store: FileStore, which: PartId, lender: PartId | None = None) -> None:
        if self.again and [info async for info in store.scan(which.manifest_key)]:
            return  # no daemon would send it again
        with self.change([(TIER, which.path)]):
            lent = decode(bytes(await store.get(lender.manifest_key)), lender) if lender else None
            await flush(spool, which, Way(store, "tier", node(spool.root)), lender=lent)


@dataclass
class _Pieces:
    data: bytes
    size: int

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[memoryview]:
        view = memoryview(self.data)
        return (view[at : at + self.size] for at in range(0, len(view), self.size))


@dataclass(frozen=True)
class Scene:
    """One operation.

    Attributes:
        prepare: makes what is there before; all of it durable, and said.
        act: is cut, and done again afterwards.
        sizes: in the rounds where nothing is left to chance.
        expect: adds to what must hold afterwards.
        apart: whether the tier lies on another file system than the spool.
        keep, keep_local: what the daemon's retention keeps.
    """

    name: str
    prepare: Callable[[Ground], None]
    act: Callable[[Ground], None]
    sizes: Sizes
    expect: Callable[[Truth], None] = lambda truth: None
    apart: bool = False
    keep: int = 100
    keep_local: int = 100


def _manifest(which: PartId) -> Manifest:
    checkpoint = which.checkpoint
    return Manifest(
        version=VERSION,
        run=checkpoint.run,
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        resumed_from=None,
        rank=which.rank,
        world_size=which.world,
        created=f"2026-01-01T00:00:{checkpoint.step:02}+00:00",
        writer="test",
        metrics={},
        files=(),
    )


def alone(work: Coroutine[Any, Any, None]) -> None:
    """Run what is asynchronous, with every call in a thread made where it is asked for: one order of events."""
    inline = Inline(1)
    tierd.daemon.together.POLITE = inline
    tierd.stores.file.Pools.here = lambda pools: inline  # type: ignore[method-assign]

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(inline)
        await work

    asyncio.run(main())


# -- the daemon -----------------------------------------------------------------------------------------------------


async def _settle(ground: Ground, keep: int, keep_local: int) -> None:
    spool, store = ground.opened()
    with spool.lock():
        daemon = Reconciler(config(spool, TIER, keep=keep, keep_local=keep_local), spool, {TIER: store})
        daemon.writers = lambda: frozenset({part(1).lane})
        if daemon.pause.paused:
            await daemon.pause.end()
        for _ in range(_TURNS):
            await daemon.look(TIER)
            await daemon.tiers.tidy(TIER, {RUN})
            actions = plan(daemon.world(), daemon.config, {}, 0.0)
            if not actions:
                break
            await daemon._act(actions[0])
        else:
            raise Lost(f"the daemon does not come to rest: {actions[0]}")
    await store.aclose()


def settle(ground: Ground, keep: int = 100, keep_local: int = 100) -> None:
    """Start a daemon, with nothing worth waiting for, until it has nothing left to do."""
    tierd.daemon.reconcile._ABANDONED = tierd.daemon.reconcile._TAKEN_UP = 0.0
    tierd.daemon.turns._OWN_STALE = 0
    tierd.daemon.turns._LOOKS = 3
    alone(_settle(ground, keep, keep_local))


def offered(ground: Ground) -> set[str]:
    """The checkpoints that a restore would try."""
    found: set[str] = set()

    async def ask() -> None:
        spool, store = ground.opened()
        resume = restore_candidates(await look_around(spool, {TIER: store}, RUN), RUN)
        found.update(f"{RUN}/{one.checkpoint.name}" for one in resume.candidates)

    alone(ask())
    return found


# -- saving ---------------------------------------------------------------------------------------------------------


def _nothing(ground: Ground) -> None:
    ground.tier.mkdir()


def _saved(*steps: int, flushed: Sequence[int] = (), world: int = 1, gone: Sequence[int] = ()) -> Callable:
    def prepare(ground: Ground) -> None:
        ground.tier.mkdir()
        spool, store = ground.opened()
        parts = [part(step, rank=rank, world=world) for step in steps for rank in range(world)]
        for which in parts:
            ground.save(spool, which)

        async def work() -> None:
            lender: dict[int, PartId] = {}
            for which in parts:
                if which.checkpoint.step in flushed:
                    await ground.flush(spool, store, which, lender.get(which.rank))
                    lender[which.rank] = which

        alone(work())
        for which in parts:
            if which.checkpoint.step in gone:
                with ground.change(drops=[(SPOOL, which.path)]):
                    spool.remove([which])

    return prepare


def _save(*steps: int) -> Callable[[Ground], None]:
    def act(ground: Ground) -> None:
        spool = Spool(ground.spool)
        for step in steps:
            ground.save(spool, part(step))

    return act


def _recycle(ground: Ground) -> None:
    spool = Spool(ground.spool)
    for old, new in ((1, 4), (2, 5)):
        with ground.change(drops=[(SPOOL, part(old).path)]):
            spool.remove([part(old)], {part(old).lane})
        ground.save(spool, part(new))


def _stage(ground: Ground) -> None:
    """What another library writes, in directories of its own."""
    spool = Spool(ground.spool)
    for which in (part(1), part(2)):
        with ground.change([(SPOOL, which.path)]):
            if ground.again and spool.has(which):
                continue
            with spool.stage(which) as stage:
                for name, data in ground.sizes.files_of(which.path).items():
                    (stage.path / name).parent.mkdir(parents=True, exist_ok=True)
                    (stage.path / name).write_bytes(data)
                files = describe_directory(stage.path)
                stage.commit(msgspec.structs.replace(_manifest(which), files=files))


def _ranks(ground: Ground) -> None:
    """Two ranks save at once, and an older checkpoint goes meanwhile."""
    failures: list[BaseException] = []

    def saver(rank: int) -> None:
        try:
            spool = Spool(ground.spool)
            with ground.change(drops=[(SPOOL, part(1, rank=rank, world=2).path)]):
                spool.remove([part(1, rank=rank, world=2)], {part(1, rank=rank, world=2).lane})
            ground.save(spool, part(3, rank=rank, world=2))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=saver, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# -- the way to a tier and back -------------------------------------------------------------------------------------


def _flush(ground: Ground) -> None:
    async def work() -> None:
        spool, store = ground.opened()
        await ground.flush(spool, store, part(1))
        await ground.flush(spool, store, part(2), part(1))

    alone(work())


def _prepare_fetch(ground: Ground) -> None:
    _saved(1, 2, 3, 4, flushed=(1, 2, 3, 4), gone=(1, 2))(ground)
    spool = Spool(ground.spool)
    _damage(spool.path(part(3)) / "weights.bin")
    (spool.path(part(4)) / "manifest.json").write_bytes(b"no manifest")


def _damage(path: Path) -> None:
    """Spoil what no other step holds: of a chunk that a tier has already, a flush does not read the spool's copy."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        [last] = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def _expect_fetch(truth: Truth) -> None:
    truth.damaged |= {(SPOOL, part(3).path), (SPOOL, part(4).path)}


def _fetch(ground: Ground) -> None:
    async def work() -> None:
        spool, store = ground.opened()
        for step in (1, 2, 3, 4):
            which = part(step)
            with ground.change([(SPOOL, which.path)]):
                await fetch(spool, which, {TIER: store})
            ground.say(["whole", [(SPOOL, which.path)]])

    alone(work())


# -- going ----------------------------------------------------------------------------------------------------------


def _remove(ground: Ground) -> None:
    spool = Spool(ground.spool)
    for step in (1, 2):
        parts = [part(step, rank=rank, world=2) for rank in range(2)]
        with ground.change(drops=[(SPOOL, which.path) for which in parts]):
            spool.remove(parts, {parts[0].lane})


def _prune(ground: Ground) -> None:
    async def work() -> None:
        spool, store = ground.opened()
        for step in (1, 2):
            with ground.change(drops=[(TIER, part(step).path)]):
                await prune(store, part(step).checkpoint, node(spool.root))

    alone(work())


def _prepare_quarantine(ground: Ground) -> None:
    _saved(1, 2, 3, flushed=(2,))(ground)
    spool, again = Spool(ground.spool), part(1)
    with ground.change([(ASIDE, again.path)], [(SPOOL, again.path)]):
        spool.quarantine(again)
    ground.save(spool, again)
    for which in (part(1), part(3)):
        _damage(spool.path(which) / "weights.bin")


def _expect_quarantine(truth: Truth) -> None:
    truth.damaged |= {(SPOOL, part(1).path), (SPOOL, part(3).path)}
    truth.together += [((SPOOL, part(1).path), (ASIDE, part(1).path)), ((SPOOL, part(3).path), (ASIDE, part(3).path))]
    truth.together += [((TIER, part(2).path), (TIER_ASIDE, part(2).path))]
    truth.apart += [((SPOOL, part(3).path), (ASIDE, part(3).path))]


def _quarantine(ground: Ground) -> None:
    async def work() -> None:
        spool, store = ground.opened()
        for which in (part(1), part(3)):
            ground.say(["begun", [(ASIDE, which.path)], [(SPOOL, which.path), (ASIDE, which.path)]])
            spool.quarantine(which)
            ground.say(["done", [(ASIDE, which.path)], [(SPOOL, which.path)]])
        with ground.change([(TIER_ASIDE, part(2).path)], [(TIER, part(2).path)]):
            await quarantine(store, part(2))

    alone(work())


# -- small things, and a start --------------------------------------------------------------------------------------


def _pin(ground: Ground) -> None:
    async def work() -> None:
        spool, store = ground.opened()
        one, two = part(1).checkpoint, part(2).checkpoint
        pause = Pause(spool)
        with ground.change([(PAUSED, "")]):
            await pause.begin(None)
        for checkpoint in (one, two):
            with ground.change([(PINNED, f"{RUN}/{checkpoint.name}")]):
                spool.pin(checkpoint, pinned=True)
            with ground.change([(TIER_PINNED, f"{RUN}/{checkpoint.name}")]):
                await store.put(f"{pins_prefix(RUN)}{checkpoint.name}", b"")
        with ground.change(drops=[(PINNED, f"{RUN}/{one.name}")]):
            spool.pin(one, pinned=False)
        with ground.change(drops=[(TIER_PINNED, f"{RUN}/{one.name}")]):
            await store.delete([f"{pins_prefix(RUN)}{one.name}"])
        with ground.change(drops=[(PAUSED, "")]):
            await pause.end()

    alone(work())


def _prepare_start(ground: Ground) -> None:
    """What a daemon may find: stages and a fetch whose writers died, half-removed parts, a spare, parts to send."""
    _saved(1, 2, 3, 4, flushed=(1, 2))(ground)
    spool, files = Spool(ground.spool), ground.sizes.files_of(part(8).path)
    spool.stage(part(7))
    stage = spool.stage(part(8)).path
    trash = spool.control / "trash" / "0123456789abcdef" / "deep"
    trash.mkdir(parents=True)
    partial = Partial(spool, part(9))
    partial.take()
    for room in (stage, trash, partial.path):
        for name, data in files.items():
            (room / name).parent.mkdir(parents=True, exist_ok=True)
            (room / name).write_bytes(data)
    partial.leave()


def _expect_start(truth: Truth) -> None:
    every = {(place, part(step).path) for place in (SPOOL, TIER) for step in (1, 2, 3, 4)}
    truth.may |= every
    truth.must -= every - {(SPOOL, part(4).path)}
    truth.together += [((SPOOL, part(3).path), (TIER, part(3).path))]


def _start(ground: Ground) -> None:
    settle(ground, 2, 1)
    ground.say(["done", [(TIER, part(3).path), (TIER, part(4).path)], [(SPOOL, part(step).path) for step in (1, 2, 3)]])


_TINY = Sizes(0, 9_000, 300, 4096, files=2)
_SMALL = Sizes(0, 9_000, 300, 4096)
_LARGE = Sizes(0, (1 << 20) + 1234, 300, 512 << 10, files=2)

SCENES = (
    Scene("first saves", _nothing, _save(1, 2), _SMALL),
    Scene("large saves", _saved(1), _save(2, 3), _LARGE),
    Scene("saves over spares", _saved(1, 2, 3, flushed=(1, 2)), _recycle, _LARGE),
    Scene("saves of two ranks", _saved(1, 2, world=2, flushed=(1, 2)), _ranks, _LARGE),
    Scene("stages", _nothing, _stage, Sizes(0, 9_000, 300, 4096, files=4, folder="deep/er/")),
    Scene("flushes", _saved(1, 2), _flush, _TINY),
    Scene("flushes elsewhere", _saved(1, 2), _flush, _TINY, apart=True),
    Scene("fetches", _prepare_fetch, _fetch, _TINY, _expect_fetch),
    Scene("large fetches", _prepare_fetch, _fetch, _LARGE, _expect_fetch, apart=True),
    Scene("removals", _saved(1, 2, 3, world=2, flushed=(1, 2, 3)), _remove, _LARGE),
    Scene("prunes", _saved(1, 2, 3, flushed=(1, 2, 3), gone=(1, 2)), _prune, _TINY),
    Scene("quarantines", _prepare_quarantine, _quarantine, _TINY, _expect_quarantine),
    Scene("pins and pauses", _saved(1, 2, flushed=(1, 2)), _pin, _TINY),
    Scene("starts", _prepare_start, _start, _TINY, _expect_start, keep=2, keep_local=1),
)


def by_chance(scene: Scene, rng: random.Random) -> Sizes:
    """Other sizes than the scene's own."""
    large = rng.choice((rng.randrange(2, 5000), rng.randrange(5000, 200_000), rng.randrange(1 << 20, 4 << 20)))
    return Sizes(
        seed=rng.randrange(1 << 30),
        large=large,
        small=rng.randrange(1, 6000),
        chunk=max(4096, large // rng.randrange(1, 6)),
        files=rng.randrange(1, 6),
        folder=scene.sizes.folder,
    )
