"""Seeded corruptions, on the spool, on tiers or on both: each is noticed, and answered with the right checkpoint.

A world of two attempts is built once. For each seed it is copied and harmed, and what a restore must answer is worked
out here, from the pristine copy and byte by byte, by none of tierd's code: a checkpoint can be had if somewhere a
manifest of it is right and every chunk of every file is right in at least one place. Then a real client restores
through a real daemon, and must give exactly that: the step, its tensors bit for bit, and what it passed over.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.timed import timed_client
from support.training import same, tensors
from support.world import Daemon, hurry

import tierd
from tierd.client.saving import pipeline
from tierd.core.errors import CheckpointNotFound
from tierd.daemon import handoff
from tierd.spool import commit
from tierd.stores.file import FileStore

CHUNK = 8192  # bytes, at most
SEEDS = int(os.environ.get("TIERD_CORRUPTIONS", "40"))  # `make gate` has ten times as many
RUN = "run"
FILES = ("tensors.safetensors", "state.json")


@dataclass(frozen=True)
class World:
    """A pristine world: `spool` and the tiers' directories under `root`. Checkpoints are `(attempt, step)`."""

    root: Path
    tiers: tuple[str, ...]
    origin: dict[str, tuple[str, int] | None]  # attempt -> what it resumed from
    checkpoints: tuple[tuple[str, int], ...]

    def local(self, root: Path, checkpoint: tuple[str, int]) -> Path:
        attempt, step = checkpoint
        return root / "spool" / RUN / f"{step:012}.{attempt}" / "00000-of-00001"

    def manifest(self, root: Path, tier: str, checkpoint: tuple[str, int]) -> Path:
        attempt, step = checkpoint
        return root / tier / RUN / "manifests" / f"{step:012}.{attempt}" / "00000-of-00001.json"

    def chunks(self, root: Path, tier: str, checkpoint: tuple[str, int]) -> list[list[Path]]:
        """For each file, in the manifest's order, its chunks' objects."""
        return [[root / tier / RUN / key for key in keys] for keys in _keys(self.manifest(self.root, tier, checkpoint))]

    def spans(self, checkpoint: tuple[str, int]) -> list[list[tuple[int, int]]]:
        """For each file, in the manifest's order, where its chunks begin and end."""
        files = json.loads((self.local(self.root, checkpoint) / "manifest.json").read_text())["files"]
        bounds = [[0, *itertools.accumulate(chunk["size"] for chunk in file["chunks"])] for file in files]
        return [list(itertools.pairwise(found)) for found in bounds]


@functools.cache
def _keys(manifest: Path) -> list[list[str]]:
    files = json.loads(manifest.read_text())["files"]
    return [[chunk["stored"]["key"] for chunk in file["chunks"]] for file in files]


def build(root: Path, tiers: tuple[str, ...], patch: pytest.MonkeyPatch) -> World:
    for module in (pipeline, handoff):
        patch.setattr(module, "write_part", functools.partial(commit.write_part, chunk_size=CHUNK))
    for tier in tiers:
        (root / tier).mkdir(parents=True)
    with Daemon(root / "spool", lambda: {tier: FileStore(root / tier) for tier in tiers}) as daemon:
        launches: list[tuple[str, list[int]]] = []
        with tierd.Checkpointer(root / "spool", RUN) as first:
            for step in (1, 2, 3, 4):
                first.save(step, tensors(step)).wait()
            launches.append((first.attempt, [1, 2, 3, 4]))
        with tierd.Checkpointer(root / "spool", RUN) as second:
            second.restore(tensors(0), step=2)
            for step in (3, 4, 5):
                second.save(step, tensors(step)).wait()
            launches.append((second.attempt, [3, 4, 5]))
        daemon.settle()
    (one, _), (two, _) = launches
    checkpoints = tuple((attempt, step) for attempt, steps in launches for step in steps)
    return World(root, tiers, {one: None, two: (one, 2)}, checkpoints)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        root = tmp_path_factory.mktemp("pristine")
        yield {number: build(root / str(number), ("near", "far")[:number], patch) for number in (1, 2)}


# -- harm -------------------------------------------------------------------------------------------------------------


def harm(path: Path, noise: random.Random) -> None:
    """One corruption of one file."""
    data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
    if not data:
        return
    at = noise.randrange(len(data))
    match noise.choice(["bit", "bit", "burst", "truncate", "empty", "longer", "remove", "directory"]):
        case "bit":
            data[at] ^= 1 << noise.randrange(8)
        case "burst":
            data[at : at + 4096] = noise.randbytes(len(data[at : at + 4096]))
        case "truncate":
            del data[at:]
        case "empty":
            data.clear()
        case "longer":
            data += noise.randbytes(noise.randrange(1, 9000))
        case "remove":
            path.unlink()
            return
        case "directory":
            path.unlink()
            path.mkdir()
            return
    path.write_bytes(data)


