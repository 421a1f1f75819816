"""The arena: memory that holds a snapshot, shared with the daemon by descriptor; and how much memory is left for it.

A control group limits memory in version 1 or 2, and a hybrid system lists both. Its version 2 usually has no memory
controller, so the limit is in version 1.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierd.spool.direct_io import PAGE, populate

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # bytes; version 1 writes "no limit" as a number near 2^63


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that limits memory: where its files are, and the bytes that its processes may use together."""

    directory: Path
    limit: int

    def left_bytes(self) -> int:
        """Return the bytes that the group leaves: its limit less its use, where clean page cache does not count as use.

        Raises OSError or ValueError if the kernel does not say how much is used.
        """
        current = self.directory / "memory.current"
        if not current.is_file():
            current = self.directory / "memory.usage_in_bytes"
        used = int(current.read_text())
        stat = dict(line.split() for line in (self.directory / "memory.stat").read_text().splitlines())
        # In version 1, only the totals include the groups below, as the use does.
        cache = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
        return self.limit - used + int(cache)


def limited_groups(groups: str = "", root: Path = _ROOT) -> Iterator[MemoryGroup]:
    """Yield each control group at or above this process that limits memory.

    `groups` is the content of ``/proc/self/cgroup``, cgroups(7), which is read if it is empty; they are mounted at
    `root`.
    """
    for line in (groups or _read(_GROUPS)).splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if not controllers:
            base, names = root, ["memory.max", "memory.high"]
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ["memory.limit_in_bytes"]
        else:
            continue
        # In a container the path may be the host's, which is not there. The container's own group is then the root, and
        # the root is asked in any case.
        own_group = base / path.lstrip("/")
        for directory in (own_group, *own_group.parents):
            texts = (_read(directory / name).strip() for name in names)
            limits = [limit for text in texts if text.isdigit() and (limit := int(text)) < _UNLIMITED]
            if limits:
                yield MemoryGroup(directory, min(limits))
            if directory == base:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SLICE = 64 << 20  # bytes touched by one call, so that an interpreter's exit does not wait for the whole arena
_TOUCHING_THREADS = 4  # more of them gain little, and training has most cores
_SPARE = 0.05  # share of all memory, and of a limit, that is left to others

_open: weakref.WeakSet[Arena] = weakref.WeakSet()


class _Mapping(mmap.mmap):
    """A mapping that calls `before_unmapping` before its memory is unmapped.

    Every view of the memory keeps the mapping alive, so the call comes after the last view is deleted. A weak reference
    would not do, because its callback runs after the unmapping.
    """

    before_unmapping: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.before_unmapping is not None:
            self.before_unmapping()


_foreign_mappings: list[_Mapping] = []


def _forget_in_child() -> None:
    # A DataLoader's worker must not keep a state's worth of memory alive.
    for arena in list(_open):
        # Never unmapped in a child, because a later mapping may use the same address there.
        _foreign_mappings.append(arena._memory)
        arena.close()


os.register_at_fork(after_in_child=_forget_in_child)


class Arena:
    """A block of shared memory, of at least `size` bytes, rounded up to whole pages.

    It maps and then owns the descriptor `fd`; without one it allocates new memory. `view` is the content. `shared` says
    whether a later trainer may also use the arena.

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
            limit = "; raise the limit of a file's size (`ulimit -f unlimited`)" if error.errno == errno.EFBIG else ""
            raise MemoryError(f"an arena of {self.size} bytes: {error.strerror}{limit}") from error
        self._memory.madvise(mmap.MADV_DONTFORK)
        try:
            # Huge pages speed up direct I/O; most systems refuse them for shared memory.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass
        self.view = memoryview(self._memory)
        _open.add(self)

    @classmethod
    def received(cls, fd: int) -> Arena:
        """Map the arena behind a descriptor that another process sent, and take the descriptor.

        Raises ValueError unless it is a sealed memfd of whole pages, because its sender could truncate another one.
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

    def prefault(self, size: int | None = None, begin: int = 0) -> None:
        """Touch the bytes from `begin` to `size` (all by default), so that later writes find their pages allocated.

        Several threads share the work, because the kernel clears each page in the thread that touches it.

        Raises:
            MemoryError: the system lacks the memory. Without this call, SIGBUS would kill the process at a later write.
        """
        end = min(self.size, -(-(self.size if size is None else size) // PAGE) * PAGE)
        starts, errors = iter(range(begin - begin % PAGE, end, _SLICE)), list[int]()

        def touch() -> None:
            for start in starts:
                if errors:
                    return
                if number := self._touch(start, min(_SLICE, end - start)):
                    errors.append(number)

        helpers = []
        for _ in range(min(_TOUCHING_THREADS, len(os.sched_getaffinity(0)), -(-(end - begin) // _SLICE)) - 1):
            helper = threading.Thread(target=touch, name="tierd-touch", daemon=True)
            with suppress(RuntimeError):  # the system grants no thread, or the interpreter is ending
                helper.start()
                helpers.append(helper)
        touch()
        for helper in helpers:
            helper.join()
        if errors:
            raise MemoryError(f"an arena of {end} bytes: {os.strerror(errors[0])}")

    def _touch(self, begin: int, length: int) -> int:
        """Touch the pages of a slice. Returns an errno value, 0 on success."""
        number = populate(self._memory, begin, length)
        # An older kernel: allocate the pages only, because mapping them is the smaller cost.
        if number in (errno.EINVAL, errno.ENOSYS):
            try:
                os.posix_fallocate(self.fd, begin, length)
                number = 0
            except OSError as error:
                number = error.errno or errno.ENOMEM
        return number

    @property
    def before_unmapping(self) -> Callable[[], None] | None:
        """A callback for the moment after the last view in this process is deleted and before the memory is unmapped.

        The callback must not hold a reference to the arena.
        """
        return self._memory.before_unmapping

    @before_unmapping.setter
    def before_unmapping(self, call: Callable[[], None] | None) -> None:
        self._memory.before_unmapping = call

    def trim(self, size: int) -> None:
        """Return the memory after the first `size` bytes to the system. It reads as zeros until a write allocates it
        again.
        """
        begin = -(-size // PAGE) * PAGE
        if begin < self.size:
            self._memory.madvise(mmap.MADV_REMOVE, begin, self.size - begin)

    def close(self) -> None:
        """Close the descriptor. The memory is unmapped with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        _open.discard(self)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


def available() -> int:
    """Return the bytes of memory that this process could still take.

    That is the least that the system, every control group above the process and the limit of its address space leave.
    A share of each is left to others.
    """
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(facts[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    free_bytes = [free - int(_SPARE * total)]
    for group in limited_groups():
        with suppress(OSError, ValueError):
            free_bytes.append(group.left_bytes() - int(_SPARE * group.limit))
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        free_bytes.append(space - mapped - int(_SPARE * space))
    return max(0, min(free_bytes))
