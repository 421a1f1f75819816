"""Read a checkpoint's files in the spool, and verify them. Shared by client and daemon.

Invariant: bytes are returned only if they equal the digest that was taken before the first write (`spool.file_io`). The
disk is read in whole pages regardless of chunks. A chunk counts as corrupt only if the same wrong bytes were read past
the page cache and through it (`core.storage_faults`).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from tierd.core.errors import CorruptChunk
from tierd.core.manifest import Chunk, File
from tierd.core.storage_faults import Reading, ReadVerdict, judge_readings, unstable_error
from tierd.spool.direct_io import LARGE, PAGE, PIECE, ahead, finish_read, memory_for, read_cached, read_into, set_direct
from tierd.spool.file_io import digest, open_plain

PIECE_IN_CACHE = 512 << 10  # bytes; a piece of this size is still in a core's own cache when it is digested


def read_file(path: Path, file: File) -> memoryview:
    """Read all bytes of a file into writable memory, verified chunk by chunk; one is digested while the next is read.

    Raises:
        CorruptChunk: size or digest differ; the message names the file and the byte range.
        OSError: the system could not read; this says nothing about the bytes.
    """
    fd = _open_direct(path, file.size)
    try:
        _check_size(fd, path, file)
        into = memory_for(file.size)
        with ahead(_read_chunks_in_turn(fd, into, path, file), worth=len(file.chunks) > 1) as chunks:
            for offset, chunk in chunks:
                _verify_chunk_or_reread(into[offset : offset + chunk.size], chunk, path, file, offset)
        return finish_read(into, file.size)
    finally:
        os.close(fd)


def _read_chunks_in_turn(fd: int, memory: memoryview, path: Path, file: File) -> Iterator[tuple[int, Chunk]]:
    offset = position = 0
    for chunk in file.chunks:
        while position < offset + chunk.size:
            size = min(PIECE, file.size - position)
            _read_pages(fd, memory[position:], size, position, path)
            position += size
        yield offset, chunk
        offset += chunk.size


def check_bytes(data: memoryview, file: File, verified: Callable[[int], None] = lambda end: None) -> None:
    """Verify all bytes of a file that are in memory already; `CorruptChunk` is as for `read_file`.

    `verified` is called after every chunk with the end of the verified bytes.
    """
    if len(data) != file.size:
        raise CorruptChunk(f"{file.path}: {len(data)} bytes, not the {file.size} of its manifest")
    offset = 0
    for chunk in file.chunks:
        _verify_chunk(data[offset : offset + chunk.size], chunk, file.path, offset)
        offset += chunk.size
        verified(offset)


def read_chunk(path: Path, file: File, index: int) -> memoryview:
    """Read and verify one chunk of a file; raises as `read_file` does."""
    memory = memory_for(chunk_buffer_size(file, index))
    data = read_chunks(path, file, index, index + 1, memory)
    finish_read(memory, len(memory))
    return data


def digest_cached(fd: int, memory: memoryview, size: int, offset: int, *, keep: bool = False) -> str | None:
    """Read `size` bytes from the page cache and digest them; None if they are not all there.

    With `keep`, all of them are in `memory` in the end; otherwise only its first `PIECE_IN_CACHE` bytes are used.
    """
    hasher = xxhash.xxh3_128()
    for at in range(0, size, PIECE_IN_CACHE):
        begin = at if keep else 0
        piece = memory[begin : begin + min(PIECE_IN_CACHE, size - at)]
        if not read_cached(fd, piece, len(piece), offset + at):
            return None
        hasher.update(piece)
    return hasher.hexdigest()


def chunk_buffer_size(file: File, index: int) -> int:
    """Return the bytes of memory into which `read_chunks` reads one chunk."""
    return _buffer_bytes(file, file.chunks[index].size)


def read_recent_chunk(path: Path, file: File, index: int, memory: memoryview) -> memoryview:
    """Read and verify one chunk of a file: from the page cache if it is there, past it otherwise.

    Only for a reader that needs the right bytes. One that asks whether the disk still has them uses `read_chunk`.
    `memory` has `chunk_buffer_size` bytes of `memory_for`; the result is a part of it. Raises as `read_file` does.
    """
    chunk, offset = file.chunks[index], sum(map(operator.attrgetter("size"), file.chunks[:index]))
    fd = open_plain(path)
    try:
        _check_size(fd, path, file)
        digested = digest_cached(fd, memory, chunk.size, offset, keep=True)
        if digested == chunk.xxh3_128:
            return memory[: chunk.size]
    finally:
        os.close(fd)
    return read_chunks(path, file, index, index + 1, memory)


def read_chunks(
    path: Path, file: File, first: int, end: int, memory: memoryview, offset: int | None = None
) -> memoryview:
    """Read and verify the chunks from `first` to before `end` of a file as one piece; raises as `read_file` does.

    `memory` is two pages larger than the chunks. To read past the page cache, it must consist of whole pages of its own
    (`memory_for` at least `LARGE`). `offset` is that of the first chunk, if the caller knows it.
    """
    offset = sum(map(operator.attrgetter("size"), file.chunks[:first])) if offset is None else offset
    size = sum(map(operator.attrgetter("size"), file.chunks[first:end]))
    fd = _open_direct(path, file.size)
    try:
        _check_size(fd, path, file)
        data, position = read_range(fd, memory, size, offset, path), 0
        for chunk in file.chunks[first:end]:
            _verify_chunk_or_reread(data[position : position + chunk.size], chunk, path, file, offset + position)
            position += chunk.size
        return data
    finally:
        os.close(fd)


def bad_chunks(path: Path, file: File) -> list[tuple[int, int, CorruptChunk | OSError]]:
    """Return `(index, offset, reason)` of every chunk of a file that cannot be verified, unreadable chunks included.

    A file that is too long is reported as a bad last chunk, because writing that chunk and truncating repairs the file.
    An empty file that is missing or not empty is reported as chunk 0.
    """
    defects: list[tuple[int, int, CorruptChunk | OSError]] = []
    offset = 0
    if not file.chunks:
        try:
            read_file(path, file)
        except (CorruptChunk, OSError) as error:
            defects.append((0, 0, error))
    memory = memory_for(_buffer_bytes(file, max((chunk.size for chunk in file.chunks), default=0)))
    for index, chunk in enumerate(file.chunks):
        try:
            fd = _open_direct(path, file.size)
            try:
                _verify_chunk_or_reread(read_range(fd, memory, chunk.size, offset, path), chunk, path, file, offset)
                if index == len(file.chunks) - 1:
                    _check_size(fd, path, file)
            finally:
                os.close(fd)
        except (CorruptChunk, OSError) as error:
            defects.append((index, offset, error))
        offset += chunk.size
    return defects


def _open_direct(path: Path, size: int) -> int:
    """Open a file of `size` bytes as `open_plain` does, with O_DIRECT if it is large."""
    fd = open_plain(path)
    if size >= LARGE:
        set_direct(fd, True)
    return fd


def _check_size(fd: int, path: Path, file: File) -> None:
    size = os.fstat(fd).st_size
    if size != file.size:
        raise CorruptChunk(f"{path}: {size} bytes, not the {file.size} of its manifest")


def _verify_chunk(data: memoryview, chunk: Chunk, path: Path | str, offset: int) -> None:
    if digest(data) != chunk.xxh3_128:
        raise CorruptChunk(f"{path}: bytes {offset}..{offset + chunk.size} differ from their digest")


def _verify_chunk_or_reread(data: memoryview, chunk: Chunk, path: Path, file: File, offset: int) -> None:
    """Verify a chunk that was just read. If it is wrong, read it again, and put the right bytes into `data`.

    The reads alternate between both paths, because a wrong page in memory is wrong in every read through the cache.

    Raises:
        CorruptChunk: both paths gave the same wrong bytes.
        UnstableRead: the reads differ from each other.
        OSError: the system could not read.
    """
    try:
        return _verify_chunk(data, chunk, path, offset)
    except CorruptChunk as error:
        wrong = error.with_traceback(None)
    read_digest, access = digest(data), "direct" if file.size >= LARGE else "cached"
    readings = [Reading(read_digest, access, is_right=read_digest == chunk.xxh3_128)]
    memory = memory_for(max(LARGE, chunk.size + 2 * PAGE))  # `data` may be the cause, and is not aligned
    while True:
        verdict = judge_readings(readings, paths=2)
        if verdict is ReadVerdict.RIGHT:
            return None
        if verdict is ReadVerdict.CORRUPT:
            raise wrong
        if verdict is ReadVerdict.UNSTABLE:
            raise unstable_error(str(wrong)) from wrong
        access = "cached" if access == "direct" else "direct"
        fd = open_plain(path)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if access == "direct":
                set_direct(fd, True)
            reread = read_range(fd, memory, chunk.size, offset, path)
        finally:
            os.close(fd)
        read_digest = digest(reread)
        if read_digest == chunk.xxh3_128:
            data[:] = reread
        readings.append(Reading(read_digest, access, is_right=read_digest == chunk.xxh3_128))


def _buffer_bytes(file: File, largest: int) -> int:
    """Return the bytes that `read_range` needs for a chunk of up to `largest` bytes; aligned for a large file."""
    return max(largest + 2 * PAGE, min(file.size, LARGE))


def read_range(fd: int, memory: memoryview, size: int, offset: int, path: Path) -> memoryview:
    """Read `size` bytes at `offset` into `memory`, together with the rest of their first and last pages."""
    lead = offset % PAGE
    _read_pages(fd, memory, lead + size, offset - lead, path)
    return memory[lead : lead + size]


def _read_pages(fd: int, memory: memoryview, size: int, offset: int, path: Path) -> None:
    length = read_into(fd, memory, size, offset)
    if length < size:
        raise CorruptChunk(f"{path}: it ends at byte {offset + length}, inside a chunk")
