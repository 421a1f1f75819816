"""Who saves a rank of a run: one Checkpointer of one process on one node. A second one is refused, or both are told."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.doubles import Double
from support.interrupted import at_line
from support.timed import timed_client
from support.training import tensors
from support.waiting import wait_until
from support.world import Daemon

import tierd
from tierd.client.ranks.launchers import slurm_attempt
from tierd.core.errors import ConfigError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.place import Trainer
from tierd.core.timeline.concurrent_launches import concurrent_launches
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest
from tierd.spool import leases
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore


@pytest.fixture
def spool(tmp_path) -> Spool:
    return Spool(tmp_path / "spool")


def made(spool: Spool, **options) -> tierd.Checkpointer:
    return tierd.Checkpointer(spool.root, "run", **{"to": [], **options})


def save(ckpt: tierd.Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save(step, tensors(step)).wait(timeout=60)


def alive(spool: Spool) -> list[str]:
    return [one.attempt for one in leases.living_trainers(spool.control, ["run"]).get("run", ())]


# -- one process ------------------------------------------------------------------------------------------------------


def test_two_checkpointers_that_save_in_turns_are_both_warned(spool, caplog):
    """Nothing said it: the second one's data won."""
    first, second = made(spool), made(spool)
    save(first, 1)
    save(second, 2)
    assert alive(spool) == [second.attempt] and caplog.text == ""
    save(first, 3)
    assert alive(spool) == sorted([first.attempt, second.attempt])
    for one in (first, second):
        wait_until(lambda one=one: f"attempt {one.attempt}, another Checkpointer of this process" in caplog.text)
    save(second, 4)
    save(first, 5)
    assert caplog.text.count("another Checkpointer of this process") == 2, "once for each"
    first.close()
    assert alive(spool) == [second.attempt]
    second.close()
    assert alive(spool) == []


def test_checkpointer_that_replaces_an_unclosed_checkpointer_is_not_warned(spool, caplog):
    """A notebook's cell that is run again."""
    several = []
    for number in range(3):
        several.append(made(spool))
        several[-1].restore(tensors(0))
        save(several[-1], 10 * number + 1, 10 * number + 2)
        assert alive(spool) == [several[-1].attempt]
    several[0].restore(tensors(0))  # to look at it
    time.sleep(1.2)  # longer than between two looks at the locks
    assert caplog.text == ""
    for one in several:
        one.close()
    assert alive(spool) == []


def test_two_checkpointers_of_the_same_attempt_are_warned_when_they_save_in_turns(spool, caplog):
    attempt = tierd.new_attempt()
    first, second = made(spool, attempt=attempt), made(spool, attempt=attempt)
    save(first, 1)
    save(second, 2)
    assert caplog.text == ""
    save(first, 3)
    save(second, 4)
    assert caplog.text.count(f"two Checkpointers of this process save rank 0 of attempt {attempt} of run run") == 1
    first.close()
    assert alive(spool) == [attempt], "the other one lives"
    second.close()
    assert alive(spool) == []


def test_two_world_sizes_of_an_attempt_are_warned(spool, caplog):
    """Each has a lock of its own, so that neither is refused."""
    attempt = tierd.new_attempt()
    with made(spool, attempt=attempt) as first, made(spool, attempt=attempt, rank=0, world_size=2) as second:
        save(first, 1)
        assert caplog.text == ""
        save(second, 2)
        wait_until(lambda: caplog.text.count(f"{attempt}, another Checkpointer of this process, as rank 0 of") == 2)
        assert "as rank 0 of 1; this" in caplog.text and "as rank 0 of 2; this" in caplog.text


def launch(root: Path) -> tuple[Path, PartId]:
    """A new spool's control directory, and a part of a launch."""
    (root / leases.ALIVE).mkdir(mode=0o700, parents=True)
    return root, PartId(CheckpointId("run", tierd.new_attempt(), 1), 0, 1)


@pytest.mark.timeout(30)
def test_a_handler_may_save_at_any_line_of_a_launchs_first_save(tmp_path):
    """It does not wait for the lease that the interrupted thread takes, which is shown when that thread goes on."""
    for moment in range(100):
        first = launch(tmp_path / str(moment))
        with at_line(moment, {"leases.py"}, lambda first=first: leases.acquire_lease(*first)) as fired:
            leases.acquire_lease(*first)
        assert leases.holds_lease(*first)
        leases.release_lease(*first)
        if not fired:
            break
    assert 20 < moment < 99


