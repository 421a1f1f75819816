"""Memory <-> file: the only code that reads or writes a checkpoint's bytes in the spool. Shared by client and daemon.

Invariant: bytes are verified from the producer's memory on. A digest is taken from memory before the first write, and
bytes that are read back are returned only if they equal that digest. `core.chunking` decides where chunks end; the disk
is read and written in whole pages regardless of chunks. After a failed write or fsync the file is abandoned: the caller
writes anew from the source and never calls fsync on that file again.
"""

from __future__ import annotations

import errno
import mmap
import operator
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import xxhash

from tierd.core.chunking import cut
from tierd.core.errors import CorruptChunk
from tierd.core.manifest import CHUNK_SIZE, Chunk, File
from tierd.spool.direct_io import (
    LARGE,
    PAGE,
    PIECE,
    ahead,
    is_spare,
    memory_for,
    read_into,
    reserve,
    set_direct,
    settle,
    write_all,
)

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return xxh3-128 of `data` as 32 hex digits (big-endian, as `xxhsum -H128` prints it)."""
    return xxhash.xxh3_128_hexdigest(data)


class FileWriter:
    """Write a file from memory. A thread digests the next bytes while the previous bytes are written to the disk.

    Args:
        path: a new file; if `recycled`, a file to overwrite, unless another process holds it.
        name: the file's path inside its part, for the manifest.
        size: the file's final size, in bytes.
        chunk_size: the size of the largest chunk, in bytes. The first piece decides where chunks end.
        recycled: overwrite the file at `path`.

    Attributes:
        direct: whether all whole pages were written past the page cache.
        recycled: whether the file overwrote the blocks of the file that existed.

    Raises:
        OSError: as the system reports it, from any method; the caller must then abandon the file.
    """

    def __init__(
        self, path: Path, name: str, size: int, chunk_size: int = CHUNK_SIZE, *, recycled: bool = False
    ) -> None:
        self._name, self._size, self._chunk_size, self._done = name, size, chunk_size, 0
        self._cuts: list[int] | None = None  # sizes of the unfinished chunks, the next one last
        self._hash, self._hashed, self._chunks = xxhash.xxh3_128(), 0, list[Chunk]()
        over = _open_spare(path) if recycled else None
        self.recycled = over is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600) if over is None else over
        try:
            if os.fstat(self._fd).st_size > size:
                os.ftruncate(self._fd, size)
            if size >= LARGE:
                reserve(self._fd, size)
            self.direct = size >= LARGE and set_direct(self._fd, True)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, piece: memoryview) -> None:
        """Write the next bytes: whole pages, except for the file's last piece. The caller may reuse `piece` afterwards.

        Raises:
            ValueError: there are more bytes than `size`.
        """
        if self._done + len(piece) > self._size:
            raise ValueError(f"{self._name}: more than the {self._size} bytes that were announced")
        if self._cuts is None:
            self._cuts = cut(lambda offset, size: piece[offset : offset + size], self._size, self._chunk_size)[::-1]
        with ahead(self._digested(piece), worth=len(piece) > PIECE) as digested:
            for offset, data in digested:
                self.direct &= write_all(self._fd, data, offset)

    def finish(self) -> File:
        """Make the content durable, and return its description with the digests that were taken from memory.

        Raises:
            ValueError: there are fewer bytes than `size`.
        """
        if self._done != self._size:
            raise ValueError(f"{self._name}: {self._done} bytes, not the {self._size} that were announced")
        os.fsync(self._fd)
        return File(path=self._name, size=self._size, chunks=tuple(self._chunks))

    def _digested(self, piece: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Digest `piece` in steps of `PIECE` bytes, and yield the offset in the file and the bytes of each step."""
        for begin in range(0, len(piece), PIECE):
            data, offset = piece[begin : begin + PIECE], self._done
            self._done += len(data)
            self._digest(data)
            yield offset, data

    def _digest(self, data: memoryview) -> None:
        assert self._cuts is not None
        while data:
            size = self._cuts[-1]
            here = data[: size - self._hashed]
            data = data[len(here) :]
            self._hash.update(here)
            self._hashed += len(here)
            if self._hashed == size:
                self._chunks.append(Chunk(size=size, xxh3_128=self._hash.hexdigest()))
                self._cuts.pop()
                self._hash.reset()
                self._hashed = 0

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def write_file(path: Path, name: str, data: Buffer, chunk_size: int = CHUNK_SIZE) -> File:
    """Write `data` to a new file as `FileWriter` does, and make it durable. The caller syncs the directories."""
    view = flat(data)
    with FileWriter(path, name, len(view), chunk_size) as writer:
        writer.write(view)
        return writer.finish()


