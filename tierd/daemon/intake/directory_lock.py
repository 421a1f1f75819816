"""Let one command at a time change a program's directory: every pod of a job may run the same entrypoint on one volume.

Invariant: the lock's file is removed only by its holder, and only if the directory has nothing else. An empty
directory is left empty, because some training scripts refuse another one. Otherwise the file stays, because another NFS
client may still have its name in a cache, and would lock the removed file.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from tierd.core.errors import ConfigError
from tierd.spool.file_io import open_own

log = logging.getLogger("tierd")

NAME = ".tierd-lock"  # begins with `watching.files.OWN`, so a watch does not list it
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_LONGEST_S = 3600.0  # that one holder is waited for, because it may fetch a large checkpoint
_PAUSE_S = 0.2


@asynccontextmanager
async def alone_in(directory: Path) -> AsyncIterator[None]:
    """Make the directory if it does not exist, and keep every other `prepare` and `restore --into` out of it.

    Raises:
        ConfigError: one other command held the directory for an hour; or this account may not make it; or the lock's
            file is not a plain file.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    lock = await _locked(directory / NAME)
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):
                if [*directory.iterdir()] == [directory / NAME]:
                    (directory / NAME).unlink()
            os.close(lock)


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Say of a write below the directory that is forbidden, where that is, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
        raise ConfigError(
            f"{directory}: this account may not write there: {error.strerror}; run the command as the account that "
            "owns the directory"
        ) from error


async def _locked(path: Path) -> int | None:
    """Wait for the lock, and return its descriptor; None if there can be no lock."""
    waits, until, holder = False, 0.0, (0, 0)
    while (lock := _open_lock_file(path)) is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), path.stat()):
                with suppress(OSError):  # another account's file
                    os.utime(lock)
                return lock
        except (BlockingIOError, FileNotFoundError):  # another command holds it, or removed the file
            pass
        except OSError as error:
            os.close(lock)
            log.warning("%s: this file system refuses locks (%s); run one tierd at a time there", path, error.strerror)
            return None
        now = os.fstat(lock)
        os.close(lock)
        if holder != (holder := (now.st_ino, now.st_mtime_ns)):  # the time tells holders apart
            until = time.monotonic() + _LONGEST_S
        if time.monotonic() >= until:
            raise ConfigError(f"{path}: another `tierd prepare` or `restore --into` has held it for an hour; end that")
        if not waits:
            log.warning("waiting for another `tierd prepare` or `restore --into` of %s to end", path.parent)
        waits = True
        await asyncio.sleep(_PAUSE_S)
    return None


def _open_lock_file(path: Path) -> int | None:
    """Open the lock's file, for writing if possible, because NFS locks no other descriptor (flock(2)).

    None if this account may not make it. Then it may change nothing in the directory, either. Raises as `open_own`.
    """
    for mode in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # another account's file may only be readable
        try:
            return open_own(path, mode, 0o666)
        except OSError as error:
            if error.errno not in (*_FORBIDDEN, errno.ENOENT):
                raise
    return None
