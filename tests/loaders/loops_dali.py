"""A loop over an NVIDIA DALI pipeline on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from loaders.parts import loop
from nvidia.dali import fn, pipeline_def

from tierd.adapters.dali import Restorable

SAMPLES, BATCH = 48, 4


def train(spool: Path) -> None:
    files = spool.parent / "files"
    files.mkdir(parents=True, exist_ok=True)
    for number in range(SAMPLES):
        np.save(files / f"{number:03}.npy", np.array([number]))
    names = [f"{number:03}.npy" for number in range(SAMPLES)]

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, enable_checkpointing=True, seed=11)
    def numbers() -> object:
        return fn.readers.numpy(
            file_root=os.fspath(files), files=names, shuffle_after_epoch=True, name="reader", dont_use_mmap=True
        )

    data = Restorable(numbers)

    def batches(epoch: int) -> Iterator[torch.Tensor]:
        while True:  # an epoch's edge is the reader's own
            (out,) = data.pipeline.run()
            yield torch.from_numpy(np.array(out.as_array()))[:, 0]

    loop(spool, data, batches)
