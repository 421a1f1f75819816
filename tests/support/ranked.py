"""Nodes, launches of four ranks on them, kills, and what must survive: judged from outside.

What is there is listed here anew, from the names of files and objects, with no code of tierd's; what was promised
stands in the ranks' logs. `resumes` says which checkpoint a launch has to resume from; a part also counts that lies in
the spool of the node where its rank will run.
"""

from __future__ import annotations

import glob
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from support import ranked_trainer
from support.by_hand import parts_named
from support.nursery import context as nursery
from support.ranked_trainer import RUN, WORLD, Orders

from tierd.core.errors import DaemonUnavailable
from tierd.ipc.client import Link
from tierd.ipc.messages import Status
from tierd.spool.spool import Spool

KEEP = 3  # checkpoints that retention leaves on the tier
KEEP_LOCAL = 2  # and in a spool
PATIENCE = 240.0  # seconds


class Point(NamedTuple):
    """A checkpoint; the latest attempt's is the newest."""

    attempt: str
    step: int


Seen = Mapping[Point, Collection[int]]  # the ranks whose part of it is there


class Tier(Protocol):
    """Where all nodes flush to. `name` is what tierd calls it."""

    name: str
    url: str

    def listing(self) -> list[str]: ...


class Directory:
    """A tier in a directory."""

    name = "file"

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path, self.url = path, f"file://{path}"

    def listing(self) -> list[str]:
        found = glob.glob("**", root_dir=self.path, recursive=True)  # unlike rglob's, it may go on while files go
        return [name for name in found if (self.path / name).is_file()]


def on_tier(tier: Tier) -> dict[Point, set[int]]:
    return _seen(parts_named(tier.listing(), RUN))


def in_spool(spool: Path) -> dict[Point, set[int]]:
    """What is committed: a part's directory appears whole, by one rename."""
    names = glob.glob("*/*/manifest.json", root_dir=spool / RUN)
    return _seen(parts_named((f"{RUN}/manifests/{Path(name).parent}.json" for name in names), RUN))


def _seen(parts: Iterable[tuple[int, str, int, int]]) -> dict[Point, set[int]]:
    ranks: dict[Point, set[int]] = {}
    for step, attempt, rank, world in parts:
        assert world == WORLD, f"a part of another world size: rank {rank} of {world} at step {step} of {attempt}"
        ranks.setdefault(Point(attempt, step), set()).add(rank)
    return ranks


def complete(seen: Seen) -> set[Point]:
    return {point for point, ranks in seen.items() if set(ranks) == set(range(WORLD))}


def resumes(known: Iterable[Point], whole: Collection[Point], origins: Mapping[str, Point | None]) -> Point | None:
    """The newest of `whole` down the timeline of the newest attempt among `known`."""
    attempt, limit = max((point.attempt for point in known), default=None), math.inf
    while attempt is not None:
        steps = [point.step for point in whole if point.attempt == attempt and point.step <= limit]
        if steps:
            return Point(attempt, max(steps))
        origin = origins[attempt]
        attempt, limit = (origin.attempt, origin.step) if origin else (None, math.inf)
    return None


