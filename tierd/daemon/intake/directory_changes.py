"""Changes in a program's directory: its lock, names put in place or moved to quarantine, and the pointers of programs.

Invariants: one rename makes each file, directory or pointer visible, and a pointer names a checkpoint only after that
is in place. Nothing is deleted, and no symbolic link on the way is followed. The lock's file is removed only by its
holder, and only if the directory has nothing else.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tierd.core.errors import ConfigError
from tierd.formats.byte_source import PIECE_SIZE
from tierd.spool.file_io import open_own, sync_directory
from tierd.watching.step_in_name import without_ending
from tierd.watching.unit import MAX_MARKER, Unit
from tierd.watching.unit_file import Pointer, UnitFile, pointers, points_to

log = logging.getLogger("tierd")

LOCK_NAME = ".tierd-lock"  # begins with `watching.files.OWN`, so a watch does not list it
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_LONGEST_S = 3600.0  # that one holder is waited for, because it may fetch a large checkpoint
_PAUSE_S = 0.2


@asynccontextmanager
async def locked_directory(directory: Path) -> AsyncIterator[None]:
    """Make the directory if it does not exist, and keep every other `prepare` and `restore --into` out of it.

    Raises `ConfigError` if a command held it for an hour, or this account may not make it, or the lock is no plain
    file.
    """
    with explained_refusals(directory):
        directory.mkdir(parents=True, exist_ok=True)
    lock = await _locked(directory / LOCK_NAME)
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):
                if [*directory.iterdir()] == [directory / LOCK_NAME]:
                    (directory / LOCK_NAME).unlink()
            os.close(lock)


@contextmanager
def explained_refusals(directory: Path) -> Iterator[None]:
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


QUARANTINE_NAME = ".tierd-quarantine"
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100


def quarantine_files(directory: Path, paths: Iterable[str]) -> list[str]:
    """Move files or directories to `.tierd-quarantine/`; return their new paths in the directory."""
    moved = []
    for path in paths:
        with explained_refusals(directory), suppress(FileNotFoundError):
            target = _free_name(directory, path)
            (directory / path).rename(target)
            sync_directory((directory / path).parent)
            sync_directory(target.parent)
            moved.append(str(target.relative_to(directory)))
    return moved


def swap_in(fresh: Path, directory: Path, name: str) -> str | None:
    """Put `fresh` in place; return where what was there before lies now, if anything else was."""
    final = make_parents(directory, name)
    if is_same(fresh, final):
        return None
    if not final.is_symlink() and not final.exists():
        fresh.rename(final)
        sync_directory(final.parent)
        return None
    target = _free_name(directory, name)
    # In quarantine before the exchange, because the next command deletes what an interrupted one left in the staging.
    fresh.rename(target)
    try:
        exchanged = exchange_names(target, final)
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


def is_same(fresh: Path, final: Path) -> bool:
    """Whether two paths are files of the same bytes, or directories of the same files; a link is none of them."""
    if fresh.is_symlink() or final.is_symlink():
        return False
    if fresh.is_dir() and final.is_dir():
        names = {path.name for path in fresh.iterdir()}
        return names == {path.name for path in final.iterdir()} and all(is_same(fresh / n, final / n) for n in names)
    if not all(path.is_file() and not path.is_symlink() for path in (fresh, final)):
        return False
    with fresh.open("rb") as fresh_file, final.open("rb") as final_file:
        if os.fstat(fresh_file.fileno()).st_size != os.fstat(final_file.fileno()).st_size:
            return False
        return all(piece == final_file.read(PIECE_SIZE) for piece in iter(lambda: fresh_file.read(PIECE_SIZE), b""))


def make_parents(directory: Path, name: str) -> Path:
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
            why = "not a directory; tierd needs one of that name there: move that file away"
            raise ConfigError(f"{parent}: {why}") from None
    return parent / last


def _free_name(directory: Path, name: str) -> Path:
    target = make_parents(directory, f"{QUARANTINE_NAME}/{name}")
    number = 0
    while target.is_symlink() or target.exists():
        number += 1
        target = target.with_name(f"{Path(name).name}.{number}")
    return target


def exchange_names(first: Path, second: Path) -> bool:
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


def is_pointed_to(directory: Path, program: str, path: str, files: Sequence[str]) -> bool:
    """Whether the program has pointers, and all of them name this unit."""
    expected = [*pointers(program, path, files)]
    return bool(expected) and all(_is_up_to_date(directory / pointer.path, pointer) for pointer in expected)


def pointers_of_unit(about: UnitFile, files: Sequence[str]) -> list[Pointer]:
    """Return the pointers to a unit; as they were when it was taken, if they named it then."""
    by_path = {pointer.path: pointer for pointer in pointers(about.program, about.path, files)}
    return [*(by_path | {pointer.path: pointer for pointer in about.pointers or ()}).values()]


def write_pointers(directory: Path, program: str, path: str, files: Sequence[str]) -> list[str]:
    return [pointer.path for pointer in pointers(program, path, files) if write_pointer(directory, pointer)]


def restore_pointers(directory: Path, recorded: Sequence[Pointer], torn: Iterable[Unit] = ()) -> list[str]:
    """Write the recorded pointers where nothing lies, or what names nothing that is there; return their paths.

    Ranks may have a pointer each. So where one still names the recorded unit, those are written, too, that name one of
    the `torn` units, which lack files: its program was killed between two ranks.
    """
    has_intact = any(_is_up_to_date(directory / pointer.path, pointer) for pointer in recorded)
    parts = [*torn] if has_intact else []
    dangling = [
        pointer for pointer in recorded if _is_dangling(directory, pointer) or _names_one(directory, pointer, parts)
    ]
    return [pointer.path for pointer in dangling if write_pointer(directory, pointer)]


def _names_one(directory: Path, pointer: Pointer, units: Iterable[Unit]) -> bool:
    text = _pointed_name(directory / pointer.path, pointer)
    return text is not None and any(points_to(replace(pointer, text=text), unit) for unit in units)


def _is_dangling(directory: Path, pointer: Pointer) -> bool:
    path = directory / pointer.path
    if pointer.link or not path.exists():
        return not path.exists()
    text = _pointed_name(path, pointer)
    # A text of the same form whose names are gone, or its beginning. Whether a number names something is unknown.
    form, was = (re.sub(r"\d+", "#", line) for line in (text or "", _first_line(pointer.text).strip()))
    same_form = text is not None and was.startswith(form)
    return same_form and _names_any(path.parent, pointer.text) and not _names_any(path.parent, text or "")


def _names_any(home: Path, text: str) -> bool:
    """Whether a text has the name of a file or directory beside it, also without its ending."""
    names = {name for path in home.iterdir() for name in (path.name, without_ending(path.name))}
    return any(token.rstrip("/").rpartition("/")[2] in names for token in re.split(r"[\s\"',:=\[\]{}]+", text) if token)


def write_pointer(directory: Path, pointer: Pointer) -> bool:
    path = make_parents(directory, pointer.path)
    if _is_up_to_date(path, pointer) or (path.is_dir() and not path.is_symlink()):  # the latter is no pointer any more
        return False
    write_atomically(path, pointer.text, link=pointer.link)
    return True


def _pointed_name(path: Path, pointer: Pointer) -> str | None:
    """Return what a pointer names now; None if it cannot be read. Raises `ConfigError` for a FIFO or a directory."""
    try:
        if pointer.link:
            return str(path.readlink())
        with os.fdopen(open_own(path, follow=True), encoding="utf-8") as file:
            return _first_line(file.read(MAX_MARKER)).strip()
    except (OSError, ValueError):
        return None


def _is_up_to_date(path: Path, pointer: Pointer) -> bool:
    return _pointed_name(path, pointer) == _first_line(pointer.text)


def _first_line(text: str) -> str:
    return text.split("\n")[0]


def write_atomically(path: Path, text: str, *, link: bool = False) -> None:
    """Write a small file, or a link to `text`, durably and by one rename."""
    fresh = path.with_name(f".tierd-{secrets.token_hex(8)}")
    try:
        if link:
            fresh.symlink_to(text)
        else:
            with fresh.open("x") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
