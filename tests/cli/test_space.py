"""rm and du as their users meet them: nothing goes that was not shown and confirmed, and nothing of another run."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from support.waiting import wait_until
from support.world import Daemon

import tierd
from tierd.cli import run
from tierd.cli.commands import run_commands
from tierd.core.retention.policy import RetentionPolicy
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Attach
from tierd.spool.run_records import record_policy, recorded_policies
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A spool and a tier with three checkpoints of `r` and one of `other`; `r`'s tensors but one never change."""
    spool, tier = tmp_path / "spool", tmp_path / "tier"
    tier.mkdir()
    with Daemon(spool, lambda: {"file": FileStore(tier)}) as daemon:
        for name, steps in (("r", (10, 20, 30)), ("other", (1,))):
            with tierd.Checkpointer(spool, run=name) as ckpt:
                for step in steps:
                    state = {"frozen": torch.arange(2e6), "weights": torch.full((600_000,), float(step))}
                    ckpt.save(step, state).wait("file", timeout=60)
        daemon.settle()
    return spool, tier


def under(*directories: Path) -> set[str]:
    """Every file of the run `r`."""
    return {str(path) for root in directories for path in root.glob("r/**/*") if path.is_file()}


def answer(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_du_reports_each_runs_size_in_each_place(places, capsys) -> None:
    spool, tier = places
    assert run(["du", str(tier), "--spool", str(spool), "--json"]) == 0
    found = {(one["run"], one["place"]): one for one in answer(capsys)["usage"]}
    assert {key: one["checkpoints"] for key, one in found.items()} == {
        ("other", "file"): 1,
        ("other", "local"): 1,
        ("r", "file"): 3,
        ("r", "local"): 3,
    }
    local, there = found["r", "local"], found["r", "file"]
    assert local["stored_bytes"] == sum(path.stat().st_size for path in spool.glob("r/**/*") if path.is_file())
    assert there["stored_bytes"] == sum(path.stat().st_size for path in tier.glob("r/**/*") if path.is_file())
    assert local["shared_bytes"] == 0 and 0 < there["shared_bytes"] < there["stored_bytes"]
    assert found["other", "file"]["shared_bytes"] == 0 and not there["unreadable"]
    assert run(["du", str(tier), "--run", "r"]) == 0
    shown = capsys.readouterr()
    assert "SHARED" in shown.out and "other" not in shown.out and "no place" not in shown.err
    assert run(["du", str(tier), "--run", "nope"]) == 4
    said = capsys.readouterr().err
    assert "run 'nope': there is no such checkpoint" in said and "the runs there are: other, r\n" in said


def test_du_continues_past_a_tier_that_does_not_answer(places, tmp_path, capsys) -> None:
    assert run(["du", str(places[1]), str(tmp_path / "none"), "--json"]) == 6
    found = answer(capsys)
    assert found["unreached"] == ["file-2"] and len(found["usage"]) == 2


def test_rm_asks_and_deletes_nothing_where_nobody_can_say_yes(places, capsys) -> None:
    spool, tier = places
    before = under(spool, tier)
    assert run(["rm", "r", str(tier), "--spool", str(spool)]) == 3
    assert "--yes" in capsys.readouterr().err
    assert run(["rm", "r", str(tier), "--spool", str(spool), "--dry-run", "--json"]) == 0
    found = answer(capsys)
    assert found["removed"] is False and [one["checkpoints"] for one in found["places"]] == [3, 3]
    assert under(spool, tier) == before


def test_rm_asks_a_person(places, capsys, monkeypatch) -> None:
    tier = places[1]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    asked = []
    monkeypatch.setattr(run_commands.typer, "confirm", lambda question, err: bool(asked.append(question)))
    before = under(tier)
    assert run(["rm", "r", str(tier)]) == 1
    assert "3 checkpoints" in asked[0] and under(tier) == before


def test_rm_deletes_a_run_and_no_other(places, capsys) -> None:
    spool, tier = places
    assert run(["pin", "r", "20", str(tier), "--spool", str(spool)]) == 0
    quarantined = next((tier / "r" / "manifests").glob("*10.*/*.json"))
    kept = tier / "r" / "quarantine" / quarantined.parent.name / quarantined.name
    kept.parent.mkdir(parents=True)
    quarantined.rename(kept)
    assert run(["rm", "r", str(tier), "--spool", str(spool), "--yes"]) == 0
    assert under(spool, tier) == set() and not (spool / "r").exists()
    assert [one.checkpoint.run for one in Spool(spool).parts()] == ["other"]
    capsys.readouterr()
    assert run(["verify", str(tier), "--run", "other"]) == 0
    assert run(["rm", "r", str(tier), "--spool", str(spool), "--yes"]) == 4


@pytest.mark.parametrize("name", ["other", "chunks"])
def test_rm_keeps_the_runs_of_a_tier_below_the_run(places, tmp_path, capsys, name) -> None:
    """Two tiers `n` and `n/r`, of two configurations: `rm r` on the outer one deleted the runs of the inner one."""
    tier = places[1]
    inner = tier / "r"
    shutil.copytree(tier / "other", inner / name, dirs_exist_ok=True)
    inner_files = {
        inner / name / path.relative_to(tier / "other"): path.read_bytes()
        for path in (tier / "other").rglob("*")
        if path.is_file()
    }
    assert inner_files
    assert run(["rm", "r", str(tier), "--yes"]) == 0
    assert under(tier) == {str(path) for path in inner_files}
    assert all(path.read_bytes() == data for path, data in inner_files.items())


def test_rm_deletes_manifests_first(places, monkeypatch) -> None:
    """Cut off anywhere, nothing is left that looks whole."""
    tier, real = places[1], FileStore.delete
    calls: list[list[str]] = []

    async def delete(self, keys):
        calls.append(list(keys))
        await real(self, keys)

    monkeypatch.setattr(FileStore, "delete", delete)
    assert run(["rm", "r", str(tier), "--yes"]) == 0
    assert all("/manifests/" in key for key in calls[0]) and len(calls[0]) == 3


@pytest.mark.parametrize("restored", [False, True])
def test_rm_keeps_the_policy_of_a_launch_that_began_meanwhile(places, monkeypatch, restored) -> None:
    """The default would prune what the new trainer wants kept. The removal itself changes the run's directory later."""
    spool, real = Spool(places[0]), Spool.remove
    record_policy(spool.control, "r", RetentionPolicy())
    spool.pin(next(part.checkpoint for part in spool.parts() if part.checkpoint.run == "r"), pinned=True)
    if restored:  # fetched only: no launch has saved it here
        shutil.rmtree(spool.control / "saved" / "r")
    wanted = RetentionPolicy(keep_last=9)

    def remove(self, parts):
        record_policy(spool.control, "r", wanted)
        time.sleep(0.02)  # longer than a tick of the file system's clock
        real(self, parts)

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "remove", remove)
        assert run(["rm", "r", "--spool", str(spool.root), "--yes"]) == 0
    assert not (spool.root / "r").exists()
    assert [one.retention for one in recorded_policies(spool.control, ["r"])["r"]] == [wanted]
    assert run(["rm", "r", "--spool", str(spool.root), "--yes"]) == 0
    assert recorded_policies(spool.control, ["r"]) == {}


