"""Writes the golden fixtures of format version 1: `python tests/format/make_v1.py DIRECTORY`.

Invariant: run once, for `tests/format/v1/`; what lies there is never edited and never written again. It is what a tierd
of today left on somebody's disk, and every later tierd reads it. `tests/test_format.py` calls `build` to see that the
bytes written today are still the same.

    tier/   run `demo`: A@100, and B@200, which resumed from A@100 and borrows a chunk of it; B@200 is pinned
    spool/  the local copy of B@200

Every file is cut at 4,096 bytes instead of 64 MiB, so that small files have several chunks. The tensor file's header
compresses (codec `zst`), its data is noise (codec `raw`). Nothing here depends on a clock, a seed of the system or a
generator that a library could change: the numbers are SHAKE-256 of a name.
Keys of chunks are in the form of this version; later ones have another.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from support.chunk_keys import old_chunk_key
from support.fixture_makers import build_into_argument, write_object
from support.state_files import copy_into, flatten, plan_layout

from tierd.codec import chunk_codec
from tierd.core.ids import CheckpointId, PartId, pin_key
from tierd.core.manifest import Chunk, File, Manifest, Origin, StoredChunk, metrics_to_json
from tierd.core.manifest_codec import encode
from tierd.spool import file_io

CHUNK = 4096
RUN = "demo"
FIRST = PartId(CheckpointId(RUN, "01941f297c00-0a0b0c0d", 100), 0, 1)
SECOND = PartId(CheckpointId(RUN, "01941f3ad400-1a1b1c1d", 200), 0, 1)
CREATED = {100: "2025-01-01T00:00:00+00:00", 200: "2025-01-01T00:20:00.123456+00:00"}
METRICS = {100: {"loss": 0.5, "accuracy": 1.0}, 200: {"loss": float("nan"), "accuracy": float("inf")}}


def noise(name: str, size: int) -> bytes:
    return hashlib.shake_256(name.encode()).digest(size)


def state(step: int) -> dict[str, object]:
    """One value of every kind whose encoding FORMAT.md describes and that needs nothing but torch."""
    moments = torch.frombuffer(bytearray(noise(f"moments {step}", 4096)), dtype=torch.float32).reshape(32, 32)
    weights = torch.frombuffer(bytearray(noise(f"weights {step}", 2048)), dtype=torch.bfloat16)
    return {
        "model": OrderedDict(weight=weights, tied=weights, phase=torch.tensor([1 + 2j, 3 - 4j])),
        "optimizer": {"state": {0: {"exp_avg": moments, "step": torch.tensor(float(step))}}, "lr": 1e-3},
        "data": {"seen": range(0, step, 2), "order": (3, 1, 2), "key": b"\x00\xff", "offset": 2**60 + step},
        "rest": [None, True, step, "ü", float("-inf"), {"a", "b"}, torch.float16, torch.Size([2, 3])],
    }


def files(step: int) -> dict[str, bytes]:
    """What `save(step, state(step))` puts into a part."""
    flat = flatten(state(step))
    layout = plan_layout(flat.tensors)
    image = bytearray(layout.size)
    copy_into(layout, flat.tensors, image)
    return {"state.json": flat.tree, "tensors.safetensors": bytes(image)}


def manifest(part: PartId, described: tuple[File, ...]) -> Manifest:
    step = part.checkpoint.step
    origin = Origin(step=100, attempt=FIRST.checkpoint.attempt) if part == SECOND else None
    return Manifest(
        version=1,
        run=RUN,
        step=step,
        attempt=part.checkpoint.attempt,
        resumed_from=origin,
        rank=part.rank,
        world_size=part.world,
        created=CREATED[step],
        writer="tierd 0.1.0",
        metrics=metrics_to_json(METRICS[step]),
        files=described,
    )


def build(root: Path, files: Callable[[int], dict[str, bytes]] = files) -> None:
    """Write `root/tier` and `root/spool`; `files` gives what each step's part holds."""
    there: dict[str, StoredChunk] = {}  # raw digest -> where an earlier checkpoint put it
    for part in (FIRST, SECOND):
        home = root / "spool" / part.path if part == SECOND else root / "scratch"
        home.mkdir(parents=True)
        contents = files(part.checkpoint.step)
        plain = tuple(file_io.write_file(home / name, name, data, CHUNK) for name, data in contents.items())
        if part == SECOND:
            (home / "manifest.json").write_bytes(encode(manifest(part, plain)))
        else:
            for path in (*home.iterdir(), home):
                path.unlink() if path.is_file() else path.rmdir()
        tiered = tuple(_put(root / "tier" / RUN, part, file, contents[file.path], there) for file in plain)
        write_object(root / "tier" / part.manifest_key, encode(manifest(part, tiered)))
    write_object(root / "tier" / pin_key(SECOND.checkpoint), b"")


def _put(home: Path, part: PartId, file: File, data: bytes, there: dict[str, StoredChunk]) -> File:
    chunks, offset = [], 0
    for chunk in file.chunks:
        raw = data[offset : offset + chunk.size]
        offset += chunk.size
        if chunk.xxh3_128 not in there:
            encoded = chunk_codec.encode(part, chunk, raw)
            key = old_chunk_key(part, chunk.xxh3_128, encoded.stored.codec)
            write_object(home / key, bytes(encoded.data))
            there[chunk.xxh3_128] = msgspec.structs.replace(encoded.stored, key=key)
        chunks.append(Chunk(size=chunk.size, xxh3_128=chunk.xxh3_128, stored=there[chunk.xxh3_128]))
    return File(path=file.path, size=file.size, chunks=tuple(chunks))


if __name__ == "__main__":
    build_into_argument(build)
