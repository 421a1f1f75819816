"""Readers of the tiers on checkpoints whose ranks divided replicated tensors among them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.divided import (
    DECLARED,
    DividedPart,
    comparable,
    divided,
    divided_state,
    elsewhere_of,
    emptied,
    put_divided,
    with_elsewhere,
)
from support.doubles import Double
from support.state_files import files_of
from support.world import part
from torch.distributed import checkpoint as dcp

import tierd
from tierd.core.errors import CheckpointNotFound, StateMismatch
from tierd.core.manifest import TENSORS
from tierd.reading import Reader
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

STATES = [divided_state(rank) for rank in range(4)]
NODES = [[(0, 1, 2, 3)], [(0, 1), (2, 3)], [(0, 3), (1,), (2,)]]


def put(home: Path, parts: list[DividedPart], step: int = 1, tier: str = "tier") -> str:
    """Have the parts on a tier; its URL."""
    (home / tier).mkdir(exist_ok=True)

    async def work() -> None:
        store = FileStore(home / tier)
        await put_divided(Spool(home / f"spool-{step}-{tier}"), step, parts, store)
        await store.aclose()

    asyncio.run(work())
    return f"file://{home / tier}"


def largest_chunk(spool: Path, step: int) -> str:
    """The digest of the chunk that holds `model/large`, of rank 0's part."""
    manifest = Spool(spool).manifest(part(step, rank=0, world=4))
    return max((chunk.size, chunk.xxh3_128) for file in manifest.files for chunk in file.chunks)[1]


def into(*names: str) -> dict:
    return dict.fromkeys(names or STATES[0])


@pytest.mark.parametrize("nodes", NODES)
def test_each_rank_is_restored_from_the_tiers(tmp_path, nodes):
    with tierd.open(put(tmp_path, divided(STATES, nodes=nodes)), "run") as reader:
        for rank, state in enumerate(STATES):
            restored = into()
            assert reader.restore(restored, rank=rank).rank == rank
            assert files_of(restored) == files_of(state)
            restored = into("model", "own")
            reader.restore(restored, rank=rank, only=("model", "own"))
            assert files_of(restored) == files_of({name: state[name] for name in ("model", "own")})


@pytest.mark.parametrize("nodes", NODES)
def test_shared_entries_are_restored_without_a_rank(tmp_path, nodes):
    with tierd.open(put(tmp_path, divided(STATES, nodes=nodes)), "run") as reader:
        restored = into(*DECLARED)
        assert reader.restore(restored, only=DECLARED).world_size == 4
        assert files_of(restored) == files_of({name: STATES[0][name] for name in DECLARED})
        with pytest.raises(StateMismatch, match='"own", "rank" differ between them'):
            reader.restore(into())


@pytest.mark.parametrize("nodes", NODES)
def test_checkpoint_that_is_the_same_on_all_ranks_is_restored_whole(tmp_path, nodes):
    shared = {name: STATES[0][name] for name in DECLARED}
    with tierd.open(put(tmp_path, divided([shared] * 4, nodes=nodes)), "run") as reader:
        restored = into(*DECLARED)
        reader.restore(restored)
        assert files_of(restored) == files_of(shared)


def test_declared_entry_that_differs_is_named(tmp_path):
    """Ranks of two nodes declared it, and had other bytes in it: only a comparison can tell."""
    states = [divided_state(rank, step=1 + rank // 2) for rank in range(4)]
    url = put(tmp_path, divided(states, nodes=[(0, 1), (2, 3)]))
    differ = '"model", "optimizer", "list", "array" differ between them'
    with tierd.open(url, "run") as reader, pytest.raises(StateMismatch, match=differ):
        reader.restore(into(*DECLARED), only=DECLARED)


def test_modules_are_restored_into(tmp_path):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Linear(50, 70))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 60)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    url = put(tmp_path, divided([state] * 4, ("model", "optimizer")))
    target = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Linear(50, 70))
    other = torch.optim.AdamW(target.parameters())
    with tierd.open(url, "run") as reader:
        reader.restore({"model": target, "optimizer": other})
    assert files_of({"model": target, "optimizer": other}) == files_of(state)


