"""A writer of one layout that is killed, deletes, renames or rewrites at any point, beside a watch with a real spool.

The judge is written from the promise's words. A checkpoint that is taken is, at that moment, byte for byte one that its
writer finished (0 torn). A finished one that was left alone is in the spool, verifies there, and is the newest of the
run (0 sound ones lost). Nothing in the watched directory was written. In every third trial two nodes watch, and share a
tier: no checkpoint is read by both unless one of them was killed, and then none is lost either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.layouts import WRITERS
from support.watched import OBSERVE_S, SETTLE_S, Files, World, unit_of
from support.watched_nodes import RUN, Lone, Sharing, Tier, content
from support.watched_run import observed

from tierd.core.errors import CorruptChunk
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import UNIT_NAME
from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.unit import DEEPSPEED, MEGATRON
from tierd.watching.unit_detection import units

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
    world, tier = World(root, seed, saves[name]), Tier()
    judge = _Judge(world)
    if seed % 3:
        nodes = [Lone(world, spool := Spool(home / "spool"), judge.on(spool))]
    else:
        nodes = [Sharing(world, home, who, tier, judge.on, mortal=who == "a") for who in "ab"]
        world.acts["two nodes"] += 1
    _watch_to_the_end(world, nodes)
    notes = list(world.acts)
    if all(node.alive for node in nodes):
        assert len(set(judge.parts)) == len(judge.parts), ("read by both nodes", judge.parts)
    if not world.whole or world.there() not in world.finished:
        return [*notes, "ends torn or deleted"]
    _judge_end(world, [node for node in nodes if node.alive], tier, judge)
    return [*notes, f"{name}: whole and taken"]


class _Judge:
    """Compares each unit that is taken, as it is taken, with what the writer finished."""

    def __init__(self, world: World) -> None:
        self.world, self.parts = world, list[PartId]()
        self.reasons: dict[str, str] = {}

    def on(self, spool: Spool) -> _OnNode:
        """The reports of one node."""
        return _OnNode(self, spool)


class _OnNode:
    def __init__(self, judge: _Judge, spool: Spool) -> None:
        self.judge, self.spool, self.world = judge, spool, judge.world

    def report_taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        assert isinstance(outcome, CommittedPart), outcome
        copy = content(self.spool, part)
        path = json.loads((self.spool.path(part) / UNIT_NAME).read_text())["path"]
        with DirectoryTree(self.world.root) as tree:
            unit = next(one for one in units(tree.listing()) if one.path == path)
        # Where the marker beside it named it before, a save over it is whole before that is written again.
        more = self.world.save if unit.layout in (MEGATRON, DEEPSPEED) else []
        assert any(copy == unit_of(one, unit) for one in [*self.world.finished, *more]), ("torn", path, sorted(copy))
        self.judge.parts.append(part)

    def report_refused(self, path: str, why: str) -> None:
        self.judge.reasons[path] = why

    def report_doubt(self, path: str, checkpoint: CheckpointId) -> None:
        raise AssertionError(f"a single unit is in doubt: {path} as {checkpoint}")


def _watch_to_the_end(world: World, nodes: Sequence[Lone]) -> None:
    """Look while the writer works, and until all has settled after it ended or was killed."""
    calm, left = 0, None
    while calm < _CALM:
        for _ in range(0 if world.over else world.chance.randint(1, 8)):
            world.step()
        if world.over:
            left = _state(world) if left is None else left
            world.now_s, calm = world.now_s + OBSERVE_S, calm + 1
        for node in nodes:
            node.observe()
    assert _state(world) == left, "the watched directory was written to"


def _judge_end(world: World, nodes: Sequence[Lone], tier: Tier, judge: _Judge) -> None:
    there, found = world.there(), _newest([node.spool for node in nodes], tier)
    missing = [path for path, data in there.items() if found.get(path) != data]
    assert all(path.rpartition("/")[2].startswith("latest") for path in missing), ("lost", missing, judge.reasons)
    count, spool = len(judge.parts), nodes[0].spool
    again = UnitWatch(spool, world.root, RUN, judge.on(spool), settle_s=SETTLE_S)
    for _ in range(2):  # a daemon that starts anew takes nothing twice
        world.now_s += 2 * SETTLE_S
        again.observe(observed(spool, RUN).merge(tier.known), world.now_s)
    assert len(judge.parts) == count, ("taken twice", judge.parts)
    assert world.there() == there, "the watched directory was written to"


def _state(world: World) -> dict[str, tuple[bytes, int]]:
    return {path: (data, (world.root / path).stat().st_mtime_ns) for path, data in world.there().items()}


def _newest(spools: Sequence[Spool], tier: Tier) -> Files:
    """What a restore finds: of each unit, the newest checkpoint that verifies.

    One does not verify any more if its program has since rewritten the blocks that a link shares with it.
    """
    parts = dict(tier.parts)
    for spool in spools:
        for part in spool.parts(RUN):
            with suppress(CorruptChunk):
                parts[part] = content(spool, part)
    found: Files = {}
    for part in sorted(parts):
        found |= parts[part]
    return found
