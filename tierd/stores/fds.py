"""Descriptors below a root: how `FileStore` walks, syncs and locks without ever resolving a path through a symlink."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # a file system whose directories can't be synced has nothing to sync


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close `fd` at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def descend(root: int, parts: Sequence[str]) -> Iterator[int]:
    """Open a directory below `root` step by step, so that no symlink leads out."""
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
    """Remove the file `name` from the directory `above`; where there is none, there is nothing to do."""
    try:
        os.unlink(name, dir_fd=above)
    except (FileNotFoundError, IsADirectoryError):
        pass


def lock(fd: int) -> bool:
    """Whether the lock was free and is now held. False also where the file system has no locks: then none is swept."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep(directory: int, names: re.Pattern[str], at_most: int) -> None:
    """Remove the files of those `names` that nobody holds a lock on, among the first `at_most` entries."""
    with os.scandir(directory) as entries:
        for name in [entry.name for entry in islice(entries, at_most) if names.fullmatch(entry.name)]:
            try:
                with closing(os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)) as fd:
                    if lock(fd):
                        os.unlink(name, dir_fd=directory)
            except OSError:  # another user's, or gone: what can't be swept is left
                continue