def harm_span(path: Path, span: tuple[int, int], noise: random.Random) -> None:
    """A corruption within one chunk of a local file."""
    begin, end = span
    if not path.is_file() or path.stat().st_size <= begin:
        return
    data = bytearray(path.read_bytes())
    at = noise.randrange(begin, min(end, len(data)))
    data[at] ^= 1 << noise.randrange(8)
    path.write_bytes(data)


def harm_world(world: World, root: Path, noise: random.Random) -> None:
    """One to ten corruptions, most of them of what a restore would like best."""
    favoured = sorted(world.checkpoints, reverse=True)
    for _ in range(noise.randrange(1, 11)):
        checkpoint = favoured[min(int(noise.expovariate(0.6)), len(favoured) - 1)]
        home = world.local(root, checkpoint)
        tier = noise.choice(world.tiers)
        file = noise.randrange(2)
        objects = world.chunks(root, tier, checkpoint)[1 - file]  # a manifest names state.json first
        match noise.choice(["local", "local", "chunk", "chunk", "manifest", "both", "both", "all", "gone", "no name"]):
            case "local":
                harm(home / noise.choice([*FILES, "manifest.json"]), noise)
            case "chunk":
                harm(noise.choice(objects), noise)
            case "manifest":
                harm(world.manifest(root, tier, checkpoint), noise)
            case "both":  # the same chunk everywhere
                index = noise.randrange(len(objects))
                harm_span(home / FILES[file], world.spans(checkpoint)[1 - file][index], noise)
                for name in world.tiers:
                    harm(world.chunks(root, name, checkpoint)[1 - file][index], noise)
            case "all":  # every manifest
                harm(home / "manifest.json", noise)
                for name in world.tiers:
                    harm(world.manifest(root, name, checkpoint), noise)
            case "gone":
                shutil.rmtree(
                    noise.choice([home, world.chunks(root, tier, checkpoint)[0][0].parent]), ignore_errors=True
                )
            case "no name":
                shutil.rmtree(home, ignore_errors=True)
                shutil.rmtree(world.manifest(root, tier, checkpoint).parent, ignore_errors=True)


# -- what must be answered --------------------------------------------------------------------------------------------


def right(path: Path, pristine: Path) -> bool:
    return path.is_file() and path.read_bytes() == pristine.read_bytes()


def is_on(world: World, root: Path, tier: str, checkpoint: tuple[str, int], number: int, index: int) -> bool:
    """Whether a tier has a chunk right, under whichever checkpoint's name."""
    pristine = world.chunks(world.root, tier, checkpoint)[number][index]
    return any(right(path, pristine) for path in (root / tier / RUN / "chunks").glob(f"*/*/{pristine.name}"))


def can_be_had(world: World, root: Path, checkpoint: tuple[str, int], *, anew: bool = False) -> bool:
    home, good = world.local(root, checkpoint), world.local(world.root, checkpoint)
    manifests = [right(home / "manifest.json", good / "manifest.json")]
    for tier in world.tiers:
        manifests.append(right(world.manifest(root, tier, checkpoint), world.manifest(world.root, tier, checkpoint)))
    if not any(manifests):
        return False
    for number, name in enumerate(sorted(FILES)):
        whole = (good / name).read_bytes()
        here = (home / name).read_bytes() if (home / name).is_file() else b""
        for index, (begin, end) in enumerate(world.spans(checkpoint)[number]):
            elsewhere = any(is_on(world, root, tier, checkpoint, number, index) for tier in world.tiers)
            others = [world.local(root, other) / name for other in world.checkpoints] if anew else []
            elsewhere |= any(path.is_file() and path.read_bytes()[begin:end] == whole[begin:end] for path in others)
            if here[begin:end] != whole[begin:end] and not elsewhere:
                return False
    return True


