"""How many requests a place is asked at once, after it has said that they are too many.

Law: additive increase, multiplicative decrease, as TCP's congestion control (RFC 5681, section 3.1). A refusal halves
the window, once for all the requests that were under way together; each answer opens it by a part, so that a whole
window of answers adds one. Where the place says how long it wants to be left alone, nothing begins until then. Before
the first refusal, and once it is wide again, nobody waits: nodes that share a place find their shares of it without
knowing of each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tierd.core.errors import StoreUnavailable

_WIDE = 64.0  # requests at once that no refusal is to be feared from, since no store of ours asks as many


class StoreThrottled(StoreUnavailable):
    """The store takes no more requests for now. `wait_s`: for so many seconds, where it says so; else 0."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Window:
    """Requests of one place, and how many may be under way. `clock`, in seconds, and `sleep` are there for tests."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._most = _WIDE
        self._under_way = 0
        self._closed_until = self._halved_at = -1.0
        self._changed = asyncio.Condition()

    @property
    def closed_s(self) -> float:
        """For how many seconds more nothing begins, because the place asked for that."""
        return max(0.0, self._closed_until - self._clock())

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Within, a request may be under way. Raises what it raised; learns from `StoreThrottled`."""
        await self._wait()
        begun = self._clock()
        self._under_way += 1
        try:
            yield
        except StoreThrottled as error:
            self._refused(begun, error.wait_s)
            raise
        else:
            self._most = min(_WIDE, self._most + 1.0 / self._most)
        finally:
            self._under_way -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _wait(self) -> None:
        while self._under_way >= self._most or self._clock() < self._closed_until:
            if (left := self._closed_until - self._clock()) > 0:
                await self._sleep(left)
                continue
            async with self._changed:
                await self._changed.wait_for(lambda: self._under_way < self._most)

    def _refused(self, begun: float, wait_s: float) -> None:
        now = self._clock()
        self._closed_until = max(self._closed_until, now + wait_s)
        if begun >= self._halved_at:  # a request that was under way with one refused before says nothing new
            self._most = max(1.0, min(self._most, self._under_way) / 2)
            self._halved_at = now