# -- exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", NODES)
def test_exports_hold_tensors_of_all_ranks(tmp_path, nodes):
    url = put(tmp_path, divided(STATES, nodes=nodes))
    with tierd.open(url, "run") as reader:
        reader.export(tmp_path / "one", "safetensors", only="model")
        reader.export(tmp_path / "hf", "hf", only="model")
        reader.export(tmp_path / "state", "torch", only="optimizer")
        reader.export(tmp_path / "list", "torch", only="list")
        reader.export(tmp_path / "dcp", "dcp", only="model")
    model = {name: tensor for name, tensor in STATES[0]["model"].items() if not tensor.is_complex()}
    for directory in ("one", "hf"):
        exported = load_file(tmp_path / directory / "model.safetensors")
        assert comparable({name: exported[name] for name in model}) == comparable(model)
    optimizer = torch.load(tmp_path / "state" / "state.pt")
    assert comparable(optimizer) == comparable(STATES[0]["optimizer"])
    assert torch.load(tmp_path / "list" / "state.pt") == STATES[0]["list"]
    state = emptied(STATES[0]["model"])
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert comparable(state) == comparable(STATES[0]["model"])


def test_export_refuses_entries_that_differ(tmp_path):
    with tierd.open(put(tmp_path, divided(STATES)), "run") as reader, pytest.raises(StateMismatch, match="'own'"):
        reader.export(tmp_path / "own", "safetensors", only="own")


# -- damage -----------------------------------------------------------------------------------------------------------


def test_reader_falls_back_if_another_ranks_part_is_corrupt(tmp_path):
    put(tmp_path, divided(STATES), 1)
    url = put(tmp_path, divided([divided_state(rank, 2) for rank in range(4)]), 2)
    for path in (tmp_path / "tier").rglob(f"{largest_chunk(tmp_path / 'spool-2-tier', 2)}.*"):
        path.write_bytes(path.read_bytes()[:-1])
    with tierd.open(url, "run") as reader:
        restored = into()
        loaded = reader.restore(restored, rank=3)
        assert loaded.step == 1 and loaded.skipped[0].step == 2
        assert files_of(restored) == files_of(STATES[3])


def test_reader_falls_back_if_a_header_puts_a_tensor_where_it_is_not(tmp_path):
    put(tmp_path, divided(STATES), 1)
    newer = divided([divided_state(rank, 2) for rank in range(4)])
    by_rank = elsewhere_of(newer[2].files[TENSORS])
    by_rank["3"] += by_rank.pop("0")
    url = put(tmp_path, [*newer[:2], with_elsewhere(newer[2], by_rank), newer[3]], 2)
    with tierd.open(url, "run") as reader:
        for asked in ({"rank": 2}, {"rank": 2, "only": "model"}, {"only": "model"}):
            restored = into("model") if "only" in asked else into()
            loaded = reader.restore(restored, **asked)
            assert loaded.step == 1 and "not in the part of rank 3" in loaded.skipped[0].reason
            assert comparable(restored["model"]) == comparable(STATES[0]["model"])
        with pytest.raises(CheckpointNotFound, match="not in the part of rank 3"):
            reader.restore(into(), 2, rank=2)
        reader.restore(into(), 2, rank=1)  # its own header is right


async def bucket(parts: list[DividedPart], home: Path) -> Double:
    store = Double()
    await put_divided(Spool(home / "spool"), 1, parts, store)
    return store


def test_tensor_that_all_trees_name_is_fetched_once(tmp_path):
    """For the load: no comparison needs it."""
    shared = {name: STATES[0][name] for name in DECLARED}
    store = asyncio.run(bucket(divided([shared] * 4), tmp_path))
    digest = largest_chunk(tmp_path / "spool", 1)
    with Reader({"tier": store}, "run") as reader:
        store.calls.clear()
        restored = into(*DECLARED)
        reader.restore(restored)
    assert files_of(restored) == files_of(shared)
    assert len([key for name, key in store.calls if name == "get" and digest in key]) == 1
