"""One flipped bit, as a failing disk leaves it: same size, same name, no error from anything that reads it.

Invariant: exactly one bit of exactly one byte; it finds its way by the documented layout alone (tierd/FORMAT.md), not
by tierd's code.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

_BIT = 0x10
TENSORS = "tensors.safetensors"


def flip_bit(path: Path) -> str:
    """Flip one bit of the middle byte; says which."""
    with path.open("r+b") as file:
        offset = path.stat().st_size // 2
        file.seek(offset)
        before = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([before ^ _BIT]))
        file.flush()
        os.fsync(file.fileno())
    return f"byte {offset:,} of {path}: 0x{before:02x} -> 0x{before ^ _BIT:02x}"


def in_spool(spool: Path, run: str, checkpoint: str) -> Path:
    """The tensor file of a checkpoint `<step:012>.<attempt>` in the spool."""
    return spool / run / checkpoint / "00000-of-00001" / TENSORS


def on_tier(tier: Path, run: str, checkpoint: str) -> Path:
    """The object on the tier that holds the middle of the same file, by the tier's own manifest."""
    manifest = json.loads((tier / run / "manifests" / checkpoint / "00000-of-00001.json").read_bytes())
    file = next(file for file in manifest["files"] if file["path"] == TENSORS)
    ends = itertools.accumulate(chunk["size"] for chunk in file["chunks"])
    chunk = next(chunk for chunk, end in zip(file["chunks"], ends, strict=True) if end > file["size"] // 2)
    return tier / run / str(chunk["stored"]["key"])
