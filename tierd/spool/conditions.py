"""The conditions behind errors of the spool's file system, as errors of tierd."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from tierd.core.errors import SpoolFull, SpoolUnusable, TierdError


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Convert an `OSError` of the spool's file system into the `TierdError` that names its condition."""
    try:
        yield
    except OSError as error:
        raise condition(error, doing) from error


def condition(error: OSError, doing: str) -> TierdError:
    """Return the `TierdError` that names the condition behind an `OSError` of the spool's file system."""
    text = f"{doing}: {error.strerror or error}"
    if is_full(error):
        return SpoolFull(
            f"{text}; free space on that file system, or keep less in the spool. If `df` shows free space, `df -i` "
            "tells whether its inodes are used up: delete files there, or make the file system with more inodes"
        )
    if error.errno == errno.EFBIG:
        return SpoolUnusable(
            f"{text}: a limit of this process or of the file system on a file's size; raise it with `ulimit -f "
            "unlimited` (LimitFSIZE= of systemd) before the process starts"
        )
    return SpoolUnusable(text)


def is_full(error: OSError) -> bool:
    """Whether an `OSError` means that the disk, or this user's quota on it, is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
