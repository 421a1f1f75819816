"""Read a file of `FileStore`, into memory of the caller or only to digest it.

A large read bypasses the page cache, because pages that are read once cost more than their bytes. After a put, it also
gives what the device has.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import xxhash
from aiofiles.threadpool.binary import AsyncFileIO

from tierd.spool.direct_io import LARGE, memory_for, read_into, set_direct

DIRECT_PIECE = 4 << 20  # bytes; direct I/O has no read-ahead and no write-behind, so it needs larger requests
_PIECE = 1 << 20  # bytes; small enough to stay in the processor's cache until it is copied


async def fill(file: AsyncFileIO, view: memoryview, on_piece: Callable[[], None]) -> memoryview:
    """Fill `view` from `file` through a small buffer. `on_piece` is called after each piece.

    The buffer is needed because the thread of a cancelled call may still write to it.
    """
    large = len(view) >= LARGE and set_direct(file.fileno(), True)
    buffer, at = _buffer(len(view), large=large), 0
    while at < len(view):
        try:
            count = await file.readinto(buffer)
        except OSError as error:
            if error.errno != errno.EINVAL or not set_direct(file.fileno(), False):
                raise
            continue
        if not count:
            raise _became_shorter()
        count = min(count, len(view) - at)
        view[at : at + count] = buffer[:count]
        at += count
        on_piece()
    return view


def digest_file(fd: int, size: int, on_piece: Callable[[], None]) -> str:
    """Return the XXH3-128 of an open file of `size` bytes. `on_piece` is called after each piece.

    Raises:
        OSError: it cannot be read, or is shorter by now.
    """
    large = size >= LARGE and set_direct(fd, True)
    buffer, hasher = _buffer(size, large=large), xxhash.xxh3_128()
    for at in range(0, size, len(buffer) or 1):
        length = min(len(buffer), size - at)
        if read_into(fd, buffer, length, at) < length:
            raise _became_shorter()
        hasher.update(buffer[:length])
        on_piece()
    return hasher.hexdigest()


def _buffer(size: int, *, large: bool) -> memoryview:
    return memory_for(DIRECT_PIECE if large else min(_PIECE, size))


def _became_shorter() -> OSError:
    return OSError(errno.EIO, "the file became shorter")
