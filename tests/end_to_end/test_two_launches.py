"""Two launches of one run at the same time, by mistake: each is warned, and neither loses what it would keep alone.

Trainers are processes of their own that do as they are told on their standard input; they start the daemon.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import wait_until
from support.world import commit, part

import tierd
from tierd.client.ranks.attempts import ConcurrentLaunchWarning
from tierd.core.errors import ConfigError
from tierd.core.planning.place import Trainer
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest
from tierd.spool import leases
from tierd.spool.spool import Spool

_TRAINER = """
import dataclasses, logging, sys
import torch, tierd
from tierd.client import client_timings
quick = dataclasses.replace(client_timings.USUAL_TIMINGS, launches_s=0.5)
client_timings.current_timings = lambda: quick
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
spool, to = sys.argv[1], sys.argv[2:]
ckpt = tierd.Checkpointer(spool, run="r", to=to, retention=tierd.Retention(keep_last=2))
print(ckpt.attempt, flush=True)
for line in sys.stdin:
    ckpt.save(int(line), {"w": torch.full((1000,), int(line))}).wait(timeout=60)
    print("acked", flush=True)
"""


class Launch:
    """A trainer, its standard error in a file."""

    def __init__(self, home: Path, name: str, *to: str) -> None:
        self.log = home / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _TRAINER, str(home / "spool"), *to],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.attempt = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.log.read_text()
        return line

    def save(self, *steps: int) -> None:
        assert self.process.stdin is not None
        for step in steps:
            print(step, file=self.process.stdin, flush=True)
            assert self._line() == "acked"

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[tuple[Launch, Launch]]:
    (tmp_path / "tier").mkdir()
    both = []
    try:
        for name in ("first", "second"):
            both.append(Launch(tmp_path, name, f"file://{tmp_path / 'tier'}"))
            both[-1].save(*((1, 2, 3) if name == "first" else (11, 12, 13)))
        yield both[0], both[1]
    finally:
        for one in both:
            one.end()
        end_daemon(tmp_path / "spool")


def end_daemon(spool: Path) -> None:
    lock, line = spool / ".tierd" / "lock", spool / ".tierd" / "control.sock"
    if lock.exists() and line.exists() and (pid := lock.read_text().strip()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)
        wait_until(lambda: not line.exists())


def kept(home: Path) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Attempts and steps in the spool and on the tier."""
    names = [path.name for path in (home / "tier" / "r" / "manifests").glob("*")]
    spool = {(one.checkpoint.attempt, one.checkpoint.step) for one in Spool(home / "spool").parts()}
    return spool, {(name.partition(".")[2], int(name.partition(".")[0])) for name in names}


def status(home: Path) -> dict:
    with DaemonConnection(Spool(home / "spool")) as link:
        return link.ask(StatusRequest(), 60)["status"]


@pytest.mark.timeout(300)
def test_both_are_warned_and_neither_loses_anything_until_it_ends(launches, tmp_path, capsys) -> None:
    first, second = launches
    mine, other = {(first.attempt, 2), (first.attempt, 3)}, {(second.attempt, 12), (second.attempt, 13)}
    wait_until(lambda: kept(tmp_path) == (mine | other, mine | other))
    for one, rival in ((first, second), (second, first)):
        wait_until(lambda one=one, rival=rival: f"attempt {rival.attempt}, process" in one.log.read_text())
    reported = status(tmp_path)
    assert [(one["attempt"], one["pids"]) for one in reported["launches"]] == [
        (first.attempt, [first.process.pid]),
        (second.attempt, [second.process.pid]),
    ]
    assert [event["run"] for event in reported["events"] if event["what"] == "two launches"] == ["r"]
    wait_until(lambda: not any(tier["pending_prunes"] for tier in status(tmp_path)["tiers"]))
    from tierd.cli import run

    assert run(["status", "--spool", str(tmp_path / "spool")]) == 0
    assert "2 launches of run r save at the same time" in " ".join(capsys.readouterr().out.split())
    first.save(4)  # it goes on as if it were alone
    mine = {(first.attempt, 3), (first.attempt, 4)}
    wait_until(lambda: kept(tmp_path) == (mine | other, mine | other))
    first.end()
    wait_until(lambda: kept(tmp_path)[1] == other)
    assert status(tmp_path)["launches"] == []