@dataclass
class Node:
    """A spool and its daemon. What a killed daemon leaves behind stays, until the node is lost."""

    name: str
    home: Path
    tier: Tier
    lives: int = 0  # how often it was lost
    daemon: subprocess.Popen[bytes] | None = None

    @property
    def spool(self) -> Path:
        return self.home / "spool"

    def start(self) -> None:
        """Start the daemon; returns before it answers, as a service manager does."""
        assert self.daemon is None or self.daemon.poll() is not None
        self.home.mkdir(exist_ok=True)
        config = self.home / "tierd.toml"
        config.write_text(
            f'spool = "{self.spool}"\nrescan = "3s"\n[retention]\nkeep_last = {KEEP_LOCAL}\n'
            f'[[tier]]\nname = "{self.tier.name}"\nurl = "{self.tier.url}"\nretention = {{ keep_last = {KEEP} }}\n'
        )
        with (self.home / "daemon.log").open("ab") as log:
            command = [sys.executable, "-m", "tierd", "run", "--config", str(config)]
            self.daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL the daemon."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait(60)

    def lose(self) -> None:
        """The daemon and the disk are gone. The ranks have to be killed before."""
        self.kill()
        shutil.rmtree(self.spool, ignore_errors=True)
        assert not self.spool.exists()
        self.lives += 1

    def end(self) -> None:
        """SIGTERM: everything pending is flushed, and the exit code is 0."""
        assert self.daemon is not None and self.daemon.poll() is None, self.last_words()
        self.daemon.terminate()
        assert self.daemon.wait(PATIENCE) == 0, self.last_words()

    def status(self) -> dict[str, object] | None:
        """The daemon's own view; None where none answers."""
        assert self.daemon is not None and self.daemon.poll() is None, self.last_words()
        if not self.spool.exists():
            return None
        try:
            with Link(Spool(self.spool)) as link:
                return link.ask(Status(), 60)["status"]
        except (DaemonUnavailable, TimeoutError):
            return None

    def last_words(self) -> str:
        return f"node {self.name}'s daemon ended; it said: {(self.home / 'daemon.log').read_text()[-800:]}"


@dataclass
class Launch:
    """Four ranks of one launch, and where they run."""

    number: int
    nodes: tuple[Node, ...]  # by rank
    processes: list[multiprocessing.process.BaseProcess]
    expected: Point | None  # to be resumed from, or something newer
    lives: tuple[int, ...]

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid is not None]

    def running(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def kill(self, *ranks: int) -> None:
        """SIGKILL these ranks, or all, and wait until they are gone."""
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].kill()
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].join(60)
            assert not self.processes[rank].is_alive()

    def signal(self, number: int) -> None:
        for pid in self.pids():
            os.kill(pid, number)

    def join(self) -> None:
        """Wait until all have ended by themselves, in order."""
        end = time.monotonic() + PATIENCE
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        assert [process.exitcode for process in self.processes] == [0] * len(self.processes), f"launch {self.number}"


Line = tuple[int, list[str]]  # the launch that wrote it, and its words


