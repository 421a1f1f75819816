"""Writes the golden fixture of the codec `planes`: `python tests/format/make_v1_planes.py DIRECTORY`.

Invariant: run once, for `tests/format/v1-planes/`; what lies there is never edited and never written again. It is a
tier whose run `demo` has one checkpoint with a file for each kind of number, each in one chunk. `tests/test_format.py`
reads it.

The numbers are SHAKE-256 of a name; sums of twelve are near enough to a normal distribution, and exact in any library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
from support.chunk_keys import old_chunk_key
from support.fixture_makers import build_into_argument, write_object

from tierd.codec import chunk_codec
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Chunk, File, Manifest
from tierd.core.manifest_codec import encode
from tierd.spool.file_io import digest

PART = PartId(CheckpointId("demo", "01941f297c00-0a0b0c0d", 100), 0, 1)
COUNT = 6001  # numbers in a file; odd, so that pairs are padded


def normal(name: str, count: int = COUNT) -> np.ndarray:
    bits = np.frombuffer(hashlib.shake_256(name.encode()).digest(12 * count), np.uint8)
    return (bits.reshape(count, 12).astype(np.float64).sum(1) - 1530) / 255


def contents() -> dict[str, bytes]:
    """File name -> bytes."""
    single = normal("single").astype("<f4")
    brain = (single.view("<u4") >> 16).astype("<u2")
    rows = brain.copy()
    rows[::13] = 0  # other bytes than the 15 neighbours
    shift = b"\x80\x02}q" + normal("late").astype("<f4").tobytes() + b"tail."  # elements at a phase of 0; a rest
    return {
        "bf16": brain.tobytes(),
        "bf16-late": b"?" + brain.tobytes() + b"!!",
        "bf16-zeros": rows.tobytes(),
        "fp16": normal("half").astype("<f2").tobytes(),
        "fp32": single.tobytes(),
        "fp32-late": b"?!" + shift,
        "fp32-low-zeros": (single.view("<u4") & 0xFFFF0000).astype("<u4").tobytes(),
        "fp32-positive": (single * single).tobytes(),
        "fp64": (normal("double") * normal("other")).astype("<f8").tobytes(),
        "int64": (normal("whole") * 300 + 20_000).astype("<i8").tobytes(),
    }


def build(root: Path) -> None:
    """Write the tier."""
    files = []
    for name, data in contents().items():
        found = chunk_codec.encode(PART, Chunk(size=len(data), xxh3_128=digest(data)), data)
        stored = msgspec.structs.replace(
            found.stored, key=old_chunk_key(PART, found.chunk.xxh3_128, found.stored.codec)
        )
        files.append(File(path=name, size=len(data), chunks=(msgspec.structs.replace(found.chunk, stored=stored),)))
        write_object(root / "demo" / stored.key, bytes(found.data))
    manifest = Manifest(
        version=1,
        run="demo",
        step=100,
        attempt=PART.checkpoint.attempt,
        resumed_from=None,
        rank=0,
        world_size=1,
        created="2026-11-21T00:00:00+00:00",
        writer="tierd 0.2.0",
        metrics={},
        files=tuple(files),
    )
    write_object(root / PART.manifest_key, encode(manifest))


if __name__ == "__main__":
    build_into_argument(build)
