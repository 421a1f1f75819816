"""The pages' datasets with a state, resumed at each moment at which workers make a state wrong."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata")

import torch
from support.recipes import execute as recipe
from support.recipes import recipes
from support.snippets import ROOT, blocks, execute
from torch.utils.data import get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")
WORKERS = {"no workers": (0, False), "two workers": (2, False), "two persistent workers": (2, True)}
SAMPLES, BATCH, STEPS = 29, 4, 8  # two workers have 15 and 14 samples: the last batch of each is short
MOMENTS = {"within an epoch": 3, "last batch of a worker": STEPS - 1, "last batch": STEPS, "after the loop": -1}


def shuffled(home: Path, options: str) -> Any:
    [(_, code)] = recipes()["A dataset with a state"]
    return recipe(resized(code, "Shuffled(96,", f"Shuffled({SAMPLES},", "batch_size=8", options), home)


def counted(home: Path, options: str) -> Any:
    (block,) = blocks(ROOT / "docs" / "howto" / "webdataset.md")
    names = {"webdataset": WEBDATASET, "urls": range(SAMPLES), "torch": torch, "StatefulDataLoader": StatefulDataLoader}
    return SimpleNamespace(**execute(resized(block, "batch_size=16, num_workers=2", options), home, names))


def resized(code: str, *pairs: str) -> str:
    for shown, here in zip(pairs[::2], pairs[1::2], strict=True):
        assert code.count(shown) == 1
        code = code.replace(shown, here)
    return code


def _shuffle(samples: Iterable[int], seed: int) -> list[int]:
    order = list(samples)
    random.Random(seed).shuffle(order)
    return order


def _split(samples: Iterable[int]) -> list[int]:
    info = get_worker_info()
    return [*samples][info.id :: info.num_workers] if info else [*samples]


def _pipeline(source: Iterable[int], *stages: Any) -> Iterator[int]:
    for stage in stages:
        source = stage(source)
    return iter(source)


# A shard of one sample each, and of webdataset's stages those that decide the order.
WEBDATASET = SimpleNamespace(
    DataPipeline=_pipeline,
    SimpleShardList=lambda urls, seed: _shuffle(urls, seed),
    split_by_worker=_split,
    tarfile_to_samples=lambda: iter,
    detshuffle=lambda size, seed: lambda samples: _shuffle(samples, seed),
    decode=lambda: iter,
    to_tuple=lambda *names: iter,
)


def train(begin: Any, spool: Path, steps: int, moment: int | None = None) -> list[list[int]]:
    """The batches up to step `steps`, or up to a moment, at which the state is saved: a step, or after an epoch."""
    page = begin()
    state, read = {"data": page.loader, "step": 0, "epoch": 0}, []
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        ckpt.restore(state)
        while state["step"] < steps:
            page.data.epoch.fill_(state["epoch"])
            for batch in page.loader:
                read.append(batch.tolist())
                state["step"] += 1
                if state["step"] == moment:
                    ckpt.save(state["step"], state)
                    return read
                if state["step"] == steps:
                    break
            else:
                state["epoch"] += 1
                if moment is not None and -state["epoch"] == moment:
                    ckpt.save(state["step"], state)
                    return read
    return read


@pytest.mark.parametrize("page", [shuffled, counted])
@pytest.mark.parametrize("workers", WORKERS)
def test_dataset_of_a_page_resumes_exactly(page: Any, workers: str, tmp_path: Path) -> None:
    number, persistent = WORKERS[workers]

    def begin() -> Any:
        return page(tmp_path, f"batch_size={BATCH}, num_workers={number}, persistent_workers={persistent}")

    whole = train(begin, tmp_path / "whole", 2 * STEPS)
    first, second = ([*chain(*epoch)] for epoch in (whole[:STEPS], whole[STEPS:]))
    assert sorted(first) == sorted(second) == list(range(SAMPLES)) and first != second
    for name, moment in MOMENTS.items():
        read = train(begin, tmp_path / name, 2 * STEPS, moment)
        assert read + train(begin, tmp_path / name, 2 * STEPS) == whole, name
