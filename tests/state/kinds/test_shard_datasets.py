"""A dataset of shards is compared before a load. tests/loaders has torch-dataloader-utils' own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training import through
from torch import nn
from torch.utils.data import IterableDataset

from tierd.core.errors import StateMismatch
from tierd.state.kinds.loader_fingerprint import state_dict_with_arguments
from tierd.state.load_check import check_fit
from tierd.state.state_loading import load_restored

LIBRARY = "torch_dataloader_utils.dataset.base"


class CheckpointMismatchError(Exception):
    def __init__(self, shard: object, state: object) -> None:
        super().__init__(f"{shard} of {state}")


@dataclass
class File:
    path: str
    file_size: int | None = 10


class TargetSize:
    def __init__(self, target_rows: int | None = None, shuffle: bool = True, seed: int = 42) -> None:
        self.target_rows, self.shuffle, self.seed = target_rows, shuffle, seed


class BaseDataset(IterableDataset[int]):
    """Names its seed in its state and does not restore it; compares a shard only when it was completed."""

    def __init__(self, files: list[File], shuffle: bool, shuffle_seed: int, num_ranks: int, rows: int | None) -> None:
        self._files, self._shuffle, self._shuffle_seed, self._num_ranks = files, shuffle, shuffle_seed, num_ranks
        self._strategy = TargetSize(rows, shuffle, shuffle_seed)
        self.completed: list[str] = []

    def __iter__(self) -> Any:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 0, "_shuffle_seed": self._shuffle_seed, "completed_shards": self.completed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state["completed_shards"]) - {one.path for one in self._files}:
            raise CheckpointMismatchError(state["completed_shards"], state)
        self.completed = state["completed_shards"]


BaseDataset.__module__ = LIBRARY
FILES = [File(f"{number}.parquet") for number in range(4)]


class Own(BaseDataset):
    def __init__(
        self,
        files: list[File] = FILES,
        shuffle: bool = True,
        shuffle_seed: int = 42,
        num_ranks: int = 1,
        rows: int | None = None,
    ) -> None:
        super().__init__(files, shuffle, shuffle_seed, num_ranks, rows)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(LIBRARY)
    module.CheckpointMismatchError = CheckpointMismatchError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, LIBRARY, module)


OTHERS = {
    "seed": (lambda: Own(shuffle_seed=43), "shuffle_seed=42 in the checkpoint, shuffle_seed=43 here"),
    "a file less": (lambda: Own(FILES[:3]), r"files='4 \(\w{12}\)' in the checkpoint, files='3 \(\w{12}\)' here"),
    "another order": (lambda: Own(FILES[::-1]), r"files='4 \(\w{12}\)' in the checkpoint, files='4 \(\w{12}\)' here"),
    "another size": (lambda: Own([*FILES[:3], File(FILES[3].path, 11)]), r"files='4 \(\w{12}\)' in"),
    "split": (lambda: Own(rows=3), r"split='TargetSize\(shuffle=True\)' in .*split='TargetSize\(target_rows=3, "),
    "ranks": (lambda: Own(num_ranks=2), "num_ranks=1 in the checkpoint, num_ranks=2 here"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_difference_is_named_before_anything_is_loaded_and_is_the_librarys_error(name: str):
    make, reason = OTHERS[name]
    for error in (StateMismatch, CheckpointMismatchError):
        with pytest.raises(error, match=rf'^state\["data"\]: {reason}'):
            check_fit({"data": make()}, through({"data": Own()}))
    check_fit({"data": Own()}, through({"data": Own()}))


def test_a_seed_that_decides_nothing_need_not_fit():
    check_fit({"data": Own(shuffle=False, shuffle_seed=43)}, through({"data": Own(shuffle=False)}))


def test_a_state_without_a_record_is_compared_by_the_seed_that_it_names():
    with pytest.raises(CheckpointMismatchError, match="shuffle_seed=42 in the checkpoint, shuffle_seed=43 here"):
        check_fit({"data": Own(shuffle_seed=43)}, through({"data": Own().state_dict()}))


def test_with_another_mismatch_it_is_not_only_the_librarys():
    with pytest.raises(StateMismatch, match="shuffle_seed") as caught:
        check_fit({"data": Own(shuffle_seed=43), "t": torch.zeros(2)}, through({"data": Own(), "t": torch.zeros(3)}))
    assert not isinstance(caught.value, CheckpointMismatchError)


def test_files_are_read_once_for_a_dataset():
    data = Own()
    first = state_dict_with_arguments(data)._metadata
    data._files = FILES[:1]
    assert state_dict_with_arguments(data)._metadata == first


def test_refusal_of_a_dataset_precedes_the_load_of_a_model():
    data = Own()
    data.completed = ["9.parquet"]  # not one of its files: the record cannot tell
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointMismatchError, match="nothing was loaded before it"):
        load_restored({"model": model, "data": Own()}, through({"model": nn.Linear(2, 2), "data": data}))
    assert torch.equal(model.weight, before)
