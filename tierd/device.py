"""Bytes between memory and a disk, at the disk's speed: past the page cache where the file system goes along.

Law: a shortcut that is refused is no error. What O_DIRECT does not take goes through the page cache in the same call,
with no byte lost, none written beyond the end, and nothing for the caller to ask.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeVar

PAGE = 4096  # O_DIRECT alignment of memory, offsets and lengths on every Linux file system we know, bytes
LARGE = 1 << 20  # from here on a file is worth O_DIRECT, a reservation and a thread, bytes
PIECE = 16 << 20  # one read(2) or write(2), bytes; larger ones gain nothing (design, section 7)

T = TypeVar("T")

_POPULATE_WRITE = 23  # madvise(2), Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def set_direct(fd: int, on: bool) -> bool:
    """Switch O_DIRECT of an open file; False where that changed nothing, since it was so or the file system refuses."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) == on:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags ^ os.O_DIRECT)
    except OSError:
        return False
    return True


def reserve(fd: int, size: int) -> None:
    """Give a file its blocks and its size, so that a full disk says so before anything is written.

    Not `posix_fallocate`: where a file system has none, that one writes a byte into every block instead.
    """
    if _fallocate(fd, 0, 0, size) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def is_spare(fd: int) -> bool:
    """Whether a file that nobody needs may be overwritten: plain, ours, with no other name, and open nowhere else.

    The kernel grants a write lease only then (a mapping counts as open); it is given back at once.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
        return False
    try:
        # Whoever opens the file before the lease is given back makes the kernel send a signal; SIGIO would kill us.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> bool:
    """Write all of `data` at `offset`, in pieces.

    Returns:
        Whether all its whole pages went past the page cache. What is left of a page clears the file's O_DIRECT.

    Raises:
        OSError: as the system reports it; some of the bytes may have been written.
    """
    view, direct = memoryview(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    whole, done = len(view) - len(view) % PAGE, 0
    while done < len(view):
        if done >= whole:
            set_direct(fd, False)
        end = min(done + PIECE, whole if done < whole else len(view))
        try:
            done += os.pwrite(fd, view[done:end], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not set_direct(fd, False):
                raise
            direct = False
    return direct


def read_into(fd: int, memory: memoryview, size: int, offset: int) -> int:
    """Read `size` bytes at `offset`, and to the end of a page where `memory` has room, since O_DIRECT reads whole ones.

    Returns:
        How many of the `size` bytes there are: fewer where the file ends before.
    """
    pages, done = memory[: -(-size // PAGE) * PAGE], 0
    while done < size:
        try:
            count = os.preadv(fd, [pages[done : done + PIECE]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not set_direct(fd, False):
                raise
            continue
        if count == 0:
            break
        done += count
    return min(done, size)


def memory_for(size: int) -> memoryview:
    """At least `size` writable bytes to read into, whole pages of their own where that is worth O_DIRECT.

    Huge pages: the first touch of small ones costs twenty times a copy (design, section 7). Not for children until
    `settle`: on older kernels a fork while the disk fills private memory could leave the parent with other pages.
    """
    if size < LARGE:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        pass
    return memoryview(memory)


def populate(memory: mmap.mmap, begin: int, length: int) -> int:
    """Touch writable pages, so that what is written there finds them; the error's number, 0 if there was none."""
    # Not mmap.madvise, which holds the interpreter's lock for as long as the kernel clears pages.
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.madvise(ctypes.c_void_p(first + begin), ctypes.c_size_t(length), _POPULATE_WRITE) == 0:
        return 0
    return ctypes.get_errno()


def settle(memory: memoryview, size: int) -> memoryview:
    """The `size` bytes that were read into `memory`, as memory like any other from here on."""
    if isinstance(memory.obj, mmap.mmap):
        memory.obj.madvise(mmap.MADV_DOFORK)
    return memory[:size]


@contextmanager
def ahead(items: Iterator[T], *, worth: bool) -> Iterator[Iterator[T]]:
    """The items, made by a thread beside the one that takes them; once the block is left, none is being made any more.

    A plain thread, not a pool: while the interpreter waits for its last save, pools take no work.

    Args:
        worth: without, they are made as they are taken.
    """
    made: SimpleQueue[T | None] = SimpleQueue()
    failed: list[BaseException] = []
    left = Event()

    def make() -> None:
        try:
            for item in items:
                made.put(item)
                if left.is_set():
                    break
        except BaseException as error:
            failed.append(error)
        made.put(None)

    def taken() -> Iterator[T]:
        while (item := made.get()) is not None:
            yield item
        if failed:
            raise failed[0]

    thread = Thread(target=make, name="tierd-ahead")
    try:
        if worth:
            thread.start()
    except RuntimeError:  # no thread to be had
        worth = False
    try:
        yield taken() if worth else items
    finally:
        left.set()
        if worth:
            thread.join()
