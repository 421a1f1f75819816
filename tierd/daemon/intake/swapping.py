"""Change names in a program's directory: put a file or directory in place, and move what was there to quarantine.

Invariant: one rename makes each file or directory visible. If the kernel can exchange two names, nothing is ever
missing in between. Nothing is deleted, and no symbolic link on the way is followed.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tierd.core.errors import ConfigError
from tierd.daemon.intake.directory_lock import writing
from tierd.formats.byte_source import PIECE
from tierd.spool.file_io import sync_directory

QUARANTINE = ".tierd-quarantine"
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100


def quarantine_files(directory: Path, paths: Iterable[str]) -> list[str]:
    """Move files or directories to `.tierd-quarantine/`; return their new paths in the directory."""
    moved = []
    for path in paths:
        with writing(directory), suppress(FileNotFoundError):
            target = _free_name(directory, path)
            (directory / path).rename(target)
            sync_directory((directory / path).parent)
            sync_directory(target.parent)
            moved.append(str(target.relative_to(directory)))
    return moved


def swap_in(fresh: Path, directory: Path, name: str) -> str | None:
    """Put `fresh` in place; return where what was there before lies now, if anything else was."""
    final = way_to(directory, name)
    if _is_same(fresh, final):
        return None
    if not final.is_symlink() and not final.exists():
        fresh.rename(final)
        sync_directory(final.parent)
        return None
    target = _free_name(directory, name)
    # In quarantine before the exchange, because the next command deletes what an interrupted one left in `RESTORED`.
    fresh.rename(target)
    try:
        exchanged = exchange(target, final)
    except OSError:
        target.rename(fresh)  # or each try would leave a whole checkpoint in quarantine
        raise
    if not exchanged:
        target.rename(fresh)
        final.rename(target)
        fresh.rename(final)
    sync_directory(final.parent)
    sync_directory(target.parent)
    return str(target.relative_to(directory))


def _is_same(fresh: Path, final: Path) -> bool:
    """Whether a plain file with the same bytes lies there."""
    if not all(path.is_file() and not path.is_symlink() for path in (fresh, final)):
        return False
    with fresh.open("rb") as fresh_file, final.open("rb") as final_file:
        if os.fstat(fresh_file.fileno()).st_size != os.fstat(final_file.fileno()).st_size:
            return False
        return all(piece == final_file.read(PIECE) for piece in iter(lambda: fresh_file.read(PIECE), b""))


def way_to(directory: Path, name: str) -> Path:
    """Make the directories above a path, and return the path. A link among them would lead elsewhere."""
    parent = directory
    *above, last = name.split("/")
    for piece in above:
        parent /= piece
        if parent.is_symlink():
            raise ConfigError(f"{parent}: a symbolic link; name the directory to which it leads")
        try:
            parent.mkdir(exist_ok=True)
        except FileExistsError:
            raise ConfigError(
                f"{parent}: not a directory; tierd needs one of that name there: move that file away"
            ) from None
    return parent / last


def _free_name(directory: Path, name: str) -> Path:
    target = way_to(directory, f"{QUARANTINE}/{name}")
    number = 0
    while target.is_symlink() or target.exists():
        number += 1
        target = target.with_name(f"{Path(name).name}.{number}")
    return target


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False if the file system or the C library cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    at = ctypes.c_int(_AT_FDCWD)
    if not rename(at, os.fsencode(first), at, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(second))
