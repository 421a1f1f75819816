"""Take a file that another program wrote into a stage: by reflink, by hard link, or by a copy.

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

from tierd.core.chunking import cut
from tierd.core.corruption import proven
from tierd.core.errors import CorruptChunk
from tierd.core.manifest import CHUNK_SIZE, Chunk, File
from tierd.spool.describe import agreed_digest, describe_file
from tierd.spool.direct_io import LARGE, PAGE, memory_for, read_into, write_all
from tierd.spool.file_io import digest, sync_directory

How: TypeAlias = Literal["reflink", "link", "copy"]
_FICLONE = 0x40049409  # linux/fs.h
# The file system or the kernel's rules do not allow a link or a clone between the two paths.
_UNSUPPORTED = (
    *(errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS),
    *(errno.EMLINK, errno.ETXTBSY),
)


def adopt(fd: int, size: int, path: Path, name: str, *, link: bool, going: Callable[[], None]) -> tuple[File, How]:
    """Put an open file of another program at `path`, durably, and describe it.

    Args:
        fd: the other program's file, open for reading.
        size: its size in bytes.
        path: a path that does not exist, in a stage.
        name: the file's path inside its part, for the manifest.
        link: a hard link is allowed, because the program will not write to this file again.
        going: called before each chunk; what it raises ends the work.

    Raises:
        CorruptChunk: the file changed meanwhile.
        OSError: as the system reports it.
    """
    how: How = "reflink" if _clone(fd, path) else "link" if link and _link_open_file(fd, path) else "copy"
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


def unshare_below(home: Path) -> None:
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
    sizes = cut(lambda offset, length: os.pread(fd, length, offset), size, CHUNK_SIZE)
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

    return proven(read, str(path))
