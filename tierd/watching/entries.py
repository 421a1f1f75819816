"""Describe the entries of an open directory, without following links."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import TypeAlias, get_args

from tierd.watching.listing import Kind, ListedEntry

_BY_MODE: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
_KINDS = {kind: ListedEntry(kind) for kind in get_args(Kind)}
Describe: TypeAlias = Callable[[os.DirEntry[str], int], ListedEntry]
"""Describes an entry of the open directory of this descriptor. It raises `OSError`."""


def status(name: str | os.DirEntry[str], directory: int) -> ListedEntry:
    """Describe an entry of an open directory by its status."""
    entry_name = name if isinstance(name, str) else name.name
    return entry_of(os.stat(entry_name, dir_fd=directory, follow_symlinks=False))


def kind(entry: os.DirEntry[str], directory: int) -> ListedEntry:
    """Describe an entry of an open directory by its kind alone, which most file systems give with the name."""
    if entry.is_file(follow_symlinks=False):
        return _KINDS["file"]
    if entry.is_dir(follow_symlinks=False):
        return _KINDS["directory"]
    return _KINDS["link" if entry.is_symlink() else "other"]


def entry_of(stat_result: os.stat_result) -> ListedEntry:
    """Return the entry of a status."""
    mode = _BY_MODE.get(stat.S_IFMT(stat_result.st_mode), "other")
    return ListedEntry(mode, stat_result.st_size, stat_result.st_mtime_ns, (stat_result.st_dev, stat_result.st_ino))


def printable(name: str) -> str:
    """Return a name as valid UTF-8, with other bytes escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")