def test_a_handler_that_closes_during_the_first_save_leaves_no_lease(spool, monkeypatch):
    ckpt = made(spool)
    closing = {"flock": lambda *arguments: (ckpt.close(), fcntl.flock(*arguments))}
    monkeypatch.setattr(leases, "fcntl", SimpleNamespace(**{**vars(fcntl), **closing}))
    with suppress(ConfigError):  # it is closed
        save(ckpt, 1)
    assert alive(spool) == []


def test_interrupted_first_save_does_not_refuse_the_next_save(tmp_path, monkeypatch):
    def interrupt(_fd) -> None:
        raise KeyboardInterrupt

    first = launch(tmp_path)
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(os, "fstat", interrupt)
        leases.acquire_lease(*first)
    leases.acquire_lease(*first)
    assert leases.holds_lease(*first)
    leases.release_lease(*first)


# -- two processes ----------------------------------------------------------------------------------------------------

_HOLDER = """
import sys, tierd, torch
ckpt = tierd.Checkpointer(sys.argv[1], "run", attempt=sys.argv[2], to=[])
ckpt.save(1, {"w": torch.zeros(10)}).wait(timeout=60)
print("saved", flush=True)
sys.stdin.read()
"""


def test_same_rank_of_the_same_attempt_in_another_process_is_refused_until_that_process_ends(spool):
    attempt = tierd.new_attempt()
    command = [sys.executable, "-c", _HOLDER, str(spool.root), attempt]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "saved\n"
        with made(spool, attempt=attempt) as ckpt:
            with pytest.raises(ConfigError, match=rf"process {other.pid} saves rank 0 of attempt {attempt} of run run"):
                ckpt.save(2, tensors(2))
            assert [part.checkpoint.step for part in spool.parts()] == [1]
            other.kill()
            other.wait(60)
            save(ckpt, 2)
    assert [part.checkpoint.step for part in spool.parts()] == [1, 2]


def test_tasks_of_a_slurm_array_derive_attempts_of_their_own(monkeypatch):
    """Each has a SLURM_JOB_ID of its own."""
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_ARRAY_JOB_ID": "7"}
    for name, value in {**step, "SLURM_JOB_START_TIME": "1767225600"}.items():
        monkeypatch.setenv(name, value)
    derived = []
    for task, job in enumerate(("8", "9", "7")):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        monkeypatch.setenv("SLURM_JOB_ID", job)
        derived.append(slurm_attempt(0, 2))
    assert len(set(derived)) == 3


# -- status -----------------------------------------------------------------------------------------------------------


def test_status_names_who_saves_and_since_when_also_for_a_single_launch(spool, capsys):
    begun = datetime.now(UTC) - timedelta(seconds=2)  # what is told has whole seconds
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        with made(spool, to=None) as ckpt:
            save(ckpt, 1)
            daemon.settle()
            with DaemonConnection(spool) as link:
                answer = link.ask(StatusRequest())["status"]
            assert answer["launches"] == []
            (lease,) = answer["leases"]
            assert [lease[name] for name in ("run", "attempt", "rank", "pid")] == ["run", ckpt.attempt, 0, os.getpid()]
            since, renewed = (datetime.fromisoformat(lease[name]) for name in ("since", "renewed"))
            assert begun <= since <= renewed <= datetime.now(UTC)
            from tierd.cli import run

            assert run(["status", "--spool", str(spool.root)]) == 0
            reported = " ".join(capsys.readouterr().out.split())
            who = rf"saves rank 0 \(pid {os.getpid()}\) for \d+ s, last \d+ s ago"
            assert re.search(f"run run: attempt {ckpt.attempt} {who}", reported)
        daemon.settle()
        with DaemonConnection(spool) as link:
            assert link.ask(StatusRequest())["status"]["leases"] == [], "it was closed"


def test_lock_records_since_when_it_is_held(spool):
    with made(spool) as ckpt:
        before = time.time()
        save(ckpt, 1)
        (one,) = leases.living_trainers(spool.control, ["run"])["run"]
        assert isinstance(one, Trainer) and before - 1 <= one.since <= time.time()
        save(ckpt, 2)
        assert leases.living_trainers(spool.control, ["run"])["run"] == (one,)


