"""A limit on how many bytes per second a store moves, separately for puts and gets.

Invariant: a chunk waits until its own bytes and all bytes charged before it are paid for, in FIFO order. In any span of
time, at most (limit times span) bytes begin to move, plus the larger of one second's worth and one chunk. A single
chunk moves at the speed of the network, because the limit is an average.

Other objects are charged but never wait, because a tier with slow manifests would seem unavailable. Restores are not
limited, because training waits for them.

The limit wraps the retries: no deadline runs while a chunk waits, and a repeated attempt is not charged again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tierd.priority import is_hasty
from tierd.stores.base import Buffer, Store, StoreWrapper

_BURST_S = 1.0  # seconds of its rate that an idle bucket saves up


class _Bucket:
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
        """Count `size` bytes as moved, without waiting; the next `take` waits for them.

        A negative `size` refunds bytes.
        """
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
        self._up = _Bucket(up, clock, sleep) if up else None
        self._down = _Bucket(down, clock, sleep) if down else None

    async def put(self, key: str, data: Buffer) -> str:
        if self._up:
            await _charge(self._up, key, memoryview(data).nbytes)
        return await self._inner.put(key, data)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        if not self._down or is_hasty():
            return await self._inner.get(key, into)
        room = into.nbytes if into is not None else 0
        await _charge(self._down, key, room)
        content = await self._inner.get(key, into)
        self._down.charge(memoryview(content).nbytes - room)
        return content

    async def digest(self, key: str) -> tuple[int, str]:
        """Digest an object of `inner`, charged as a get without `into`."""
        if not self._down or is_hasty():
            return await self._inner.digest(key)
        await _charge(self._down, key, 0)
        size_and_digest = await self._inner.digest(key)
        self._down.charge(size_and_digest[0])
        return size_and_digest


async def _charge(bucket: _Bucket, key: str, size: int) -> None:
    if "/chunks/" in key:
        await bucket.take(size)
    else:
        bucket.charge(size)
