"""A model under FSDP2, killed (SIGKILL) with copies behind training, goes on as if nobody had killed it: loss by loss
and shard by shard, bit for bit, from the daemon's memory, the spool, a tier, and on another number of ranks."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import sharded_trainer
from support.by_hand import parts_on
from support.sharded_trainer import RUN, Orders, Reported, reported
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(400)

STEPS = 14
PATIENCE_S = 100.0


class Job:
    """Launches of one training; each rank's log goes on from launch to launch."""

    def __init__(self, base: Path, stack: contextlib.ExitStack) -> None:
        self.base, self._stack = base, stack
        self._count = itertools.count(1)
        self.processes: list = []
        stack.callback(self.kill)

    def launch(self, world: int, spool: Path | None, halt: str = "", *, alike: bool = False, name: str = "rank") -> int:
        number = next(self._count)
        meeting = str(self.base / f"meeting-{number}")
        place, self.processes = str(spool) if spool else None, []
        for rank in range(world):
            log = str(self.log(rank, name))
            orders = Orders(number, rank, world, place, log, meeting, STEPS, alike, halt)
            self.processes.append(sharded_trainer.start(orders))
        return number

    def log(self, rank: int, name: str = "rank") -> Path:
        return self.base / f"{name}-{rank}.log"

    def reported(self, world: int, name: str = "rank") -> list[Reported]:
        return [reported(self.log(rank, name)) for rank in range(world)]

    def until(self, reached: Callable[[], bool]) -> None:
        wait_until(lambda: self.died() or reached(), pause_s=0.02)
        assert not self.died(), self.died()

    def died(self) -> list[str]:
        return [error for path in self.base.glob("*.log") if (error := reported(path).died)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(60)

    def end(self) -> None:
        for process in self.processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0, [path.read_text()[-600:] for path in self.base.glob("*.err")]


@pytest.fixture
def job(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Job(tmp_path, stack)


class Node:
    """A spool with a daemon, and one tier."""

    def __init__(self, home: Path, tier: Path) -> None:
        self.spool, self.tier = home / "spool", tier
        home.mkdir()
        tier.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tierd", "run", "--spool", str(self.spool), "--to", f"file://{tier}"]
        with (home / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        self.daemon.kill()
        self.daemon.wait(60)


@pytest.fixture
def node(tmp_path):
    with contextlib.ExitStack() as stack:

        def started(name: str) -> Node:
            made = Node(tmp_path / name, tmp_path / "tier")
            stack.callback(made.kill)
            return made

        yield started


def uninterrupted(job: Job, world: int, *, alike: bool = False) -> list[dict[int, str]]:
    number = job.launch(world, None, alike=alike, name="alone")
    job.end()
    return [one.steps[number] for one in job.reported(world, "alone")]


def kill_at(job: Job, number: int, world: int, halt: str) -> None:
    """Kill all ranks when each waits behind the line `halt`."""
    what, step = halt.split()
    seen = {"step": lambda one: one.steps.get(number, {}), "saved": lambda one: one.saved.get(number, ())}[what]
    job.until(lambda: all(int(step) in seen(one) for one in job.reported(world)))
    job.kill()


@pytest.mark.parametrize(
    ("place", "world", "halt", "comes_back"),
    [
        ("memory", 2, "step 7", 6),  # the copies of step 6 were confirmed by the step behind it
        ("local", 4, "saved 6", 3),  # they are under way, and nobody has confirmed them
        ("file", 3, "step 7", 6),
    ],
)
def test_killed_job_continues_exactly(job, node, place, world, halt, comes_back):
    home = node("a")
    expected = uninterrupted(job, world)
    first = job.launch(world, home.spool, halt)
    if place == "file":
        job.until(lambda: [part[0] for part in parts_on(home.tier, RUN)].count(comes_back) == world)
    kill_at(job, first, world, halt)
    if place == "local":
        home.kill()
    elif place == "file":
        home.kill()
        shutil.rmtree(home.spool)
        home = node("b")
    second = job.launch(world, home.spool)
    job.end()
    for one, steps in zip(job.reported(world), expected, strict=True):
        assert one.resumed == {first: "none", second: f"{comes_back} {place} restored"}
        assert second in one.ended and not one.died
        for seen in one.steps.values():
            assert seen == {number: steps[number] for number in seen}
        assert list(one.steps[second]) == list(range(comes_back + 1, STEPS + 1))


def test_killed_job_continues_exactly_on_another_number_of_ranks(job, node):
    home = node("a")
    expected = uninterrupted(job, 2, alike=True)
    assert expected[0] == expected[1]
    before = 0
    for world, step in ((2, 3), (1, 6), (2, 9)):
        halt = f"step {step + 1}"
        number = job.launch(world, home.spool, halt, alike=True)
        kill_at(job, number, world, halt)
        for one in job.reported(world):
            assert one.steps[number] == {at: expected[0][at] for at in range(before + 1, step + 2)} and not one.died
            assert one.resumed[number] == (f"{before} local resharded" if before else "none")
        before = step