@dataclass
class Cluster:
    """A tier, nodes, the launches on them, and all that their ranks wrote down."""

    home: Path
    tier: Tier
    every: int = 5
    pace: float = 0.02
    nodes: dict[str, Node] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    _read: dict[Path, list[Line]] = field(default_factory=dict)
    _offsets: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.home / "logs").mkdir()

    def node(self, name: str) -> Node:
        """The node of that name; a new one is started, and answers."""
        if name not in self.nodes:
            self.nodes[name] = node = Node(name, self.home / name, self.tier)
            node.start()
            self.await_that(f"node {name} answers", node.status)
        return self.nodes[name]

    def stop(self) -> None:
        """Make sure that nothing that was started is left."""
        for launch in self.launches:
            for process in launch.processes:
                if process.is_alive():
                    process.kill()
                    process.join(60)
        for node in self.nodes.values():
            node.kill()

    # -- launches ---------------------------------------------------------------------------------------------------

    def launch(self, names: str, steps: int = 10**9, *, tierless: bool = False) -> Launch:
        """Start four ranks on the nodes `names` ("AABB"). What must survive is listed before the first one starts."""
        nodes = tuple(self.node(name) for name in names) if not tierless else ()
        number = len(self.launches)
        expected = self.must_survive(nodes) if nodes else None
        meeting = self.home / f"meeting-{number}"
        lives = tuple(node.lives for node in nodes)
        launch = Launch(number, nodes, [], expected, lives)
        self.launches.append(launch)
        for rank in range(len(names)):
            orders = Orders(
                launch=number,
                rank=rank,
                world=len(names),
                spool=None if tierless else str(nodes[rank].spool),
                tier=self.tier.name,
                log=str(self.log("alone" if tierless else "rank", rank)),
                meeting=str(meeting),
                steps=steps,
                every=self.every,
                pace=0.0 if tierless else self.pace,
            )
            process = nursery.Process(target=ranked_trainer.main, args=(orders,))
            launch.processes.append(process)
            process.start()
        return launch

    def log(self, name: str, rank: int) -> Path:
        return self.home / "logs" / f"{name}-{rank}"

    def lines(self, rank: int, name: str = "rank") -> list[Line]:
        """All that a rank wrote down, in every launch."""
        path = self.log(name, rank)
        found = self._read.setdefault(path, [])
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = file.read()  # a line is appended by one write
                self._offsets[path] = file.tell()
            found += [
                (int(words[0]), words[1:]) for words in (line.split(" ", 4) for line in whole.decode().splitlines())
            ]
        return found

    def said(self, launch: Launch, what: str, rank: int | None = None) -> list[list[str]]:
        """What the ranks of a launch, or one of them, wrote down after `what`."""
        ranks = range(WORLD) if rank is None else (rank,)
        return [
            words[1:]
            for one in ranks
            for number, words in self.lines(one)
            if number == launch.number and words[0] == what
        ]

    def await_that(self, what: str, observe: Callable[[], object], launch: Launch | None = None) -> bool:
        """Wait until `observe` gives something true; False when a rank of `launch` has ended by itself before."""
        end = time.monotonic() + PATIENCE
        while not observe():
            if launch is not None and not launch.running():
                return bool(observe())
            assert time.monotonic() < end, f"waited {PATIENCE:.0f} s in vain until {what}"
            time.sleep(0.02)
        return True

    # -- what must survive ------------------------------------------------------------------------------------------

    def origins(self) -> dict[str, Point | None]:
        """Attempt -> the checkpoint it resumed from, by the ranks' own word."""
        found: dict[str, Point | None] = {}
        for rank in range(WORLD):
            for _, words in self.lines(rank):
                if words[0] == "attempt":
                    found[words[1]] = None if words[2] == "none" else _point(words[2])
        return found

    def must_survive(self, nodes: tuple[Node, ...]) -> Point | None:
        """What a launch on these nodes has to resume from: that, or something newer that is still becoming whole."""
        tier = on_tier(self.tier)
        spools = {node.name: in_spool(node.spool) for node in nodes}
        known = {*tier, *(point for seen in spools.values() for point in seen)}
        near = {point: set(ranks) for point, ranks in tier.items()}
        for rank, node in enumerate(nodes):
            for point, ranks in spools[node.name].items():
                near.setdefault(point, set()).update({rank} & ranks)
        listed = resumes(known, complete(near), self.origins())
        promised = self._promised(nodes)
        return max((point for point in (listed, promised) if point), default=None)

    def _promised(self, nodes: tuple[Node, ...]) -> Point | None:
        """The newest checkpoint of which every rank was told that its part is safe."""
        safe: dict[Point, set[int]] = {}
        for rank, node in enumerate(nodes):
            attempts: dict[int, str] = {}
            for number, words in self.lines(rank):
                if words[0] == "attempt":
                    attempts[number] = words[1]
                launch = self.launches[number]
                there = launch.nodes[rank] is node and launch.lives[rank] == node.lives
                if words[0] == "kept" or (words[0] == "acked" and there):
                    safe.setdefault(Point(attempts[number], int(words[1])), set()).add(rank)
        return max(complete(safe), default=None)

    def check_resumed(self, launch: Launch) -> None:
        """All ranks that came so far resumed from one checkpoint, that was whole, and none newer had survived."""
        reported = {tuple(words) for words in (one[:2] for one in self.said(launch, "resumed"))}
        if not reported:
            return
        here = f"launch {launch.number}"
        assert len(reported) == 1, f"{here}: the ranks resumed from different checkpoints: {reported}"
        (words,) = reported
        point = None if words == ("none",) else Point(words[1], int(words[0]))
        if point is None:
            assert launch.expected is None, f"{here}: began anew, and {launch.expected} had survived"
            return
        assert launch.expected is None or point >= launch.expected, f"{here}: {point}, not {launch.expected}"
        there = {rank for node in self.nodes.values() for rank in in_spool(node.spool).get(point, ())}
        there |= on_tier(self.tier).get(point, set())
        assert there == set(range(WORLD)) or not launch.running(), (
            f"{here}: {point} lacks ranks: only {there} are there"
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def progress(self, launch: Launch | None = None) -> int:
        """The last step that any rank has made, in any launch or in this one."""
        reported = (line for rank in range(WORLD) for line in self.lines(rank))
        return max(
            int(words[1])
            for number, words in reported
            if words[0] == "step" and launch in (None, self.launches[number])
        )

    def check_training(self, steps: int) -> None:
        """Whatever any launch computed is what an uninterrupted run computes; and no step is missing."""
        furthest = max(steps, self.progress())  # a zombie may have come further
        self.launch("----", furthest, tierless=True).join()
        for rank in range(WORLD):
            alone = {int(words[1]): words[2:] for _, words in self.lines(rank, "alone") if words[0] == "step"}
            assert list(alone) == list(range(1, furthest + 1))
            last: dict[int, list[str]] = {}
            for number, words in self.lines(rank):
                assert words[0] != "failed", f"launch {number}, rank {rank}: a save failed: {words}"
                if words[0] == "step":
                    last[int(words[1])] = words[2:]
                    reported = f"launch {number}, rank {rank}, step {words[1]}"
                    assert words[2:] == alone[int(words[1])], f"{reported}: {words[2:]}, not {alone[int(words[1])]}"
            assert set(range(1, steps + 1)) <= last.keys(), f"rank {rank}: steps are missing"

    def converge(self) -> None:
        """Wait until every daemon is at rest with nothing pending; then the tier's retention holds as well."""

        def at_rest() -> bool:
            for node in self.nodes.values():
                status = node.status()
                if status is None:
                    return False
                for tier in status["tiers"]:  # type: ignore[attr-defined]
                    if not tier["reached"] or tier["pending_parts"] or tier["failures"] or tier["doing"]:
                        return False
            return True

        self.await_that("every daemon is at rest", at_rest)

    def check_retention(self) -> None:
        """On the tier lie the newest `KEEP`, whole. Beside them nothing but what a killed flush announced and nobody
        deletes before that has aged: no half of another checkpoint, no chunk that nobody names."""

        def excess() -> list[str]:
            keys = self.tier.listing()
            announced = {key.split("/")[2] for key in keys if key.startswith(f"{RUN}/flushing/")}
            whole = sorted(complete(on_tier(self.tier)) - set(map(_point, announced)))
            left = {f"{point.step:012}.{point.attempt}" for point in whole[-KEEP:]} | announced
            named = {key.split("/")[2] for key in keys if key.startswith((f"{RUN}/manifests/", f"{RUN}/chunks/"))}
            return sorted(named - left)

        try:
            self.await_that("retention holds on the tier", lambda: not excess())
        except AssertionError as error:
            raise AssertionError(f"{error}: too much are {excess()}") from None
        assert len(complete(on_tier(self.tier))) >= KEEP

    def verify(self) -> None:
        """`tierd verify` over the tier finds every byte right."""
        command = [sys.executable, "-m", "tierd", "verify", self.tier.url, "--run", RUN, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, f"verify ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert len(json.loads(done.stdout)["checks"]) >= WORLD


def _point(name: str) -> Point:
    step, attempt = name.split(".")
    return Point(attempt, int(step))


@contextmanager
def cluster(home: Path, tier: Tier, **options: object) -> Iterator[Cluster]:
    """A cluster of which nothing is left running when the block is left."""
    made = Cluster(home, tier, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.stop()
