"""File descriptors below a root: `FileStore` opens, syncs and locks files without following a symlink."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

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


def lock(fd: int) -> bool:
    """Take the lock without blocking, and return whether it is now held.

    Returns:
        False also if the file system has no locks. A sweep then removes no file.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep(directory: int, names: re.Pattern[str], limit: int) -> bool:
    """Remove unlocked files whose name matches `names`, among the first `limit` entries of the directory.

    Returns:
        False if a transient error kept one of the files from being removed, so that a later sweep is worthwhile.
    """
    is_complete = True
    with os.scandir(directory) as entries:
        for name in [entry.name for entry in islice(entries, limit) if names.fullmatch(entry.name)]:
            try:
                with closing(os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)) as fd:
                    if lock(fd):
                        os.unlink(name, dir_fd=directory)
            except OSError as error:
                is_complete &= error.errno in _PERMANENT_ERRORS
    return is_complete