def flat(data: Buffer) -> memoryview:
    """Return any buffer as a memoryview of bytes."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _open_spare(path: Path) -> int | None:
    """Open a file to overwrite it. If another process may hold the file, remove it and return None."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if is_spare(fd):
                return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
    except OSError:
        pass
    path.unlink(missing_ok=True)
    return None


def describe_file(
    path: Path,
    name: str,
    chunk_size: int = CHUNK_SIZE,
    *,
    written: tuple[int, str] | None = None,
    going: Callable[[], None] = lambda: None,
) -> File:
    """Digest and sync a file that another library wrote.

    Without `written`, the file's bytes are verified from this call on, not before.

    Args:
        path: the file.
        name: the file's path inside its part, for the manifest.
        chunk_size: the size of the largest chunk, in bytes.
        written: size in bytes and digest of everything that was written to the file, taken from the writer's memory.
            The file must be synced; its bytes are then verified from the writer's memory on.
        going: called before each chunk; what it raises ends the work.

    Raises:
        CorruptChunk: the file differs from what was written, or changed meanwhile.
    """
    fd = open_plain(path)
    try:
        if written is None:
            os.fsync(fd)
        size = os.fstat(fd).st_size
        chunks, offset = [], 0
        sizes = cut(lambda offset, length: os.pread(fd, length, offset), size, chunk_size)
        memory = memory_for(max(sizes, default=0) + PAGE)
        whole = xxhash.xxh3_128()
        for length in sizes:
            going()
            data = _read(fd, memory, length, offset, path)
            chunks.append(Chunk(size=length, xxh3_128=digest(data)))
            whole.update(data if written else b"")
            offset += length
        if os.fstat(fd).st_size != size:
            raise CorruptChunk(f"{path}: it changed while it was being digested")
        if written and written != (size, whole.hexdigest()):
            raise CorruptChunk(f"{path}: its {size} bytes are not the {written[0]} that were written to it")
    finally:
        os.close(fd)
    return File(path=name, size=size, chunks=tuple(chunks))


def read_file(
    path: Path,
    file: File,
    memory: memoryview | None = None,
    verified: Callable[[int], None] = lambda end: None,
) -> memoryview:
    """Read all bytes of a file into writable memory, verified chunk by chunk.

    One chunk is digested while the next is read.

    Args:
        path: the file.
        file: the file's description in the manifest.
        memory: whole pages to read into; if None, memory is allocated.
        verified: called after every chunk with the end of the verified bytes, as an offset in bytes.

    Raises:
        CorruptChunk: size or digest differ; the message names the file and the byte range.
        OSError: the system could not read; this says nothing about the bytes.
    """
    fd = _open_direct(path, file.size)
    try:
        _check_size(fd, path, file)
        into = memory_for(file.size) if memory is None else memory
        with ahead(_chunks_read(fd, into, path, file), worth=len(file.chunks) > 1) as chunks:
            for offset, chunk in chunks:
                _check(into[offset : offset + chunk.size], chunk, path, offset)
                verified(offset + chunk.size)
        return settle(into, file.size) if memory is None else into[: file.size]
    finally:
        os.close(fd)


def _chunks_read(fd: int, memory: memoryview, path: Path, file: File) -> Iterator[tuple[int, Chunk]]:
    offset = done = 0
    for chunk in file.chunks:
        while done < offset + chunk.size:
            size = min(PIECE, file.size - done)
            _read_pages(fd, memory[done:], size, done, path)
            done += size
        yield offset, chunk
        offset += chunk.size


def check_bytes(data: memoryview, file: File, verified: Callable[[int], None] = lambda end: None) -> None:
    """Verify all bytes of a file that are in memory already; `verified` and `CorruptChunk` are as for `read_file`."""
    if len(data) != file.size:
        raise CorruptChunk(f"{file.path}: {len(data)} bytes, not the {file.size} of its manifest")
    offset = 0
    for chunk in file.chunks:
        _check(data[offset : offset + chunk.size], chunk, file.path, offset)
        offset += chunk.size
        verified(offset)


def read_chunk(path: Path, file: File, index: int) -> memoryview:
    """Read and verify one chunk of a file; raises as `read_file` does."""
    memory = _memory_for_chunks(file, file.chunks[index].size)
    data = read_chunks(path, file, index, index + 1, memory)
    settle(memory, len(memory))
    return data


