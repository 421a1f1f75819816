"""Wrappers around any store: a limit on bytes per second, a count of requests, and a guard of refused deletions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from tierd.core.errors import DeleteRefused
from tierd.stores.base import FIRST_PAGE, PAGE, Buffer, ObjectInfo, Store, StoreWrapper, flatten
from tierd.threads import is_foreground

_BURST_S = 1.0  # seconds of its rate that an idle bucket saves up


class _TokenBucket:
    """A token bucket of `rate` bytes per second.

    `_level` is the number of bytes that may move now. Below 0, it is the number of bytes that were charged and are not
    yet paid for.
    """

    def __init__(self, rate: int, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._capacity = rate * _BURST_S
        self._level, self._at = self._capacity, clock()
        self._lock = asyncio.Lock()  # admits its waiters in FIFO order

    async def take(self, size: int) -> None:
        """Charge `size` bytes, and return when they and all bytes charged before them are paid for."""
        async with self._lock:
            self.charge(size)
            try:
                while self._level <= -1:  # less than a byte is a rounding error
                    await self._sleep(-self._level / self._rate)
                    self.charge(0)
            except asyncio.CancelledError:
                self._level += size
                raise

    def charge(self, size: int) -> None:
        """Count `size` bytes as moved, or refund a negative `size`, without waiting; the next `take` waits for them."""
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self._rate, self._capacity)
        self._level = min(self._level - size, self._capacity)
        self._at = now


class LimitedStore(StoreWrapper):
    """Wrap `inner` and move at most `up` bytes per second in puts and `down` in gets; None means no limit.

    A get is charged for the size of its `into` and refunded the bytes that the object did not fill. A get without
    `into` is charged when its size is known, and the next get waits. A failed call remains charged, because some of its
    bytes may have moved. Tests replace `clock` and `sleep`.
    """

    def __init__(
        self,
        inner: Store,
        up: int | None,
        down: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(inner)
        self._up = _TokenBucket(up, clock, sleep) if up else None
        self._down = _TokenBucket(down, clock, sleep) if down else None

    async def put(self, key: str, data: Buffer) -> str:
        if self._up:
            await _charge(self._up, key, memoryview(data).nbytes)
        return await self._inner.put(key, data)

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        if self._up:
            await _charge(self._up, key, memoryview(data).nbytes)
        return await self._inner.put_if_absent(key, data)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        if not self._down or is_foreground():
            return await self._inner.get(key, into)
        room = into.nbytes if into is not None else 0
        await _charge(self._down, key, room)
        content = await self._inner.get(key, into)
        self._down.charge(memoryview(content).nbytes - room)
        return content

    async def digest(self, key: str) -> tuple[int, str]:
        """Digest an object of `inner`, charged as a get without `into`."""
        if not self._down or is_foreground():
            return await self._inner.digest(key)
        await _charge(self._down, key, 0)
        size_and_digest = await self._inner.digest(key)
        self._down.charge(size_and_digest[0])
        return size_and_digest


async def _charge(bucket: _TokenBucket, key: str, size: int) -> None:
    if "/chunks/" in key:
        await bucket.take(size)
    else:
        bucket.charge(size)


class CountedStore(StoreWrapper):
    """Wrap `inner` and count its requests: `put`, `get`, `list` (pages), `delete` (of up to 1,000 keys each).

    A listing counts one request for each page that was begun, with the page sizes of `S3Store`. Retries inside `inner`
    are not counted.

    Attributes:
        counts: the number so far of each kind: `put`, `get`, `list` (pages), `delete` (of up to 1,000 keys each).
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.counts = Counter(put=0, get=0, list=0, delete=0)

    @property
    def requests(self) -> int:
        """The number of all requests so far."""
        return self.counts.total()

    async def put(self, key: str, data: Buffer) -> str:
        self.counts["put"] += 1
        return await self._inner.put(key, data)

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        self.counts["put"] += 1
        return await self._inner.put_if_absent(key, data)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        self.counts["get"] += 1
        return await self._inner.get(key, into)

    async def get_small(self, keys: Sequence[str]) -> list[bytes | None]:
        objects = await self._inner.get_small(keys)
        self.counts["get"] += sum(data is not None for data in objects)
        return objects

    async def digest(self, key: str) -> tuple[int, str]:
        self.counts["get"] += 1
        return await self._inner.digest(key)

    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        return flatten(self.scan_pages(prefix, after))

    async def scan_pages(self, prefix: str, after: str = "") -> AsyncGenerator[Sequence[ObjectInfo], None]:
        self.counts["list"] += 1
        count = 0
        async with aclosing(self._inner.scan_pages(prefix, after)) as listing:
            async for page in listing:
                before, count = count, count + len(page)
                self.counts["list"] += _full_pages(count) - _full_pages(before)
                yield page

    async def directories(self, prefix: str) -> list[str] | None:
        names = await self._inner.directories(prefix)
        self.counts["list"] += 0 if names is None else max(1, -(-len(names) // PAGE))
        return names

    async def delete(self, keys: Sequence[str]) -> None:
        self.counts["delete"] += -(-len(keys) // PAGE)
        await self._inner.delete(keys)


def _full_pages(count: int) -> int:
    """Return how many pages of a listing end before its last one of `count` objects."""
    return max(0, -(-(count - FIRST_PAGE) // PAGE))


class DeletionGuard(StoreWrapper):
    """Wrap `inner` and remember which deletions it refuses, for `again_s` seconds, until the store is asked again.

    Attributes:
        refused: the latest reason that the store gave; empty while no refusal is known.
        has_refused: whether a deletion was refused since the owner last set this to False, so that its objects may
            still be there although the store permits deletions again.
    """

    def __init__(self, inner: Store, again_s: float = 600.0) -> None:
        super().__init__(inner)
        self._again_s = again_s
        self.refused = ""
        self.has_refused = False
        self._until: dict[str, float] = {}  # kind of object -> monotonic seconds until which no deletion of it is tried
        self._worked = False

    @property
    def is_resting(self) -> bool:
        """Whether deletions should pause, because the store would refuse some of them."""
        return any(time.monotonic() < until for until in self._until.values())

    async def check(self, key: str) -> None:
        """Find out whether the store permits deletions, before the caller puts an object that must later be deleted.

        The key, which no object uses, is deleted if no deletion has succeeded yet. After a refusal an empty object is
        put there first, because a file system refuses only the deletion of a file that exists. Raises `DeleteRefused`.
        """
        refused = self.refused
        if not self._worked or refused:
            await self.delete([key])
        if refused:
            await self.put(key, b"")
            await self.delete([key])

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete `keys` as a `Store` does. Raise DeleteRefused at once if an earlier refusal still counts."""
        sorts = {key.partition("/")[2].partition("/")[0] for key in keys}
        if any(time.monotonic() < self._until.get(sort, 0.0) for sort in sorts):
            self.has_refused = True
            raise DeleteRefused(self.refused)
        try:
            await self._inner.delete(keys)
        except DeleteRefused as error:
            self.refused, self.has_refused = str(error), True
            self._until |= dict.fromkeys(sorts, time.monotonic() + self._again_s)
            raise
        for sort in sorts:
            self._until.pop(sort, None)
            self._worked = True
        if not self._until:
            self.refused = ""
