"""Each recipe of docs/howto that needs another library than torch; tests/test_recipes.py has the others."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recipes import execute, recipes

from tierd.core.errors import ConfigError

pytestmark = [pytest.mark.loaders, pytest.mark.filterwarnings("ignore:'set_vital'")]
RECIPES = recipes()


def executed(heading: str, at: Path, monkeypatch: pytest.MonkeyPatch, **names: Any) -> list[Any]:
    """What the code before and the code after define, each with a spool of its own; the process is in `at`."""
    found = []
    for side, code in zip(("before", "after"), RECIPES[heading][0], strict=True):
        (at / side).mkdir(parents=True, exist_ok=True)
        found.append(execute(code, at / side, **names))
    monkeypatch.chdir(at)
    return found


@pytest.fixture
def structured(tmp_path: Path) -> dict[str, Any]:
    """150 samples in 10 files, and the library's names."""
    library = pytest.importorskip("torch_dataloader_utils")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from torch_dataloader_utils.filesystem.discovery import discover_files

    for number in range(10):
        pq.write_table(pa.table({"id": range(15 * number, 15 * number + 15)}), tmp_path / f"{number}.parquet")
    names = {name: getattr(library, name) for name in ("StructuredDataset", "CheckpointMismatchError")}
    return {**names, "files": discover_files(f"{tmp_path}/*.parquet")}


def test_resume_a_structured_dataset_exactly(structured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    heading = "Resume a StructuredDataset exactly"
    before, after = executed(heading, tmp_path, monkeypatch, **structured)
    one, two = before.train(14), before.train(20)  # saved after batch 12 of 30, of five samples each
    assert two == one[:40], "shards that were not complete are read again from their beginning"
    one, two = after.train(14), after.train(40)
    _, uninterrupted = executed(heading, tmp_path / "whole", monkeypatch, **structured)
    whole = uninterrupted.train(40)
    assert one[:60] + two == whole and sorted(whole[:150]) == list(range(150)) and whole[150:] != whole[:50]


def test_fall_back_to_a_fresh_epoch(structured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import tierd

    def dataset(seed: int) -> Any:
        made = structured["StructuredDataset"]
        return made(structured["files"], "parquet", batch_size=5, shuffle=True, shuffle_seed=seed, num_workers=2)

    before, after = executed("Fall back to a fresh epoch", tmp_path, monkeypatch, **structured)
    model, read = torch.nn.Linear(1, 1), dataset(42)
    assert list(read), "one shard is complete"
    torch.save({"model": model.state_dict(), "data": read.state_dict()}, "last.pt")
    with tierd.Checkpointer(tmp_path / "after" / "spool", "fallback", to=[]) as ckpt:
        ckpt.save(1, {"model": model, "data": read, "epoch": 3})
    for side in (before, after):
        for seed, begun in ((43, 0), (42, 1)):
            other, data = torch.nn.Linear(1, 1), dataset(seed)
            side.resume(other, data, 0)
            assert torch.equal(other.weight, model.weight)
            assert len(data.state_dict()["completed_shards"]) == begun


def test_dali(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dali = pytest.importorskip("nvidia.dali")
    names = {"fn": dali.fn, "pipeline_def": dali.pipeline_def, "np": pytest.importorskip("numpy")}
    before, after = executed("Recipe: an external source", tmp_path, monkeypatch, **names)
    for side, then in ((before, range(8)), (after, range(12, 20))):
        assert side.train(4) == list(range(16))
        assert side.train(5) == list(then), "steps 4 and 5"

    @dali.pipeline_def(batch_size=4, num_threads=1, device_id=None)
    def without() -> Any:
        return dali.fn.external_source(source=lambda batch: [names["np"].array([batch])] * 4)

    from tierd.adapters.dali import Restorable

    with pytest.raises(ConfigError, match="enable_checkpointing=True"):
        Restorable(without).state_dict()


def keras_on_torch() -> Any:
    os.environ["KERAS_BACKEND"] = "torch"
    return pytest.importorskip("keras")


def test_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keras = keras_on_torch()
    torch.manual_seed(0)
    x, y = torch.rand(32, 4).numpy(), torch.rand(32, 1).numpy()
    before, after = executed("Keras", tmp_path, monkeypatch, keras=keras, x=x, y=y)
    before.train(1)
    again, lost = before.train(3)
    assert again == [0, 1, 2], "all epochs again"
    after.train(1)
    rest, weights = after.train(3)
    _, uninterrupted = executed("Keras", tmp_path / "whole", monkeypatch, keras=keras, x=x, y=y)
    epochs, whole = uninterrupted.train(3)
    assert (rest, epochs) == ([1, 2], [0, 1, 2])
    assert all((one == other).all() for one, other in zip(weights, whole, strict=True))
    assert any((one != other).any() for one, other in zip(lost, whole, strict=True))


@pytest.mark.parametrize("name", ["ModelCheckpoint", "BackupAndRestore", "EarlyStopping", "RemoteMonitor"])
def test_parity_names_each_option_that_keras_has(name: str):
    page = (Path(__file__).parents[2] / "docs/explanation/parity.md").read_text()
    section = page.split(f"\n## keras.callbacks.{name}\n")[1].split("\n## ")[0]
    rows = {option for line in section.splitlines() for option in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert rows == set(inspect.signature(getattr(keras_on_torch().callbacks, name)).parameters)
