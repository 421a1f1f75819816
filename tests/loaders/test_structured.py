"""A StructuredDataset of torch-dataloader-utils is compared before anything is loaded, and its own error is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch_dataloader_utils")

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from loaders.loops_structured import BATCH, FILES, SAMPLES, SHARD, WORKERS, dataset, written
from torch import nn
from torch.utils.data import DataLoader
from torch_dataloader_utils import CheckpointMismatchError, DataFileInfo, StructuredDataset
from torch_dataloader_utils.filesystem.discovery import discover_files

import tierd
from tierd.core.errors import StateMismatch

pytestmark = pytest.mark.loaders


def made(files: list[DataFileInfo], **arguments: Any) -> StructuredDataset:
    usual = {"batch_size": BATCH, "shuffle": True, "shuffle_seed": 42, "num_workers": WORKERS}
    return StructuredDataset(files, "parquet", **{**usual, **arguments})


@pytest.fixture
def files(tmp_path: Path) -> list[DataFileInfo]:
    return discover_files(f"{written(tmp_path / 'files')}/*.parquet")


OTHERS = {
    "seed": (lambda files: made(files, shuffle_seed=43), "shuffle_seed=42 in the checkpoint, shuffle_seed=43 here"),
    "missing file": (
        lambda files: made(files[:-1]),
        rf"files='{FILES} \(\w+\)' in .*, files='{FILES - 1} \(\w+\)' here",
    ),
    "renamed file": (
        lambda files: made([*files[:-1], DataFileInfo(files[-1].path + ".new", files[-1].file_size)]),
        rf"files='{FILES} \(\w+\)' in .*, files='{FILES} \(\w+\)' here",
    ),
    "rewritten file": (
        lambda files: made([*files[:-1], DataFileInfo(files[-1].path, 1)]),
        rf"files='{FILES} \(\w+\)' in .*, files='{FILES} \(\w+\)' here",
    ),
    "split": (lambda files: made(files, split_rows=3), "split='TargetSize.*target_rows=3"),
    "workers": (lambda files: made(files, num_workers=3), "num_workers=2 in the checkpoint, num_workers=3 here"),
    "ranks": (lambda files: made(files, num_ranks=2), "num_ranks=1 in the checkpoint, num_ranks=2 here"),
    "rank": (lambda files: made(files, num_ranks=2, rank=1), "rank=0 in the checkpoint, rank=1 here"),
}


@pytest.mark.parametrize("read", [False, True], ids=["no shard is complete", "a shard is complete"])
@pytest.mark.parametrize("name", OTHERS)
def test_it_is_compared_before_anything_is_loaded(name: str, read: bool, files: list[DataFileInfo], tmp_path: Path):
    other, reason = OTHERS[name]
    data = made(files)
    assert not read or list(data), "without workers it reads the first worker's shard"
    assert len(data.state_dict()["completed_shards"]) == read
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        ckpt.save(1, {"model": nn.Linear(2, 2), "data": data, "epoch": 7})
        model = nn.Linear(2, 2)
        before = model.weight.detach().clone()
        state = {"model": model, "data": other(files), "epoch": 0}
        for error in (StateMismatch, CheckpointMismatchError):
            with pytest.raises(error, match=rf'^state\["data"\]: .*{reason}'):
                ckpt.restore(state)
        assert torch.equal(model.weight, before) and state["epoch"] == 0
        assert ckpt.restore({**state, "data": made(files)}), "what fits is restored"
        assert not torch.equal(model.weight, before)


def test_the_fallback_of_the_library_s_documents_works(files: list[DataFileInfo], tmp_path: Path):
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        ckpt.save(1, {"model": nn.Linear(2, 2), "data": made(files), "epoch": 7})
        state = {"model": nn.Linear(2, 2), "data": made(files, shuffle_seed=43), "epoch": 0}
        try:
            ckpt.restore(state)
        except CheckpointMismatchError:
            assert ckpt.restore({**state, "data": None}).step == 1
        else:
            pytest.fail("another seed was taken")


def test_mismatch_outside_of_the_dataset_is_not_called_the_datasets_error(files: list[DataFileInfo], tmp_path: Path):
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        ckpt.save(1, {"model": nn.Linear(2, 2), "data": made(files)})
        with pytest.raises(StateMismatch, match="shuffle_seed") as caught:
            ckpt.restore({"model": nn.Linear(3, 2), "data": made(files, shuffle_seed=43)})
        assert not isinstance(caught.value, CheckpointMismatchError)


def test_a_state_that_was_saved_without_a_record_is_compared_by_its_own_seed(files: list[DataFileInfo], tmp_path: Path):
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        ckpt.save(1, {"data": made(files).state_dict()})
        with pytest.raises(CheckpointMismatchError, match="shuffle_seed=42 in the checkpoint, shuffle_seed=43 here"):
            ckpt.restore({"data": made(files, shuffle_seed=43)})
        assert ckpt.restore({"data": made(files)})


def test_unshuffled_dataset_needs_no_seed(files: list[DataFileInfo], tmp_path: Path):
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        ckpt.save(1, {"data": made(files, shuffle=False)})
        assert ckpt.restore({"data": made(files, shuffle=False, shuffle_seed=43)})


def test_dataset_that_was_read_to_its_end_is_not_read_again(tmp_path: Path):
    data = dataset(tmp_path / "files")
    assert sum(len(batch["id"]) for batch in data) == SHARD, "without workers it reads the first worker's shard"
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        ckpt.save(1, {"data": data})
        again = dataset(tmp_path / "files")
        assert ckpt.restore({"data": again})
    assert list(again) == [] and SHARD < SAMPLES


# -- what is read again, in samples -----------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "structured-dataset.md"
EPOCH, AT_ONCE, IN_FILE = 150, 5, 15  # samples
DONE = (8, 16, 24, 28)  # batches


def ids(batches: Any) -> list[int]:
    return [one for batch in batches for one in batch["id"].tolist()]


def read_again(files: list[DataFileInfo], count: int) -> tuple[int, int]:
    """Samples done after ``count`` batches, and how many of them a resume reads again; none is skipped."""

    def begun() -> tuple[StructuredDataset, DataLoader]:
        data = made(files, batch_size=AT_ONCE)
        return data, DataLoader(data, batch_size=None, num_workers=WORKERS, prefetch_factor=1)

    data, loader = begun()
    iterator = iter(loader)
    first = ids(next(iterator) for _ in range(count))
    again, rest = begun()
    again.load_state_dict(data.state_dict())
    second = ids(rest)
    assert set(first) | set(second) == set(range(EPOCH)), "samples were skipped"
    return len(first), len(set(first) & set(second))


def table(files: list[DataFileInfo]) -> str:
    """What stands in the how-to."""
    rows = ["| {} | {} | {} |\n".format(count, *read_again(files, count)) for count in DONE]
    head = f"| batches done, of {EPOCH // AT_ONCE} | samples done | samples read again |\n| --- | --- | --- |\n"
    return head + "".join(rows)


def test_how_to_gives_in_samples_the_data_that_is_read_again(tmp_path: Path):
    for number in range(EPOCH // IN_FILE):
        numbers = range(number * IN_FILE, (number + 1) * IN_FILE)
        pq.write_table(pa.table({"id": numbers}), tmp_path / f"{number}.parquet")
    shown = PAGE.read_text().split("<!-- structured: made of tests/loaders/test_structured.py -->\n")[1]
    files = discover_files(f"{tmp_path}/*.parquet")
    assert shown.split("<!-- structured: end -->")[0] == table(files)
    # The worker says that its shard is complete after the main process took the last batch of it: sooner or later.
    assert read_again(files, 29) in ((145, 145), (145, 70)), "the page says so in words"


def test_the_how_to_quotes_the_message(files: list[DataFileInfo], tmp_path: Path):
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        ckpt.save(1, {"data": made(files)})
        with pytest.raises(CheckpointMismatchError) as caught:
            ckpt.restore({"data": made(files, shuffle_seed=43)})
    assert f"\n    {caught.value}\n" in PAGE.read_text()
