"""The arena: memory that holds a snapshot, shared with the daemon by descriptor. Sync; used by client and daemon.

Law: an arena never shrinks under whoever maps it (it is sealed), and a forked child has no part in it. It is touched
page by page before training needs it, since a first touch costs twenty times a copy (design, section 7).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from tierd.device import PAGE, populate

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SLICE = 64 << 20  # bytes touched by one call, so that an interpreter that ends does not wait for all of it
_SPARE = 0.05  # of all memory, left to everybody else

_open: weakref.WeakSet[Arena] = weakref.WeakSet()


class _Mapping(mmap.mmap):
    """A mapping that says when it is about to go. What has a view of its memory keeps it, so that is after the last;
    and before the memory is unmapped, which a weak reference is not."""

    before_unmapping: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.before_unmapping is not None:
            self.before_unmapping()


_not_here: list[_Mapping] = []


def _forget_in_child() -> None:
    # A DataLoader's worker must not keep a state's worth of memory alive.
    for arena in list(_open):
        _not_here.append(arena._memory)  # not mapped in a child: unmapping would hit whatever has taken the address
        arena.close()


os.register_at_fork(after_in_child=_forget_in_child)


class Arena:
    """`size` bytes of shared memory, a multiple of the page. `view` is its content, `fd` what others map. Once it is
    `shared`, another trainer may come to use it.

    Raises:
        MemoryError: the system has no memory for it.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = -(-max(size, 1) // PAGE) * PAGE
        self.fd = -1 if fd is None else fd
        self.shared = False
        try:
            if fd is None:
                self.fd = os.memfd_create("tierd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(self.fd, self.size)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = _Mapping(self.fd, self.size)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
            raise MemoryError(f"an arena of {self.size} bytes: {error.strerror}") from error
        self._memory.madvise(mmap.MADV_DONTFORK)
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # direct I/O likes them; most systems give shared memory none
        except OSError:
            pass
        self.view = memoryview(self._memory)
        _open.add(self)

    @classmethod
    def received(cls, fd: int) -> Arena:
        """The arena behind a descriptor that another process sent; takes the descriptor.

        Raises:
            ValueError: it is none: it could be cut short while it is read.
        """
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:
            sealed = False
        size = os.fstat(fd).st_size
        if not sealed or not size or size % PAGE:
            os.close(fd)
            raise ValueError("the descriptor is no sealed memfd of whole pages")
        return cls(size, fd)

    def prefault(self, size: int | None = None) -> None:
        """Touch the first `size` bytes (all by default), so that later writes find their pages there.

        Raises:
            MemoryError: there is not that much memory. Without this call a later write would be killed by SIGBUS.
        """
        end = min(self.size, -(-(self.size if size is None else size) // PAGE) * PAGE)
        for begin in range(0, end, _SLICE):
            length = min(_SLICE, end - begin)
            number = populate(self._memory, begin, length)
            if number in (errno.EINVAL, errno.ENOSYS):  # an older kernel: get the pages; mapping them is the small part
                try:
                    os.posix_fallocate(self.fd, begin, length)
                    number = 0
                except OSError as error:
                    number = error.errno or errno.ENOMEM
            if number:
                raise MemoryError(f"an arena of {end} bytes: {os.strerror(number)}")

    @property
    def before_unmapping(self) -> Callable[[], None] | None:
        """Called when nothing in this process has a view of the memory any more, and it is still mapped. It must not
        hold the arena."""
        return self._memory.before_unmapping

    @before_unmapping.setter
    def before_unmapping(self, call: Callable[[], None] | None) -> None:
        self._memory.before_unmapping = call

    def trim(self, size: int) -> None:
        """Give the memory after the first `size` bytes back; it reads as zeros and is there again once written to."""
        begin = -(-size // PAGE) * PAGE
        if begin < self.size:
            self._memory.madvise(mmap.MADV_REMOVE, begin, self.size - begin)

    def close(self) -> None:
        """Let go of the descriptor. The memory goes with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        _open.discard(self)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


def available() -> int:
    """Bytes of memory that this process could still take: what the system and every control group above it leave,
    less a share for everybody else."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(facts[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    left = min([free, *_group_headroom()])
    return max(0, left - int(_SPARE * total))


def _group_headroom() -> list[int]:
    """What every memory control group (v2) above this process leaves it: limit less use, but for clean page cache."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        name = next(line[3:].strip() for line in lines if line.startswith("0::"))
        group = Path("/sys/fs/cgroup") / name.lstrip("/")
        while group.is_relative_to("/sys/fs/cgroup"):
            limit = group / "memory.max"
            if limit.is_file() and (text := limit.read_text().strip()) != "max":
                used = int((group / "memory.current").read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                found.append(int(text) - used + int(stat.get("inactive_file", 0)))
            group = group.parent
    except (OSError, ValueError, StopIteration):
        pass  # no control groups to ask: the system's word alone
    return found
