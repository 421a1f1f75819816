"""Memory <-> file: the only code that reads or writes a checkpoint's bytes in the spool. Shared by client and daemon.

Law: bytes are verified from the producer's memory on. A digest is taken from memory before the first write, and what is
read back is not handed on until it equals that digest. After a failed write or fsync the file is abandoned: the caller
writes anew from the source and never calls fsync on it again.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import xxhash

from tierd.core.errors import CorruptChunk
from tierd.core.manifest import CHUNK_SIZE, Chunk, File, chunk_sizes

PAGE = 4096  # O_DIRECT alignment of memory, offsets and lengths on every Linux file system we know, bytes
_PIECE = 16 << 20  # one write(2), bytes; larger ones gain nothing (design, section 7)


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of `data` as 32 hex digits (big-endian, as `xxhsum -H128` prints it)."""
    return xxhash.xxh3_128_hexdigest(data)


def write_file(path: Path, name: str, data: bytes | bytearray | memoryview, chunk_size: int = CHUNK_SIZE) -> File:
    """Write `data` to a new file at `path` and make its content durable; directories are the caller's to sync.

    Args:
        name: the file's path inside its part, for the manifest.

    Returns:
        The file's description, whose digests were taken from `data` in memory.

    Raises:
        OSError: as the system reports it; the file must then be abandoned.
    """
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    chunks = tuple(Chunk(size=len(piece), xxh3_128=digest(piece)) for piece in _cut(view, chunk_size))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, view, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    return File(path=name, size=len(view), chunks=chunks)


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, in pieces."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _PIECE], offset + done)


def describe_file(path: Path, name: str, chunk_size: int = CHUNK_SIZE) -> File:
    """Digest and sync a file that somebody else wrote. Its bytes are vouched for from here on, not before."""
    fd = open_plain(path)
    try:
        os.fsync(fd)
        size = os.fstat(fd).st_size
        chunks, offset = [], 0
        for length in chunk_sizes(size, chunk_size):
            chunks.append(Chunk(size=length, xxh3_128=digest(_read(fd, offset, length, path))))
            offset += length
        if os.fstat(fd).st_size != size:
            raise CorruptChunk(f"{path}: it changed while it was being digested")
    finally:
        os.close(fd)
    return File(path=name, size=size, chunks=tuple(chunks))


def read_file(path: Path, file: File) -> bytearray:
    """All bytes of a file, verified chunk by chunk.

    Raises:
        CorruptChunk: size or digest differ; names the file and the byte range.
        OSError: the system could not read; says nothing about the bytes.
    """
    fd = open_plain(path)
    try:
        _check_size(fd, path, file)
        data = bytearray(file.size)
        view, offset = memoryview(data), 0
        for chunk in file.chunks:
            piece = view[offset : offset + chunk.size]
            _read_into(fd, offset, piece, path)
            _check(piece, chunk, path, offset)
            offset += chunk.size
        return data
    finally:
        os.close(fd)


def read_chunk(path: Path, file: File, index: int) -> bytearray:
    """One chunk of a file, verified; raises as `read_file` does."""
    fd = open_plain(path)
    try:
        _check_size(fd, path, file)
        offset = sum(chunk.size for chunk in file.chunks[:index])
        chunk = file.chunks[index]
        data = _read(fd, offset, chunk.size, path)
        _check(data, chunk, path, offset)
        return data
    finally:
        os.close(fd)


def bad_chunks(path: Path, file: File) -> list[tuple[int, int, CorruptChunk | OSError]]:
    """`(index, offset, reason)` of every chunk of a file that cannot be verified, unreadable ones included.

    A file that is too long is reported as a bad last chunk: writing that chunk and truncating makes it whole. An empty
    file that is missing or not empty is reported as chunk 0.
    """
    found: list[tuple[int, int, CorruptChunk | OSError]] = []
    offset = 0
    if not file.chunks:
        try:
            read_file(path, file)
        except (CorruptChunk, OSError) as error:
            found.append((0, 0, error))
    for index, chunk in enumerate(file.chunks):
        try:
            fd = open_plain(path)
            try:
                _check(_read(fd, offset, chunk.size, path), chunk, path, offset)
                if index == len(file.chunks) - 1:
                    _check_size(fd, path, file)
            finally:
                os.close(fd)
        except (CorruptChunk, OSError) as error:
            found.append((index, offset, error))
        offset += chunk.size
    return found


def sync_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _cut(view: memoryview, chunk_size: int) -> Iterator[memoryview]:
    offset = 0
    for length in chunk_sizes(len(view), chunk_size):
        yield view[offset : offset + length]
        offset += length


def open_plain(path: Path) -> int:
    """Open a file of a part for reading.

    Raises:
        CorruptChunk: it is missing, or something else than a plain file lies in its place.
    """
    try:
        # O_NONBLOCK: a FIFO in a file's place is refused below, not waited for.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptChunk(f"{path}: the file is missing") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptChunk(f"{path}: not a plain file, which no writer leaves there") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptChunk(f"{path}: not a plain file, which no writer leaves there")
    return fd


def _check_size(fd: int, path: Path, file: File) -> None:
    size = os.fstat(fd).st_size
    if size != file.size:
        raise CorruptChunk(f"{path}: {size} bytes, not the {file.size} of its manifest")


def _check(data: bytes | bytearray | memoryview, chunk: Chunk, path: Path, offset: int) -> None:
    if digest(data) != chunk.xxh3_128:
        raise CorruptChunk(f"{path}: bytes {offset}..{offset + chunk.size} differ from their digest")


def _read(fd: int, offset: int, size: int, path: Path) -> bytearray:
    data = bytearray(size)
    _read_into(fd, offset, memoryview(data), path)
    return data


def _read_into(fd: int, offset: int, view: memoryview, path: Path) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise CorruptChunk(f"{path}: it ends at byte {offset + done}, inside a chunk")
        done += count
