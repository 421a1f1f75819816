"""List a spool's directories. What is removed meanwhile is no error."""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterator
from pathlib import Path


def parts_below(base: Path) -> Iterator[tuple[str, str, str]]:
    """Yield `(run, checkpoint, part)` names of the directories three levels under `base`."""
    for run in directories_in(base):
        yield from parts_of_run(base, run)


def parts_of_run(base: Path, run: str) -> Iterator[tuple[str, str, str]]:
    """Yield `(run, checkpoint, part)` names of a run's directories under `base`."""
    for checkpoint in directories_in(base / run):
        for part in directories_in(base / run / checkpoint):
            yield run, checkpoint, part


def links_in(path: Path) -> list[str]:
    """List the symbolic links in a directory."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_symlink() and not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def odd_entries_in(path: Path) -> list[str]:
    """List everything in a directory that is no directory itself, as a symbolic link to one; without hidden ones."""
    try:
        with os.scandir(path) as entries:
            return sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and not entry.is_dir(follow_symlinks=False)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_plain_directory(path: Path) -> bool:
    """Whether a path is a directory, and no link to one. Raises OSError if the disk does not say."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def childless_below(base: Path) -> Iterator[tuple[str, str]]:
    """Yield `(run, checkpoint)` names of the empty directories two levels under `base`."""
    for run in directories_in(base):
        for checkpoint in directories_in(base / run):
            try:
                with os.scandir(base / run / checkpoint) as entries:
                    if next(entries, None) is not None:
                        continue
            except FileNotFoundError:
                continue
            yield run, checkpoint


def names_in(path: Path) -> list[str]:
    """List the names in a directory; none if it does not exist."""
    try:
        return os.listdir(path)  # noqa: PTH208  # there may be thousands, and none needs a Path
    except (FileNotFoundError, NotADirectoryError):
        return []


def directories_in(path: Path, known_names: Container[str] = ()) -> list[str]:
    """List the directories in a directory, without links and hidden ones.

    Args:
        path: the directory.
        known_names: names that were such directories before, which is not asked again, because there may be thousands.
    """
    try:
        if known_names:
            names = os.listdir(path)  # noqa: PTH208  # as in `names_in`
            return [name for name in names if name in known_names or _is_directory(path / name)]
        with os.scandir(path) as entries:
            return [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []


def _is_directory(path: Path) -> bool:
    try:
        return not path.name.startswith(".") and stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False