def test_rm_without_a_daemon_refuses_while_a_trainer_saves_the_run(places, capsys) -> None:
    spool = places[0]
    with tierd.Checkpointer(spool, "r", to=[]) as ckpt:
        ckpt.save(40, {"weights": torch.ones(10)}).wait()
        assert run(["rm", "r", "--spool", str(spool), "--yes"]) == 3
        assert f"(pid {os.getpid()})" in capsys.readouterr().err and under(spool)
    assert run(["rm", "r", "--spool", str(spool), "--yes"]) == 0


def test_rm_on_a_spool_asks_its_daemon_and_is_refused_while_a_trainer_is_there(places, capsys) -> None:
    spool, tier = places
    with Daemon(spool, lambda: {"file": FileStore(tier)}) as daemon:
        with DaemonConnection(daemon.spool) as link:
            link.ask(Attach(run="r"))
            assert run(["rm", "r", "--spool", str(spool), "--yes"]) == 3
            assert "a trainer" in capsys.readouterr().err and under(spool)
        wait_until(lambda: daemon.control.trainers == 0)
        assert run(["rm", "r", "--spool", str(spool), "--yes"]) == 0
        assert under(spool) == set() and under(tier)
        assert [one.run for one in daemon.reconciler.inventory().spool.checkpoints] == ["other"]
