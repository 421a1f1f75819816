"""Deadlines and retries around any store.

Invariant: every call ends. Each attempt has a deadline. Only `StoreUnavailable` is retried, and the last one is raised.
An attempt with an unknown outcome is repeated in full, because every method of a `Store` is idempotent.

A store that itself gives up stalled transfers declares the lowest rate that it accepts (`slowest_rate`). A deadline
must not cut off a transfer that makes progress.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from tierd.core.errors import StoreUnavailable, TierdError
from tierd.stores.base import LARGEST, Buffer, ObjectInfo, Store, StoreWrapper
from tierd.stores.window import StoreThrottled, Window

T = TypeVar("T")

_log = logging.getLogger(__name__)
# Bytes/s that a store must sustain to meet the deadline of a put or get, unless it declares `slowest_rate`.
_SLOWEST = 1_000_000
_PER_KEY_S = 0.05  # seconds that a delete's deadline gains for each key
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 20.0  # before the jitter


class RetryingStore(StoreWrapper):
    """Wrap `inner` with a deadline on every attempt, and up to `attempts` attempts for each call.

    An attempt may take `deadline_s` seconds. A put or get gains 1 s for each MB (more if `inner.slowest_rate` is
    lower), and a delete 0.05 s for each key. A scan's deadline and attempts start again with each object that
    arrives.

    Between attempts the store waits a random part ("full jitter") of a delay that doubles from 0.25 s to 20 s. The
    server's Retry-After is added to it. `window` limits the number of concurrent requests by how many the server
    refuses. Tests replace `rng`, `sleep` and `clock`, the window's.
    """

    def __init__(
        self,
        inner: Store,
        *,
        attempts: int = 5,
        deadline_s: float = 60.0,
        rng: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._attempts = attempts
        self._deadline_s = deadline_s
        self._slowest = inner.slowest_rate or _SLOWEST
        self._rng = rng
        self._sleep = sleep
        self._window = Window(clock=clock, sleep=sleep, rng=rng)
        self._answers = 0
        self._deadlines: dict[
            object, float
        ] = {}  # each attempt under way -> when it could be answered, monotonic seconds

    @property
    def retry_after_s(self) -> float:
        """For how many more seconds no request is sent, because the server asked for that."""
        return self._window.closed_s

    @property
    def signs_of_life(self) -> int:
        """See `Store`. An attempt that ends without an answer of the server is no sign of life."""
        return self._answers + self._inner.signs_of_life

    @property
    def is_waiting(self) -> bool:
        """See `Store`. A pause between two attempts, or for the window, is no wait for the server."""
        now = time.monotonic()
        return any(deadline <= now for deadline in self._deadlines.values())

    async def put(self, key: str, data: Buffer) -> str:
        size = memoryview(data).nbytes
        return await self.call(f"put {key}", size / self._slowest, lambda: self._inner.put(key, data), size)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        size = LARGEST if into is None else into.nbytes  # an object of unknown size gets the time of the largest
        moves = 0 if into is None else size
        return await self.call(f"get {key}", size / self._slowest, lambda: self._inner.get(key, into), moves)

    async def digest(self, key: str) -> tuple[int, str]:
        return await self.call(f"digest {key}", LARGEST / self._slowest, lambda: self._inner.digest(key))

    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        return self.resumed(self._inner.scan, prefix, after)

    async def resumed(
        self, scan: Callable[[str, str], AsyncGenerator[ObjectInfo, None]], prefix: str, after: str
    ) -> AsyncGenerator[ObjectInfo, None]:
        """List by `scan`, which begins again after the last object that arrived."""
        doing, failed = f"scan {prefix or '/'}", 0
        while True:
            async with aclosing(scan(prefix, after)) as listing:
                has_started = False
                while True:
                    try:
                        info = await self._next(doing, listing, has_started=has_started)
                    except StoreUnavailable as error:
                        failed += 1
                        await self._pause(doing, failed, error)
                        break  # continue after the last object that arrived
                    if info is None:
                        return
                    has_started, failed, after = True, 0, info.key
                    yield info

    async def _next(
        self, doing: str, listing: AsyncGenerator[ObjectInfo, None], *, has_started: bool
    ) -> ObjectInfo | None:
        """Return a listing's next object; None at its end. Its beginning is a request, which the window may hold up."""
        if has_started:
            return await self._within(doing, self._deadline_s, anext(listing, None))
        async with self._window.request():
            return await self._within(doing, self._deadline_s, anext(listing, None))

    async def directories(self, prefix: str) -> list[str] | None:
        return await self.call(f"scan {prefix or '/'}", 0.0, lambda: self._inner.directories(prefix))

    async def delete(self, keys: Sequence[str]) -> None:
        await self.call(f"delete {len(keys)} keys", len(keys) * _PER_KEY_S, lambda: self._inner.delete(keys))

    async def aclose(self) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._inner.aclose()
        except TimeoutError:
            _log.warning("%r: not closed within %g s, left as it is", self._inner, self._deadline_s)

    async def call(self, doing: str, extra_s: float, begin: Callable[[], Awaitable[T]], moves: int = 0) -> T:
        """Try a call of `inner`; each attempt has `extra_s` seconds more than `deadline_s`.

        `moves` is the number of bytes that the call moves. An `inner` with `hides_progress` shows no sign of life while
        they move, so they get the time that `_SLOWEST` takes before the call counts as waiting.
        """
        failed, moving_s = 0, moves / _SLOWEST if self._inner.hides_progress else 0.0
        while True:
            try:
                # Waiting for the window does not count towards the attempt's deadline.
                async with self._window.request():
                    return await self._within(doing, self._deadline_s + extra_s, begin(), moving_s)
            except StoreUnavailable as error:
                failed += 1
                await self._pause(doing, failed, error)

    async def _within(self, doing: str, deadline_s: float, call: Awaitable[T], moving_s: float = 0.0) -> T:
        attempt = object()
        self._deadlines[attempt] = time.monotonic() + moving_s
        try:
            async with asyncio.timeout(deadline_s):
                answer = await call
            self._answers += 1
            return answer
        except TimeoutError as error:
            raise StoreUnavailable(f"{doing}: no answer within {deadline_s:g} s") from error
        except TierdError as error:
            self._answers += isinstance(error, StoreThrottled) or not isinstance(error, StoreUnavailable)
            raise
        finally:
            del self._deadlines[attempt]

    async def _pause(self, doing: str, failed: int, error: StoreUnavailable) -> None:
        """Wait before the next attempt, or raise `error` if none is left."""
        if failed >= self._attempts:
            error.add_note(f"{doing}: attempt {failed} of {self._attempts}, the last")
            raise error
        delay = self._rng() * min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (failed - 1))
        if isinstance(error, StoreThrottled):
            delay += error.wait_s
        _log.warning("%s: attempt %d of %d failed, again in %.2f s: %s", doing, failed, self._attempts, delay, error)
        await self._sleep(delay)
