"""Step, metrics and ranks of a unit come from its files, and a file that lies is no error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import layouts

from tierd.watching.describe import Described, describe
from tierd.watching.files import Tree
from tierd.watching.layouts import units


def described(root: Path) -> Described:
    with Tree(root) as tree:
        listing = tree.listing()
        (unit,) = units(listing)
        return describe(unit, lambda path: tree.opened(path, listing.entries[path]))


def state(root: Path, content: object) -> Described:
    here = layouts.trainer(root)
    (here / "trainer_state.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return described(root)


def test_a_trainers_state_says_step_metrics_and_ranks(tmp_path: Path) -> None:
    log = [{"loss": 3.0, "step": 10, "epoch": 0.5}, {"eval_loss": 2.5}, {"loss": 1.5, "name": "x", "flag": True}]
    found = state(tmp_path, {"global_step": 123, "log_history": log})
    assert found == Described(123, {"loss": 1.5, "eval_loss": 2.5}, 2)


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "no JSON", {"global_step": -1}, {"global_step": 1.5}, {"global_step": True}),
        *({"global_step": 10**15}, {"log_history": [1, {"a\nb": 1.0, "x": float("inf")}, None]}),
    ],
)
def test_what_is_no_step_and_no_metric_counts_for_nothing(tmp_path: Path, content: object) -> None:
    assert state(tmp_path, content) == Described(500, {}, 2)


def test_a_lightning_file_without_a_step_in_its_name_has_it_inside(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "global_step": 1234, "state_dict": {"w": torch.ones(3)}}, tmp_path / "last.ckpt")
    assert described(tmp_path) == Described(1234)


def test_a_name_may_hold_metrics(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "epoch=3-step=20-val_loss=0.25.ckpt")
    assert described(tmp_path) == Described(20, {"val_loss": 0.25})


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
