"""`--dry-run` of `copy`, `import`, `prepare` and `restore`: it says what would be done and touches nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.world import commit, part

from tierd.cli import run
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A tier with two checkpoints of two ranks, and an empty one beside it."""
    spool, store = Spool(tmp_path / "spool"), FileStore(tmp_path / "tier")
    for name in ("tier", "other"):
        (tmp_path / name).mkdir()

    async def work() -> None:
        for step in (10, 20):
            for rank in range(2):
                commit(spool, part(step, rank=rank, world=2), metrics={"loss": 1 / step})
                await flush(spool, part(step, rank=rank, world=2), TierUploadContext(store))

    asyncio.run(work())
    return tmp_path


def content(home: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in home.rglob("*")}


@pytest.fixture
def tried(home: Path, capsys: pytest.CaptureFixture[str]):
    """Run a command with --dry-run, as text and as JSON, which changes nothing."""

    def dry(*command: str) -> tuple[str, dict]:
        before = content(home)
        assert run([*command, "--dry-run"]) == 0, capsys.readouterr().err
        text = capsys.readouterr().out
        assert run([*command, "--dry-run", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert content(home) == before
        return text, answer

    return dry


def test_copy_forecasts_bytes_to_send(home: Path, tried, capsys) -> None:
    command = ["copy", str(home / "tier"), str(home / "other"), "--run", "run"]
    text, answer = tried(*command)
    forecast = answer["copy"]["checkpoints"]
    assert answer["dry_run"] and [each["step"] for each in forecast] == [10, 20]
    assert text.startswith("would copy run: 2 checkpoints, ") and "  step 20, " in text
    assert run([*command, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)["copy"]["checkpoints"]
    assert [each["size"] for each in done] == [each["size"] for each in forecast]
    assert all(real["sent"] <= guess["sent"] for real, guess in zip(done, forecast, strict=True))
    text, answer = tried(*command)
    assert all(each["was_there"] and not each["sent"] for each in answer["copy"]["checkpoints"])
    assert "; all are there" in text


def test_restore_forecasts_chunks_and_directory(home: Path, tried, capsys) -> None:
    command = ["restore", str(home / "tier"), "--run", "run", "--to", str(home / "out")]
    text, forecast = tried(*command)
    assert (forecast["step"], forecast["world_size"], forecast["tiers"]) == (20, 2, ["file"])
    assert forecast["files"] == 6 and forecast["objects"] > 2 and forecast["target"] == str(home / "out")
    assert text.startswith("would restore run step 20 (attempt") and text.splitlines()[1] == f"  {home}/out"
    assert tried(*command, "--step", "10")[1]["step"] == 10
    assert tried(*command, "--best", "loss", "--mode", "max")[1]["step"] == 10
    assert run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size"] == forecast["size"]
    assert run([*command, "--dry-run"]) == 3, "the directory is not empty any more"
    assert run([*command[:-1], str(home / "absent"), "--step", "11", "--dry-run"]) == 4


def test_import_says_which_checkpoints_it_would_take(home: Path, tried, capsys) -> None:
    layouts = pytest.importorskip("support.layouts")
    layouts.trainer(home / "outputs")
    command = ["import", str(home / "outputs"), "--run", "imported", "--to", str(home / "other")]
    text, answer = tried(*command)
    units = answer["imported"]["units"]
    assert answer["dry_run"] and units and not any(unit["was_there"] for unit in units)
    assert f"would import {len(units)} checkpoint" in text
    assert run([*command, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)["imported"]["units"]
    assert [(unit["step"], unit["size"]) for unit in done] == [(unit["step"], unit["size"]) for unit in units]
    assert all(unit["was_there"] for unit in tried(*command)[1]["imported"]["units"])


def test_prepare_forecasts_moves_and_fetches(home: Path, tried, capsys) -> None:
    layouts = pytest.importorskip("support.layouts")
    layouts.trainer(home / "outputs")
    watch = ["watch", str(home / "outputs"), "--run", "watched", "--to", str(home / "other"), "--until-idle"]
    assert run(watch) == 0
    optimizer = home / "outputs" / "checkpoint-500" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-20])
    capsys.readouterr()
    command = ["prepare", str(home / "outputs"), "--run", "watched", "--to", str(home / "other")]
    text, forecast = tried(*command)
    assert "WOULD BE" in text and "checkpoint-500" in text
    (damaged,) = [unit for unit in forecast["units"] if unit["verdict"] == "damaged"]
    assert damaged["moved"] and damaged["replaced"]
    assert run([*command, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)["units"]
    shown = ("path", "step", "verdict", "replaced")
    assert [[unit[name] for name in shown] for unit in done] == [
        [unit[name] for name in shown] for unit in forecast["units"]
    ]
