"""A writer of one layout that is killed, deletes, renames or rewrites at any point, beside a watch with a real spool.

The judge is written from the promise's words. A checkpoint that is taken is, at that moment, byte for byte one that its
writer finished (0 torn). A finished one that was left alone is in the spool, verifies there, and is the newest of the
run (0 sound ones lost). Nothing in the watched directory was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from support.layouts import WRITERS
from support.watched import LOOK_S, SETTLE_S, Files, World, unit_of

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
LAYOUTS = tuple(one.__name__ for one in WRITERS)
_CALM = 200  # looks after the writer has ended: ten minutes, so that the longest wait of a settling unit is over


def layout_of(seed: int) -> str:
    """The layout of this seed, each in turn."""
    return LAYOUTS[seed % len(LAYOUTS)]


def play(seed: int, saves: Mapping[str, list[Files]], home: Path) -> list[str]:
    """One life of a writer beside a watch; `home` is an empty directory.

    Returns:
        What happened, for the page.

    Raises:
        AssertionError: a torn checkpoint was taken, a sound one was lost, or something there was written.
    """
    name, root = layout_of(seed), home / "watched"
    root.mkdir()
    world, spool = World(root, seed, saves[name]), Spool(home / "spool")
    judge = _Judge(world, spool)

    def meddle() -> None:
        steps = world.chance.randint(1, 5) if world.chance.random() < 0.05 else 0
        if steps and not world.over:
            world.acts["overtaken while it is taken"] += 1
        for _ in range(steps):
            world.step()

    _watch_to_the_end(world, spool, UnitWatch(spool, root, RUN, judge, None, meddle, SETTLE_S), judge)
    notes = list(world.acts)
    if not world.whole or world.there() not in world.finished:
        return [*notes, "ends torn or deleted"]
    _judge_end(world, spool, judge)
    return [*notes, f"{name}: whole and taken"]


class _Judge:
    """Compares each unit that is taken, as it is taken, with what the writer finished."""

    def __init__(self, world: World, spool: Spool) -> None:
        self.world, self.spool, self.parts = world, spool, list[PartId]()
        self.reasons: dict[str, str] = {}

    def taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        assert isinstance(outcome, CommittedPart), outcome
        copy = _content(self.spool, part)
        path = json.loads((self.spool.path(part) / UNIT_NAME).read_text())["path"]
        with Tree(self.world.root) as tree:
            unit = next(one for one in units(tree.listing()) if one.path == path)
        # Where the marker beside it named it before, a save over it is whole before that is written again.
        more = self.world.save if unit.layout in (MEGATRON, DEEPSPEED) else []
        assert any(copy == unit_of(one, unit) for one in [*self.world.finished, *more]), ("torn", path, sorted(copy))
        self.parts.append(part)

    def not_taken(self, path: str, why: str) -> None:
        self.reasons[path] = why

    def in_doubt(self, path: str, checkpoint: CheckpointId) -> None:
        raise AssertionError(f"a single unit is in doubt: {path} as {checkpoint}")


def _watch_to_the_end(world: World, spool: Spool, watch: UnitWatch, judge: _Judge) -> None:
    """Look while the writer works, and until all has settled after it ended or was killed."""
    known, calm, left = History(), 0, None
    while calm < _CALM:
        for _ in range(0 if world.over else world.chance.randint(1, 8)):
            world.step()
        if world.over:
            left = _state(world) if left is None else left
            world.now_s, calm = world.now_s + LOOK_S, calm + 1
        count = len(judge.parts)
        watch.look(known, world.now_s)
        known = _observed(spool) if len(judge.parts) > count else known
    assert _state(world) == left, "the watched directory was written to"


def _judge_end(world: World, spool: Spool, judge: _Judge) -> None:
    there, found = world.there(), _newest(spool)
    missing = [path for path, data in there.items() if found.get(path) != data]
    assert all(path.rpartition("/")[2].startswith("latest") for path in missing), ("lost", missing, judge.reasons)
    count, again = len(judge.parts), UnitWatch(spool, world.root, RUN, judge, settle_s=SETTLE_S)
    for _ in range(2):  # a daemon that starts anew takes nothing twice
        world.now_s += 2 * SETTLE_S
        again.look(_observed(spool), world.now_s)
    assert len(judge.parts) == count, ("taken twice", judge.parts)
    assert world.there() == there, "the watched directory was written to"


def _state(world: World) -> dict[str, tuple[bytes, int]]:
    return {path: (data, (world.root / path).stat().st_mtime_ns) for path, data in world.there().items()}


def _content(spool: Spool, part: PartId) -> Files:
    """A part's files, verified; without the description."""
    found = spool.read(part, spool.manifest(part))
    return {path: bytes(data) for path, data in found.items() if path != UNIT_NAME}


def _observed(spool: Spool) -> History:
    """What a daemon that starts anew knows of the run."""
    return history(Inventory(SpoolObserver(spool).look(), {}), RUN)


def _newest(spool: Spool) -> Files:
    """What a restore finds: of each unit, the newest checkpoint that verifies.

    One does not verify any more if its program has since rewritten the blocks that a link shares with it.
    """
    found: Files = {}
    for part in sorted(spool.parts(RUN)):
        try:
            found |= _content(spool, part)
        except CorruptChunk:
            continue
    return found
