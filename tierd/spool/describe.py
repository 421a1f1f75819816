"""Digest files that another program wrote, and of which no digest is known. Shared by client and daemon.

Invariant: one wrong read of a disk never becomes a digest, because right bytes would then count as corrupt for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from tierd.core.chunking import cut
from tierd.core.corruption import Reading, ReadVerdict, judge, proven, unstable
from tierd.core.errors import CorruptChunk
from tierd.core.manifest import CHUNK_SIZE, Chunk, File
from tierd.spool.direct_io import LARGE, memory_for, set_direct
from tierd.spool.file_io import open_plain
from tierd.spool.verified_reads import PIECE_IN_CACHE, digest_cached, read_range


def describe_file(
    path: Path,
    name: str,
    chunk_size: int = CHUNK_SIZE,
    *,
    written: tuple[int, str] | None = None,
    going: Callable[[], None] = lambda: None,
) -> File:
    """Digest and sync a file that another library wrote.

    Without `written`, the file's bytes are verified from this call on, not before. Bytes that come from the disk are
    read twice then, because a wrong digest would make the right bytes count as corrupt for ever.

    Args:
        path: the file.
        name: the file's path inside its part, for the manifest.
        chunk_size: the size of the largest chunk, in bytes.
        written: size in bytes and digest of everything that was written to the file, taken from the writer's memory.
            The file must be synced; its bytes are then verified from the writer's memory on.
        going: called before each chunk; what it raises ends the work.

    Raises:
        CorruptChunk: the file differs from what was written, or changed meanwhile.
        UnstableRead: the reads of it differ from each other.
    """

    def described() -> File:
        return _describe(path, name, chunk_size, written, going)

    return described() if written is None else proven(described, str(path))


def _describe(
    path: Path, name: str, chunk_size: int, expected: tuple[int, str] | None, going: Callable[[], None]
) -> File:
    fd = open_plain(path)
    try:
        if expected is None:
            os.fsync(fd)
        size = os.fstat(fd).st_size
        chunks, offset = [], 0
        sizes = cut(lambda offset, length: os.pread(fd, length, offset), size, chunk_size)
        memory, file_hash = memory_for(LARGE), xxhash.xxh3_128()
        for length in sizes:
            going()
            if expected:
                digested = _digest_pieces(fd, memory, length, offset, path, file_hash)
            else:
                digested = agreed_digest(fd, memory, length, offset, path)
            chunks.append(Chunk(size=length, xxh3_128=digested))
            offset += length
        if os.fstat(fd).st_size != size:
            raise CorruptChunk(f"{path}: it changed while it was being digested")
        if expected and expected != (size, file_hash.hexdigest()):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the next read, if any, comes from the disk
            error = CorruptChunk(f"{path}: its {size} bytes are not the {expected[0]} that were written to it")
            error.read_digest = f"{size} {file_hash.hexdigest()}"
            raise error
    finally:
        os.close(fd)
    return File(path=name, size=size, chunks=tuple(chunks))


def agreed_digest(fd: int, memory: memoryview, size: int, offset: int, path: Path) -> str:
    """Digest a range of a file of which no digest is known.

    Bytes in the page cache are believed, because their writer has just put them there. Bytes from the disk are read
    until two reads agree, one of them past the page cache.

    Args:
        fd: the file, without O_DIRECT.
        memory: `LARGE` bytes of `memory_for`, which are overwritten.
        size: the size of the range in bytes.
        offset: where it begins.
        path: for messages.

    Raises:
        CorruptChunk: the file ends inside the range.
        UnstableRead: the reads differ from each other.
    """
    cached = digest_cached(fd, memory, size, offset)
    if cached is not None:
        return cached
    readings: list[Reading] = []
    while True:
        access = "cached" if len(readings) % 2 else "direct"  # the last read leaves the bytes in the page cache
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        set_direct(fd, access == "direct")
        try:
            readings.append(Reading(_digest_pieces(fd, memory, size, offset, path), access))
        finally:
            set_direct(fd, False)
        verdict = judge(readings, paths=2)
        if verdict is ReadVerdict.CORRUPT:  # the same bytes twice
            return readings[-1].digest
        if verdict is ReadVerdict.UNSTABLE:
            raise unstable(f"{path}: bytes {offset}..{offset + size}")


def _digest_pieces(
    fd: int, memory: memoryview, size: int, offset: int, path: Path, file_hash: xxhash.xxh3_128 | None = None
) -> str:
    """Read and digest a range piece by piece in `LARGE` bytes of memory; also update `file_hash`."""
    hasher = xxhash.xxh3_128()
    for at in range(offset, offset + size, PIECE_IN_CACHE):
        piece = read_range(fd, memory, min(PIECE_IN_CACHE, offset + size - at), at, path)
        hasher.update(piece)
        if file_hash:
            file_hash.update(piece)
    return hasher.hexdigest()
