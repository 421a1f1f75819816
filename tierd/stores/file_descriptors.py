"""Below the root of `FileStore`, by file descriptors: open, lock, list and read, without following a symlink."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import xxhash
from aiofiles.threadpool.binary import AsyncFileIO

from tierd.spool.direct_io import LARGE, give_back_spare, memory_for, read_into, set_direct, take_spare
from tierd.stores.base import ObjectInfo, is_key

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# Errors of a file system whose directories can't be synced, and therefore need no sync.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
# The file to remove does not exist, or belongs to another user.
_PERMANENT_ERRORS = (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EPERM)


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close `fd` at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def descend(root: int, parts: Sequence[str]) -> Iterator[int]:
    """Open a directory below `root` one component at a time, so that no symlink leads outside the root."""
    fd = os.dup(root)
    try:
        for part in parts:
            below = os.open(part, DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def sync_directory(fd: int) -> None:
    """Make the entries of a directory durable."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def unlink(name: str, above: int) -> None:
    """Remove the file `name` from the directory `above`; do nothing if it does not exist."""
    try:
        os.unlink(name, dir_fd=above)
    except (FileNotFoundError, IsADirectoryError):
        pass


def take_lock(fd: int) -> bool:
    """Take the lock without blocking, and return whether it is now held.

    If the file system has no locks, it is not, and a sweep then removes no file.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_unlocked(directory: int, names: re.Pattern[str], limit: int) -> bool:
    """Remove unlocked files whose name matches `names`, among the first `limit` entries of the directory.

    Return False if a transient error kept one of them from being removed, so that a later sweep is worthwhile.
    """
    is_complete = True
    with os.scandir(directory) as entries:
        for name in [entry.name for entry in islice(entries, limit) if names.fullmatch(entry.name)]:
            try:
                with closing(os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)) as fd:
                    if take_lock(fd):
                        os.unlink(name, dir_fd=directory)
            except OSError as error:
                is_complete &= error.errno in _PERMANENT_ERRORS
    return is_complete


class DirectoryEntries(NamedTuple):
    """The entries of one directory that a scan may show."""

    infos: list[ObjectInfo]
    keys: list[str]  # the sorted keys that follow them; subdirectories end in '/'
    is_empty: bool = False


@dataclass(slots=True)
class ScanState:
    top: str
    # a stack of the keys to come in order, the next one last; directories end in '/'
    pending: list[str] = field(init=False)
    relisted: set[str] = field(default_factory=set)  # directories that were listed again because one in them was empty

    def __post_init__(self) -> None:
        self.pending = [self.top]

    def is_stale(self, directory: str, listed: DirectoryEntries | None) -> bool:
        """Whether to list the directory above `directory` again: this one was removed since, and others may be new.

        An empty one is about to be removed. But a delete that was cut off leaves it, so it counts once in each.
        """
        if directory == self.top or (listed is not None and not listed.is_empty):
            return False
        above = parent(directory[:-1])
        is_stale = listed is None or above not in self.relisted
        if listed is not None:
            self.relisted.add(above)
        return is_stale

    def forget_entries(self, above: str) -> None:
        """Forget the entries of a directory that are pending."""
        while self.pending and parent(self.pending[-1].rstrip("/")) == above:
            self.pending.pop()


def list_directory(root: int, directory: str, prefix: str, after: str, limit: int = 0) -> DirectoryEntries | None:
    """List the entries of `directory` (empty, or ending in '/') that a scan may show; None if it does not exist.

    `limit` is how many of the objects before the first subdirectory are described.
    """
    keys, is_empty = [], True
    if directory and not is_key(directory[:-1]):
        return DirectoryEntries([], [])
    try:
        with descend(root, directory.split("/")[:-1]) as fd:
            with os.scandir(fd) as entries:
                for entry in entries:
                    is_empty = False
                    key = directory + entry.name
                    if not is_key(key):
                        continue
                    if entry.is_dir(follow_symlinks=False) and _reaches(key + "/", prefix, after):
                        keys.append(key + "/")
                    elif key.startswith(prefix) and key > after and entry.is_file(follow_symlinks=False):
                        keys.append(key)
            keys.sort()  # as strings: "a-b" < "a.b" < "a/", which is the order of the keys below
            first = list(itertools.takewhile(lambda key: not key.endswith("/"), keys[:limit]))
            return DirectoryEntries(_stat_keys(fd, first), keys[len(first) :], is_empty)
    except (FileNotFoundError, NotADirectoryError):
        return None


def stat_objects(root: int, directory: str, keys: Sequence[str]) -> list[ObjectInfo]:
    """Describe those of `keys`, which are in `directory`, that still exist."""
    try:
        with descend(root, directory.split("/")[:-1]) as fd:
            return _stat_keys(fd, keys)
    except (FileNotFoundError, NotADirectoryError):
        return []  # removed meanwhile


def _stat_keys(directory: int, keys: Sequence[str]) -> list[ObjectInfo]:
    infos = []
    for key in keys:
        try:
            status = os.stat(key.rpartition("/")[2], dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
        token = f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"
        infos.append(ObjectInfo(key, status.st_size, token))
    return infos


def parent(key: str) -> str:
    """Return the directory that holds `key`, with its '/'; a directory (ending in '/') is its own parent."""
    return key[: key.rfind("/") + 1]


def _reaches(directory: str, prefix: str, after: str) -> bool:
    """Return whether a key in `directory` (ending in '/') may begin with `prefix` and sort after `after`."""
    if not (directory.startswith(prefix) or prefix.startswith(directory)):
        return False
    # Every character of a key sorts before '\x7f'.
    inside = after.startswith(directory) and after[len(directory) :] < "\x7f"
    return directory > after or inside


_PIECE = 1 << 20  # bytes; small enough to stay in the processor's cache until it is copied


async def read_file_into(file: AsyncFileIO, view: memoryview, on_piece: Callable[[], None]) -> memoryview:
    """Fill `view` from `file` through a small buffer. `on_piece` is called after each piece.

    The buffer is needed because the thread of a cancelled call may still write to it. So only a read that ended gives
    its buffer to the next one, because the first touch of fresh memory costs more than the copy.
    """
    large = len(view) >= LARGE and set_direct(file.fileno(), True)
    buffer, at = take_spare() if large else memory_for(min(_PIECE, len(view))), 0
    while at < len(view):
        try:
            count = await file.readinto(buffer)
        except OSError as error:
            if error.errno != errno.EINVAL or not set_direct(file.fileno(), False):
                raise
            continue
        if not count:
            raise _became_shorter()
        count = min(count, len(view) - at)
        view[at : at + count] = buffer[:count]
        at += count
        on_piece()
    if large:
        give_back_spare(buffer)
    return view


def digest_file(fd: int, size: int, on_piece: Callable[[], None]) -> str:
    """Return the XXH3-128 of an open file of `size` bytes. `on_piece` is called after each piece.

    Raises OSError if it cannot be read, or is shorter by now.
    """
    large = size >= LARGE and set_direct(fd, True)
    buffer = take_spare() if large else memory_for(min(_PIECE, size))
    hasher = xxhash.xxh3_128()
    for at in range(0, size, len(buffer) or 1):
        length = min(len(buffer), size - at)
        if read_into(fd, buffer, length, at) < length:
            raise _became_shorter()
        hasher.update(buffer[:length])
        on_piece()
    if large:
        give_back_spare(buffer)
    return hasher.hexdigest()


def _became_shorter() -> OSError:
    return OSError(errno.EIO, "the file became shorter")
