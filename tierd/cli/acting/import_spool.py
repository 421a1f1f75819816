"""The spool of one `tierd import`, and the removal of those that killed imports left.

Invariant: only a directory of this account is removed, and only one whose lock nobody holds: the kernel releases the
lock of a process that ends, however it ends.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tierd.core.errors import SpoolUnusable, TierdError
from tierd.spool.spool import Spool

_SIBLING_PREFIX, _TEMP_PREFIX = ".tierd-import-", "tierd-import-"
_YOUNG_S = 60.0  # a directory so young may belong to an import that has not taken its lock yet


@contextmanager
def import_spool(path: Path | None) -> Iterator[Spool]:
    """Make a spool for one command: beside the path, where files can be linked, or else where temporary files go.

    What killed imports left in the same directory is removed first.

    Raises:
        SpoolHeld: another import of the path is at work.
    """
    with ExitStack() as stack:
        spool = _sibling_spool(path) if path else None
        if spool is None:
            above = Path(tempfile.gettempdir())
            _sweep(above, _TEMP_PREFIX, "spool")
            directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=_TEMP_PREFIX, ignore_cleanup_errors=True)
            )
            spool = Spool(Path(directory) / "spool")
        stack.enter_context(spool.lock())
        stack.callback(shutil.rmtree, spool.root, ignore_errors=True)
        spool.remove(spool.parts())  # of an import that was killed
        if path and spool.root.parent == path.parent:
            _sweep(path.parent, _SIBLING_PREFIX, "", spool.root)
        yield spool


def _sibling_spool(path: Path) -> Spool | None:
    try:
        return Spool(path.with_name(f"{_SIBLING_PREFIX}{path.name or 'root'}"))
    except (SpoolUnusable, OSError):  # a read-only file system, or somebody else's directory
        return None


def _sweep(above: Path, prefix: str, inside: str, own_spool: Path | None = None) -> None:
    """Remove the directories of imports that ended without removing them; what cannot be removed is left.

    Args:
        above: the directory in which they lie.
        prefix: how their names begin.
        inside: the spool's name in them; empty if they are spools themselves.
        own_spool: the spool of this import.
    """
    for leftover in above.glob(f"{prefix}*"):
        with suppress(OSError, TierdError):
            status = leftover.lstat()
            is_own_directory = (
                stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            )  # others may write to /tmp
            if leftover == own_spool or not is_own_directory or time.time() - status.st_mtime < _YOUNG_S:
                continue
            spool = Spool(leftover / inside, write=False)
            if not spool.lock_path.exists():
                continue  # not a spool of an import
            with spool.lock():  # refuses one that is in use
                shutil.rmtree(leftover)
