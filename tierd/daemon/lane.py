"""One place's lane: when it works, when it rests, and how long after a failure.

Law: the delay after the n-th failure in a row is uniform in [½, 1] of min(2ⁿ s, 5 min): retries of many nodes spread,
and a tier that is back is found within minutes.
"""

from __future__ import annotations

import asyncio
import random
import time

_LONGEST = 300.0  # seconds


class Lane:
    """What one lane is doing and how it has fared."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wake = asyncio.Event()
        self._retry = asyncio.Event()
        self.retry_at = 0.0  # monotonic seconds
        self.failures = 0
        self.last_error: Exception | None = None
        self.doing: str | None = None

    def now(self) -> float:
        return time.monotonic()

    def succeeded(self) -> None:
        self.failures, self.retry_at, self.last_error = 0, 0.0, None

    def failed(self, error: Exception, jitter: random.Random, *, long: bool) -> float:
        """Note a failure; the seconds until the lane may try again. `long`: trying at once cannot help."""
        self.failures += 1
        self._retry.clear()
        self.last_error = error
        delay = min(2.0 ** min(self.failures + (3 if long else 0), 16), _LONGEST) * jitter.uniform(0.5, 1.0)
        self.retry_at = self.now() + delay
        return delay

    async def rest(self, rescan: float) -> None:
        """Wait for an event, at most `rescan` seconds; after a failure, out the backoff whatever happens."""
        if self.last_error is not None:
            await self._sleep(self._retry, self.retry_at - self.now())
        else:
            await self._sleep(self.wake, rescan)

    def retry_now(self) -> None:
        """End a backoff early."""
        self.retry_at = 0.0
        self._retry.set()

    async def _sleep(self, event: asyncio.Event, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass
