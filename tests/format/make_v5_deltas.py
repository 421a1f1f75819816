"""Writes the golden fixture of deltas: `python tests/format/make_v5_deltas.py DIRECTORY`.

Invariant: run once, for `tests/format/v5-deltas/`; what lies there is never edited and never written again. It is a
tier whose run `demo` had three checkpoints of numbers that move by little, so the third one is stored as deltas of
deltas, and one chunk as a patch of a delta. The first two checkpoints were deleted since: of them only the objects are
left that the third one needs. `tests/test_format.py` reads it.

The numbers are SHAKE-256 of a name.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from support.fixture_makers import build_into_argument, write_object, write_tier_of

from tierd.codec import chunk_codec
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import WITH_DELTAS, Chunk, File, Manifest
from tierd.spool.file_io import digest

PARTS = tuple(PartId(CheckpointId("demo", "01941f297c00-0a0b0c0d", step), 0, 1) for step in (100, 200, 300))
CHUNK = 16384
# By file: bytes of an element, bytes before the first, how many in 256 elements move at a step.
FILES = {"bytes": (1, 0, 9), "halves": (2, 0, 30), "late halves": (2, 1, 3), "floats": (4, 0, 20), "dense": (8, 0, 150)}


def noise(name: str, size: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(size), np.uint8)


def contents(step: int) -> dict[str, bytes]:
    """File name -> bytes. `halves` ends in a row that step 300 alone writes anew."""
    files = {}
    for name, (width, lead, moving) in FILES.items():
        data = noise(name, CHUNK + 5).copy()
        data[lead + width - 1 :: width] &= 0x83  # the tops of a number hardly vary
        elements = data[lead : lead + CHUNK // width * width - width].view(f"<u{width}")
        for save in range(200, step + 1, 100) if name != "halves" else (200,) * (step > 100):
            places = noise(f"{name} {save}", len(elements)) < moving
            elements[places] += (noise(f"{save}", len(elements))[places] % 3).astype(elements.dtype)
            elements[places] -= elements.dtype.type(1)
        if name == "halves" and step == 300:
            data[640:704] = noise("row", 64)
        files[name] = data.tobytes()
    return files


def build(root: Path) -> None:
    """Write the tier."""
    before: dict[str, tuple[Chunk, bytes]] = {}
    for part in PARTS:
        for name, raw in contents(part.checkpoint.step).items():
            chunk = Chunk(size=len(raw), xxh3_128=digest(raw))
            kind = "patch" if (name, part.checkpoint.step) == ("halves", 300) else "delta"
            encoded = chunk_codec.encode_patch(part, chunk, raw, *before[name], kind) if before.get(name) else None
            encoded = encoded or chunk_codec.encode(part, chunk, raw)
            write_object(root / "demo" / encoded.stored.key, bytes(encoded.data))
            before[name] = encoded.chunk, raw
    files = tuple(File(path=name, size=len(raw), chunks=(chunk,)) for name, (chunk, raw) in before.items())
    manifest = Manifest.of(PARTS[-1], None, {}, datetime(2026, 12, 1, tzinfo=UTC), "0.4.0", files)
    write_tier_of(root, msgspec.structs.replace(manifest, version=WITH_DELTAS))


if __name__ == "__main__":
    build_into_argument(build)
