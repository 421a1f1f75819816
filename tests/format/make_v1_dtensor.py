"""Writes the golden fixture of sharded tensors: `PYTHONPATH=tests python tests/format/make_v1_dtensor.py DIRECTORY`.

Invariant: run once, for `tests/format/v1-dtensor/`; what lies there is never edited and never written again. It is what
two ranks saved of one state of DTensors: checkpoint A@100 of run `demo` in a spool and on a tier.
`tests/test_format_shards.py` reads it, and sees that ranks of today write the same trees.

    spool/  both parts as `save` left them
    tier/   both parts as the daemon left them

The numbers of a tensor are its elements' indexes in the whole, so that a reader needs nothing else to tell whether an
element lies where it should.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
from support.chunk_keys import old_chunk_key
from support.fixture_makers import build_into_argument, write_object

from tierd.codec import chunk_codec
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Chunk, File, Manifest
from tierd.core.manifest_codec import encode
from tierd.spool import file_io

CHECKPOINT = CheckpointId("demo", "01941f297c00-0a0b0c0d", 100)
PARTS = [PartId(CHECKPOINT, rank, 2) for rank in range(2)]

# name -> dtype, shape, mesh's shape, mesh's names, placements
TENSORS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], tuple[str, ...] | None, list[tuple[Any, ...]]]] = {
    "rows": ("float32", (5, 4), (2,), None, [("shard", 0)]),  # 3 rows and 2
    "columns": ("bfloat16", (3, 6), (2,), None, [("shard", 1)]),
    "few": ("int64", (1, 3), (2,), None, [("shard", 0)]),  # rank 1 has nothing
    "copied": ("float64", (4,), (2,), None, [("replicate",)]),
    "scalar": ("float32", (), (2,), None, [("replicate",)]),
    "complex": ("complex64", (4, 2), (2,), None, [("shard", 0)]),
    "strided": ("int32", (10, 2), (2, 1), ("dp", "tp"), [("strided_shard", 0, 2), ("replicate",)]),
    "two": ("int16", (7, 2), (1, 2), ("dp", "tp"), [("shard", 1), ("shard", 0)]),
}


def whole(name: str) -> Any:
    """The tensor that the ranks' shards make up."""
    import torch

    dtype, shape, *_ = TENSORS[name]
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(getattr(torch, dtype))


def state(rank: int) -> dict[str, Any]:
    """On a rank of a group of two."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    makers = {
        "replicate": Replicate,
        "shard": Shard,
        "strided_shard": lambda dim, split: _StridedShard(dim, split_factor=split),
    }
    made = {}
    for name, (_, _, mesh_shape, names, placements) in TENSORS.items():
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        full = local = whole(name)
        rules = [makers[kind](*numbers) for kind, *numbers in placements]
        for rule, count, at in zip(rules, mesh_shape, mesh.get_coordinate(), strict=True):
            if not isinstance(rule, Replicate):
                local = rule._split_tensor(local, count, with_padding=False, contiguous=True)[0][at]
        made[name] = DTensor.from_local(
            local.clone(), mesh, rules, run_check=False, shape=full.shape, stride=full.stride()
        )
    return {
        "model": OrderedDict(made, tied=made["rows"]),
        "optimizer": {"state": {0: {"exp_avg": made["columns"], "step": torch.tensor(100.0)}}, "lr": 1e-3},
        "step": 100,
        "rank": rank,
    }


def files(rank: int) -> dict[str, bytes]:
    """What a rank of two puts into its part."""
    from support.state_files import copy_into, flatten, plan_layout

    flat = flatten(state(rank))
    layout = plan_layout(flat.tensors)
    image = bytearray(layout.size)
    copy_into(layout, flat.tensors, image)
    return {"state.json": flat.tree, "tensors.safetensors": bytes(image)}


def build(root: Path) -> None:
    """Write `root/spool` and `root/tier`."""
    from support import dcp_ranks

    with tempfile.TemporaryDirectory() as room:
        found = dcp_ranks.run(2, Path(room) / "meeting", files)
    for part, contents in zip(PARTS, found, strict=True):
        home = root / "spool" / part.path
        home.mkdir(parents=True)
        plain = tuple(file_io.write_file(home / name, name, data) for name, data in sorted(contents.items()))
        (home / "manifest.json").write_bytes(encode(_manifest(part, plain)))
        tiered = tuple(_put(root / "tier" / "demo", part, file, contents[file.path]) for file in plain)
        write_object(root / "tier" / part.manifest_key, encode(_manifest(part, tiered)))


def _manifest(part: PartId, described: tuple[File, ...]) -> Manifest:
    return Manifest(
        version=1,
        run="demo",
        step=100,
        attempt=CHECKPOINT.attempt,
        resumed_from=None,
        rank=part.rank,
        world_size=part.world,
        created="2026-11-23T00:00:00+00:00",
        writer="tierd 0.2.0",
        metrics={},
        files=described,
    )


def _put(home: Path, part: PartId, file: File, data: bytes) -> File:
    ends = list(itertools.accumulate((chunk.size for chunk in file.chunks), initial=0))
    chunks: list[Chunk] = []
    for chunk, begin in zip(file.chunks, ends, strict=False):
        encoded = chunk_codec.encode(part, chunk, data[begin : begin + chunk.size])
        key = old_chunk_key(part, chunk.xxh3_128, encoded.stored.codec)
        write_object(home / key, bytes(encoded.data))
        stored = msgspec.structs.replace(encoded.stored, key=key)
        chunks.append(Chunk(size=chunk.size, xxh3_128=chunk.xxh3_128, stored=stored))
    return File(path=file.path, size=file.size, chunks=tuple(chunks))


if __name__ == "__main__":
    build_into_argument(build)
