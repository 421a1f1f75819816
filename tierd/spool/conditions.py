"""The conditions behind errors of the spool's file system, as errors of tierd."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierd.core.disk_full import FULL, remedy
from tierd.core.errors import SpoolFull, SpoolUnusable, TierdError


@contextmanager
def translated(doing: str, directory: Path | None = None) -> Iterator[None]:
    """Convert an `OSError` of the spool's file system into the `TierdError` that names its condition."""
    try:
        yield
    except OSError as error:
        raise condition(error, doing, directory) from error


def condition(error: OSError, doing: str, directory: Path | None = None) -> TierdError:
    """Return the `TierdError` that names the condition behind an `OSError` of the spool's file system.

    Args:
        error: the error.
        doing: what failed.
        directory: a directory of that file system, which is asked whether it lacks blocks or inodes.
    """
    way_out = way_out_of(error, "in the spool", directory)
    text = f"{doing}: {error.strerror or error}{way_out}"
    return SpoolFull(text) if is_full(error) else SpoolUnusable(text)


def way_out_of(error: OSError, place: str, directory: Path | None = None) -> str:
    """Return what to do about a lack of room, after a semicolon; empty for other errors.

    Args:
        error: the error.
        place: where to keep less, such as `in the spool`.
        directory: as for `condition`.
    """
    room = None
    if directory is not None and is_full(error):
        try:
            room = os.statvfs(directory)
        except OSError:
            room = None
    text = remedy(error.errno, place, room)
    return f"; {text}" if text else ""


def is_full(error: OSError) -> bool:
    """Whether an `OSError` means that the disk, or this user's quota on it, is used up."""
    return error.errno in FULL
