"""A node's disk that loses, at a power cut, what was not made durable, by ALICE's model.

Invariant: what an fsync returned for stays. Of a file that is all its bytes; of a directory its entries. Of everything
else any part may be there: a file's new bytes block by block, in any order, or zeros in their place; any set of changed
entries, as long as what one name went through is kept in order. A rename is one change, never half of it, unless only
the directory that something came from was synced. On some disks, as with a journal, changes of entries are kept in the
order in which they were made.

The node works on a real directory. `watched` sees what it changes there; `Disk.cut` makes a directory that a power cut
could have left.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

_BLOCK = 512  # bytes that a disk writes whole or not at all
_MOST = 64  # changes that wait to be made durable
_REAL = {name: getattr(os, name) for name in ("open", "mkdir", "rename", "replace", "unlink", "remove", "rmdir")}
_REAL |= {name: getattr(os, name) for name in ("fsync", "fdatasync", "link", "symlink", "pwrite", "statvfs")}
_OPEN = io.open

_STATVFS = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_flag")

OUTCOMES = ("all", "none", "any", "any", "any", "ordered")  # of what was not made durable


@dataclass(frozen=True)
class _Change:
    """Entries that change together: `(directory, name, what is there now, None for nothing)`. `inside`: a directory
    that goes, and can only when it was emptied before."""

    entries: tuple[tuple[int, str, int | None], ...]
    inside: int | None = None

    @cached_property
    def names(self) -> frozenset[tuple[int, str]]:
        return frozenset((directory, name) for directory, name, _ in self.entries)

    @cached_property
    def homes(self) -> frozenset[int]:
        return frozenset(directory for directory, _, _ in self.entries)


class Disk:
    """A disk, mounted at `root`.

    Attributes:
        ops: how many changes of entries and syncs there were.
        version: another number whenever anything may look otherwise.
        cut_at: the number of the one before which the power goes; `cut_off` is then what is left.
        outcome: one of `OUTCOMES`, of the next cut.
        capacity: how many bytes files may have here together; None where there is room for all.
    """

    def __init__(self, root: Path, rng: random.Random, watch: Watch) -> None:
        self.root, self._rng, self._watch = root, rng, watch
        self.ops = self.version = 0
        self.cut_at: int | None = None
        self.cut_off: Disk | None = None
        self.outcome: str | None = None
        self.capacity: int | None = None
        self.target: Callable[[], Path] = lambda: root
        self._durable: dict[int, dict[str, int]] = {}  # directory -> its entries
        self._now: dict[int, dict[str, int]] = {}
        self._synced: dict[int, bytes] = {}  # file -> its bytes
        self._gone: dict[int, bytes] = {}  # what files without a name held
        self._pending: list[_Change] = []
        self._adopt(root)

    def _adopt(self, home: Path) -> None:
        """All that is there is durable."""
        inode = os.stat(home).st_ino
        self._watch.owners[inode] = self
        self._durable[inode], self._now[inode] = {}, {}
        for name in sorted(os.listdir(home)):
            found = os.lstat(home / name)
            self._durable[inode][name] = self._now[inode][name] = found.st_ino
            if stat.S_ISDIR(found.st_mode):
                self._adopt(home / name)
            elif stat.S_ISREG(found.st_mode):
                self._watch.owners[found.st_ino] = self
                self._synced[found.st_ino] = _content(home / name)

    # -- what is done to it -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Something is about to be done."""
        self.ops += 1
        self.version += 1
        if self.ops == self.cut_at and self.cut_off is None:
            self.cut_off = self.cut()

    def made(self, directory: int, name: str, inode: int, *, is_directory: bool) -> None:
        self._watch.owners[inode] = self
        if is_directory:
            self._durable[inode], self._now[inode] = {}, {}
        self._change(_Change(((directory, name, inode),)))

    def went(self, directory: int, name: str, content: bytes | None) -> None:
        inode = self._now[directory].get(name)
        if inode is not None and content is not None:
            self._gone[inode] = content
        self._change(_Change(((directory, name, None),), inode if inode in self._now else None))

    def moved(self, source: tuple[int, str], target: tuple[int, str], replaced: bytes | None) -> None:
        inode = self._now[source[0]].get(source[1])
        old = self._now[target[0]].get(target[1])
        if inode is None or source == target:
            return
        if old is not None and replaced is not None:
            self._gone[old] = replaced
        self._change(_Change(((*source, None), (*target, inode)), old if old in self._now else None))

    def _change(self, change: _Change) -> None:
        self.version += 1
        _apply(self._now, change)
        self._pending.append(change)
        if len(self._pending) > _MOST:  # a kernel writes back by itself what is old
            for one in self._pending[: _MOST // 2]:
                _apply(self._durable, one)
            del self._pending[: _MOST // 2]

    def synced(self, inode: int, content: bytes | None) -> None:
        """An fsync of a file, or of a directory."""
        self.version += 1
        if inode not in self._now:
            self._synced[inode] = content or b""
            return
        pending = self._pending
        kept = self._closure({number for number, one in enumerate(pending) if inode in one.homes})
        left = []
        for number, one in enumerate(pending):
            if number not in kept:
                left.append(one)
            elif (
                len(one.entries) == 2
                and one.entries[1][0] != inode == one.entries[0][0]
                and not any(_needs(pending[later], one) for later in kept if later > number)
            ):  # it is known to be gone from here, and not to have come there
                _apply(self._durable, _Change(one.entries[:1]))
                left.append(_Change(one.entries[1:]))
            else:
                _apply(self._durable, one)
        self._pending = left

    def _closure(self, wanted: set[int]) -> set[int]:
        """These changes, and those that had to come before them."""
        found = set(wanted)
        for number in range(len(self._pending) - 1, -1, -1):
            if number in found:
                here = self._pending[number]
                for before in range(number):
                    if _needs(here, self._pending[before]):
                        found.add(before)
        return found

    def free(self) -> int:
        """How many bytes there is room for."""
        files = (Path(home, name) for home, _, names in os.walk(self.root) for name in names)
        return max(0, (self.capacity or 0) - sum(path.lstat().st_size for path in files))

    # -- the cut ----------------------------------------------------------------------------------------------------

    def cut(self) -> Disk:
        """A disk as the power cut leaves it, at a place of its own. This one is what the dead processes go on with."""
        outcome = self.outcome or self._rng.choice(OUTCOMES)
        entries = {inode: dict(held) for inode, held in self._durable.items()}
        for number in sorted(self._kept(outcome)):
            _apply(entries, self._pending[number])
        root = self.target()
        paths = dict(self._paths(os.stat(self.root).st_ino, self.root))
        self._write(os.stat(self.root).st_ino, root, entries, paths, outcome)
        left = Disk(root, self._rng, self._watch)
        left.capacity = self.capacity
        return left

    def _kept(self, outcome: str) -> set[int]:
        number = len(self._pending)
        if outcome == "all":
            return set(range(number))
        if outcome == "ordered":
            return set(range(self._rng.randint(0, number)))
        kept: set[int] = set()
        if outcome == "any":
            likely = self._rng.choice((0.2, 0.5, 0.8, 0.95))
            for here in range(number):
                needed = [before for before in range(here) if _needs(self._pending[here], self._pending[before])]
                if kept.issuperset(needed) and self._rng.random() < likely:
                    kept.add(here)
        return kept

    def _paths(self, inode: int, home: Path) -> Iterator[tuple[int, Path]]:
        for name, below in self._now[inode].items():
            if below in self._now:
                yield from self._paths(below, home / name)
            else:
                yield below, home / name

    def _write(
        self, inode: int, home: Path, entries: dict[int, dict[str, int]], paths: dict[int, Path], outcome: str
    ) -> None:
        _REAL["mkdir"](home)
        for name, below in sorted(entries[inode].items()):
            if below in entries:
                self._write(below, home / name, entries, paths, outcome)
                continue
            old = self._synced.get(below, b"")
            now = self._gone[below] if below in self._gone else _content(paths[below])
            fd = _REAL["open"](home / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(fd, now if outcome == "all" else old if outcome == "none" else self._torn(old, now))
            os.close(fd)

    def _torn(self, old: bytes, now: bytes) -> bytes:
        """A file's bytes of which some were written."""
        if old == now:
            return now
        way = self._rng.choice(("old", "now", "zeros", "blocks", "blocks"))
        if way in ("old", "now"):
            return old if way == "old" else now
        size = self._rng.choice((len(old), len(now), len(now), self._rng.randint(0, max(len(old), len(now)))))
        found = bytearray(size)
        for begin in range(0, size, _BLOCK):
            source = self._rng.choice((old, now)) if way == "blocks" else old
            piece = source[begin : min(begin + _BLOCK, size)]
            found[begin : begin + len(piece)] = piece
        return bytes(found)


def _apply(entries: dict[int, dict[str, int]], change: _Change) -> None:
    for directory, name, inode in change.entries:
        if inode is None:
            entries[directory].pop(name, None)
        else:
            entries[directory][name] = inode


def _needs(here: _Change, before: _Change) -> bool:
    """Whether a change can only be there if an earlier one is: of the same name, or in a directory that goes."""
    return not here.names.isdisjoint(before.names) or here.inside in before.homes


def _content(path: Path | str) -> bytes:
    fd = _REAL["open"](path, os.O_RDONLY)
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


class Watch:
    """Sees what is done to the disks whose inodes are in `owners`."""

    def __init__(self) -> None:
        self.owners: dict[int, Disk] = {}

    def leave(self, disk: Disk) -> None:
        """Nobody is to learn any more of what is done there."""
        self.owners = {inode: owner for inode, owner in self.owners.items() if owner is not disk}

    def _where(self, path: Any, at: int | None) -> tuple[Disk, int, str] | None:
        text = os.fspath(path)
        head, name = os.path.split(text.rstrip("/"))
        try:
            inode = os.stat(head or ".", dir_fd=at).st_ino
        except OSError:
            return None
        disk = self.owners.get(inode)
        return (disk, inode, name) if disk else None

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & os.O_CREAT:
            return int(_REAL["open"](path, flags, mode, dir_fd=dir_fd))
        with self._making(path, dir_fd):
            return int(_REAL["open"](path, flags, mode, dir_fd=dir_fd))

    def io_open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax"):
            return _OPEN(file, mode, *args, **options)
        with self._making(file, None):
            return _OPEN(file, mode, *args, **options)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._making(path, dir_fd):
            _REAL["mkdir"](path, mode, dir_fd=dir_fd)

    @contextlib.contextmanager
    def _making(self, path: Any, at: int | None) -> Iterator[None]:
        where = self._where(path, at)
        new = where is not None and not _exists(path, at)
        if where and new:
            where[0].tick()
        yield
        if where and new:
            found = os.stat(path, dir_fd=at, follow_symlinks=False)
            where[0].made(where[1], where[2], found.st_ino, is_directory=stat.S_ISDIR(found.st_mode))

    def rename(self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        here, there = self._where(source, src_dir_fd), self._where(target, dst_dir_fd)
        replaced = None
        if here and there:
            here[0].tick()
            replaced = _bytes_at(target, dst_dir_fd)
        _REAL["rename"](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if here and there:
            here[0].moved(here[1:], there[1:], replaced)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        where = self._where(path, dir_fd)
        content = _bytes_at(path, dir_fd) if where else None
        if where:
            where[0].tick()
        _REAL["unlink"](path, dir_fd=dir_fd)
        if where:
            where[0].went(*where[1:], content)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        where = self._where(path, dir_fd)
        if where:
            where[0].tick()
        _REAL["rmdir"](path, dir_fd=dir_fd)
        if where:
            where[0].went(*where[1:], None)

    def fsync(self, fd: int) -> None:
        found = os.fstat(fd)
        disk = self.owners.get(found.st_ino)
        if disk:
            disk.tick()
            disk.synced(found.st_ino, _content(f"/proc/self/fd/{fd}") if stat.S_ISREG(found.st_mode) else None)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        disk = self.owners.get(os.fstat(fd).st_ino)
        if disk and disk.capacity is not None:
            more = offset + memoryview(data).nbytes - os.fstat(fd).st_size
            if more > 0 and more > disk.free():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(_REAL["pwrite"](fd, data, offset))

    def statvfs(self, path: Any) -> Any:
        found = _REAL["statvfs"](path)
        disk = None if isinstance(path, int) else self.owners.get(os.stat(path).st_ino)
        if disk is None or disk.capacity is None:
            return found
        free = disk.free()
        sizes = {"f_bsize": 1, "f_frsize": 1, "f_blocks": disk.capacity, "f_bfree": free, "f_bavail": free}
        return SimpleNamespace(**{name: sizes.get(name, getattr(found, name)) for name in _STATVFS})

    def refuse(self, *args: Any, **options: Any) -> None:
        raise AssertionError("the simulated disk knows no links")


def _exists(path: Any, at: int | None) -> bool:
    try:
        os.stat(path, dir_fd=at, follow_symlinks=False)
    except OSError:
        return False
    return True


def _bytes_at(path: Any, at: int | None) -> bytes | None:
    try:
        if not stat.S_ISREG(os.stat(path, dir_fd=at, follow_symlinks=False).st_mode):
            return None
        fd = _REAL["open"](path, os.O_RDONLY, dir_fd=at)
    except OSError:
        return None
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Within, `watch` sees every change of the file system that this process makes through `os`, `io` and `pathlib`."""
    with contextlib.ExitStack() as stack:
        others = {"replace": watch.rename, "remove": watch.unlink, "fdatasync": watch.fsync}
        others |= dict.fromkeys(("link", "symlink"), watch.refuse)
        same = ("open", "mkdir", "rename", "unlink", "rmdir", "fsync", "pwrite", "statvfs")
        for name, call in ({name: getattr(watch, name) for name in same} | others).items():
            stack.enter_context(mock.patch.object(os, name, call))
        stack.enter_context(mock.patch.object(io, "open", watch.io_open))
        yield
