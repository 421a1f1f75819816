"""What happens to a disk: calls that fail, room that ends, files that may not grow, read-only, taken away.

Each fault names a `place`, the mount point that it is about, and begins and ends when told.
"""

from __future__ import annotations

import errno
import os
import random
import resource

from faults.disk.calls import ALL, READS, WRITES, Calls
from faults.disk.volumes import Volume

_CODES = (errno.EIO,) * 6 + (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EUCLEAN)
_GONE = {"mounted?", "No such file or directory", "does not exist", "unmounted"}


class Fault:
    """
    Attributes:
        sort, kind, notes: for the notes: which, what it meets, and what else it is.
        texts: what an error that it causes may say of its cause.
        renew: the place has to be mounted anew, with nobody on it, before it can be used again.
        lasting: it meets everything until it ends.
    """

    sort = ""
    notes: tuple[str, ...] = ()

    def __init__(self, volume: Volume, kind: str, texts: set[str], *, lasting: bool, renew: bool = False) -> None:
        self.volume, self.place = volume, volume.point
        self.kind, self.texts, self.lasting, self.renew = kind, texts, lasting, renew
        self.hit = False

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Hooked(Fault):
    """A fault that meets calls as they are made."""

    def __init__(
        self, volume: Volume, calls: Calls, kind: str, texts: set[str], *, lasting: bool, renew: bool = False
    ) -> None:
        self._calls = calls
        super().__init__(volume, kind, texts, lasting=lasting, renew=renew)

    def begin(self) -> None:
        self._calls.act = self._met

    def end(self) -> None:
        with self._calls.turn:
            self._calls.act = None

    def _met(self, name: str, path: str, size: int) -> int | None:
        raise NotImplementedError


class Filled(Fault):
    """A fault that takes room, and gives it back."""

    def end(self) -> None:
        self.volume.make_room()


class Refused(Hooked):
    """The k-th of some calls fails, or all from there on."""

    sort = "a call fails"

    def __init__(self, volume: Volume, calls: Calls, rng: random.Random, reading: bool) -> None:
        made = [name for name in (READS if reading else WRITES) if self._is_made(name, volume.point.name)]
        self._names = (rng.choice(made),) if rng.random() < 0.8 else READS if reading else ALL
        self._code = rng.choice(_CODES)
        if reading and self._code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            self._code = errno.EIO
        self._left = int(2 ** rng.uniform(0, 3 if len(self._names) == 1 else 6))
        lasting = rng.random() < 0.35
        what = f"{errno.errorcode[self._code]} on {self._names[0] if len(self._names) == 1 else 'any call'}"
        super().__init__(volume, calls, what, {os.strerror(self._code)}, lasting=lasting)

    def _is_made(self, name: str, place: str) -> bool:
        """Whether tierd calls it there."""
        return name not in (("write",) if place == "nvme" else ("pwrite", "preadv", "pread", "fallocate", "statvfs"))

    def _met(self, name: str, path: str, size: int) -> None:
        if name in self._names:
            self._left -= 1
            if self._left == 0 or (self.lasting and self._left < 0):
                self.hit = True
                if self._code == errno.EIO and name in ("read", "pread", "preadv"):
                    self.notes = ("EIO on a read",)
                raise OSError(self._code, os.strerror(self._code), path)


class Bytes(Hooked):
    """A quota of so many bytes: the write that passes it is cut short, and the next ones fail."""

    sort = "so many bytes"

    def __init__(self, volume: Volume, calls: Calls, rng: random.Random, size: int) -> None:
        self._code = rng.choice((errno.ENOSPC, errno.EDQUOT))
        self._left = rng.choice((rng.randrange(size), rng.randrange(30_000), rng.randrange(2_000)))
        texts = {os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "the file system is full"}
        super().__init__(volume, calls, f"{errno.errorcode[self._code]} after so many bytes", texts, lasting=True)

    def _met(self, name: str, path: str, size: int) -> int | None:
        if name not in ("write", "pwrite"):
            return size if name != "fallocate" or size <= self._left else 0
        done = min(size, self._left)
        self._left -= done
        if size and not done:
            self.hit = True
            self.notes = (f"{errno.errorcode[self._code]} on a write",)
            raise OSError(self._code, os.strerror(self._code), path)
        return done


class Full(Filled):
    """A file system with so many pages left."""

    sort = "full"

    def __init__(self, volume: Volume, rng: random.Random, pages: int) -> None:
        self._pages = rng.choice((rng.randrange(pages), rng.randrange(16)))
        super().__init__(
            volume, f"{volume.kind} full", {os.strerror(errno.ENOSPC), "file system is full"}, lasting=True
        )

    def begin(self) -> None:
        self.volume.leave_pages(self._pages)


class Inodes(Filled):
    """A file system with so many inodes left."""

    sort = "out of inodes"

    def __init__(self, volume: Volume, rng: random.Random) -> None:
        self._count = rng.randrange(14)
        texts = {os.strerror(errno.ENOSPC), "file system is full"}
        super().__init__(volume, f"{volume.kind} out of inodes", texts, lasting=True)

    def begin(self) -> None:
        self.volume.leave_inodes(self._count)


class FileSize(Fault):
    """RLIMIT_FSIZE: no file of this process may grow beyond so many bytes, memory files included."""

    sort = "no larger file"

    def __init__(self, volume: Volume, rng: random.Random, size: int) -> None:
        self._size = rng.choice((rng.randrange(size), rng.randrange(4_000)))
        super().__init__(volume, "EFBIG", {os.strerror(errno.EFBIG)}, lasting=True)

    def begin(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, resource.RLIM_INFINITY))

    def end(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class ReadOnly(Hooked):
    """The file system turns read-only at the k-th call."""

    sort = "read-only"

    def __init__(self, volume: Volume, calls: Calls, rng: random.Random) -> None:
        self._left, self._done = int(2 ** rng.uniform(0, 5)), False
        super().__init__(
            volume, calls, f"{volume.kind} read-only", {os.strerror(errno.EROFS)}, lasting=True, renew=True
        )

    def _met(self, name: str, path: str, size: int) -> None:
        self._left -= 1
        if self._left <= 0 and not self._done:
            self.hit = self._done = self.volume.turn_read_only()


class Vanished(Hooked):
    """The file system is unmounted, as by `umount -l`, at the k-th call, and comes back when it ends."""

    sort = "vanished"

    def __init__(self, volume: Volume, calls: Calls, rng: random.Random) -> None:
        self._left = int(2 ** rng.uniform(0, 5))
        super().__init__(volume, calls, "vanished mount", _GONE, lasting=True)

    def end(self) -> None:
        super().end()
        if self.hit:
            written = self.volume.below()
            self.volume.back()
            if written:
                raise AssertionError(f"written to the disk below {self.place}: {written}")

    def _met(self, name: str, path: str, size: int) -> None:
        self._left -= 1
        if self._left <= 0 and not self.hit:
            self.hit = True
            self._calls.act = None
            self.volume.vanish()
