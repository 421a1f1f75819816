"""List the objects in one directory of `FileStore`, below the root's descriptor."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tierd.stores.base import ObjectInfo, is_key
from tierd.stores.descriptors import descend


class DirectoryEntries(NamedTuple):
    """The entries of one directory that a scan may show.

    Attributes:
        infos: the first objects, described.
        keys: the sorted keys that follow them; subdirectories end in '/'.
        is_empty: whether the directory has no entry at all.
    """

    infos: list[ObjectInfo]
    keys: list[str]
    is_empty: bool = False


@dataclass(slots=True)
class Walk:
    """The state of one scan.

    Attributes:
        top: the directory where it began.
        pending: a stack of the keys to come in order, the next one last; directories end in '/'.
        again: directories that were listed again because one in them was empty.
    """

    top: str
    pending: list[str] = field(init=False)
    again: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pending = [self.top]

    def is_stale(self, directory: str, listed: DirectoryEntries | None) -> bool:
        """Whether to list the directory above `directory` again: this one was removed since, and others may be new.

        An empty one is about to be removed. But a delete that was cut off leaves it, so it counts once in each.
        """
        if directory == self.top or (listed is not None and not listed.is_empty):
            return False
        above = parent(directory[:-1])
        is_stale = listed is None or above not in self.again
        if listed is not None:
            self.again.add(above)
        return is_stale

    def drop(self, above: str) -> None:
        """Forget the entries of a directory that are pending."""
        while self.pending and parent(self.pending[-1].rstrip("/")) == above:
            self.pending.pop()


def list_directory(root: int, directory: str, prefix: str, after: str, limit: int = 0) -> DirectoryEntries | None:
    """List the entries of `directory` (empty, or ending in '/') that a scan may show.

    Args:
        root: the root's descriptor.
        directory: the directory's key.
        prefix: as in `Store.scan`.
        after: as in `Store.scan`.
        limit: how many of the objects before the first subdirectory are described.

    Returns:
        These entries; None if the directory does not exist.
    """
    keys, is_empty = [], True
    if directory and not is_key(directory[:-1]):
        return DirectoryEntries([], [])
    try:
        with descend(root, directory.split("/")[:-1]) as fd:
            with os.scandir(fd) as entries:
                for entry in entries:
                    is_empty = False
                    key = directory + entry.name
                    if not is_key(key):
                        continue
                    if entry.is_dir(follow_symlinks=False) and _reaches(key + "/", prefix, after):
                        keys.append(key + "/")
                    elif key.startswith(prefix) and key > after and entry.is_file(follow_symlinks=False):
                        keys.append(key)
            keys.sort()  # as strings: "a-b" < "a.b" < "a/", which is the order of the keys below
            first = list(itertools.takewhile(lambda key: not key.endswith("/"), keys[:limit]))
            return DirectoryEntries(_stat_keys(fd, first), keys[len(first) :], is_empty)
    except (FileNotFoundError, NotADirectoryError):
        return None


def stat_objects(root: int, directory: str, keys: Sequence[str]) -> list[ObjectInfo]:
    """Describe those of `keys`, which are in `directory`, that still exist."""
    try:
        with descend(root, directory.split("/")[:-1]) as fd:
            return _stat_keys(fd, keys)
    except (FileNotFoundError, NotADirectoryError):
        return []  # removed meanwhile


def _stat_keys(directory: int, keys: Sequence[str]) -> list[ObjectInfo]:
    infos = []
    for key in keys:
        try:
            status = os.stat(key.rpartition("/")[2], dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
        token = f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"
        infos.append(ObjectInfo(key, status.st_size, token))
    return infos


def parent(key: str) -> str:
    """Return the directory that holds `key`, with its '/'; a directory (ending in '/') is its own parent."""
    return key[: key.rfind("/") + 1]


def _reaches(directory: str, prefix: str, after: str) -> bool:
    """Return whether a key in `directory` (ending in '/') may begin with `prefix` and sort after `after`."""
    if not (directory.startswith(prefix) or prefix.startswith(directory)):
        return False
    # Every character of a key sorts before '\x7f'.
    inside = after.startswith(directory) and after[len(directory) :] < "\x7f"
    return directory > after or inside
