"""Move bytes between memory and a disk at the disk's speed: past the page cache if the file system permits that.

Invariant: a refused shortcut is no error. Bytes that O_DIRECT does not accept are moved through the page cache in the
same call. No byte is lost, none is written beyond the end, and the caller need not check.
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
LARGE = 1 << 20  # bytes; from this size on, O_DIRECT, a reservation and a thread pay off
PIECE = 16 << 20  # one read(2) or write(2), bytes; larger ones gain nothing
SPARE_BYTES = 4 << 20  # of a buffer; direct I/O has no read-ahead and no write-behind, so it needs larger requests

T = TypeVar("T")

_POPULATE_WRITE = 23  # madvise(2), Linux 5.14
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def set_direct(fd: int, on: bool) -> bool:
    """Set or clear O_DIRECT of an open file; False if it had that state already, or the file system refuses."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) == on:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags ^ os.O_DIRECT)
    except OSError:
        return False
    return True


def reserve(fd: int, size: int) -> None:
    """Allocate a file's blocks and set its size, so that a full disk is an error before anything is written.

    `posix_fallocate` is not used, because on file systems without allocation it writes a byte into every block instead.
    """
    if libc.fallocate(fd, 0, 0, size) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def is_overwritable(fd: int) -> bool:
    """Whether a file that is not needed may be overwritten: plain, ours, with one name, and open nowhere else.

    The kernel grants a write lease only in that case (a mapping counts as open). The lease is released at once.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        return False
    try:
        # A process that opens the file before the release makes the kernel send a signal; the default, SIGIO, would
        # kill us.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> bool:
    """Write all of `data` at `offset`, in pieces of at most `PIECE` bytes.

    Return whether all whole pages were written past the page cache. A partial last page clears the file's O_DIRECT. If
    the system raises OSError, some of the bytes may have been written.
    """
    view, direct = memoryview(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    aligned, position = len(view) - len(view) % PAGE, 0
    while position < len(view):
        if position >= aligned:
            set_direct(fd, False)
        end = min(position + PIECE, aligned if position < aligned else len(view))
        try:
            position += os.pwrite(fd, view[position:end], offset + position)
        except OSError as error:
            if error.errno != errno.EINVAL or not set_direct(fd, False):
                raise
            direct = False
    return direct


_SPARES = 4  # idle buffers
_spares: list[memoryview] = []
os.register_at_fork(after_in_child=_spares.clear)  # because a child does not have their memory


def take_spare() -> memoryview:
    """Return `SPARE_BYTES` of whole pages, which earlier users have touched if there were any; for any thread."""
    try:
        return _spares.pop()  # not asked for their number first, because other threads take them as well
    except IndexError:
        return memory_for(SPARE_BYTES)


def give_back_spare(memory: memoryview) -> None:
    """End the use of what `take_spare` returned. A reader that was cancelled keeps it, because its thread may go on."""
    if len(_spares) < _SPARES:
        _spares.append(memory)


def write_pages(fd: int, data: memoryview, offset: int) -> None:
    """Write `data` at `offset`: whole pages of the file past the page cache, the rest through it.

    A neighbouring write may share the first or last page with this one, so shared pages use the cache. The cache costs
    several times the CPU of the write itself. The file's O_DIRECT is set or cleared as needed. Data that does not lie
    in whole pages of memory is copied through a buffer. Raises OSError as `write_all`.
    """
    edge = -offset % PAGE if len(data) >= LARGE else len(data)
    set_direct(fd, False)
    write_all(fd, data[:edge], offset)
    body, offset = data[edge:], offset + edge
    if body and set_direct(fd, True) and not _is_aligned(body):
        spare = take_spare()
        while body:
            piece = spare[: min(len(spare), len(body))]
            piece[:] = body[: len(piece)]
            write_all(fd, piece, offset)
            body, offset = body[len(piece) :], offset + len(piece)
        give_back_spare(spare)
    write_all(fd, body, offset)


def _is_aligned(data: memoryview) -> bool:
    return not data.readonly and ctypes.addressof(ctypes.c_char.from_buffer(data)) % PAGE == 0


def read_into(fd: int, memory: memoryview, size: int, offset: int) -> int:
    """Read `size` bytes at `offset` into `memory`; return their number, which is less if the file ends earlier.

    The read continues to the end of the last page if `memory` has space, because O_DIRECT reads whole pages.
    """
    pages, position = memory[: -(-size // PAGE) * PAGE], 0
    while position < size:
        try:
            count = os.preadv(fd, [pages[position : position + PIECE]], offset + position)
        except OSError as error:
            if error.errno != errno.EINVAL or not set_direct(fd, False):
                raise
            continue
        if count == 0:
            break
        position += count
    return min(position, size)


def read_cached(fd: int, memory: memoryview, size: int, offset: int) -> bool:
    """Read `size` bytes at `offset` into `memory` if the page cache holds all of them; the disk is not waited for.

    A file that was just written is in memory already. Reading it past the cache would load the disk once more. The file
    is open without O_DIRECT. If the result is False, the memory's content is undefined.
    """
    # One page first, because the kernel reads ahead after a miss, and more for a larger request.
    position, length = 0, PAGE
    while position < size:
        try:
            count = os.preadv(fd, [memory[position : min(position + length, size)]], offset + position, os.RWF_NOWAIT)
        except OSError:  # not in the cache; or a kernel or a file system that does not say so
            return False
        if not count:
            return False
        position, length = position + count, PIECE
    return True


def memory_for(size: int) -> memoryview:
    """Allocate at least `size` writable bytes to read into.

    From `LARGE` bytes on, the memory consists of whole pages of its own, for O_DIRECT. Huge pages are requested,
    because the first touch of small pages costs twenty times a copy. Forked children do not inherit
    the memory until `finish_read`. On older kernels a fork during a direct read into private memory could leave the
    parent with other pages.
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
    """Touch writable pages, so that later writes find them allocated. Returns an errno value, 0 on success."""
    # Not mmap.madvise, because it holds the GIL for as long as the kernel clears pages.
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if libc.madvise(ctypes.c_void_p(first + begin), ctypes.c_size_t(length), _POPULATE_WRITE) == 0:
        return 0
    return ctypes.get_errno()


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy writable bytes to writable bytes of the same number. Other threads run meanwhile, as in no slice's copy."""
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes for a place of {len(target)}")
    if target:
        to, begin = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (target, source))
        ctypes.memmove(to, begin, len(source))


