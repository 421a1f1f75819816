"""Step, metrics and ranks of a unit come from its files, and a file that lies is no error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import layouts

from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.unit import ListedEntry, Listing
from tierd.watching.unit_description import UnitDescription, describe_unit
from tierd.watching.unit_detection import units


def described(root: Path) -> UnitDescription:
    with DirectoryTree(root) as tree:
        listing = tree.listing()
        (unit,) = units(listing)
        return describe_unit(unit, lambda path: tree.opened(path, listing.entries[path]))


def state(root: Path, content: object) -> UnitDescription:
    here = layouts.trainer(root)
    (here / "trainer_state.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return described(root)


def test_a_trainers_state_says_step_metrics_and_ranks(tmp_path: Path) -> None:
    log = [{"loss": 3.0, "step": 10, "epoch": 0.5}, {"eval_loss": 2.5}, {"loss": 1.5, "name": "x", "flag": True}]
    found = state(tmp_path, {"global_step": 123, "log_history": log})
    assert found == UnitDescription(123, {"loss": 1.5, "eval_loss": 2.5}, 2)


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "no JSON", {"global_step": -1}, {"global_step": 1.5}, {"global_step": True}),
        *({"global_step": 10**15}, {"log_history": [1, {"a\nb": 1.0, "x": float("inf"), "y": 10**400}, None]}),
    ],
)
def test_value_that_is_no_step_and_no_metric_is_ignored(tmp_path: Path, content: object) -> None:
    assert state(tmp_path, content) == UnitDescription(500, {}, 2)


def test_a_lightning_file_without_a_step_in_its_name_has_it_inside(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "global_step": 1234, "state_dict": {"w": torch.ones(3)}}, tmp_path / "last.ckpt")
    assert described(tmp_path) == UnitDescription(1234)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("model_step100.pt", 100), ("model-10.pt", 10), ("000010.pt", 10), ("model.10.pt", 10)),
        *(("10.5.pt", None), ("model-2024-11-23.pt", None), ("ckpt_000010_20241123.pt", 10), ("20241123.pt", None)),
        *(("model_20000000.pt", 20_000_000), ("step_20241123.pt", 20_241_123), ("checkpoint-2.3.pt", None)),
    ],
)
def test_a_date_or_a_fraction_in_a_name_is_no_step(name: str, step: int | None) -> None:
    (unit,) = units(Listing({name: ListedEntry("file", 1)}))
    assert unit.step == step


def test_a_metric_in_the_name_of_a_lightning_file_is_no_step(tmp_path: Path) -> None:
    torch.save({"global_step": 4000, "w": torch.ones(3)}, tmp_path / "epoch=3-val_loss=0.19.ckpt")
    assert described(tmp_path) == UnitDescription(4000, {"val_loss": 0.19})


def test_a_name_may_hold_metrics(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "epoch=3-step=20-val_loss=0.25.ckpt")
    assert described(tmp_path) == UnitDescription(20, {"val_loss": 0.25})


@pytest.mark.parametrize(
    ("write", "ranks"),
    [
        *((layouts.accelerate, 2), (layouts.deepspeed, 3), (layouts.composer, 2), (layouts.torchtitan, 1)),
        *((layouts.torch_save, 1), (layouts.orbax, 1)),
    ],
)
def test_the_number_of_ranks_is_that_of_the_files(tmp_path: Path, write, ranks: int) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path)
    assert described(tmp_path).ranks == ranks
