"""Write the pointers of programs: small files and links that name a checkpoint.

Invariant: a pointer names a checkpoint only after that is in place, and one rename makes it visible.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tierd.daemon.intake.swapping import way_to
from tierd.spool.file_io import open_own, sync_directory
from tierd.watching.listing import MAX_MARKER
from tierd.watching.pointers import Pointer, pointers, points_to
from tierd.watching.step_in_name import without_ending
from tierd.watching.unit import Unit
from tierd.watching.unit_file import UnitFile


def is_named(directory: Path, program: str, path: str, files: Sequence[str]) -> bool:
    """Whether the program has pointers, and all of them name this unit."""
    expected = [*pointers(program, path, files)]
    return bool(expected) and all(
        _pointed_name(directory / pointer.path, pointer) == _first_line(pointer.text) for pointer in expected
    )


def recorded_or_known(about: UnitFile, files: Sequence[str]) -> list[Pointer]:
    """Return the pointers to a unit; as they were when it was taken, if they named it then."""
    by_path = {pointer.path: pointer for pointer in pointers(about.program, about.path, files)}
    return [*(by_path | {pointer.path: pointer for pointer in about.pointers or ()}).values()]


def point_to(directory: Path, program: str, path: str, files: Sequence[str]) -> list[str]:
    """Write the pointers to a unit, each by one rename, if they do not name it yet; return their paths."""
    return [pointer.path for pointer in pointers(program, path, files) if write_pointer(directory, pointer)]


def write_lost(directory: Path, recorded: Sequence[Pointer], torn: Iterable[Unit] = ()) -> list[str]:
    """Write the recorded pointers where nothing lies, or what names nothing that is there; return their paths.

    Ranks may have a pointer each. So where one still names the recorded unit, those are written, too, that name one of
    the `torn` units, which lack files: its program was killed between two ranks.
    """
    has_intact = any(
        _pointed_name(directory / pointer.path, pointer) == _first_line(pointer.text) for pointer in recorded
    )
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
    path = way_to(directory, pointer.path)
    if _pointed_name(path, pointer) == _first_line(pointer.text):
        return False
    if path.is_dir() and not path.is_symlink():
        return False  # no pointer any more
    write_whole(path, pointer.text, link=pointer.link)
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


def _first_line(text: str) -> str:
    return text.split("\n")[0]


def write_whole(path: Path, text: str, *, link: bool = False) -> None:
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