def expected(world: World, root: Path) -> list[tuple[int | None, list[int]]]:
    """The step that must be restored (None: no checkpoint can be), and those newer ones that must be passed over.

    The last is what must be had in any case. Before it stand the newer ones that are had if the daemon is quick enough:
    it flushes damaged tiers anew, and an equal chunk of another checkpoint repairs it as well.
    """
    answers: list[tuple[int | None, list[int]]] = []
    known = [
        checkpoint
        for checkpoint in world.checkpoints
        if world.local(root, checkpoint).is_dir()
        or any(world.manifest(root, tier, checkpoint).is_file() for tier in world.tiers)
    ]

    def tells(checkpoint: tuple[str, int]) -> bool:  # of what its attempt resumed from
        pairs = [
            (world.local(root, checkpoint) / "manifest.json", world.local(world.root, checkpoint) / "manifest.json")
        ]
        pairs += [
            (world.manifest(root, tier, checkpoint), world.manifest(world.root, tier, checkpoint))
            for tier in world.tiers
        ]
        return any(right(one, other) for one, other in pairs)

    newest = max(world.checkpoints)  # the spool remembers that it was committed there
    skipped = [] if newest in known else [newest[1]]
    attempt, limit = max(known)[0] if known else None, 10**12
    while attempt is not None:
        for checkpoint in sorted(known, reverse=True):
            if checkpoint[0] == attempt and checkpoint[1] <= limit:
                if can_be_had(world, root, checkpoint, anew=True):
                    answers.append((checkpoint[1], [*skipped]))
                if can_be_had(world, root, checkpoint):
                    return answers
                skipped.append(checkpoint[1])
        if not any(tells(checkpoint) for checkpoint in known if checkpoint[0] == attempt):
            break
        attempt, limit = world.origin[attempt] or (None, 0)
    return [*answers, (None, skipped)]


# -- the matrix -------------------------------------------------------------------------------------------------------


def answer(world: World, root: Path) -> tuple[int | None, list[int]]:
    """What a real client answers through a real daemon; what it loaded is compared to the last bit."""
    state = tensors(10**6)
    stores = {tier: FileStore(root / tier) for tier in world.tiers}
    with Daemon(root / "spool", stores), tierd.Checkpointer(root / "spool", RUN) as client:
        try:
            found = client.restore(state)
        except CheckpointNotFound as error:
            assert same(state, 10**6), "nothing was found, and something was loaded"
            lines = [line for line in str(error).splitlines() if line.startswith("  skipped step ")]
            return None, [int(line.split()[2]) for line in lines]
    assert found is not None, "a fresh start, with checkpoints there"
    assert same(state, found.step), "what was loaded is not what was saved"
    for name in FILES:
        pristine = world.local(world.root, (found.attempt, found.step)) / name
        assert (found.directory / name).read_bytes() == pristine.read_bytes()
    return found.step, [one.step for one in found.skipped]


@pytest.fixture
def quick(monkeypatch):
    hurry(monkeypatch)
    timed_client(monkeypatch, start_s=1.0)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing here loses power


@pytest.mark.timeout(900)
def test_every_corruption_is_noticed_and_answered_with_the_right_checkpoint(worlds, tmp_path, quick):
    answers: list[tuple[int | None, int]] = []
    repaired = 0
    for seed in range(SEEDS):
        world, root = worlds[1 + seed % 2], tmp_path / str(seed)
        shutil.copytree(world.root, root, ignore=shutil.ignore_patterns("control.sock"))
        harm_world(world, root, random.Random(seed))
        allowed = expected(world, root)
        wanted = allowed[-1]
        repaired += wanted[0] is not None and not locally_whole(world, root, wanted[0])
        assert answer(world, root) in allowed, f"seed {seed}"
        if seed % 10 == 0:
            assert answer(world, root)[0] in [step for step, _ in allowed], (
                f"seed {seed}: the second launch answers otherwise"
            )
        answers.append((wanted[0], len(wanted[1])))
        shutil.rmtree(root)
    # The matrix is worth its name: whole, repaired, stepped back, across the rollback.
    steps = [step for step, _ in answers]
    assert steps.count(5) > SEEDS // 7 and steps.count(4) > SEEDS // 14 and steps.count(3) > 1 and steps.count(2) > 0, (
        steps
    )
    assert repaired > SEEDS // 10 and sum(1 for _, passed in answers if passed) > SEEDS // 5


def locally_whole(world: World, root: Path, step: int) -> bool:
    attempt = max(attempt for attempt, other in world.checkpoints if other == step)
    good, here = (world.local(base, (attempt, step)) for base in (world.root, root))
    return all(right(here / name, good / name) for name in (*FILES, "manifest.json"))


def test_an_unharmed_world_gives_the_newest(worlds, tmp_path, quick):
    for number, world in worlds.items():
        root = tmp_path / str(number)
        shutil.copytree(world.root, root, ignore=shutil.ignore_patterns("control.sock"))
        assert expected(world, root)[-1] == answer(world, root) == (5, [])


def test_the_judge_is_no_fool(worlds, tmp_path):
    """The expectation itself can see a difference."""
    world, root = worlds[1], tmp_path / "harmed"
    shutil.copytree(world.root, root, ignore=shutil.ignore_patterns("control.sock"))
    newest = max(world.checkpoints)
    home = world.local(root, newest)
    shutil.rmtree(home)
    assert can_be_had(world, root, newest)
    world.chunks(root, "near", newest)[1][0].unlink()
    assert not can_be_had(world, root, newest)
    assert expected(world, root)[-1] == (4, [5])
