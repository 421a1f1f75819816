"""Encode and decode one chunk: numbers as byte planes, text as zstd, noise raw, few changes as a patch or delta.

Synchronous.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zstandard

from tierd.codec import byte_planes
from tierd.codec.block_patches import MOST_SHARE, apply_patch, differing_share, make_patch
from tierd.codec.byte_planes import Buffer
from tierd.codec.element_deltas import apply_delta, delta_share, make_delta
from tierd.codec.number_layout import ChunkKind, chunk_kind
from tierd.codec.zstd_frames import WINDOW, expand_frame
from tierd.core.errors import CorruptChunk, FormatTooNew
from tierd.core.ids import PartId, chunk_key
from tierd.core.manifest import DELTA, PATCH, Chunk, StoredChunk, patch_kind
from tierd.spool.file_io import digest

log = logging.getLogger("tierd.daemon")

RAW = "raw"
ZSTD = "zst"
PLANES = "planes"
CODECS = (RAW, ZSTD, PLANES)  # what `encode` chooses from; `encode_patch` makes patches and deltas
PATCHES = {PATCH: (make_patch, apply_patch), DELTA: (make_delta, apply_delta)}
_BASE_DIGITS = 11  # of a base's digest, in the codec of its patches; a codec has 16 characters
_LEVEL = 1  # because data other than numbers is mostly small: headers and JSON
_SMALL = 1 << 20  # bytes; for smaller chunks both codecs are tried, because a small sample is unreliable
_PREFERENCE = 2  # times the size of a delta that a patch may have, because more versions of tierd read it
_SHORT = 1 / 128  # of a chunk; so short a patch is always taken, because samples do not tell shorter ones apart
_PIECE, _PIECES = 64 << 10, 4  # bytes of a sampled piece, and the most pieces; at most one piece per MiB
# So many threads of this process split or join numbers at a time, because more of them wait for the interpreter's lock
# and for each other's CPU caches. Background work has fewer threads than that, so a restore always finds a free one.
_CORES = max(2, os.cpu_count() or 2)  # two on one core as well, because background work has one thread there
_cores = threading.BoundedSemaphore(_CORES)


def _forget_threads() -> None:
    global _cores
    _cores = threading.BoundedSemaphore(_CORES)


os.register_at_fork(after_in_child=_forget_threads)  # because the threads that held it do not exist in the child


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk as a tier stores it, and its entry for the manifest."""

    chunk: Chunk
    data: Buffer

    @property
    def stored(self) -> StoredChunk:
        assert self.chunk.stored is not None
        return self.chunk.stored


def encode(part: PartId, chunk: Chunk, raw: Buffer, pack: bool = True, into: memoryview | None = None) -> EncodedChunk:
    """Encode one chunk of `part` from its verified bytes. Equal input gives equal output.

    Without `pack` it is stored raw, for a link that is faster than the compressor (`core/chunk_boundaries.py`). Packed
    numbers are in `into` if it is given; it has `packing_size(chunk.size)` bytes.
    """
    codec, data = _pack(chunk, raw, into) if pack else (RAW, raw)
    key = chunk_key(part, chunk.xxh3_128, codec, chunk.home)
    # The raw bytes were already compared with this digest.
    stored_digest = chunk.xxh3_128 if codec == RAW else digest(data)
    stored = StoredChunk(codec=codec, size=len(data), xxh3_128=stored_digest, key=key)
    return EncodedChunk(_with_stored(chunk, stored), data)


def _with_stored(chunk: Chunk, stored: StoredChunk) -> Chunk:
    return Chunk(size=chunk.size, xxh3_128=chunk.xxh3_128, stored=stored, home=chunk.home)


def cheapest_patch(raw: Buffer, base: Buffer) -> str:
    """Return how a chunk is best stored as its difference from a base: `PATCH`, `DELTA`, or empty for neither.

    Both arguments are samples of the two chunks, sequences of pieces that begin at multiples of 8 bytes.
    """
    new, old = np.frombuffer(raw, np.uint8), np.frombuffer(base, np.uint8)
    patch, delta = differing_share(new, old), delta_share(new, old)
    if min(patch, delta) > MOST_SHARE:
        return ""
    return PATCH if patch <= min(MOST_SHARE, max(_PREFERENCE * delta, _SHORT)) else DELTA


def encode_patch(
    part: PartId, chunk: Chunk, raw: Buffer, base: Chunk, base_raw: Buffer, kind: str = PATCH
) -> EncodedChunk | None:
    """Encode one chunk of `part` as a patch or delta of `base`, which is stored on the same tier.

    Returns None if too much differs, or the object does not give the chunk back. The key contains the base's digest, so
    that two flushes with the same base put the same object, and two with different bases do not overwrite each other's.

    Args:
        raw, base_raw: the bytes of both, already verified.
        kind: `PATCH` or `DELTA`.
    """
    make, apply = PATCHES[kind]
    with _cores:
        data = make(raw, base_raw)
    if data is None or not _decodes_to(chunk, lambda: apply(data, base_raw)):
        return None
    codec = kind + base.xxh3_128[:_BASE_DIGITS]
    key = chunk_key(part, chunk.xxh3_128, codec, chunk.home)
    stored = StoredChunk(codec=codec, size=len(data), xxh3_128=digest(data), key=key, base=base)
    return EncodedChunk(_with_stored(chunk, stored), data)


