"""Encode and decode one chunk: numbers as byte planes, text as zstd, noise raw, few changes as a patch. Synchronous.

Raw bytes and stored bytes each have a digest.

Invariant: what `encode` returns was decoded once and gave the chunk's bytes, because a tier compares only stored bytes
and would not notice a fault of the encoder. The sizes in the manifest bound a decode, not those that the bytes claim. A
frame that names another size, or is followed by anything, is corrupt before a byte of it is expanded.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import zstandard

from tierd.codec import byte_planes, patch
from tierd.codec.byte_planes import Buffer
from tierd.codec.detect import ChunkKind, kind
from tierd.codec.frames import expand
from tierd.core.errors import CorruptChunk, FormatTooNew
from tierd.core.ids import PartId, chunk_key
from tierd.core.manifest import PATCH, Chunk, Stored, is_patch
from tierd.spool.file_io import digest

log = logging.getLogger("tierd.daemon")

RAW = "raw"
ZSTD = "zst"
PLANES = "planes"
CODECS = (RAW, ZSTD, PLANES)  # what `encode` chooses from; `encode_patch` makes patches
_LEVEL = 1  # because data other than numbers is mostly small: headers and JSON
_SMALL = 1 << 20  # bytes; for smaller chunks both codecs are tried, because a small sample is unreliable
_PIECE, _PIECES = 64 << 10, 4  # bytes of a sampled piece, and the most pieces; at most one piece per MiB
_WINDOW = 128 << 20  # bytes that a decoder may be made to allocate
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
    def stored(self) -> Stored:
        assert self.chunk.stored is not None
        return self.chunk.stored


def encode(part: PartId, chunk: Chunk, raw: Buffer, pack: bool = True) -> EncodedChunk:
    """Encode one chunk of `part`. Equal input gives equal output.

    Args:
        raw: the chunk's bytes, already verified against `chunk`.
        pack: False stores the chunk raw, for a link that is faster than the compressor (`core.compression_policy`).
    """
    codec, data = _pack(chunk, raw) if pack else (RAW, raw)
    key = chunk_key(part, chunk.xxh3_128, codec)
    # The raw bytes were already compared with this digest.
    stored_digest = chunk.xxh3_128 if codec == RAW else digest(data)
    stored = Stored(codec=codec, size=len(data), xxh3_128=stored_digest, key=key)
    return EncodedChunk(Chunk(size=chunk.size, xxh3_128=chunk.xxh3_128, stored=stored), data)


def encode_patch(
    part: PartId, chunk: Chunk, raw: Buffer, base: Chunk, base_raw: Buffer, token: str
) -> EncodedChunk | None:
    """Encode one chunk of `part` as a patch of `base`, which is stored on the same tier.

    Returns None if too much differs, or the patch does not give the chunk back.

    Args:
        raw, base_raw: the bytes of both, already verified.
        token: 11 hex digits of this flush alone. The key contains them, because another flush of the part may have
            another base, and must not overwrite the patch.
    """
    data = patch.make(raw, base_raw)
    if data is None or not _decodes_to(chunk, lambda: patch.apply(data, base_raw)):
        return None
    codec = PATCH + token
    key = chunk_key(part, chunk.xxh3_128, codec)
    stored = Stored(codec=codec, size=len(data), xxh3_128=digest(data), key=key, base=base)
    return EncodedChunk(Chunk(size=chunk.size, xxh3_128=chunk.xxh3_128, stored=stored), data)


def _pack(chunk: Chunk, raw: Buffer) -> tuple[str, Buffer]:
    # The result is never longer than `raw`. Of equally short results the older codec is taken, because it comes first.
    found_kind = kind(raw)
    if found_kind is ChunkKind.NOISE and len(raw) >= _SMALL and not _repeats(raw):
        return RAW, raw
    numbers = found_kind is ChunkKind.NUMBERS
    encodings: list[tuple[str, Buffer]] = [(RAW, raw)]
    if not numbers or len(raw) < _SMALL:
        encodings.append((ZSTD, _zstd(raw)))
    if numbers:
        with _cores:
            packed = byte_planes.pack(raw)
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


def check_stored(stored: Stored, data: Buffer, where: str) -> None:
    """Compare stored bytes with their entry in the manifest.

    Raises:
        CorruptChunk: size or digest differ.
    """
    check_digest(stored, len(data), digest(data) if len(data) == stored.size else "", where)


def check_digest(stored: Stored, size: int, read_digest: str, where: str) -> None:
    """Compare the size and the digest of stored bytes with their entry in the manifest; raises as `check_stored`."""
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
    check_stored(stored, data, where)
    raw = data if stored.codec == RAW else _expand(chunk, stored, data, where, into, base)
    if len(raw) != chunk.size or digest(raw) != chunk.xxh3_128:
        raise CorruptChunk(f"{where}: {stored.key}: its decoded bytes differ from their digest")
    return raw


def recognize(chunk: Chunk, codec: str, key: str, data: Buffer, where: str) -> tuple[Chunk, Buffer]:
    """Check whether an object that no manifest at hand describes holds `chunk`.

    Returns the object's entry for a manifest, and the raw bytes.

    Args:
        codec: the expected codec.
        key: the object's key, relative to the run.

    Raises:
        CorruptChunk, FormatTooNew: as `decode`.
    """
    stored = Stored(codec=codec, size=len(data), xxh3_128=digest(data), key=key)
    entry = Chunk(size=chunk.size, xxh3_128=chunk.xxh3_128, stored=stored)
    try:
        return entry, decode(entry, data, where)
    except CorruptChunk as error:
        error.read_digest = stored.xxh3_128
        raise


def _expand(
    chunk: Chunk,
    stored: Stored,
    data: Buffer,
    where: str,
    into: memoryview | None,
    base: Buffer | None,
) -> Buffer:
    try:
        if is_patch(stored.codec):
            if base is None:
                raise ValueError("its base is not known")
            return patch.apply(data, base, into)
        if stored.codec == PLANES:
            with _cores:
                return byte_planes.unpack(data, chunk.size, into)
        if stored.codec == ZSTD:
            return _expand_zstd(chunk, data)
    except (ValueError, zstandard.ZstdError) as error:
        raise CorruptChunk(f"{where}: {stored.key}: not what codec {stored.codec!r} writes: {error}") from error
    raise FormatTooNew(f"{where}: {stored.key}: codec {stored.codec!r} is not known; use a newer tierd")


def _expand_zstd(chunk: Chunk, data: Buffer) -> bytes:
    return expand(data, chunk.size, zstandard.ZstdDecompressor(max_window_size=_WINDOW))
