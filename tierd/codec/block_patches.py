"""The codec `patch`: store the blocks of a chunk that differ from its base, as few rows of an embedding do."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import zstandard

from tierd.codec.byte_planes import Buffer
from tierd.codec.number_layout import Bytes
from tierd.codec.zstd_frames import WINDOW, declared_size, expand_frame
from tierd.spool.direct_io import memory_for

Blocks = npt.NDArray[np.bool_]

MAGIC = b"TPC1"
HEAD = struct.Struct("<4sII")  # magic, size of the chunk in bytes, number of blocks that differ
BLOCK = 64  # bytes, because rows of an embedding are rarely shorter, and a bitmap of such blocks is 1/512 of the chunk
MOST_SHARE = 1 / 4  # of the chunk; with more changes, the whole chunk is cheaper in the long run
_TILE = 1 << 20  # bytes compared at a time, so that they stay in the CPU's caches


def make_patch(raw: Buffer, base: Buffer) -> bytes | None:
    """Return the patch that turns `base` into `raw`, of equal size; None if more than `MOST_SHARE` of it differs."""
    new, old = np.frombuffer(raw, np.uint8), np.frombuffer(base, np.uint8)
    if len(new) != len(old):
        return None
    differs = _differing(new, old)
    count = int(np.count_nonzero(differs))
    if count > MOST_SHARE * len(differs):
        return None
    whole_blocks = len(new) // BLOCK
    blocks = new[: whole_blocks * BLOCK].reshape(whole_blocks, BLOCK)[differs[:whole_blocks]]
    tail = new[whole_blocks * BLOCK :] if len(differs) > whole_blocks and differs[whole_blocks] else new[:0]
    body = b"".join((np.packbits(differs, bitorder="little").tobytes(), blocks.tobytes(), tail.tobytes()))
    frame = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(body)
    return HEAD.pack(MAGIC, len(new), count) + frame


def differing_share(new: Bytes, old: Bytes) -> float:
    """Return the share of blocks that differ, 0..1."""
    return float(_differing(new, old).mean())


def apply_patch(patch: Buffer, base: Buffer, into: memoryview | None = None) -> memoryview:
    """Return the bytes of the chunk, in `into` or in new memory. The bytes of the base may be in `into` already.

    Raises ValueError or `zstandard.ZstdError` if this is no patch of a chunk of that size.
    """
    if len(patch) < HEAD.size:
        raise ValueError("it is shorter than the head of a patch")
    magic, size, count = HEAD.unpack_from(patch)
    blocks = -(-size // BLOCK)
    if magic != MAGIC or size != len(base) or count > blocks:
        raise ValueError(f"its head is not that of a patch of {len(base)} bytes")
    flags, changed = _body(memoryview(patch)[HEAD.size :], size, blocks, count)
    out = memory_for(max(size, 1))[:size] if into is None else into
    array = np.frombuffer(out, np.uint8)
    if not np.shares_memory(array, old := np.frombuffer(base, np.uint8)):
        array[:] = old
    whole_blocks = size // BLOCK
    inside = int(np.count_nonzero(flags[:whole_blocks])) * BLOCK
    array[: whole_blocks * BLOCK].reshape(whole_blocks, BLOCK)[flags[:whole_blocks]] = changed[:inside].reshape(
        -1, BLOCK
    )
    if blocks > whole_blocks and flags[whole_blocks]:
        array[whole_blocks * BLOCK :] = changed[inside:]
    return out


def _differing(new: npt.NDArray[np.uint8], old: npt.NDArray[np.uint8]) -> Blocks:
    """For each block, whether it differs; the last one may be shorter."""
    flags = np.zeros(-(-len(new) // BLOCK), np.bool_)
    aligned = len(new) // BLOCK * BLOCK
    for at in range(0, aligned, _TILE):
        end = min(at + _TILE, aligned)
        unequal = new[at:end].view(np.uint64) != old[at:end].view(np.uint64)
        flags[at // BLOCK : end // BLOCK] = unequal.reshape(-1, BLOCK // 8).any(axis=1)
    if aligned < len(new):
        flags[-1] = bool((new[aligned:] != old[aligned:]).any())
    return flags


def _body(frame: memoryview, size: int, blocks: int, count: int) -> tuple[Blocks, npt.NDArray[np.uint8]]:
    """Return which blocks differ, and their new bytes, one after the other."""
    flags_size = -(-blocks // 8)
    promised = declared_size(frame)
    if not flags_size + max(count - 1, 0) * BLOCK <= promised <= flags_size + min(count * BLOCK, size):
        raise ValueError(f"its frame promises {promised} bytes for {count} blocks")
    body = np.frombuffer(expand_frame(frame, promised, zstandard.ZstdDecompressor(max_window_size=WINDOW)), np.uint8)
    bits = np.unpackbits(body[:flags_size], bitorder="little")
    flags = bits[:blocks].astype(np.bool_)
    last = size - (blocks - 1) * BLOCK if blocks else 0
    flagged = int(np.count_nonzero(flags))
    changed_size = flagged * BLOCK - (BLOCK - last if blocks and flags[-1] else 0)
    if bits[blocks:].any() or flagged != count or len(body) - flags_size != changed_size:
        raise ValueError(f"its bitmap names {flagged} blocks, and its head {count}")
    return flags, body[flags_size:]
