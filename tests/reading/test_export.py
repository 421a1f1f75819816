"""`Reader.export` and `tierd export`: each format is loaded by its own library, and equals what was saved."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.chunk_keys import chunk_files
from support.saved import files_of, put
from support.world import commit, part
from torch.distributed import checkpoint as dcp

import tierd
import tierd.dcp
from tierd.cli import run
from tierd.client.restoring.ranged_reader import PartRanges
from tierd.core.errors import CheckpointNotFound, ConfigError, StateMismatch, StateRefused
from tierd.core.manifest import TREE, Chunk, File
from tierd.core.shard_placement import Placement
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.exporting import format_writers, streamed_tensors
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
RUN = "run"


def state() -> dict:
    noise = torch.Generator().manual_seed(1)
    weights = torch.randn(40, 30, generator=noise)
    return {
        "model": OrderedDict(
            {
                "module.weight": weights,
                "module.tied": weights,
                "module.half": torch.randn(7, 3, generator=noise).bfloat16(),
                "module.count": torch.arange(11),
                "module.odd": torch.randn(3, generator=noise).double(),
                "module.none": torch.empty(0, 4),
                "module.one": torch.tensor(2.5),
            }
        ),
        "optimizer": {"state": {0: {"moment": torch.randn(5, generator=noise)}}, "groups": [{"lr": 0.1}]},
        "note": {"step": 3, "names": ("a", "b"), "array": np.arange(4)},
        "wave": torch.randn(4, generator=noise, dtype=torch.complex128),
    }


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """A tier with one checkpoint of `Checkpointer.save`."""
    (tmp_path / "tier").mkdir()
    save(tmp_path, 3, state())
    return tmp_path / "tier"


def save(home: Path, step: int, *ranks: dict) -> None:
    async def work() -> None:
        store = FileStore(home / "tier")
        for rank, one in enumerate(ranks):
            which = part(step, rank=rank, world=len(ranks))
            await put(Spool(home / "spool"), which, one, store, metrics={"loss": 1.0 / step})
        await store.aclose()

    asyncio.run(work())


def exported(tier: Path, format: str, **more) -> Path:
    out = tier.parent / f"out-{format}-{len(list(tier.parent.iterdir()))}"
    with tierd.open(f"file://{tier}", RUN) as reader:
        reader.export(out, format, **more)
    assert not list(tier.parent.glob(".*.partial"))
    return out


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_safetensors_of_one_entry(tier):
    found = load_file(exported(tier, "safetensors", only="model", strip="module.") / "model.safetensors")
    wanted = {name.removeprefix("module."): one for name, one in state()["model"].items()}
    assert found.keys() == wanted.keys()
    assert all(equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_export_reports_its_progress(tier, format):
    reported = []
    only = "model" if format == "safetensors" else None
    exported(tier, format, only=only, on_progress=lambda done, total: reported.append((done, total)))
    assert reported == sorted(reported) and {total for _, total in reported} == {reported[-1][0]} and len(reported) > 1


def test_a_dtype_is_of_floating_point_tensors_alone(tier):
    file = exported(tier, "safetensors", only="model", dtype="bf16") / "model.safetensors"
    found = load_file(file)
    for name, one in state()["model"].items():
        assert equal(found[name], one.bfloat16() if one.is_floating_point() else one)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_shards_of_hugging_face_have_an_index(tier, monkeypatch):
    monkeypatch.setattr(format_writers, "SHARD_BYTES", 5000)
    out = exported(tier, "hf", only="model")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == sorted(
        path.name for path in out.iterdir() if path.suffix == ".safetensors"
    )
    assert len(set(index["weight_map"].values())) > 1
    for name, one in state()["model"].items():
        assert equal(load_file(out / index["weight_map"][name])[name], one)
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in state()["model"].values())
    monkeypatch.undo()
    assert [path.name for path in exported(tier, "hf", only="model").iterdir()] == ["model.safetensors"]


def test_torch_loads_the_state_as_it_was_saved(tier):
    found = torch.load(exported(tier, "torch") / "state.pt")
    wanted = state()
    assert found["note"].keys() == wanted["note"].keys() and found["note"]["names"] == ("a", "b")
    assert equal(found["note"]["array"], torch.arange(4))
    assert found["optimizer"]["state"].keys() == {0} and found["optimizer"]["groups"] == [{"lr": 0.1}]
    assert type(found["model"]) is OrderedDict
    assert all(equal(found["model"][name], one) for name, one in wanted["model"].items())
    assert found["model"]["module.tied"].data_ptr() == found["model"]["module.weight"].data_ptr()
    assert equal(found["wave"], wanted["wave"])
    file = exported(tier, "torch", only="model", strip="module.", dtype="fp16") / "state.pt"
    alone = torch.load(file, weights_only=True, mmap=True)
    assert equal(alone["weight"], wanted["model"]["module.weight"].half())
    assert alone["weight"].data_ptr() % 64 == 0
    assert run(["inspect", str(file)]) == 0


def test_dcp_loads_it(tier):
    out = exported(tier, "dcp")
    wanted = state()
    into = {
        "model": {name: torch.zeros_like(one) for name, one in wanted["model"].items()},
        "optimizer": {"state": {0: {"moment": torch.zeros(5)}}, "groups": [{"lr": 0.0}]},
        "wave": torch.zeros(4, dtype=torch.complex128),
        "note": {"step": 0},
    }
    dcp.load(into, storage_reader=dcp.FileSystemReader(str(out)))
    assert all(equal(into["model"][name], one) for name, one in wanted["model"].items())
    assert equal(into["wave"], wanted["wave"]) and into["note"] == {"step": 3}
    assert equal(into["optimizer"]["state"][0]["moment"], wanted["optimizer"]["state"][0]["moment"])


# -- of several ranks -------------------------------------------------------------------------------------------------


def sharded(rank: int, rules: list[tuple]) -> tuple[dict, list[Placement]]:
    """The rank's shards of one tensor on a mesh of two by two, split as `rules` say, and their places."""
    whole = torch.arange(9 * 10 * 3, dtype=torch.float32).view(9, 10, 3)
    found, places = {}, []
    for number, placements in enumerate(rules):
        place = Placement((9, 10, 3), (30, 3, 1), (2, 2), None, placements, (rank // 2, rank % 2))
        local = torch.empty(place.local_shape)
        for box in place.boxes():
            source, target = whole, local
            for dim in range(3):
                source = source.narrow(dim, box.offset[dim], box.size[dim])
                target = target.narrow(dim, box.local[dim], box.size[dim])
            target.copy_(source)
        found[f"w{number}"] = local
        places.append(place)
    return {"model": found, "data": {"rank": rank}, "own": torch.tensor(rank)}, places


def save_sharded(home: Path, rules: list[tuple]) -> None:
    """Save as four ranks do: in each tree a `$dtensor` says where the local shard lies."""

    async def work() -> None:
        store = FileStore(home / "tier")
        for rank in range(4):
            local, places = sharded(rank, rules)
            files = files_of(local)
            tree = json.loads(files[TREE])
            for number, place in enumerate(places):
                tree["model"][f"w{number}"] = {"$dtensor": [tree["model"][f"w{number}"], place.as_plain()]}
            spool, which = Spool(home / "spool"), part(1, rank=rank, world=4)
            commit(spool, which, files | {TREE: json.dumps(tree).encode()})
            await flush(spool, which, TierUploadContext(store))
        await store.aclose()

    asyncio.run(work())


RULES = [
    (("shard", 0), ("replicate",)),
    (("shard", 0), ("shard", 1)),
    (("shard", 1), ("shard", 2)),
    (("strided_shard", 0, 2), ("shard", 0)),
    (("shard", 2), ("shard", 0)),
]


@pytest.mark.parametrize("slab", [12, 40, 1 << 20])
def test_shards_become_whole_tensors(tmp_path, monkeypatch, slab):
    (tmp_path / "tier").mkdir()
    save_sharded(tmp_path, RULES)
    monkeypatch.setattr(streamed_tensors, "SLAB_BYTES", slab)
    found = load_file(exported(tmp_path / "tier", "safetensors", only="model") / "model.safetensors")
    for number in range(len(RULES)):
        assert equal(found[f"w{number}"], torch.arange(270, dtype=torch.float32).view(9, 10, 3)), RULES[number]
    with pytest.raises(StateMismatch, match=r"'own': it differs between the 4 ranks.*--rank 0"):
        exported(tmp_path / "tier", "safetensors")
    with pytest.raises(StateMismatch, match=r"'data.rank'"):
        exported(tmp_path / "tier", "torch")
    assert torch.load(exported(tmp_path / "tier", "torch", only="model") / "state.pt").keys() == found.keys()


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_export_writes_value_of_named_rank_where_ranks_differ(tmp_path, format, capsys):
    (tmp_path / "tier").mkdir()
    weight = torch.arange(12.0)
    save(tmp_path, 1, *({"model": {"weight": weight, "mean": torch.full((3,), float(rank))}} for rank in range(3)))
    with pytest.raises(StateMismatch, match=r"'model.mean': .*--rank 0.*`tierd restore` copies"):
        exported(tmp_path / "tier", format, only="model")
    with pytest.raises(ConfigError, match=r"rank=3: .* has ranks 0\.\.2"):
        exported(tmp_path / "tier", format, rank=3)
    for rank in range(3):
        out = tmp_path / f"of-{rank}"
        command = ["export", f"file://{tmp_path}/tier", "--to", str(out), "--format", format, "--only", "model"]
        assert run([*command, "--rank", str(rank)]) == 0, capsys.readouterr()
        tensors = torch.load(out / "state.pt") if format == "torch" else load_file(out / "model.safetensors")
        assert equal(tensors["weight"], weight) and equal(tensors["mean"], torch.full((3,), float(rank)))


def test_export_of_a_rank_takes_its_values_that_are_no_tensors(tmp_path):
    (tmp_path / "tier").mkdir()
    save_sharded(tmp_path, RULES)
    state = torch.load(exported(tmp_path / "tier", "torch", rank=2) / "state.pt")
    assert state["data"] == {"rank": 2} and state["own"] == torch.tensor(2)
    assert equal(state["model"]["w0"], torch.arange(270, dtype=torch.float32).view(9, 10, 3))


# -- of DCP -----------------------------------------------------------------------------------------------------------


async def test_a_run_of_dcp_is_exported_too(tmp_path):
    (tmp_path / "tier").mkdir()
    wanted = state()
    wanted["note"].pop("array")
    with tierd.Checkpointer(tmp_path / "spool", RUN, to=[]) as ckpt:
        dcp.save(wanted, storage_writer=tierd.dcp.StorageWriter(ckpt, 5))
        ckpt.restore()
    store, spool = FileStore(tmp_path / "tier"), Spool(tmp_path / "spool")
    for which in spool.parts():
        await flush(spool, which, TierUploadContext(store))
    await store.aclose()
    tier = tmp_path / "tier"
    found = load_file(exported(tier, "hf", only="model") / "model.safetensors")
    assert all(equal(found[name], one) for name, one in wanted["model"].items())
    whole = torch.load(exported(tier, "torch") / "state.pt", weights_only=True)
    assert whole["note"] == {"step": 3, "names": ("a", "b")} and equal(whole["wave"], wanted["wave"])
    into = {"model": {name: torch.zeros_like(one) for name, one in wanted["model"].items()}, "note": {"step": 0}}
    dcp.load(into, storage_reader=dcp.FileSystemReader(str(exported(tier, "dcp"))))
    assert into["note"] == {"step": 3} and all(equal(into["model"][name], one) for name, one in wanted["model"].items())


# -- memory, and what is refused --------------------------------------------------------------------------------------


class Memory(PartRanges):
    """A file of small chunks in memory; `fetched` counts their bytes."""

    def __init__(self, data: bytes, chunk: int) -> None:
        super().__init__()
        self.data, self.fetched = data, 0
        chunks = tuple(Chunk(size=min(chunk, len(data) - at), xxh3_128="0" * 32) for at in range(0, len(data), chunk))
        self.file = File(path="f", size=len(data), chunks=chunks)

    def manifest(self, part):
        return SimpleNamespace(files=(self.file,))

    def fill(self, memory, spans, base=0):
        for one in spans:
            memory[one.offset - base : one.offset - base + one.length] = self.data[one.offset :][: one.length]
            self.fetched += one.length


@pytest.mark.parametrize("shape", [(1 << 18,), (1, 1 << 18), (512, 512), (4, 1, 1 << 16)])
def test_memory_is_bounded_by_slabs_and_kept_chunks(monkeypatch, shape):
    """A tensor much larger than a slab: the ranges in memory, the chunks that are kept, and what is fetched."""
    whole = torch.arange(1 << 18, dtype=torch.int32).view(shape)
    files = Memory(b"head" + whole.numpy().tobytes() + b"tail", 4096)
    monkeypatch.setattr(streamed_tensors, "SLAB_BYTES", 10_000)
    monkeypatch.setattr(streamed_tensors, "CACHED_BYTES", 3 * 4096)
    sizes: list[int] = []
    taken = streamed_tensors.memory_for
    monkeypatch.setattr(streamed_tensors, "memory_for", lambda size: (sizes.append(size), taken(size))[1])
    place = part(1), "f", 4
    zeros = (0,) * len(shape)
    one = streamed_tensors.StreamedTensor(
        "t", torch.int32, shape, (streamed_tensors.TensorPiece(lambda _: place, shape, zeros, zeros, shape),), ()
    )
    reader = streamed_tensors.ChunkReader(files)
    found = b""
    for slab in streamed_tensors.read_ahead(one.slabs(reader), reader.recycle):
        assert len(slab) <= 10_000
        found += slab
        assert sum(map(len, reader._kept.values())) <= 3 * 4096
    assert found == whole.numpy().tobytes()
    assert max(sizes) <= 10_000 + 2 * 4096
    assert files.fetched == files.file.size  # each chunk once


def test_nothing_is_written_over_and_a_failure_leaves_nothing(tier):
    out = tier.parent / "out"
    out.mkdir()
    (out / "mine").touch()
    with tierd.open(f"file://{tier}", RUN) as reader:
        with pytest.raises(ConfigError, match="not an empty directory"):
            reader.export(out, "safetensors", only="model")
        with pytest.raises(StateMismatch, match=r"safetensors does not hold torch.complex128"):
            reader.export(tier.parent / "new", "safetensors")
        with pytest.raises(StateMismatch, match=r"'none' not in the checkpoint; it has model, optimizer, note, wave"):
            reader.export(tier.parent / "new", "torch", only="none")
        with pytest.raises(ConfigError, match="format 'gguf': one of safetensors, hf"):
            reader.export(tier.parent / "new", "gguf")
        with pytest.raises(ConfigError, match="dtype 'int4': one of fp32"):
            reader.export(tier.parent / "new", "hf", dtype="int4")
        with pytest.raises(StateMismatch, match=r"two tensors have the name|has none"):
            reader.export(tier.parent / "new", "hf", only="model", strip="module.weight")
        with pytest.raises(CheckpointNotFound):
            reader.export(tier.parent / "new", "hf", step=99)
    assert sorted(path.name for path in tier.parent.iterdir()) == ["out", "spool", "tier"]
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_a_corrupt_checkpoint_is_skipped(tier, tmp_path, capsys):
    save(tmp_path, 4, {"model": {"weight": torch.randn(50, 60)}})
    for chunk in chunk_files(tier, RUN, step=4):
        data = chunk.read_bytes()
        chunk.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert (
        run(["export", f"file://{tier}", "--run", RUN, "--to", str(tmp_path / "o"), "--only", "model", "--json"]) == 0
    )
    assert gc.isenabled()  # it rests only while modules are loaded
    done = json.loads(capsys.readouterr().out)
    assert done["step"] == 3 and len(done["skipped"]) == 1
    assert done["files"] == {"model.safetensors": (tmp_path / "o" / "model.safetensors").stat().st_size}


def test_parts_of_two_histories_are_not_exported(tmp_path):
    (tmp_path / "tier").mkdir()
    save(tmp_path, 1, state(), state())

    async def work() -> None:
        store = FileStore(tmp_path / "tier")
        for rank, origin in enumerate((part(1).checkpoint, None)):
            await put(Spool(tmp_path / "spool"), part(5, 2, rank, 2), state(), store, origin=origin)
        await store.aclose()

    asyncio.run(work())
    with tierd.open(f"file://{tmp_path / 'tier'}", RUN) as reader:
        done = reader.export(tmp_path / "out", "safetensors", only="model")
    assert done.step == 1 and "do not belong together" in done.skipped[0]


def test_a_value_of_dcp_that_only_a_pickle_holds_is_named(tmp_path):
    from tierd.exporting.contents import _dcp_value

    with pytest.raises(StateRefused, match="x: torch's weights-only reader refuses it"):
        _dcp_value(lambda: b"no archive", "x")


def test_export_warns_of_a_prefix_that_no_name_has(tier, tmp_path, capsys):
    words = ["export", str(tier), "--run", RUN, "--format", "torch", "--strip", "module.", "--to"]
    assert run([*words, str(tmp_path / "whole")]) == 0
    assert "--strip module.: no name begins with it" in capsys.readouterr().err
    assert run([*words, str(tmp_path / "model"), "--only", "model"]) == 0
    assert "begins with" not in capsys.readouterr().err
    assert run([*words, str(tmp_path / "again"), "--only", "model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stripped"] == 7


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_values_that_another_dtype_makes_infinite_are_named(tmp_path, format, capsys):
    tier = tmp_path / "tier"
    tier.mkdir()
    large, infinite = torch.tensor([1.0, -1e300], dtype=torch.float64), torch.tensor([1.0, float("inf")])
    save(tmp_path, 1, {"model": {"large": large, "infinite": infinite, "small": torch.ones(2)}})
    words = ["export", str(tier), "--run", RUN, "--format", format, "--dtype", "fp16", "--only", "model", "--to"]
    assert run([*words, str(tmp_path / "out")]) == 0
    assert "--dtype fp16 made finite values infinite in large\n" in capsys.readouterr().err
    assert run([*words, str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overflowed"] == ["large"]
