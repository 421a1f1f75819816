"""Memory -> file: the only code that writes a checkpoint's bytes in the spool. Shared by client and daemon.

Invariant: bytes are verified from the producer's memory on. A digest is taken from memory before the first write;
`spool.verified_reads` returns only bytes that equal it. `core.chunk_boundaries` decides where chunks end; the
disk is written in whole pages regardless of chunks. After a failed write or fsync the file is abandoned: the caller
writes anew from the source and never calls fsync on that file again.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import xxhash

from tierd.core.chunk_boundaries import content_chunk_sizes
from tierd.core.errors import ConfigError, CorruptChunk
from tierd.core.manifest import CHUNK_SIZE, Chunk, File
from tierd.spool.direct_io import LARGE, PIECE, ahead, is_overwritable, reserve, set_direct, write_all

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return xxh3-128 of `data` as 32 hex digits (big-endian, as `xxhsum -H128` prints it)."""
    return xxhash.xxh3_128_hexdigest(data)


class FileWriter:
    """Write a file from memory. A thread digests the next bytes while the previous bytes are written to the disk.

    Args:
        path: a new file; if `recycled`, a file to overwrite, unless another process holds it.
        name: the file's path inside its part, for the manifest.
        size: the file's final size, in bytes. The first piece decides where its chunks end.

    Attributes:
        direct: whether all whole pages were written past the page cache.
        recycled: whether the file overwrote the blocks of the file that existed.

    Raises:
        OSError: as the system reports it, from any method; the caller must then abandon the file.
    """

    def __init__(
        self, path: Path, name: str, size: int, chunk_size: int = CHUNK_SIZE, *, recycled: bool = False
    ) -> None:
        self._name, self._size, self._chunk_size, self._written_bytes = name, size, chunk_size, 0
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

        Raises ValueError for more bytes than `size`.
        """
        if self._written_bytes + len(piece) > self._size:
            raise ValueError(f"{self._name}: more than the {self._size} bytes that were announced")
        if self._cuts is None:
            self._cuts = content_chunk_sizes(
                lambda offset, size: piece[offset : offset + size], self._size, self._chunk_size
            )[::-1]
        with ahead(self._digested(piece), worth=len(piece) > PIECE) as digested:
            for offset, data in digested:
                self.direct &= write_all(self._fd, data, offset)

    def finish(self) -> File:
        """Make the content durable, and return its description with the digests that were taken from memory.

        Raises ValueError for fewer bytes than `size`.
        """
        if self._written_bytes != self._size:
            raise ValueError(f"{self._name}: {self._written_bytes} bytes, not the {self._size} that were announced")
        os.fsync(self._fd)
        return File(path=self._name, size=self._size, chunks=tuple(self._chunks))

    def _digested(self, piece: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Digest `piece` in steps of `PIECE` bytes, and yield the offset in the file and the bytes of each step."""
        for begin in range(0, len(piece), PIECE):
            data, offset = piece[begin : begin + PIECE], self._written_bytes
            self._written_bytes += len(data)
            self._digest(data)
            yield offset, data

    def _digest(self, data: memoryview) -> None:
        assert self._cuts is not None
        while data:
            size = self._cuts[-1]
            piece = data[: size - self._hashed]
            data = data[len(piece) :]
            self._hash.update(piece)
            self._hashed += len(piece)
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
    view = flat_bytes(data)
    with FileWriter(path, name, len(view), chunk_size) as writer:
        writer.write(view)
        return writer.finish()


def flat_bytes(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _open_spare(path: Path) -> int | None:
    """Open a file to overwrite it. If another process may hold the file, remove it and return None."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if is_overwritable(fd):
                return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
    except OSError:
        pass
    path.unlink(missing_ok=True)
    return None


def sync_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    fd = open_directory(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_directory(path: Path) -> int:
    """Open a directory to sync it, or to rename in it."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def remove(path: Path, *, best_effort: bool = False) -> None:
    """Remove a path: a directory with its content, anything else without opening or following it.

    A path that is no directory is not opened, because opening a FIFO would block forever. With `best_effort`, as much
    as possible of a directory is removed, without errors. Raises OSError if the path does not exist, or cannot be
    removed.
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


def private_opener(path: str, flags: int) -> int:
    """An `opener` for `open` that creates files for this user only, regardless of the umask.

    A link in the file's place is not followed, and a FIFO does not block: both raise `OSError`.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def replace_private(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file that only this user can access, by a rename, so that no reader sees half of it.

    A write that was cut off, or failed, leaves at most one file. Without `durable`, nothing is synced.
    """
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)  # of a write that was cut off, or an odd file in its place
        with open(fresh, "xb", opener=private_opener) as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def drop_cached(home: Path) -> None:
    """Drop a file, or all files below a directory, from the page cache. Best effort.

    A reader calls this before its second read, because a bit may have flipped in memory only.
    """
    with suppress(OSError):
        for path in (home, *home.rglob("*")):
            with suppress(CorruptChunk, OSError):
                fd = open_plain(path)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


def exists(path: Path) -> bool:
    """Whether there is anything at `path`. Raises OSError, which `Path.exists` hides since Python 3.14."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def open_own(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600, *, follow: bool = False) -> int:
    """Open a small file of tierd's in a directory that other programs write; a FIFO in its place never blocks.

    Raises:
        ConfigError: the path is a link and not `follow`, a FIFO, a directory or a device; the message says what to do.
        OSError: as `os.open`.
    """
    refused = ConfigError(
        f"{path}: not a plain file, so neither tierd nor a program saved to it; remove it or rename it"
    )
    try:
        # O_NONBLOCK, so that opening a FIFO in a file's place returns; the check below refuses the FIFO.
        fd = os.open(path, flags | (0 if follow else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise refused from error
        raise
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    raise refused


def open_plain(path: Path) -> int:
    """Open a file of a part for reading. Raises `CorruptChunk` if it is missing, or the path is not a plain file."""
    try:
        return open_own(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptChunk(f"{path}: the file is missing") from error
    except ConfigError as error:
        raise CorruptChunk(f"{path}: not a plain file, which no writer leaves there") from error


def names_in(path: Path) -> list[str]:
    """List the names in a directory; none if it does not exist."""
    try:
        return os.listdir(path)  # noqa: PTH208  # there may be thousands, and none needs a Path
    except (FileNotFoundError, NotADirectoryError):
        return []
