"""Writers of every layout that are killed, delete, rename or rewrite at any point, beside a watch with a real spool.

The judge is written from the promise's words. A checkpoint that is taken is, at that moment, byte for byte one that its
writer finished (0 torn). A finished one that was left alone is in the spool, verifies there, and is the newest of the
run (0 sound ones lost). Nothing in the watched directory was written. `TIERD_WATCHED` is the number of trials.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.layouts import WRITERS
from support.watched import LOOK_S, SETTLE_S, Files, World, unit_of, write_saves

from tierd.core.errors import CorruptChunk
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.inventory import Inventory
from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.daemon.spool_observer import SpoolObserver
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool
from tierd.watching.files import Tree
from tierd.watching.layouts import units
from tierd.watching.naming import History, history
from tierd.watching.programs import DEEPSPEED, MEGATRON
from tierd.watching.unit_file import UNIT_NAME

RUN = "watched"
TRIALS = int(os.environ.get("TIERD_WATCHED", "60"))


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Files]]:
    return write_saves(tmp_path_factory)


def content(spool: Spool, part: PartId) -> Files:
    """A part's files, verified; without the description."""
    found = spool.read(part, spool.manifest(part))
    return {path: bytes(data) for path, data in found.items() if path != UNIT_NAME}


def observed(spool: Spool) -> History:
    """What a daemon that starts anew knows of the run."""
    return history(Inventory(SpoolObserver(spool).look(), {}), RUN)


class Judge:
    """Compares each unit that is taken, as it is taken, with what the writer finished."""

    def __init__(self, world: World, spool: Spool) -> None:
        self.world, self.spool, self.parts = world, spool, list[PartId]()
        self.reasons: dict[str, str] = {}

    def taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        assert isinstance(outcome, CommittedPart), outcome
        copy = content(self.spool, part)
        path = json.loads((self.spool.path(part) / UNIT_NAME).read_text())["path"]
        with Tree(self.world.root) as tree:
            unit = next(one for one in units(tree.listing()) if one.path == path)
        # Where the marker beside it named it before, a save over it is whole before that is written again.
        more = self.world.save if unit.layout in (MEGATRON, DEEPSPEED) else []
        assert any(copy == unit_of(one, unit) for one in [*self.world.finished, *more]), (path, sorted(copy))
        self.parts.append(part)

    def not_taken(self, path: str, why: str) -> None:
        self.reasons[path] = why

    def in_doubt(self, path: str, checkpoint: CheckpointId) -> None:
        raise AssertionError(f"a single unit is in doubt: {path} as {checkpoint}")


def verified(spool: Spool, part: PartId) -> Files | None:
    """A part's files; None if its program has since rewritten the blocks that a link shares with it."""
    try:
        return content(spool, part)
    except CorruptChunk:
        return None


def newest(spool: Spool) -> Mapping[str, bytes]:
    """What a restore finds: of each unit, the newest checkpoint that verifies."""
    found: Files = {}
    for part in sorted(spool.parts(RUN)):
        found |= verified(spool, part) or {}
    return found


def watch_to_the_end(world: World, spool: Spool, watch: UnitWatch, judge: Judge) -> None:
    """Look while the writer works, and until all has settled after it ended or was killed."""
    known, calm = History(), 0
    while calm < 200:
        for _ in range(0 if world.over else world.chance.randint(1, 8)):
            world.step()
        if world.over:
            world.now_s, calm = world.now_s + LOOK_S, calm + 1
        count = len(judge.parts)
        watch.look(known, world.now_s)
        known = observed(spool) if len(judge.parts) > count else known


@pytest.mark.parametrize("name", [one.__name__ for one in WRITERS])
def test_what_is_taken_is_whole_and_what_is_whole_is_taken(
    name: str, saves: dict[str, list[Files]], tmp_path: Path
) -> None:
    taken_at_all = 0
    for seed in range(TRIALS // len(WRITERS) + 1):
        root = tmp_path / str(seed) / "watched"
        root.mkdir(parents=True)
        world, spool = World(root, seed, saves[name]), Spool(tmp_path / str(seed) / "spool")
        judge = Judge(world, spool)

        def meddle(world: World = world) -> None:
            for _ in range(world.chance.randint(1, 5) if world.chance.random() < 0.05 else 0):
                world.step()

        watch_to_the_end(world, spool, UnitWatch(spool, root, RUN, judge, None, meddle, SETTLE_S), judge)
        there = world.there()
        if not (world.whole and there in world.finished):
            continue
        found = newest(spool)
        missing = [path for path, data in there.items() if found.get(path) != data]
        assert all(path.rpartition("/")[2].startswith("latest") for path in missing), (seed, missing, judge.reasons)
        taken_at_all += 1
        count, again = len(judge.parts), UnitWatch(spool, root, RUN, judge, settle_s=SETTLE_S)
        for _ in range(2):  # a daemon that starts anew takes nothing twice
            world.now_s += 2 * SETTLE_S
            again.look(observed(spool), world.now_s)
        assert len(judge.parts) == count, (seed, judge.parts)
        assert world.there() == there
    assert taken_at_all
