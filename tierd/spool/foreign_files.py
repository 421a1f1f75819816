"""Files that another program wrote: digest them, and take them into a stage by reflink, by hard link, or by a copy.

Invariant: the other program's file is never written. A hard link shares its blocks with the program, so a file of the
spool that has a second name is replaced before it is repaired (`unshare`). The digests are taken from the clone or the
link in the stage, or from the memory that a copy is written from. Bytes that come from the disk are read twice before,
because nobody else knows their digest.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import xxhash

from tierd.core.chunk_boundaries import content_chunk_sizes
from tierd.core.errors import CorruptChunk
from tierd.core.manifest import CHUNK_SIZE, Chunk, File
from tierd.core.storage_faults import Reading, ReadVerdict, judge_readings, read_until_proven, unstable_error
from tierd.spool.direct_io import LARGE, PAGE, memory_for, read_into, set_direct, write_all
from tierd.spool.file_io import digest, open_plain, sync_directory
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
        written: size in bytes and digest of everything that was written to the file, taken from the writer's memory.
            The file must be synced; its bytes are then verified from the writer's memory on.
        going: called before each chunk; what it raises ends the work.

    Raises:
        CorruptChunk: the file differs from what was written, or changed meanwhile.
        UnstableRead: the reads of it differ from each other.
    """

    def described() -> File:
        return _describe(path, name, chunk_size, written, going)

    return described() if written is None else read_until_proven(described, str(path))


def _describe(
    path: Path, name: str, chunk_size: int, expected: tuple[int, str] | None, going: Callable[[], None]
) -> File:
    fd = open_plain(path)
    try:
        if expected is None:
            os.fsync(fd)
        size = os.fstat(fd).st_size
        chunks, offset = [], 0
        sizes = content_chunk_sizes(lambda offset, length: os.pread(fd, length, offset), size, chunk_size)
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
    until two reads agree, one of them past the page cache. The file is open without O_DIRECT, and `memory` has `LARGE`
    bytes of `memory_for`, which are overwritten.

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
        verdict = judge_readings(readings, paths=2)
        if verdict is ReadVerdict.CORRUPT:  # the same bytes twice
            return readings[-1].digest
        if verdict is ReadVerdict.UNSTABLE:
            raise unstable_error(f"{path}: bytes {offset}..{offset + size}")


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


AdoptionMethod: TypeAlias = Literal["reflink", "link", "copy"]
_FICLONE = 0x40049409  # linux/fs.h
# The file system or the kernel's rules do not allow a link or a clone between the two paths.
_UNSUPPORTED = (
    *(errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS),
    *(errno.EMLINK, errno.ETXTBSY),
)


def adopt(
    fd: int, size: int, path: Path, name: str, *, link: bool, going: Callable[[], None]
) -> tuple[File, AdoptionMethod]:
    """Put another program's file, which is open and has `size` bytes, at `path` in a stage, durably, and describe it.

    Args:
        name: the file's path inside its part, for the manifest.
        link: a hard link is allowed, because the program will not write to this file again.
        going: called before each chunk; what it raises ends the work.

    Raises:
        CorruptChunk: the file changed meanwhile.
        OSError: as the system reports it.
    """
    how: AdoptionMethod = "reflink" if _clone(fd, path) else "link" if link and _link_open_file(fd, path) else "copy"
    if how == "copy":
        return _copy_file(fd, size, path, name, going), how
    file = describe_file(path, name, going=going)
    if file.size != size:
        raise CorruptChunk(f"{path}: it had {size} bytes, and has {file.size}")
    return file, how


def is_open_for_writing(fd: int) -> bool:
    """Whether a process on this machine has an open file open for writing, or maps it so.

    The kernel grants a read lease only if none has. It grants leases only on our own files, and only on some file
    systems; where it does not, the result is False. The lease is released at once.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # a writer in between signals us; SIGIO, the default, would kill
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False


def is_shared(path: Path) -> bool:
    """Whether a plain file has a second name, by which another program may know it."""
    try:
        return path.lstat().st_nlink > 1 and path.is_file() and not path.is_symlink()
    except FileNotFoundError:
        return False


def unshare(path: Path) -> None:
    """Replace a file that has a second name by a durable copy, so that a write changes no other program's file."""
    if not is_shared(path):
        return
    fresh = path.with_name(f".{secrets.token_hex(8)}")
    try:
        shutil.copyfile(path, fresh)
        fresh.chmod(0o600)
        fd = os.open(fresh, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # before the rename, which a power loss could otherwise keep without the data
        finally:
            os.close(fd)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def unshare_tree(home: Path) -> None:
    """Replace each file below a directory that has a name outside of it as well by a durable copy of its own.

    A program that writes by the other name would change a committed checkpoint. Names inside the directory may be
    links of each other.
    """
    files: dict[tuple[int, int], list[Path]] = {}
    links: dict[tuple[int, int], int] = {}
    for directory, _, names in os.walk(home):
        for name in names:
            path = Path(directory, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                inode = status.st_dev, status.st_ino
                files.setdefault(inode, []).append(path)
                links[inode] = status.st_nlink
    for inode, paths in files.items():
        if links[inode] > len(paths):
            for path in paths:
                unshare(path)


def _clone(fd: int, path: Path) -> bool:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.ioctl(target, _FICLONE, fd)
        return True
    except OSError as error:
        path.unlink()
        if error.errno in _UNSUPPORTED:
            return False
        raise
    finally:
        os.close(target)


def _link_open_file(fd: int, path: Path) -> bool:
    """Link the open file itself, not whatever has its name by now."""
    if os.fstat(fd).st_uid != os.geteuid():
        return False  # its owner could change it, or take it away from us
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=directory, follow_symlinks=True)
    except OSError as error:
        if error.errno in (*_UNSUPPORTED, errno.ENOENT):  # ENOENT: deleted meanwhile, or /proc is not there
            return False
        raise
    finally:
        os.close(directory)
    return True


def _copy_file(fd: int, size: int, path: Path, name: str, going: Callable[[], None]) -> File:
    sizes = content_chunk_sizes(lambda offset, length: os.pread(fd, length, offset), size, CHUNK_SIZE)
    memory, pieces = memory_for(max(sizes, default=0) + PAGE), memory_for(LARGE)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        chunks, offset = [], 0
        for length in sizes:
            going()
            digested = agreed_digest(fd, pieces, length, offset, path)
            write_all(target, _read(fd, memory, length, offset, path, digested), offset)
            chunks.append(Chunk(size=length, xxh3_128=digested))
            offset += length
        os.fsync(target)
    finally:
        os.close(target)
    return File(path=name, size=size, chunks=tuple(chunks))


def _read(fd: int, memory: memoryview, size: int, offset: int, path: Path, expected: str) -> memoryview:
    """Read a range whose digest is known."""

    def read() -> memoryview:
        if read_into(fd, memory, size, offset) < size:
            raise CorruptChunk(f"{path}: it became shorter than its {offset + size} bytes")
        actual = digest(memory[:size])
        if actual != expected:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            error = CorruptChunk(f"{path}: it changed while it was copied")
            error.read_digest = actual
            raise error
        return memory[:size]

    return read_until_proven(read, str(path))