def finish_read(memory: memoryview, size: int) -> memoryview:
    """Return the `size` bytes that were read into `memory`, and let forked children inherit that memory again."""
    if isinstance(memory.obj, mmap.mmap):
        memory.obj.madvise(mmap.MADV_DOFORK)
    return memory[:size]


@contextmanager
def ahead(items: Iterator[T], *, worth: bool) -> Iterator[Iterator[T]]:
    """Yield the items, made ahead by a thread if that is `worth` it. When the block ends, the thread has ended.

    The thread is not from a pool, because pools accept no work while the interpreter's exit waits for its last save.
    """
    queue: SimpleQueue[T | None] = SimpleQueue()
    failed: list[BaseException] = []
    stopped = Event()

    def make() -> None:
        try:
            for item in items:
                queue.put(item)
                if stopped.is_set():
                    break
        except BaseException as error:
            failed.append(error)
        queue.put(None)

    def drain() -> Iterator[T]:
        while (item := queue.get()) is not None:
            yield item
        if failed:
            raise failed[0]

    thread = Thread(target=make, name="tierd-ahead")
    try:
        if worth:
            thread.start()
    except RuntimeError:  # the system grants no thread
        worth = False
    try:
        yield drain() if worth else items
    finally:
        stopped.set()
        if worth:
            thread.join()
