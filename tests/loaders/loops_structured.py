"""A loop over a torch-dataloader-utils StructuredDataset: parquet files, a shard for each of two workers.

Its state says which shards are read to their end, so that a resume reads the others again from their beginning. It
learns that from the worker, which is `prefetch_factor` batches ahead of training: with more than one, it counts batches
as seen that training never saw. So not `create_dataloader`, whose loader reads two ahead.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from loaders.parts import loop
from torch.utils.data import DataLoader
from torch_dataloader_utils import StructuredDataset
from torch_dataloader_utils.filesystem.discovery import discover_files

SAMPLES, BATCH, FILES, WORKERS = 48, 4, 4, 2
SHARD = SAMPLES // WORKERS  # samples


def written(files: Path) -> Path:
    """The directory, with its files; they are written once."""
    files.mkdir(exist_ok=True)
    for number in range(FILES):
        path = files / f"{number}.parquet"
        if not path.exists():
            share = SAMPLES // FILES
            pq.write_table(pa.table({"id": range(number * share, (number + 1) * share)}), path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
    return files


def dataset(files: Path, seed: int = 5, workers: int = WORKERS) -> StructuredDataset:
    """Of all files of a directory."""
    found = discover_files(f"{os.fspath(written(files))}/*.parquet")
    return StructuredDataset(found, "parquet", batch_size=BATCH, shuffle=True, shuffle_seed=seed, num_workers=workers)


def train_ahead(spool: Path, ahead: int) -> None:
    data = dataset(spool.parent / "parquet")
    loader = DataLoader(data, batch_size=None, num_workers=WORKERS, prefetch_factor=ahead, generator=torch.Generator())
    resumed = [True]

    def batches(epoch: int):
        if not resumed.pop():
            data.set_epoch(epoch)
        resumed.append(False)
        for batch in loader:
            yield batch["id"]

    loop(spool, data, batches)


def train(spool: Path) -> None:
    train_ahead(spool, 1)


def train_as_created(spool: Path) -> None:
    train_ahead(spool, 2)
