"""Writes the golden fixture of patches: `python tests/format/make_v3_patches.py DIRECTORY`.

Invariant: run once, for `tests/format/v3-patches/`; what lies there is never edited and never written again. It is a
tier whose run `demo` had three checkpoints of a table of rows. Each save changed a few rows, so the third one is stored
as patches of patches of the first one's chunks. The first two checkpoints were deleted since: of them only the objects
are left that the third one needs. `tests/test_format.py` reads it.

The numbers are SHAKE-256 of a name. Keys of chunks and the names of patches are in the form of this version.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from support.chunk_keys import old_chunk_key
from support.fixture_makers import build_into_argument, write_object, write_tier_of

from tierd.codec import chunk_codec
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import PATCHED, Chunk, File, Manifest
from tierd.spool.file_io import digest

PARTS = tuple(PartId(CheckpointId("demo", "01941f297c00-0a0b0c0d", step), 0, 1) for step in (100, 200, 300))
CHUNK = 4096
SIZE = 3 * CHUNK + 1000  # the last chunk ends in a block of 40 bytes
ROW = 128


def contents(step: int) -> dict[str, bytes]:
    """File name -> bytes. The later saves changed rows 3 and 40, and the last bytes."""
    data = bytearray(hashlib.shake_256(b"table").digest(SIZE))
    for save in range(200, step + 1, 100):
        for at in (3 * ROW, (40 + save // 100) * ROW, SIZE - 10):
            fresh = hashlib.shake_256(f"{save} {at}".encode()).digest(ROW)[: SIZE - at]
            data[at : at + len(fresh)] = fresh
    return {"table": bytes(data)}


def build(root: Path) -> None:
    """Write the tier."""
    before: list[tuple[Chunk, bytes]] = []
    for part in PARTS:
        (name, data), *_ = contents(part.checkpoint.step).items()
        chunks = []
        for number, at in enumerate(range(0, SIZE, CHUNK)):
            raw = data[at : at + CHUNK]
            chunk = Chunk(size=len(raw), xxh3_128=digest(raw))
            if before and before[number][1] == raw:
                chunks.append(before[number])
                continue
            found = chunk_codec.encode_patch(part, chunk, raw, *before[number]) if before else None
            codec = f"patch{part.checkpoint.step:011x}" if found else None
            found = found or chunk_codec.encode(part, chunk, raw)
            codec = codec or found.stored.codec
            key = old_chunk_key(part, chunk.xxh3_128, codec)
            stored = msgspec.structs.replace(found.stored, codec=codec, key=key)
            write_object(root / "demo" / key, bytes(found.data))
            chunks.append((msgspec.structs.replace(found.chunk, stored=stored), raw))
        before = chunks
    files = (File(path=name, size=SIZE, chunks=tuple(chunk for chunk, _ in before)),)
    manifest = Manifest.of(part, None, {}, datetime(2026, 11, 26, tzinfo=UTC), "0.2.0", files)
    write_tier_of(root, msgspec.structs.replace(manifest, version=PATCHED))


if __name__ == "__main__":
    build_into_argument(build)
