"""The spool's own directory: its name, and how it is created."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tierd.core.errors import SpoolUnusable
from tierd.spool.file_io import sync_directory


def check_name(root: Path) -> None:
    """Raise `SpoolUnusable` if a path is not valid UTF-8, because daemon, client and command line write it as JSON."""
    try:
        str(root).encode()
    except UnicodeEncodeError:
        raw = os.fsencode(root)
        try:
            raw.decode()
            why = "the locale cannot say it: set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        except UnicodeDecodeError:
            why = "it is no UTF-8: name another, or link this one from a path that is"
        raise SpoolUnusable(f"spool {raw!r}: {why}") from None


def make_durably(directory: Path) -> None:
    """Create a directory and its missing parents durably, so that a power cut leaves their content reachable."""
    if not directory.is_dir():
        make_durably(directory.parent)
        directory.mkdir(mode=0o755, exist_ok=True)  # not writable for others, because they could then replace the spool
        sync_entry(directory)


def sync_entry(path: Path) -> None:
    """Make the entry of a path in its directory durable, where this user and the file system can."""
    try:
        sync_directory(path.parent)
    except OSError as error:
        # A directory that this user cannot read was created by another user, who syncs it. Some file systems cannot
        # sync.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP):
            raise
