"""Disks and networks that return wrong bytes at some reads, while the stored bytes stay right."""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.doubles import Double, flipped

from tierd.stores.base import Buffer, Store


class BadDisk:
    """Flips a random bit in one of `one_in` reads below a directory; the files stay right."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path, seed: int, one_in: int) -> None:
        self.flips, self._home, self._one_in = 0, home, one_in
        self._random, self._read = random.Random(seed), os.preadv
        self._read_bytes = os.pread
        monkeypatch.setattr(os, "preadv", self._preadv)
        monkeypatch.setattr(os, "pread", self._pread)

    def _preadv(self, fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        count = self._read(fd, buffers, offset, flags)
        self._flip(fd, buffers[0], count)
        return count

    def _pread(self, fd: int, count: int, offset: int) -> bytes:
        data = bytearray(self._read_bytes(fd, count, offset))
        self._flip(fd, data, len(data))
        return bytes(data)

    def _flip(self, fd: int, data: bytearray | memoryview, count: int) -> None:
        bad = Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(self._home)
        if count and bad and self.is_bad():
            self.flips += 1
            for _ in range(3):  # so that the chunk among the pages that were read is met
                data[self._random.randrange(count)] ^= 1 << self._random.randrange(8)

    def is_bad(self) -> bool:
        """Decide whether a read is wrong."""
        return self._random.randrange(self._one_in) == 0


class WrongPages:
    """The page cache has a file with a flipped bit until the file's pages are dropped; the disk has the right bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self._path, self._right, self._advise = path, path.read_bytes(), os.posix_fadvise
        path.write_bytes(flipped(self._right))
        monkeypatch.setattr(os, "posix_fadvise", self._fadvise)

    def _fadvise(self, fd: int, offset: int, size: int, advice: int) -> None:
        self._advise(fd, offset, size, advice)
        if advice == os.POSIX_FADV_DONTNEED and os.path.samestat(os.fstat(fd), self._path.stat()):
            self._path.write_bytes(self._right)


class WrongPath:
    """Flips the same bit of a file at every read by one path, and another bit at the first read by the other path.

    Args:
        direct: the path that is always wrong: past the page cache, or through it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, *, direct: bool) -> None:
        self._path, self._direct, self._is_first, self._read = path, direct, True, os.preadv
        monkeypatch.setattr(os, "preadv", self._preadv)

    def _preadv(self, fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        count = self._read(fd, buffers, offset, flags)
        if offset == 0 and count and os.path.samestat(os.fstat(fd), self._path.stat()):
            is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            if is_direct == self._direct:
                buffers[0][0] ^= 1
            elif self._is_first:
                buffers[0][0] ^= 2
                self._is_first = False
        return count


class BadNetwork(Double):
    """Replaces the bytes of each of the first `left` answers for a kind of object."""

    def __init__(self, inner: Store, of: Callable[[str], bool], left: int = 10**9) -> None:
        super().__init__(inner)
        self._random, self._of, self.left = random.Random(1), of, left

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        data = await super().get(key, into)
        if not self._of(key) or not self.left:
            return data
        self.left -= 1
        wrong = self._random.randbytes(len(data))  # one bit of a small chunk may flip twice in the same way
        if into is None:
            return wrong
        into[: len(wrong)] = wrong
        return into[: len(wrong)]
