"""Removal: a path disappears by one rename to the trash, before anything in it changes."""

from __future__ import annotations

import errno
import secrets
from contextlib import suppress
from pathlib import Path

from tierd.core.manifest import MANIFEST_NAME
from tierd.spool.file_io import remove, sync_directory


def bury(path: Path, trash: Path) -> Path | None:
    """Make a path invisible for good by moving it to the trash; None if the path does not exist."""
    grave = trash / secrets.token_hex(8)
    try:
        path.rename(grave)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _take_apart(path, grave)
    sync_left(path.parent)
    return grave


def _take_apart(path: Path, grave: Path) -> None:
    """Remove a directory that cannot be renamed, because overlayfs cannot rename a lower layer's directory.

    The manifest is moved to `grave` first, so that no reader takes the half-removed part for a whole one.
    """
    grave.mkdir(mode=0o700)
    with suppress(FileNotFoundError, NotADirectoryError):
        (path / MANIFEST_NAME).rename(grave / MANIFEST_NAME)
        sync_directory(path)
    remove(path)


def delete(grave: Path) -> None:
    """Delete a directory or file in the trash, as far as the file system permits."""
    with suppress(OSError):
        remove(grave, best_effort=True)


def sync_left(directory: Path) -> None:
    """Make a removal from `directory` durable. If `directory` was removed too, sync its nearest existing parent."""
    while True:
        try:
            sync_directory(directory)
            return
        except FileNotFoundError:
            directory = directory.parent
