"""Objects of a tier in a directory, so that several followers of one node fetch each of them once.

Invariants: a file is named by the digest of its bytes and compared with it at each use, so whatever lies there cannot
change a result. A cache that fails (a full disk, a follower that hangs while it holds a file) only costs a fetch.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tierd.core.errors import ConfigError
from tierd.core.manifest import StoredChunk
from tierd.daemon.concurrency import thread_uncancelled
from tierd.daemon.tiers.tier_objects import get_object
from tierd.spool.direct_io import memory_for
from tierd.spool.file_io import digest, make_private, open_own
from tierd.stores.base import Buffer, Store

_HOLDER_S = 30.0  # seconds that a follower waits for another one's fetch before it fetches by itself
_ASKED_S = 0.02  # seconds between two tries of the lock
_KEPT_S = 600.0  # seconds that an unused file stays
# The last small objects that are kept in memory, because headers and trees are the same from step to step.
_SMALL_BYTES, _SMALL_KEPT = 256 << 10, 128


class ObjectCache:
    """The objects of chunks, by their digest. `fetched_bytes` counts those that came from a tier.

    Args:
        directory: the cache, made for this user alone; None keeps nothing.

    Raises:
        ConfigError: others may write to the directory, or it cannot be made.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory, self.fetched_bytes = directory, 0
        self._small: OrderedDict[str, bytes] = OrderedDict()
        if directory is None:
            return
        try:
            make_private(directory)
            status = directory.stat()
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be made: {error.strerror}; name a directory of yours") from error
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(f"{directory}: others may write there, so it cannot be a cache; name one of your own")

    async def read(
        self, store: Store, key: str, stored: StoredChunk, where: str = "", into: memoryview | None = None
    ) -> Buffer:
        """Read as `get_object`, from the cache if the object is there. Raises as `get_object`."""
        small = self._small.get(stored.xxh3_128)
        if small is not None and digest(small) == stored.xxh3_128:
            self._small.move_to_end(stored.xxh3_128)
            return small
        async with self._hold(stored.xxh3_128) as file:
            if file >= 0 and (data := await thread_uncancelled(_load, file, stored, into)) is not None:
                return data
            fetched = await get_object(store, key, stored, where, into)
            self.fetched_bytes += len(fetched)
            if file >= 0:
                await thread_uncancelled(_store, file, stored, fetched)
            if len(fetched) <= _SMALL_BYTES and digest(fetched) == stored.xxh3_128:
                self._small[stored.xxh3_128] = bytes(fetched)
                if len(self._small) > _SMALL_KEPT:
                    self._small.popitem(last=False)
            return fetched

    def remove_unused(self) -> None:
        """Remove the files that no follower used for ten minutes."""
        limit = time.time() - _KEPT_S
        with suppress(OSError):
            for path in self._directory.iterdir() if self._directory else ():
                if path.lstat().st_mtime < limit:
                    path.unlink()

    @asynccontextmanager
    async def _hold(self, name: str) -> AsyncIterator[int]:
        """Open and lock an object's file, which may be empty; -1 if that is not possible."""
        file = -1
        if self._directory is not None:
            with suppress(OSError, ConfigError):
                file = open_own(self._directory / name, os.O_RDWR | os.O_CREAT)
        try:
            yield file if file >= 0 and await _lock(file) else -1
        finally:
            if file >= 0:
                os.close(file)


async def _lock(file: int) -> bool:
    ends_at = time.monotonic() + _HOLDER_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends_at:
                return False
            await asyncio.sleep(_ASKED_S)
        except OSError:  # a file system without locks
            return False
        else:
            return True


def _load(file: int, stored: StoredChunk, into: memoryview | None) -> memoryview | None:
    try:
        if os.fstat(file).st_size != stored.size:
            return None
        memory = (memory_for(max(stored.size, 1)) if into is None else into)[: stored.size]
        at = 0
        while at < stored.size and (count := os.preadv(file, [memory[at:]], at)):
            at += count
        os.utime(file)
    except OSError:
        return None
    return memory if at == stored.size and digest(memory) == stored.xxh3_128 else None


def _store(file: int, stored: StoredChunk, data: Buffer) -> None:
    if len(data) != stored.size or digest(data) != stored.xxh3_128:
        return
    view, at = memoryview(data).cast("B"), 0
    try:
        while at < len(view):
            at += os.pwrite(file, view[at:], at)
        os.ftruncate(file, at)  # an older file that was damaged may be longer
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, 0)