@pytest.mark.timeout(400)
def test_launches_on_two_nodes_and_one_tier_are_warned_and_kept(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    nodes = [tmp_path / "one", tmp_path / "two"]
    both: list[Launch] = []
    try:
        for node, steps in zip(nodes, ((1, 2, 3), (11, 12, 13)), strict=True):
            node.mkdir()
            (node / "tier").symlink_to(tmp_path / "tier")
            both.append(Launch(node, "trainer", f"file://{tmp_path / 'tier'}"))
            both[-1].save(*steps)
        first, second = both
        first.save(4)  # after the second one began, which tells that one's node
        tier = {(first.attempt, 3), (first.attempt, 4), (second.attempt, 12), (second.attempt, 13)}
        for one, rival in ((first, second), (second, first)):
            wait_until(lambda one=one, rival=rival: f"{rival.attempt} (on another node" in one.log.read_text())
        wait_until(lambda: kept(nodes[0])[1] == tier)
        for one, node in zip(both, nodes, strict=True):
            assert {found["attempt"] for found in status(node)["launches"]} == {first.attempt, second.attempt}
            assert {step for attempt, step in kept(node)[0] if attempt == one.attempt} >= {
                step for attempt, step in tier if attempt == one.attempt
            }
    finally:
        for one in both:
            one.end()
        for node in nodes:
            end_daemon(node / "spool")


def shown(spool: Spool) -> list[Trainer]:
    return [one._replace(since=0.0) for one in leases.living_trainers(spool.control, ["run"])["run"]]


def test_a_lock_ends_with_its_process_and_another_launch_of_the_process_takes_its_place(tmp_path) -> None:
    spool = Spool(tmp_path / "spool")
    former, later = part(1, 1), part(1, 2)
    leases.acquire_lease(spool.control, former)
    me = os.getpid()
    assert shown(spool) == [Trainer(former.checkpoint.attempt, 0, me)]
    leases.acquire_lease(spool.control, later)
    assert shown(spool) == [Trainer(later.checkpoint.attempt, 0, me)]
    leases.release_lease(spool.control, former)  # which it is no more
    assert leases.holds_lease(spool.control, later)
    leases.release_lease(spool.control, later)
    assert leases.ended_launches(spool.control, {}, ["run"]) == {
        "run": {former.checkpoint.attempt, later.checkpoint.attempt}
    }
    assert leases.living_trainers(spool.control, ["run"]) == {}
    leases.forget_dead_trainers(spool.control, "run")
    assert not (spool.control / "alive" / "run").exists()


def test_launch_has_ended_when_its_process_begins_the_next_though_that_cannot_be_shown_yet(
    tmp_path, caplog, monkeypatch
) -> None:
    spool = Spool(tmp_path / "spool")
    beside, former, later = ConcurrentLaunchWarning(spool, asks=False, ask_s=0.0), part(1, 1), part(2, 2)
    beside.saving(former)
    with monkeypatch.context() as context:
        context.setattr("tierd.spool.leases.check_own_directory", lambda room: os.open(tmp_path / "gone", os.O_RDONLY))
        for step in (2, 3):
            beside.saving(part(step, 2))
    assert leases.living_trainers(spool.control, ["run"]) == {}
    assert caplog.text.count("other launches do not see yet that this one saves") == 1
    beside.saving(part(4, 2))
    assert [one.attempt for one in leases.living_trainers(spool.control, ["run"])["run"]] == [later.checkpoint.attempt]
    beside.close()
    assert leases.living_trainers(spool.control, ["run"]) == {}


def test_a_forked_child_does_not_keep_its_trainers_lock(tmp_path) -> None:
    spool = Spool(tmp_path / "spool")
    script = (
        "import os, time\n"
        "from pathlib import Path\n"
        "from tierd.spool import leases\n"
        "from tierd.core.ids import CheckpointId, PartId\n"
        "part = PartId(CheckpointId('run', '000000000001-00000001', 1), 0, 1)\n"
        f"leases.acquire_lease(Path({str(spool.control)!r}), part)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    print(child, flush=True)\n"  # one of the two prints: the lines of both may run into each other
        "time.sleep(600)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    child = int(trainer.stdout.readline())
    try:
        assert leases.living_trainers(spool.control, ["run"])
        trainer.kill()
        trainer.wait(60)
        wait_until(lambda: leases.living_trainers(spool.control, ["run"]) == {})
    finally:
        os.kill(child, signal.SIGKILL)
        trainer.kill()
        trainer.stdout.close()


def test_second_process_of_the_same_rank_and_attempt_is_refused(tmp_path) -> None:
    spool = Spool(tmp_path / "spool")
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tierd.spool import leases\n"
        "from tierd.core.ids import CheckpointId, PartId\n"
        f"one = CheckpointId('run', {part(1).checkpoint.attempt!r}, 1)\n"
        f"leases.acquire_lease(Path({str(spool.control)!r}), PartId(one, 0, 1))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {other.pid} saves rank 0 of attempt"):
            leases.acquire_lease(spool.control, part(1))
        other.kill()


def test_link_in_the_place_of_the_locks_is_refused_and_saving_continues(tmp_path, caplog) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with tierd.Checkpointer(tmp_path / "spool", run="r", to=[]) as ckpt:
        alive = tmp_path / "spool" / ".tierd" / "alive"
        alive.rmdir()
        alive.symlink_to(elsewhere)
        ckpt.save(1, {"step": 1}).wait(timeout=60)
    assert "other launches do not see yet that this one saves" in caplog.text
    assert not list(elsewhere.iterdir())


def test_part_committed_without_a_trainer_has_no_lease(tmp_path) -> None:
    spool = Spool(tmp_path / "spool")
    commit(spool, part(1))
    assert leases.living_trainers(spool.control, ["run"]) == {}
