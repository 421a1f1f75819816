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

_BESIDE, _TEMPORARY = ".tierd-import-", "tierd-import-"
_YOUNG_S = 60.0  # a directory so young may belong to an import that has not taken its lock yet


@contextmanager
def import_spool(path: Path | None) -> Iterator[Spool]:
    """Make a spool for one command: beside the path, where files can be linked, or else where temporary files go.

    What killed imports left in the same directory is removed first.

    Raises:
        SpoolHeld: another import of the path is at work.
    """
    with ExitStack() as stack:
        spool = _beside(path) if path else None
        if spool is None:
            above = Path(tempfile.gettempdir())
            _sweep(above, _TEMPORARY, "spool")
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix=_TEMPORARY, ignore_cleanup_errors=True))
            spool = Spool(Path(own) / "spool")
        stack.enter_context(spool.lock())
        stack.callback(shutil.rmtree, spool.root, ignore_errors=True)
        spool.remove(spool.parts())  # of an import that was killed
        if path and spool.root.parent == path.parent:
            _sweep(path.parent, _BESIDE, "", spool.root)
        yield spool


def _beside(path: Path) -> Spool | None:
    try:
        return Spool(path.with_name(f"{_BESIDE}{path.name or 'root'}"))
    except (SpoolUnusable, OSError):  # a read-only file system, or somebody else's directory
        return None


def _sweep(above: Path, prefix: str, inside: str, own: Path | None = None) -> None:
    """Remove the directories of imports that ended without removing them; what cannot be removed is left.

    Args:
        above: the directory in which they lie.
        prefix: how their names begin.
        inside: the spool's name in them; empty if they are spools themselves.
        own: the spool of this import.
    """
    for left in above.glob(f"{prefix}*"):
        with suppress(OSError, TierdError):
            found = left.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()  # others may write to /tmp
            if left == own or not ours or time.time() - found.st_mtime < _YOUNG_S:
                continue
            spool = Spool(left / inside, write=False)
            if not spool.lock_path.exists():
                continue  # not a spool of an import
            with spool.lock():  # refuses one that is in use
                shutil.rmtree(left)