def read_chunks(path: Path, file: File, first: int, end: int, memory: memoryview) -> memoryview:
    """Read and verify the chunks from `first` to before `end` of a file as one piece; raises as `read_file` does.

    Args:
        path: the file.
        file: the file's description in the manifest.
        first: the index of the first chunk.
        end: the index after the last chunk.
        memory: memory to read into: two pages larger than the chunks. To read past the page cache, it must consist of
            whole pages of its own (`memory_for` at least `LARGE`).
    """
    offset = sum(map(operator.attrgetter("size"), file.chunks[:first]))
    size = sum(map(operator.attrgetter("size"), file.chunks[first:end]))
    fd = _open_direct(path, file.size)
    try:
        _check_size(fd, path, file)
        data, done = _read(fd, memory, size, offset, path), 0
        for chunk in file.chunks[first:end]:
            _check(data[done : done + chunk.size], chunk, path, offset + done)
            done += chunk.size
        return data
    finally:
        os.close(fd)


def bad_chunks(path: Path, file: File) -> list[tuple[int, int, CorruptChunk | OSError]]:
    """Return `(index, offset, reason)` of every chunk of a file that cannot be verified, unreadable chunks included.

    A file that is too long is reported as a bad last chunk, because writing that chunk and truncating repairs the file.
    An empty file that is missing or not empty is reported as chunk 0.
    """
    found: list[tuple[int, int, CorruptChunk | OSError]] = []
    offset = 0
    if not file.chunks:
        try:
            read_file(path, file)
        except (CorruptChunk, OSError) as error:
            found.append((0, 0, error))
    memory = _memory_for_chunks(file, max((chunk.size for chunk in file.chunks), default=0))
    for index, chunk in enumerate(file.chunks):
        try:
            fd = _open_direct(path, file.size)
            try:
                _check(_read(fd, memory, chunk.size, offset, path), chunk, path, offset)
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


def remove(path: Path, *, best_effort: bool = False) -> None:
    """Remove a path: a directory with its content, anything else without opening or following it.

    A path that is no directory is not opened, because opening a FIFO would block forever.

    Args:
        path: the path to remove.
        best_effort: of a directory, remove as much as possible and ignore errors.

    Raises:
        OSError: the path does not exist, or cannot be removed.
    """
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path, ignore_errors=best_effort)
    else:
        path.unlink()


def make_private(directory: Path) -> None:
    """Create a directory and its missing parents, unless they exist, for this user only, regardless of the umask."""
    try:
        directory.mkdir(mode=0o700)
    except FileNotFoundError:
        make_private(directory.parent)
        make_private(directory)
    except FileExistsError:
        if not directory.is_dir():
            raise


def private(path: str, flags: int) -> int:
    """An `opener` for `open` that creates files for this user only, regardless of the umask."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def open_plain(path: Path) -> int:
    """Open a file of a part for reading.

    Raises:
        CorruptChunk: the file is missing, or the path is not a plain file.
    """
    try:
        # O_NONBLOCK, so that opening a FIFO in a file's place returns; the check below refuses the FIFO.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptChunk(f"{path}: the file is missing") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptChunk(f"{path}: not a plain file, which no writer leaves there") from error
        raise
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    raise CorruptChunk(f"{path}: not a plain file, which no writer leaves there")


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


def _check(data: memoryview, chunk: Chunk, path: Path | str, offset: int) -> None:
    if digest(data) != chunk.xxh3_128:
        raise CorruptChunk(f"{path}: bytes {offset}..{offset + chunk.size} differ from their digest")


def _memory_for_chunks(file: File, largest: int) -> memoryview:
    """Allocate memory for `_read` of a chunk of up to `largest` bytes, aligned if the file is read directly."""
    return memory_for(max(largest + 2 * PAGE, min(file.size, LARGE)))


def _read(fd: int, memory: memoryview, size: int, offset: int, path: Path) -> memoryview:
    """Read `size` bytes at `offset` into `memory`, together with the rest of their first and last pages."""
    lead = offset % PAGE
    _read_pages(fd, memory, lead + size, offset - lead, path)
    return memory[lead : lead + size]


def _read_pages(fd: int, memory: memoryview, size: int, offset: int, path: Path) -> None:
    found = read_into(fd, memory, size, offset)
    if found < size:
        raise CorruptChunk(f"{path}: it ends at byte {offset + found}, inside a chunk")
