"""A loop over a MosaicML StreamingDataset.

`import streaming` imports its image datasets too, which need a torchvision that fits torch: none on PyPI fits a torch
for the CPU alone. No image is read here, so where there is none two empty names stand in for it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from loaders.parts import loop
from transformers.feature_extraction_utils import BatchFeature  # noqa: F401  (looks for torchvision by itself: before)
from transformers.tokenization_utils_base import BatchEncoding  # noqa: F401

if importlib.util.find_spec("torchvision") is None:
    for name, has in {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": object},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(has)

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

SAMPLES, BATCH = 48, 4


def train(spool: Path) -> None:
    files = spool.parent / "mds"
    if not files.exists():
        with MDSWriter(out=os.fspath(files), columns={"id": "int"}, size_limit=200) as out:
            for number in range(SAMPLES):
                out.write({"id": number})
    clean_stale_shared_memory()  # of a process that was killed
    data = StreamingDataset(local=os.fspath(files), shuffle=True, shuffle_seed=4, batch_size=BATCH)
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=2, generator=torch.Generator())
    loop(spool, loader, lambda epoch: (torch.as_tensor(np.asarray(batch["id"])) for batch in loader))
