"""Which run a fine-tune started from, and which run a copy came from, is in the manifests and in `tierd show`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.world import Daemon
from torch.distributed import checkpoint as dcp

import tierd
import tierd.dcp
from tierd.cli import run
from tierd.core.errors import ConfigError
from tierd.core.manifest import Ancestor
from tierd.stores.file_store import FileStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(value: float = 0.0) -> dict[str, object]:
    return {"weights": torch.full((100,), value), "step": int(value)}


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert run(["show", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def daemon(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A daemon with a tier, on which run `base` has step 5."""
    (tmp_path / "tier").mkdir()
    with Daemon(tmp_path / "spool", lambda: {"file": FileStore(tmp_path / "tier")}) as found:
        with tierd.Checkpointer(tmp_path / "spool", run="base") as ckpt:
            ckpt.save(5, state(5.0)).wait("file", timeout=60)
        yield found


def test_fine_tune_names_its_starting_checkpoint_over_its_launches(daemon, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    spool, tier = tmp_path / "spool", str(tmp_path / "tier")
    with tierd.Checkpointer(spool, run="tune") as ckpt:
        mine = state()
        assert ckpt.restore(mine) is None
        with tierd.open(tier, run="base") as reader:
            loaded = reader.restore(mine)
        assert loaded.run == "base" and mine["step"] == 5
        ckpt.start_from(loaded)
        ckpt.save(6, mine).wait("file", timeout=60)
    wanted = Ancestor(run="base", step=5, attempt=loaded.attempt)
    for step in (7, 8):  # launches of their own; the last one is saved by DCP
        with tierd.Checkpointer(spool, run="tune") as ckpt:
            found = ckpt.restore(mine)
            assert found is not None and found.step == step - 1
            with pytest.raises(ConfigError, match="resumed from"):
                ckpt.start_from(loaded)
            if step == 7:
                ckpt.save(step, mine).wait("file", timeout=60)
            else:
                dcp.save({"weights": mine["weights"]}, storage_writer=tierd.dcp.StorageWriter(ckpt, step), no_dist=True)
                daemon.settle()
    with tierd.Checkpointer(spool, run="tune") as ckpt:  # DCP's restore tells it on, too
        dcp.load({"weights": mine["weights"]}, storage_reader=tierd.dcp.StorageReader(ckpt), no_dist=True)
        ckpt.save(9, mine).wait("file", timeout=60)
    for step in (6, 7, 8, 9):
        assert f"the run started from: {wanted}" in shown(capsys, "tune", str(step), tier)
        (manifest,) = json.loads(shown(capsys, "tune", str(step), tier, "--json"))["manifests"]
        assert manifest["started_from"] == {"run": "base", "step": 5, "attempt": loaded.attempt}
    assert "started" not in shown(capsys, "base", "5", tier)
    assert run(["copy", tier, tier, "--run", "tune", "--step", "7", "--as", "again"]) == 0
    out = shown(capsys, "again", "7", tier)
    assert f"the run started from: {wanted}" in out and "copied from: tune" in out


def test_start_from_refuses_a_value_that_is_no_other_runs_checkpoint(daemon, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with tierd.open(str(tmp_path / "tier"), run="base") as reader:
        loaded = reader.restore(state())
    with tierd.Checkpointer(tmp_path / "spool", run="base", attempt=tierd.new_attempt()) as ckpt:
        with pytest.raises(ConfigError, match=r"of this run; restore\(\) resumes"):
            ckpt.start_from(loaded)
        with pytest.raises(ConfigError, match="returns, with run, step and attempt"):
            ckpt.start_from(SimpleNamespace(step=1))
        with pytest.raises(ConfigError, match="a run's name"):
            ckpt.start_from(SimpleNamespace(run="a/b", step=1, attempt=loaded.attempt))
