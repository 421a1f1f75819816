"""An unusable checkpoint of a step hides no right one that another launch saved of it from commands that only read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.chunk_keys import chunk_files
from support.doubles import flipped
from support.saved import put
from support.world import RUN, attempt, part

import tierd
from tierd.cli import run
from tierd.core.errors import CheckpointNotFound
from tierd.core.manifest import TENSORS
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """Launch 1 saved steps 10 and 20; launch 2 resumed from 10, and saved 20 again."""
    (tmp_path / "tier").mkdir()

    async def work() -> None:
        store, spool = FileStore(tmp_path / "tier"), Spool(tmp_path / "spool")
        for launch, step, origin in ((1, 10, None), (1, 20, None), (2, 20, 10)):
            resumed_from = part(origin, 1).checkpoint if origin else None
            noise = torch.randn(1000, generator=torch.Generator().manual_seed(launch * 100 + step))
            state = {"model": {"mark": torch.tensor([float(launch)]), "noise": noise}}
            await put(spool, part(step, launch), state, store, origin=resumed_from)
        await store.aclose()

    asyncio.run(work())
    return tmp_path / "tier"


def damage(tier: Path, kind: str) -> None:
    """Damage what launch 2 has of step 20."""
    name = f"{20:012}.{attempt(2)}"
    if kind == "chunks":
        for chunk in (path for path in chunk_files(tier, RUN, 20) if name in path.parts):
            chunk.write_bytes(flipped(chunk.read_bytes()))
    elif kind == "manifest":
        manifest = tier / RUN / "manifests" / name / "00000-of-00001.json"
        manifest.write_bytes(flipped(manifest.read_bytes()))
    else:  # another world size, of which rank 0's part is missing
        manifest = tier / RUN / "manifests" / name / "00000-of-00001.json"
        manifest.rename(manifest.with_name("00001-of-00002.json"))


@pytest.mark.parametrize("kind", ["chunks", "manifest", "missing rank"])
def test_commands_take_the_right_checkpoint_of_a_step_and_name_the_other(
    kind: str, tier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(tier, kind)
    for command in ("restore", "export"):
        out = tier.parent / command
        assert run([command, str(tier), "--run", RUN, "--to", str(out), "--step", "20", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["step"], answer["attempt"]) == (20, attempt(1))
        assert any(attempt(2) in text for text in answer["skipped"])
        [file] = out.rglob("model.safetensors" if command == "export" else TENSORS)
        tensors = load_file(file)
        assert next(one for name, one in tensors.items() if name.endswith("mark")).item() == 1.0


@pytest.mark.parametrize("kind", ["chunks", "manifest"])
def test_reader_takes_it_too_and_another_launch_named_is_not_replaced(kind: str, tier: Path) -> None:
    damage(tier, kind)
    state = {"model": {"mark": torch.zeros(1), "noise": torch.zeros(1000)}}
    with tierd.open(tier, RUN) as reader:
        loaded = reader.restore(state, step=20)
        assert (loaded.attempt, state["model"]["mark"].item()) == (attempt(1), 1.0)
        assert [one.attempt for one in loaded.skipped] == [attempt(2)]
        with pytest.raises(CheckpointNotFound):
            reader.restore(state, step=20, attempt=attempt(2))


def test_trainer_continues_no_other_history_by_itself(tier: Path) -> None:
    damage(tier, "chunks")
    state = {"model": {"mark": torch.zeros(1), "noise": torch.zeros(1000)}}
    with (
        tierd.Checkpointer(tier.parent / "new", RUN, to=[str(tier)]) as checkpointer,
        pytest.raises(CheckpointNotFound, match=attempt(1)),
    ):
        checkpointer.restore(state, step=20)
    assert state["model"]["mark"].item() == 0.0
