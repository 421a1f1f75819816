"""Writes the golden fixtures of format version 4: `python tests/format/make_v4.py DIRECTORY`.

Invariant: run once, for `tests/format/v4/`; what lies there is never edited and never written again.
`tests/test_format.py` calls `build` to see that the bytes written today are still the same.

    tier/   run `demo` of two ranks: step 100, as a tierd of version 1 left it; and the steps 200 and 300
    spool/  the local copy of rank 1's part of step 300

Both ranks hold the file `replicated`, of which step 300 changes a few bytes of one chunk, so that this is stored as a
patch. `own` is each rank's own. `frozen` is each rank's own, too, and never changes, so that its chunks lie under old
keys. Files are cut at 4,096 bytes. `tensors.safetensors` has `tierd.homes`, by which `write_part` finds the homes.

The numbers are SHAKE-256 of a name.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from support.chunk_keys import old_chunk_key
from support.fixture_makers import build_into_argument, write_object

from tierd.codec import chunk_codec
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import FIRST, Chunk, ContentId, File, Manifest, StoredChunk
from tierd.core.manifest_codec import encode
from tierd.spool.file_io import digest

CHUNK, WORLD = 4096, 2
STEPS = (100, 200, 300)
CHANGED = 2 * CHUNK + 100  # where step 300 changes the replicated bytes


def part(step: int, rank: int) -> PartId:
    return PartId(CheckpointId("demo", "01941f297c00-0a0b0c0d", step), rank, WORLD)


def noise(name: str, size: int) -> bytes:
    return hashlib.shake_256(name.encode()).digest(size)


def contents(step: int, rank: int) -> dict[str, bytes]:
    """File name -> bytes."""
    replicated = bytearray(noise("replicated", 4 * CHUNK))
    if step == 300:
        replicated[CHANGED : CHANGED + 64] = noise("changed", 64)
    own, name = noise(f"own {step} {rank}", CHUNK + 512), b"tensor of rank %d" % rank
    tensors = {
        "own": {"dtype": "U8", "shape": [len(own)], "data_offsets": [0, len(own)]},
        "replicated": {
            "dtype": "U8",
            "shape": [len(replicated)],
            "data_offsets": [len(own), len(own) + len(replicated)],
        },
        "__metadata__": {"tierd.homes": f"{len(own)}:{len(own) + len(replicated)}:0"},
    }
    header = json.dumps(tensors, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % CHUNK)
    file = len(header).to_bytes(8, "little") + header + own + bytes(replicated)
    return {"frozen": noise(f"frozen {rank}", CHUNK + 100), "name": name, "tensors.safetensors": file}


def sizes(name: str, size: int) -> list[int]:
    """Where the fixture cuts a file: the tensor file at its header and between the tensors, too."""
    pieces = [size] if name != "tensors.safetensors" else [CHUNK, CHUNK + 512, 4 * CHUNK]
    return [min(CHUNK, piece - at) for piece in pieces for at in range(0, piece, CHUNK)]


def describe(rank: int, name: str, data: bytes) -> tuple[File, dict[ContentId, bytes]]:
    """A file without anything stored, and the bytes of its chunks."""
    chunks, raws, at = list[Chunk](), dict[ContentId, bytes](), 0
    for number, size in enumerate(sizes(name, len(data))):
        raw = data[at : at + size]
        home = 0 if name == "tensors.safetensors" and number >= 3 else None
        chunks.append(Chunk(size=size, xxh3_128=digest(raw), home=home))
        raws[chunks[-1].content] = raw
        at += size
    return File(path=name, size=len(data), chunks=tuple(chunks)), raws


def build(root: Path) -> None:
    """Write `root/tier` and `root/spool`."""
    tier = root / "tier" / "demo"
    there: list[dict[ContentId, StoredChunk]] = [{}, {}]  # what each rank names, by content
    older: dict[tuple[int, str, int], tuple[Chunk, bytes]] = {}  # rank, file, index -> the chunk before
    for step in STEPS:
        for rank in range(WORLD):
            which, files = part(step, rank), []
            for name, data in contents(step, rank).items():
                plain, raws = describe(rank, name, data)
                chunks = []
                for index, described in enumerate(plain.chunks):
                    chunk = described if step > 100 else msgspec.structs.replace(described, home=None)
                    raw = raws[chunk.content]
                    if chunk.content not in there[rank] or (step == 200 and chunk.home is not None):
                        before = older.get((rank, name, index))
                        there[rank][chunk.content] = _put(tier, which, chunk, raw, before if step == 300 else None)
                    chunks.append(msgspec.structs.replace(chunk, stored=there[rank][chunk.content]))
                    older[rank, name, index] = chunks[-1], raw
                files.append(msgspec.structs.replace(plain, chunks=tuple(chunks)))
            manifest = Manifest.of(which, None, {}, datetime(2026, 11, 30, tzinfo=UTC), "0.3.0", tuple(files))
            if step == 100:
                manifest = msgspec.structs.replace(manifest, version=FIRST)
            write_object(root / "tier" / which.manifest_key, encode(manifest))
    files = []
    for name, data in contents(300, 1).items():
        write_object(root / "spool" / part(300, 1).path / name, data)
        files.append(describe(1, name, data)[0])
    local = msgspec.structs.replace(manifest, files=tuple(files))
    write_object(root / "spool" / part(300, 1).path / "manifest.json", encode(local))


def _put(tier: Path, which: PartId, chunk: Chunk, raw: bytes, before: tuple[Chunk, bytes] | None) -> StoredChunk:
    fits = before is not None and before[0].home is not None and before[0].size == chunk.size
    encoded = chunk_codec.encode_patch(which, chunk, raw, *before) if before and fits else None
    encoded = encoded or chunk_codec.encode(which, chunk, raw)
    stored = encoded.stored
    if which.checkpoint.step == 100:
        stored = msgspec.structs.replace(stored, key=old_chunk_key(which, chunk.xxh3_128, stored.codec))
    write_object(tier / stored.key, bytes(encoded.data))
    return stored


if __name__ == "__main__":
    build_into_argument(build)
