"""What is being done when the power goes.

Invariant: a scene begins from what is durable, and what it does can be done again, wherever it was cut off.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from faults.power.ground import Ground, alone, later, manifest_of, settle
from faults.power.truth import (
    PAUSED,
    PINNED,
    QUARANTINED,
    SPOOL,
    TIER,
    TIER_PINNED,
    TIER_QUARANTINED,
    Sizes,
    Thing,
    Truth,
)
from faults.rounds import Lost
from support.world import RUN, part

from tierd.client.client_timings import ClientTimings
from tierd.client.saving import snapshot_handoff as giving
from tierd.core.errors import StepRefused
from tierd.core.ids import PartId, pins_prefix
from tierd.core.manifest import TENSORS, TREE
from tierd.daemon import daemon_timings
from tierd.daemon import handoff_socket as taking
from tierd.daemon.daemon_timings import USUAL
from tierd.daemon.tiers.tier_pauses import TierPause
from tierd.daemon.tiers.tier_prune import prune, quarantine
from tierd.daemon.transfer.tier_fetch import PartialFetch, fetch
from tierd.spool.arena import Arena
from tierd.spool.spool import Spool
from tierd.spool.spool_directory import node_id
from tierd.spool.stage import describe_directory


@dataclass(frozen=True)
class Scene:
    """One operation.

    Attributes:
        prepare: makes what is there before; all of it durable, and said.
        act: is cut, and done again afterwards.
        sizes: in the rounds where nothing is left to chance.
        rest: the steps that lie at each place once all is done and a daemon has come to rest, of `world` ranks each.
        expect: adds to what must hold afterwards.
        apart: whether the tier lies on another file system than the spool.
        keep, keep_local: what the daemon's retention keeps.
    """

    name: str
    prepare: Callable[[Ground], None]
    act: Callable[[Ground], None]
    sizes: Sizes
    rest: Mapping[str, Sequence[int]]
    expect: Callable[[Truth], None] = lambda truth: None
    apart: bool = False
    keep: int = 100
    keep_local: int = 100
    world: int = 1

    def things_at_rest(self) -> set[Thing]:
        ranks = range(self.world)
        return {
            (place, f"{RUN}/{part(step).checkpoint.name}" if place in (PINNED, TIER_PINNED) else name)
            for place, steps in self.rest.items()
            for step in steps
            for name in (part(step, rank=rank, world=self.world).path for rank in ranks)
        }


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
            base: dict[int, PartId] = {}
            for which in parts:
                if which.checkpoint.step in flushed:
                    await ground.flush(spool, store, which, base.get(which.rank))
                    base[which.rank] = which

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
            spool.remove([part(old)], {part(old).writer})
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
                stage.commit(msgspec.structs.replace(manifest_of(which), files=files))


def _ranks(ground: Ground) -> None:
    """Two ranks save at once, and an older checkpoint goes meanwhile."""
    failures: list[BaseException] = []

    def saver(rank: int) -> None:
        try:
            spool = Spool(ground.spool)
            with ground.change(drops=[(SPOOL, part(1, rank=rank, world=2).path)]):
                spool.remove([part(1, rank=rank, world=2)], {part(1, rank=rank, world=2).writer})
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


def _hand_off(ground: Ground) -> None:
    """Snapshots that a daemon takes over, on its own threads: what it answers for is durable, the trainer does nothing
    more for it. The second one goes over a spare."""
    spool = Spool(ground.spool)
    daemon = taking.HandoffServer(
        spool, lambda which, written: None, replace(USUAL, tick_s=0.01)
    )  # its end waits for it
    with daemon.listening(60.0):
        trainer = giving.HandoffClient(spool, ClientTimings(greeting_s=60.0, silence_s=60.0))
        _give(ground, spool, trainer, 0, part(2))
        with ground.change(drops=[(SPOOL, part(1).path)]):
            spool.remove([part(1)], daemon.writers())
        _give(ground, spool, trainer, 1, part(3))
        trainer.close()


def _give(ground: Ground, spool: Spool, trainer: giving.HandoffClient, slot: int, which: PartId) -> None:
    files = ground.sizes.files_of(which.path)
    tensors, tree = files[TENSORS], files[TREE]
    arena = Arena(len(tensors))
    arena.view[: len(tensors)] = tensors
    with ground.change([(SPOOL, which.path)]):
        given = trainer.hand_over(slot, arena, manifest_of(which), len(tensors), tree)
        if given is None:
            raise Lost(f"the daemon takes no {which}")
        try:
            trainer.answer(given)
        except StepRefused:
            if not (ground.again and spool.has(which)):
                raise


# -- the way to a tier and back -------------------------------------------------------------------------------------


def _flush(ground: Ground) -> None:
    async def work() -> None:
        spool, store = ground.opened()
        await ground.flush(spool, store, part(1))
        await ground.flush(spool, store, part(2), part(1))
        await ground.pin_there(store, part(2).checkpoint)

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
            spool.remove(parts, {parts[0].writer})


def _prune(ground: Ground) -> None:
    async def work() -> None:
        spool, store = ground.opened()
        for step in (1, 2):
            with ground.change(drops=[(TIER, part(step).path)]):
                await prune(store, [part(step).checkpoint], node_id(spool.root), timings=daemon_timings.given())

    alone(work())


def _prepare_quarantine(ground: Ground) -> None:
    _saved(1, 2, 3, flushed=(2,))(ground)
    spool, again = Spool(ground.spool), part(1)
    with ground.change([(QUARANTINED, again.path)], [(SPOOL, again.path)]):
        spool.quarantine(again)
    ground.save(spool, again)
    for which in (part(1), part(3)):
        _damage(spool.path(which) / "weights.bin")


def _expect_quarantine(truth: Truth) -> None:
    truth.damaged |= {(SPOOL, part(1).path), (SPOOL, part(3).path)}
    truth.together += [((SPOOL, part(step).path), (QUARANTINED, part(step).path)) for step in (1, 3)]
    truth.together += [((TIER, part(2).path), (TIER_QUARANTINED, part(2).path))]
    truth.apart += [((SPOOL, part(3).path), (QUARANTINED, part(3).path))]


def _quarantine(ground: Ground) -> None:
    async def work() -> None:
        spool, store = ground.opened()
        with ground.change([(TIER_QUARANTINED, part(2).path)], [(TIER, part(2).path)]):
            await quarantine(store, part(2))
        for which in (part(1), part(3)):
            ground.say(["begun", [(QUARANTINED, which.path)], [(SPOOL, which.path), (QUARANTINED, which.path)]])
            spool.quarantine(which)
            ground.say(["done", [(QUARANTINED, which.path)], [(SPOOL, which.path)]])

    alone(work())


# -- small things, and a start --------------------------------------------------------------------------------------


def _pin(ground: Ground) -> None:
    async def work() -> None:
        spool, store = ground.opened()
        one, two = part(1).checkpoint, part(2).checkpoint
        pause = TierPause(spool)
        with ground.change([(PAUSED, "")]):
            await pause.begin(None)
        with ground.change(drops=[(PAUSED, "")]):
            await pause.end()
        for checkpoint in (one, two):
            await ground.pin_there(store, checkpoint)
        with ground.change(drops=[(TIER_PINNED, f"{RUN}/{one.name}")]):
            await store.delete([f"{pins_prefix(RUN)}{one.name}"])
        for checkpoint, pinned in ((one, True), (one, False), (two, True)):
            thing = PINNED, f"{RUN}/{checkpoint.name}"
            with ground.change([thing] if pinned else [], [] if pinned else [thing]):
                spool.pin(checkpoint, pinned=pinned)

    alone(work())


def _prepare_start(ground: Ground) -> None:
    """What a daemon may find: stages and a fetch whose writers died, half-removed parts, a spare, parts to send."""
    _saved(1, 2, 3, 4, flushed=(1, 2))(ground)
    spool, files = Spool(ground.spool), ground.sizes.files_of(part(8).path)
    spool.stage(part(7))
    stage = spool.stage(part(8)).path
    trash = spool.control / "trash" / "0123456789abcdef" / "deep"
    trash.mkdir(parents=True)
    partial = PartialFetch(spool, part(9))
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
    later()
    settle(ground, 2, 1)
    ground.say(["done", [(TIER, part(3).path), (TIER, part(4).path)], [(SPOOL, part(step).path) for step in (1, 2, 3)]])


_TINY = Sizes(0, 9_000, 300, 4096, files=2)
_SMALL = Sizes(0, 9_000, 300, 4096)
_LARGE = Sizes(0, (1 << 20) + 1234, 300, 512 << 10, files=2)
_HANDED = Sizes(0, (1 << 20) + 1234, 300, 0, handed=True)


def _both(*steps: int) -> dict[str, Sequence[int]]:
    return {SPOOL: steps, TIER: steps}


SCENES = (
    Scene("first saves", _nothing, _save(1, 2), _SMALL, _both(1, 2)),
    Scene("large saves", _saved(1), _save(2, 3), _LARGE, _both(1, 2, 3)),
    Scene(
        "saves over spares",
        _saved(1, 2, 3, flushed=(1, 2)),
        _recycle,
        _LARGE,
        {SPOOL: (3, 4, 5), TIER: (1, 2, 3, 4, 5)},
    ),
    Scene(
        "saves of two ranks",
        _saved(1, 2, world=2, flushed=(1, 2)),
        _ranks,
        _LARGE,
        {SPOOL: (2, 3), TIER: (1, 2, 3)},
        world=2,
    ),
    Scene("stages", _nothing, _stage, Sizes(0, 9_000, 300, 4096, files=4, folder="deep/er/"), _both(1, 2)),
    Scene("hand-offs", _saved(1, flushed=(1,)), _hand_off, _HANDED, {SPOOL: (2, 3), TIER: (1, 2, 3)}),
    Scene("flushes", _saved(1, 2), _flush, _TINY, _both(1, 2) | {TIER_PINNED: (2,)}),
    Scene("flushes elsewhere", _saved(1, 2), _flush, _TINY, _both(1, 2) | {TIER_PINNED: (2,)}, apart=True),
    Scene("fetches", _prepare_fetch, _fetch, _TINY, _both(1, 2, 3, 4), _expect_fetch),
    Scene("large fetches", _prepare_fetch, _fetch, _LARGE, _both(1, 2, 3, 4), _expect_fetch, apart=True),
    Scene(
        "removals",
        _saved(1, 2, 3, world=2, flushed=(1, 2, 3)),
        _remove,
        _LARGE,
        {SPOOL: (3,), TIER: (1, 2, 3)},
        world=2,
    ),
    Scene("prunes", _saved(1, 2, 3, flushed=(1, 2, 3), gone=(1, 2)), _prune, _TINY, _both(3)),
    Scene("quarantines", _prepare_quarantine, _quarantine, _TINY, _both(2) | {QUARANTINED: (1, 3)}, _expect_quarantine),
    Scene(
        "pins and pauses", _saved(1, 2, flushed=(1, 2)), _pin, _TINY, _both(1, 2) | {PINNED: (2,), TIER_PINNED: (2,)}
    ),
    Scene("starts", _prepare_start, _start, _TINY, {SPOOL: (4,), TIER: (3, 4)}, _expect_start, keep=2, keep_local=1),
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
        handed=scene.sizes.handed,
    )
