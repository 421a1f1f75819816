"""The local files of downloads: a part's files, and the directory in which a restore gathers them. Synchronous."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tierd.core.errors import ConfigError
from tierd.core.manifest import File
from tierd.spool.direct_io import write_pages
from tierd.spool.file_io import private_opener, remove, sync_directory
from tierd.spool.stage import try_lock_stage

log = logging.getLogger("tierd.daemon")


@dataclass(slots=True)
class TargetFile:
    """A file of the part."""

    number: int
    file: File
    path: Path
    existed: bool  # whether the file existed before
    todo: set[int]  # the chunks that must still be right before the file is synced
    shared: bool = False  # whether another program may know the file by a second name, so that it must not be written
    # Index and offset of the chunks that were found right while the file was shared.
    right_chunks: list[tuple[int, int]] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the file is replaced by a copy of its own
    fd: int = -1  # open from the first write to the sync, so that a failed write-back is noticed

    def open(self, flags: int = os.O_WRONLY) -> None:
        if self.fd < 0:
            self.fd = private_opener(str(self.path), flags)

    def sync(self) -> None:
        self.open(os.O_RDONLY)  # read-only, because a file without writes may not be writable
        os.fsync(self.fd)
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def chunks_to_write(targets: list[TargetFile]) -> Iterator[tuple[TargetFile, int, int]]:
    for target in targets:
        offset = 0
        for index, chunk in enumerate(target.file.chunks):
            if index in target.todo:
                yield target, index, offset
            offset += chunk.size


def is_hole(path: Path, offset: int, size: int) -> bool:
    """Whether the file system reports that a range of a file was never written."""
    fd = private_opener(str(path), os.O_RDONLY)
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + size
    except OSError as error:
        return error.errno == errno.ENXIO  # a hole up to the end
    finally:
        os.close(fd)


def write_at(path: Path, data: memoryview, offset: int) -> None:
    """Write at a file's offset. Each call opens its own descriptor, because O_DIRECT belongs to the descriptor."""
    fd = private_opener(str(path), os.O_WRONLY)
    try:
        write_pages(fd, data, offset)
    finally:
        os.close(fd)


def clear_path(home: Path, name: str) -> None:
    """Remove obstacles from a file's path: a link, a directory in the file's place, a file in a directory's place."""
    parent = home
    for piece in name.split("/")[:-1]:
        parent /= piece
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            parent.unlink()
    path = home / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        remove(path)


def remove_other_files(home: Path, files: set[str]) -> None:
    """Remove everything except `files` from a directory that must hold nothing else."""
    above = {name.rsplit("/", depth)[0] for name in files for depth in range(1, name.count("/") + 1)}
    for directory, names, leaves in os.walk(home):
        parent = Path(directory)
        for name in (*names, *leaves):
            inside = (parent / name).relative_to(home).as_posix()
            if inside in files or inside in above:
                continue
            remove(parent / name)
            if name in names:  # so that os.walk does not enter the removed directory
                names.remove(name)


def sync_directories(home: Path) -> None:
    for directory, _, _ in os.walk(home, topdown=False):
        sync_directory(Path(directory))


def check_restore_target(target: Path) -> Path:
    """Return the path of a directory that a finished one may replace: absent or empty."""
    target = target.resolve() if target.is_symlink() else target.absolute()
    if target.is_mount():
        raise ConfigError(f"{target}: a mount point, which no finished directory can replace; name one inside it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: it exists and is not an empty directory; nothing was touched")
    return target


def partial_path(target: Path) -> Path:
    """Where files are gathered. A hidden target's name gets no second dot, so a watch knows it as tierd's own."""
    return target.with_name(f".{target.name.removeprefix('.')}.partial")


@contextmanager
def locked_partial(gathered: Path) -> Iterator[Path]:
    """Lock `gathered` for this restore, creating it if needed, and log at the end whether files are left in it.

    The yielded path leads to this directory even if a user who may write to the parent directory replaces it. Other
    users cannot enter the directory, so it contains no links of theirs.
    """
    gathered.parent.mkdir(parents=True, exist_ok=True)
    try:
        gathered.mkdir(mode=0o700)
    except FileExistsError:
        status = gathered.lstat()  # another user could guess the name and may have write access to the parent
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(f"{gathered}: it is in the way, and none of your directories") from None
    lock = try_lock_stage(gathered)
    if lock is None:
        raise ConfigError(f"{gathered}: another restore is filling it, or its file system has no locks")
    home = Path(f"/proc/self/fd/{lock}")
    try:
        status = os.fstat(lock)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(f"{gathered}: others may write to it, or own it; look at it, and remove it")
        os.fchmod(lock, 0o700 | status.st_mode & stat.S_ISGID)
        if any(home.iterdir()):
            log.info("going on with what an interrupted restore left in %s", gathered)
        yield home
    except OSError as error:
        if error.filename:
            error.filename = str(error.filename).replace(str(home), str(gathered))
        raise
    finally:
        if gathered.exists() and not any(home.iterdir()):
            gathered.rmdir()
        elif gathered.exists():
            log.warning("what was fetched is kept in %s; run the same command again to continue", gathered)
        os.close(lock)


def publish_directory(home: Path, target: Path, parts: set[str]) -> None:
    """Put the directory that `locked_partial` yields in the place of `target`, with these parts and nothing else.

    Raises:
        ConfigError: another user put another directory there.
    """
    remove_all_but(home, parts)  # removes files of another checkpoint with more ranks that was begun before
    sync_directory(home)
    home.chmod(_mode(home, target))
    partial_path(target).replace(target)
    sync_directory(target.parent)
    if not os.path.samestat(home.stat(), target.lstat()):
        raise ConfigError(f"{target}: somebody who may write to {target.parent} put another directory in its place")


def _mode(home: Path, target: Path) -> int:
    """Return the mode of the directory that is replaced; if there is none, the mode that mkdir would give it there."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o777 & ~mask | home.stat().st_mode & stat.S_ISGID


def remove_all_but(home: Path, keep: set[str]) -> None:
    """Remove everything but the directories with these names."""
    for path in home.iterdir():
        if path.name not in keep:
            remove(path)