def _pack(chunk: Chunk, raw: Buffer, into: memoryview | None) -> tuple[str, Buffer]:
    # The result is never longer than `raw`. Of equally short results the older codec is taken, because it comes first.
    found_kind = chunk_kind(raw)
    if found_kind is ChunkKind.NOISE and len(raw) >= _SMALL and not _repeats(raw):
        return RAW, raw
    numbers = found_kind is ChunkKind.NUMBERS
    encodings: list[tuple[str, Buffer]] = [(RAW, raw)]
    if not numbers or len(raw) < _SMALL:
        encodings.append((ZSTD, _zstd(raw)))
    if numbers:
        with _cores:
            packed = byte_planes.pack(raw, into)
        if packed is not None:
            encodings.append((PLANES, packed))
    codec, data = min(encodings, key=lambda encoding: len(encoding[1]))
    if codec == ZSTD and not _decodes_to(chunk, lambda: _expand_zstd(chunk, data)):
        return RAW, raw
    return codec, data


def _decodes_to(chunk: Chunk, read: Callable[[], Buffer]) -> bool:
    """Whether an object that was just made decodes to the chunk. `byte_planes` makes none that does not."""
    try:
        if digest(read()) == chunk.xxh3_128:
            return True
        why = "other bytes"
    except (ValueError, zstandard.ZstdError) as error:
        why = str(error)
    log.error("chunk %s does not come back from what was made of it, which is not stored: %s", chunk.xxh3_128, why)
    return False


def _zstd(raw: Buffer) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(raw)


def _repeats(raw: Buffer) -> bool:
    """Return whether zstd shortens a sample of bytes whose values are equally frequent, by finding repetitions.

    Only a sample is compressed, because compressing all of a chunk that does not shrink costs as much as sending it.
    """
    view = memoryview(raw)
    step = max(len(view) // _PIECES, 16 * _PIECE)
    sample = b"".join(view[at : at + _PIECE] for at in range(0, len(view) - _PIECE + 1, step))
    return len(_zstd(sample)) < len(sample)


def verify_stored(stored: StoredChunk, data: Buffer, where: str) -> None:
    """Compare stored bytes with their entry in the manifest. Raises `CorruptChunk` if size or digest differ."""
    verify_stored_digest(stored, len(data), digest(data) if len(data) == stored.size else "", where)


def verify_stored_digest(stored: StoredChunk, size: int, read_digest: str, where: str) -> None:
    """Compare the size and the digest of stored bytes with their entry in the manifest; raises as `verify_stored`."""
    if size != stored.size:
        raise CorruptChunk(f"{where}: {stored.key}: {size} bytes, not the {stored.size} of its manifest")
    if read_digest != stored.xxh3_128:
        error = CorruptChunk(f"{where}: {stored.key}: its bytes differ from their digest")
        error.read_digest = read_digest
        raise error


def decode(
    chunk: Chunk,
    data: Buffer,
    where: str,
    into: memoryview | None = None,
    base: Buffer | None = None,
) -> Buffer:
    """Return the raw bytes of a chunk, verified before and after decoding.

    Args:
        where: the place that supplied the bytes, for messages.
        into: writable memory of the chunk's size for decoded numbers and patches; its content is undefined after an
            error. Other chunks are not copied into it.
        base: the raw bytes of a patch's base; they may be in `into`.

    Raises:
        CorruptChunk: the stored bytes, the frame or the raw bytes differ from the manifest.
        FormatTooNew: the stored bytes are correct, but this version of tierd does not know their codec.
    """
    stored = chunk.stored
    if stored is None:
        raise CorruptChunk(f"{where}: the manifest does not say how chunk {chunk.xxh3_128} is stored")
    verify_stored(stored, data, where)
    if stored.codec == RAW and (stored.size, stored.xxh3_128) == (chunk.size, chunk.xxh3_128):
        return data
    raw = data if stored.codec == RAW else _expand(chunk, stored, data, where, into, base)
    if len(raw) != chunk.size or digest(raw) != chunk.xxh3_128:
        raise CorruptChunk(f"{where}: {stored.key}: its decoded bytes differ from their digest")
    return raw


def identify_object(chunk: Chunk, codec: str, key: str, data: Buffer, where: str) -> tuple[Chunk, Buffer]:
    """Check whether an object that no manifest at hand describes holds `chunk`, encoded by `codec`.

    Returns its entry for a manifest, with its `key` relative to the run, and the raw bytes. Raises as `decode`.
    """
    stored = StoredChunk(codec=codec, size=len(data), xxh3_128=digest(data), key=key)
    entry = _with_stored(chunk, stored)
    try:
        return entry, decode(entry, data, where)
    except CorruptChunk as error:
        error.read_digest = stored.xxh3_128
        raise


def _expand(
    chunk: Chunk,
    stored: StoredChunk,
    data: Buffer,
    where: str,
    into: memoryview | None,
    base: Buffer | None,
) -> Buffer:
    try:
        if kind := patch_kind(stored.codec):
            if base is None:
                raise ValueError("its base is not known")
            with _cores:
                return PATCHES[kind][1](data, base, into)
        if stored.codec == PLANES:
            with _cores:
                return byte_planes.unpack(data, chunk.size, into)
        if stored.codec == ZSTD:
            return _expand_zstd(chunk, data)
    except (ValueError, zstandard.ZstdError) as error:
        raise CorruptChunk(f"{where}: {stored.key}: not what codec {stored.codec!r} writes: {error}") from error
    raise FormatTooNew(f"{where}: {stored.key}: codec {stored.codec!r} is not known; use a newer tierd")


def _expand_zstd(chunk: Chunk, data: Buffer) -> bytes:
    return expand_frame(data, chunk.size, zstandard.ZstdDecompressor(max_window_size=WINDOW))
