"""A limit on how many bytes per second any store moves, each way by itself.

Law: chunks wait until they and the bytes before them are paid for, first come, first served; so what begins in any span
of time is at most the limit times that span, plus one second's worth or one chunk, whichever is more. A chunk by itself
goes at the line's speed: the limit is an average. What is no chunk is charged, but never waits: a tier whose manifests
came late would look as if it did not answer. What a restore moves is not limited, for training waits for it.

A limit stands outside of retries: no deadline runs while a chunk waits, and a repeated attempt is not charged again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from tierd.priority import is_hasty
from tierd.stores.base import Buffer, ObjectInfo, Store, asked_s

_BURST_S = 1.0  # what an idle line has saved up, in seconds of its rate


class _Bucket:
    """`rate` bytes per second. `_level` is what may be moved now; below 0, what was charged and is not paid yet."""

    def __init__(self, rate: int, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._most = rate * _BURST_S
        self._level, self._at = self._most, clock()
        self._turn = asyncio.Lock()  # lets its waiters in in the order in which they came

    async def take(self, size: int) -> None:
        """Charge `size` bytes, and return when they and all before them are paid."""
        async with self._turn:
            self.charge(size)
            try:
                while self._level <= -1:  # less than a byte is rounding
                    await self._sleep(-self._level / self._rate)
                    self.charge(0)
            except asyncio.CancelledError:
                self._level += size
                raise

    def charge(self, size: int) -> None:
        """Count `size` bytes as moved; less than 0 gives back what was not. Whoever takes next waits for them."""
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self._rate, self._most)
        self._level = min(self._level - size, self._most)
        self._at = now


class LimitedStore:
    """`inner`, moving at most `up` bytes per second in puts and `down` in gets; None is no limit.

    A get is charged for all the room that it brings and given back what the object did not fill; without `into` it is
    charged when its size is known, and the next one waits. A call that fails stays charged, since some of it may have
    moved. `clock` and `sleep` are there for tests.
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
        self._inner = inner
        self._up = _Bucket(up, clock, sleep) if up else None
        self._down = _Bucket(down, clock, sleep) if down else None

    def __repr__(self) -> str:
        return f"LimitedStore({self._inner!r})"

    @property
    def asked_s(self) -> float:
        """As `inner` has it."""
        return asked_s(self._inner)

    async def put(self, key: str, data: Buffer) -> str:
        if self._up:
            await _charge(self._up, key, memoryview(data).nbytes)
        return await self._inner.put(key, data)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        if not self._down or is_hasty():
            return await self._inner.get(key, into)
        room = into.nbytes if into is not None else 0
        await _charge(self._down, key, room)
        found = await self._inner.get(key, into)
        self._down.charge(memoryview(found).nbytes - room)
        return found

    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        return self._inner.scan(prefix, after)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._inner.delete(keys)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _charge(bucket: _Bucket, key: str, size: int) -> None:
    if "/chunks/" in key:
        await bucket.take(size)
    else:
        bucket.charge(size)
