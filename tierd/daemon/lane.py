"""One place's lane: when it works, when it rests, how long after a failure, and what it puts off meanwhile.

Law: the delay after the n-th failure in a row is uniform in [½, 1] of 2ⁿ s, but of no more than a quarter of the time
for which the place has failed (at least 15 s, at most 5 min): retries of many nodes spread, a place that was gone for a
minute is found seconds after it is back, and one that is gone for hours is asked seldom.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Hashable

_LONGEST = 300.0  # seconds
_SOON = 15.0  # seconds that it rests at least as soon as it has failed often, however short the outage
_FIRST = 10.0  # seconds that what failed once is put off: what failed may have been the place


class Lane:
    """What one lane is doing and how it has fared."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wake = asyncio.Event()
        self._retry = asyncio.Event()
        self.retry_at = 0.0  # monotonic seconds
        self.failures = 0
        self._since = 0.0  # when the first of them was, monotonic seconds
        self.last_error: Exception | None = None
        self._last_failure: Exception | None = None
        self.doing: str | None = None
        self.sent = False  # whether the last thing begun was to send a part
        self._off: dict[Hashable, float] = {}  # what was put off -> until when, monotonic seconds

    def now(self) -> float:
        return time.monotonic()

    def succeeded(self) -> None:
        self.failures, self.retry_at, self.last_error = 0, 0.0, None
        if self.off_for == math.inf:
            self._last_failure = None

    @property
    def trouble(self) -> Exception | None:
        """Why the lane does not get on: its last error, also while only the thing that failed is put off."""
        return self.last_error or self._last_failure

    def failed(self, error: Exception, jitter: random.Random, *, long: bool) -> float:
        """Note a failure; the seconds until the lane may try again. `long`: trying at once cannot help."""
        self._since = self._since if self.failures else self.now()
        self.failures += 1
        self._retry.clear()
        self.last_error = self._last_failure = error
        longest = min(max(_SOON, (self.now() - self._since) / 4), _LONGEST)
        delay = min(2.0 ** min(self.failures + (3 if long else 0), 16), longest) * jitter.uniform(0.5, 1.0)
        self.retry_at = self.now() + delay
        return delay

    def put_off(self, what: Hashable, seconds: float) -> None:
        """Let others go first for so long."""
        self._off = {one: until for one, until in self._off.items() if until > self.now() - _LONGEST}
        self._off[what] = self.now() + seconds

    def put_off_stuck(self, what: Hashable, seconds: float) -> None:
        """Let others go first for so long, but for a few seconds only where it has not been put off lately."""
        self.put_off(what, seconds if what in self._off else min(seconds, _FIRST))

    def is_off(self, what: Hashable) -> bool:
        return self._off.get(what, 0.0) > self.now()

    @property
    def off_for(self) -> float:
        """Seconds until something that was put off has its turn; infinite where nothing was."""
        now = self.now()
        return min((until - now for until in self._off.values() if until > now), default=math.inf)

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
