"""The directory in which a restore gathers files, next to the directory that it becomes when all are verified."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierd.core.errors import ConfigError
from tierd.spool.file_io import remove, sync_directory
from tierd.spool.stage import try_lock

log = logging.getLogger("tierd.daemon")


def usable(target: Path) -> Path:
    """Return the path of a directory that a finished one may replace: absent or empty.

    Raises:
        ConfigError: it is another kind of path.
    """
    target = target.resolve() if target.is_symlink() else target.absolute()
    if target.is_mount():
        raise ConfigError(f"{target}: a mount point, which no finished directory can replace; name one inside it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: it exists and is not an empty directory; nothing was touched")
    return target


def partial_of(target: Path) -> Path:
    """Where files are gathered. A hidden target's name gets no second dot, so a watch knows it as tierd's own."""
    return target.with_name(f".{target.name.removeprefix('.')}.partial")


@contextmanager
def held(gathered: Path) -> Iterator[Path]:
    """Lock `gathered` for this restore, creating it if needed, and log at the end whether files are left in it.

    The yielded path leads to this directory even if a user who may write to the parent directory replaces it. Other
    users cannot enter the directory, so it contains no links of theirs.
    """
    gathered.parent.mkdir(parents=True, exist_ok=True)
    try:
        gathered.mkdir(mode=0o700)
    except FileExistsError:
        status = gathered.lstat()  # another user could guess the name and may have write access to the parent
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(f"{gathered}: it is in the way, and none of your directories") from None
    lock = try_lock(gathered)
    if lock is None:
        raise ConfigError(f"{gathered}: another restore is filling it, or its file system has no locks")
    home = Path(f"/proc/self/fd/{lock}")
    try:
        status = os.fstat(lock)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(f"{gathered}: others may write to it, or own it; look at it, and remove it")
        os.fchmod(lock, 0o700 | status.st_mode & stat.S_ISGID)
        if any(home.iterdir()):
            log.info("going on with what an interrupted restore left in %s", gathered)
        yield home
    except OSError as error:
        if error.filename:
            error.filename = str(error.filename).replace(str(home), str(gathered))
        raise
    finally:
        if gathered.exists() and not any(home.iterdir()):
            gathered.rmdir()
        elif gathered.exists():
            log.warning("what was fetched is kept in %s; run the same command again to continue", gathered)
        os.close(lock)


def publish(home: Path, target: Path, parts: set[str]) -> None:
    """Put the directory that `held` yields in the place of `target`, with these parts and nothing else.

    Raises:
        ConfigError: another user put another directory there.
    """
    clear(home, parts)  # removes files of another checkpoint with more ranks that was begun before
    sync_directory(home)
    home.chmod(_mode(home, target))
    partial_of(target).replace(target)
    sync_directory(target.parent)
    if not os.path.samestat(home.stat(), target.lstat()):
        raise ConfigError(f"{target}: somebody who may write to {target.parent} put another directory in its place")


def _mode(home: Path, target: Path) -> int:
    """Return the mode of the directory that is replaced; if there is none, the mode that mkdir would give it there."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o777 & ~mask | home.stat().st_mode & stat.S_ISGID


def clear(home: Path, keep: set[str]) -> None:
    """Remove everything but the directories with these names."""
    for path in home.iterdir():
        if path.name not in keep:
            remove(path)
