"""Several nodes, in random histories: whatever happens in whatever order, nobody is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.doubles import contents, is_chunk
from support.node_states import deterministic  # noqa: F401
from support.nodes import Node, Nodes, launch_of
from support.seeds import seeds
from support.world import RUN, attempt

from tierd.core.errors import StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, chunk_owner, pin_key
from tierd.daemon import daemon_timings


@dataclass
class Launch:
    number: int
    placing: str
    origin: tuple[int, int] | None
    step: int


class Story:
    """Launches that follow each other, not all of which end; nodes that go and come back; saves that fail for some.

    `saved` is what really happened, which no place is asked for: (launch, step) -> the ranks that saved.
    """

    def __init__(self, home: Path, seed: int, *, lag: bool) -> None:
        self.rng = random.Random(seed)
        self.keep = self.rng.choice((1, 1, 2, 3))
        self.nodes = Nodes(home, *"ABC", keep=self.keep, rng=self.rng, lag=lag)
        self.launches: list[Launch] = []
        self.saved: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.pins: set[CheckpointId] = set()
        self.at_work: dict[Node, asyncio.Task] = {}

    async def launch(self, names: str = "ABCDE") -> None:
        """A launch resumes from what a node of its own sees first, or is told another one."""
        placing = "".join(self.rng.choice(names) for _ in range(self.rng.choice((1, 2, 2, 3))))
        for name in placing:
            self.nodes[name]  # comes up
        found = await self.nodes.resume(placing[0])
        known = [one.checkpoint for one in found.candidates]
        start = (known[:1] if self.rng.random() < 0.8 else known) or list(found.branches)
        origin = self.rng.choice(start) if start else None
        reported = (launch_of(origin), origin.step) if origin else None
        number = len(self.launches) + 1
        self.launches.append(Launch(number, placing, reported, origin.step if origin else 0))

    def save(self, launch: Launch, ranks: Collection[int] | None = None) -> None:
        launch.step += self.rng.choice((1, 1, 5))
        there = [rank for rank, name in enumerate(launch.placing) if name in self.nodes.names()]
        ranks = [rank for rank in there if ranks is None or rank in ranks]
        self.nodes.save(launch.step, launch.number, launch.placing, origin=launch.origin, ranks=ranks)
        self.saved[launch.number, launch.step] |= set(ranks)

    async def lose(self) -> None:
        if len(self.nodes.names()) > 1:
            name = self.rng.choice(self.nodes.names())
            await self.stop(self.nodes[name])
            self.nodes.lose(name, spool=self.rng.random() < 0.6)

    async def stop(self, node: Node) -> None:
        """Kill a daemon, wherever it is."""
        task = self.at_work.pop(node, None)
        if task:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def pin(self) -> None:
        if self.nodes.tier.whole():
            self.pins.add(self.rng.choice(sorted(self.nodes.tier.whole())))
            for pinned in self.pins:
                await self.nodes.tier.put(pin_key(pinned), b"")

    async def event(self) -> None:
        """Something that is no daemon's doing."""
        live = self.launches[-1]
        match self.rng.choices(("save", "some", "zombie", "launch", "lose", "pin", "line", "restart"), _WEIGHTS)[0]:
            case "save":
                self.save(live)
            case "some":
                self.save(live, [rank for rank in range(len(live.placing)) if self.rng.random() < 0.5])
            case "zombie":
                self.save(self.rng.choice(self.launches))
            case "launch":
                await self.launch()
            case "lose":
                await self.lose()
            case "pin":
                await self.pin()
            case "line":
                node = self.rng.choice(self.nodes.alive())
                node.line.down = not node.line.down
            case "restart":
                node = self.rng.choice(self.nodes.alive())
                await self.stop(node)
                node.start()

    async def observe(self) -> None:
        """What a fresh node is offered was saved by every rank of one launch, and lies on the newest timeline."""
        found = await self.nodes.resume()
        newest = line = int(max(found.attempts, default="0")[-8:], 16)
        limit = math.inf
        for one in found.candidates:
            launch, step = launch_of(one.checkpoint), one.checkpoint.step
            assert self.saved[launch, step] == set(range(len(self.launches[launch - 1].placing)))
            while line != launch:
                origin = self.launches[line - 1].origin
                assert origin, f"launch {launch} step {step} is no ancestor of launch {newest}"
                line, limit = origin
            assert step <= limit

    async def end(self) -> None:
        """The last launch goes on where nothing fails any more: the tier comes to hold what retention wants."""
        self.pins &= set(self.nodes.tier.checkpoints())  # a prune that had begun before it was pinned went on
        for node in self.nodes.alive():
            node.line.down, node.line.rng = False, None
            node.start()
        await self.nodes.settle()
        await self.launch("".join(self.nodes.names()))
        for _ in range(self.keep + 1):
            self.save(self.launches[-1])
            await self.nodes.settle()
            await self.observe()
        last = [one for one in sorted(self.nodes.tier.whole()) if one.attempt == attempt(len(self.launches))]
        assert len(last) >= self.keep
        assert set(self.nodes.tier.checkpoints()) == {*last[-self.keep :], *self.pins}
        for node in self.nodes.alive():
            assert not await node.planned()
            if node.name in self.launches[-1].placing:
                kept = {which.checkpoint for which in node.spool.parts()} - self.pins
                assert kept == set(last[-self.keep :])
        manifests = self.nodes.tier.manifests().values()
        named = {f"{RUN}/{one.stored.key}" for found in manifests for one in found.chunks()}
        shared = {owner for found in manifests for owner in found.owners}
        there = [key for key in await contents(self.nodes.tier) if key.startswith(f"{RUN}/")]
        # What was cut off under a name whose chunks others share still goes with those.
        assert not {key for key in there if is_chunk(key) and chunk_owner(*key.split("/", 1)) not in shared} - named
        assert not [key for key in there if "/flushing/" in key or "/pruning/" in key]


_WEIGHTS = (40, 12, 15, 8, 5, 1, 6, 3)


@pytest.mark.parametrize("seed", seeds())
async def test_daemons_in_turns_harm_no_checkpoint_in_any_history(home, seed):
    """Daemons take turns; each acts on what it just saw."""
    story = Story(home, seed, lag=False)
    await story.launch()
    for _ in range(60):
        if story.rng.random() < 0.4:
            await story.event()
        else:
            with contextlib.suppress(StoreUnavailable):
                await story.rng.choice(story.nodes.alive()).turn(story.rng)
        await story.observe()
    await story.end()
    assert story.nodes.tier.checks > 20


@pytest.mark.parametrize("seed", seeds())
async def test_daemons_at_once_harm_no_checkpoint_in_any_history(home, seed, monkeypatch):
    """Daemons work at the same time over slow lines, and act on what they saw a while ago."""
    story = Story(home, seed, lag=True)
    story.nodes.tier.aware = False  # nobody can know of what came after the look
    await story.launch()

    async def daemon(node: Node) -> None:
        while True:
            with contextlib.suppress(TierdError):
                await node.turn(story.rng)
            await asyncio.sleep(0)

    for _ in range(30):
        await story.event()
        for node in story.nodes.alive():
            if node not in story.at_work:
                story.at_work[node] = asyncio.ensure_future(daemon(node))
        for _ in range(story.rng.choice((0, 20, 100))):
            await asyncio.sleep(0)
        await story.observe()
    for node in story.nodes.alive():
        await story.stop(node)
    daemon_timings.given().wall_ns.at_ms += 10**12  # what was cut off is left over now
    await story.end()
