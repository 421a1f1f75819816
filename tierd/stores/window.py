"""A congestion window: how many requests a store receives at once after it has refused some as too many.

Invariant: additive increase, multiplicative decrease, as in TCP's congestion control (RFC 5681, section 3.1). A refusal
halves the window, once for all the requests that were in flight together. Each answer widens the window a little, so
that a whole window of answers adds one.

A window of one request is still too wide if a thousand nodes have one each. So a refusal also closes the window for a
random part of a delay, which doubles with each refusal and is halved by each answer.

If the server names a wait, no request begins until it has passed. Before the first refusal, and once the window is wide
again, no request waits. Nodes that share a server thus find their shares of its capacity without any communication.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tierd.core.errors import StoreUnavailable

_FIRST_REST_S, _LONGEST_REST_S = 0.25, 20.0  # before the jitter; as `retry` waits for one request
_MOST_DOUBLINGS = 7  # with them a rest is at its longest
_MAX_WIDTH = 64.0  # concurrent requests; the window is no limit at this width, because no store of tierd sends as many


class StoreThrottled(StoreUnavailable):
    """The server refuses requests for now because there are too many.

    Attributes:
        wait_s: the seconds to wait that the server named; 0 if it named none.
    """

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Window:
    """A limit on the requests in flight to one store. Tests replace `clock` (in seconds), `sleep` and `rng`."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._clock, self._sleep, self._rng = clock, sleep, rng
        self._most = _MAX_WIDTH
        self._under_way = self._waiting = 0
        self._closed_until = self._resting_until = self._halved_at = -1.0
        self._doublings = 0  # of the next rest
        self._changed = asyncio.Condition()

    @property
    def closed_s(self) -> float:
        """For how many more seconds no request begins, because the server asked for that."""
        return max(0.0, self._closed_until - self._clock())

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Run one request inside the window. Pass on every exception, and narrow the window on `StoreThrottled`."""
        await self._wait()
        started_at = self._clock()
        self._under_way += 1
        try:
            yield
        except StoreThrottled as error:
            self._refused(started_at, error.wait_s)
            raise
        else:
            self._most = min(_MAX_WIDTH, self._most + 1.0 / self._most)
            self._doublings = max(0, self._doublings - 1)
        finally:
            self._under_way -= 1
            if self._waiting:
                async with self._changed:
                    self._changed.notify_all()

    async def _wait(self) -> None:
        while self._under_way >= self._most or self._clock() < self._opens_at:
            if (wait_s := self._opens_at - self._clock()) > 0:
                await self._sleep(wait_s)
                continue
            self._waiting += 1
            try:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._under_way < self._most)
            finally:
                self._waiting -= 1

    @property
    def _opens_at(self) -> float:
        return max(self._closed_until, self._resting_until)

    def _refused(self, started_at: float, wait_s: float) -> None:
        now = self._clock()
        self._closed_until = max(self._closed_until, now + wait_s)
        # A request that was in flight together with an earlier refused one adds no information.
        if started_at >= self._halved_at:
            self._most = max(1.0, min(self._most, self._under_way) / 2)
            self._halved_at = now
            rest_s = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0**self._doublings)
            self._resting_until = now + self._rng() * rest_s
            self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)