# -- two nodes --------------------------------------------------------------------------------------------------------


def rivals(spool: Spool) -> list[tuple[str, str]]:
    with DaemonConnection(spool) as link:
        return [(one["attempt"], one["place"]) for one in link.ask(StatusRequest())["status"]["launches"]]


def test_two_nodes_that_save_the_same_rank_of_an_attempt_are_warned(tmp_path):
    """The one whose part the tier did not take, or that is behind. The other one sees nothing that it cannot have
    written."""
    inner, attempt = MemoryStore(), tierd.new_attempt()
    nodes = [Spool(tmp_path / name) for name in "ab"]
    with (
        Daemon(nodes[0].root, {"tier": Double(inner)}) as one,
        Daemon(nodes[1].root, {"tier": Double(inner)}) as other,
        made(nodes[0], to=None, attempt=attempt) as first,
        made(nodes[1], to=None, attempt=attempt) as second,
    ):
        for ckpt, step in ((first, 1), (second, 2), (first, 3)):
            save(ckpt, step)
            one.settle()
            other.settle()
        wait_until(lambda: rivals(nodes[1]) == [(attempt, "local"), (attempt, "tier")])
        assert "two launches" in {event.what for event in other.reconciler.journal.events}


def saving(nodes, *ranks: tuple[int, int, int], attempt: str | None = None) -> list[tierd.Checkpointer]:
    """A Checkpointer on each of these: node, rank, world size."""
    return [
        tierd.Checkpointer(nodes[node].spool.root, "run", rank, world, attempt)
        if world > 1
        else made(nodes[node].spool, to=None)
        for node, rank, world in ranks
    ]


def reported(caplog, attempt: str) -> int:
    """How many trainers were warned of a launch on another node."""
    said = [record.getMessage() for record in caplog.records if record.name == "tierd"]
    return sum("save at the same time" in line and f"{attempt} (on another node" in line for line in said)


@pytest.mark.timeout(200)
def test_array_tasks_on_two_nodes_with_one_run_name_are_both_warned_once_a_tier_shows_it(tmp_path, caplog, monkeypatch):
    """Each is rank 0 of 1, with a spool and a daemon of its own."""
    timed_client(monkeypatch, launches_s=1.0)
    store = MemoryStore()
    with (
        Daemon(tmp_path / "a", {"tier": store}, rescan="1s") as one,
        Daemon(tmp_path / "b", {"tier": store}, rescan="1s") as other,
    ):
        (first,) = saving((one, other), (0, 0, 1))
        save(first, 1)
        one.settle()
        (second,) = saving((one, other), (1, 0, 1))
        save(second, 1)
        wait_until(lambda: reported(caplog, second.attempt))
        assert not reported(caplog, first.attempt), "a launch that saves no more may have ended"
        save(first, 2)
        wait_until(lambda: reported(caplog, first.attempt))
        for node in (one, other):
            shown = node.call(_launches(node))
            assert {rival.attempt for rival in shown} == {first.attempt, second.attempt}
        assert reported(caplog, first.attempt) == reported(caplog, second.attempt) == 1, "once each"
        for ckpt in (first, second):
            ckpt.close()


@pytest.mark.timeout(200)
def test_launch_that_restarts_with_its_two_nodes_exchanged_is_no_rival(tmp_path, caplog, monkeypatch):
    timed_client(monkeypatch, launches_s=0.5)
    store = MemoryStore()
    with (
        Daemon(tmp_path / "a", {"tier": store}, rescan="1s") as one,
        Daemon(tmp_path / "b", {"tier": store}, rescan="1s") as other,
    ):
        for places in ((0, 1), (1, 0)):
            ranks = saving((one, other), *((places[rank], rank, 2) for rank in (0, 1)), attempt=tierd.new_attempt())
            for step in (1, 2):
                for ckpt in ranks:
                    save(ckpt, step)
            time.sleep(3)
            for ckpt in ranks:
                ckpt.close()
        assert not [line for line in caplog.messages if "at the same time" in line]


async def _launches(node: Daemon):
    return concurrent_launches(node.reconciler.inventory(), "run", time.time())
