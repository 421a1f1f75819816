"""Deadlines, retries and a congestion window around any store, also one of other programs' objects; unconfirmed 404s.

Invariant: every call ends. Each attempt has a deadline. Only `StoreUnavailable` is retried, and the last one is raised.
An attempt with an unknown outcome is repeated in full, because every method of a `Store` is idempotent. A
`StoreThrottled` narrows the window. `ObjectNotFound` is the store's own word: its error code, or its listing without
the key, because a prune deletes the chunks of a manifest that is not found, and a restore passes over it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from tierd.core.errors import ObjectNotFound, StoreUnavailable, TierdError
from tierd.stores.base import LARGEST, Buffer, ObjectInfo, Store, StoreWrapper, flatten, single_pages

_FIRST_REST_S, _LONGEST_REST_S = 0.25, 20.0  # before the jitter; as `RetryingStore` waits for one request
_MOST_DOUBLINGS = 7  # with them a rest is at its longest
_MAX_WIDTH = 64.0  # concurrent requests; the window is no limit at this width, because no store of tierd sends as many


class StoreThrottled(StoreUnavailable):
    """The server refuses requests for now because there are too many. It asked to wait `wait_s` seconds, or named none:
    0.
    """

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class CongestionWindow:
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
    server's Retry-After is added to it. The window limits the number of concurrent requests by how many the server
    refuses. Tests replace `rng`, `sleep` and `clock`, the window's as well.
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
        self._window = CongestionWindow(clock=clock, sleep=sleep, rng=rng)
        self._answers = 0
        # Each attempt under way, and when it could be answered, monotonic seconds.
        self._deadlines: dict[object, float] = {}

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

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        size = memoryview(data).nbytes
        return await self.call(f"put {key}", size / self._slowest, lambda: self._inner.put_if_absent(key, data), size)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        size = LARGEST if into is None else into.nbytes  # an object of unknown size gets the time of the largest
        moves = 0 if into is None else size
        return await self.call(f"get {key}", size / self._slowest, lambda: self._inner.get(key, into), moves)

    async def get_small(self, keys: Sequence[str]) -> list[bytes | None]:
        try:
            return await self._within(f"get {len(keys)} keys", self._deadline_s, self._inner.get_small(keys))
        except StoreUnavailable:
            return [None] * len(keys)  # the gets of each are tried again

    async def digest(self, key: str) -> tuple[int, str]:
        return await self.call(f"digest {key}", LARGEST / self._slowest, lambda: self._inner.digest(key))

    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        return flatten(self.scan_pages(prefix, after))

    def scan_pages(self, prefix: str, after: str = "") -> AsyncGenerator[Sequence[ObjectInfo], None]:
        return self.resumed(self._inner.scan_pages, prefix, after)

    async def resumed(
        self, pages: Callable[[str, str], AsyncGenerator[Sequence[ObjectInfo], None]], prefix: str, after: str
    ) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        """List by `scan_pages`, which begins again after the last object that arrived."""
        doing, failed = f"scan {prefix or '/'}", 0
        while True:
            async with aclosing(pages(prefix, after)) as listing:
                has_started = False
                while True:
                    try:
                        page = await self._next(doing, listing, has_started=has_started)
                    except StoreUnavailable as error:
                        failed += 1
                        await self._pause(doing, failed, error)
                        break  # continue after the last object that arrived
                    if page is None:
                        return
                    has_started, failed = True, 0
                    if page:
                        after = page[-1].key
                        yield page

    async def _next(
        self, doing: str, listing: AsyncGenerator[Sequence[ObjectInfo], None], *, has_started: bool
    ) -> Sequence[ObjectInfo] | None:
        """Return a listing's next page; None at its end. Its beginning is a request, which the window may hold up."""
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
        _log.info("%s: attempt %d of %d failed, again in %.2f s: %s", doing, failed, self._attempts, delay, error)
        await self._sleep(delay)


class ForeignStore(Store):
    """A `Store` that also lists and reads objects whose names are no keys of tierd's."""

    @abstractmethod
    def names(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """List every object whose name begins with `prefix` and sorts after `after`; otherwise as `Store.scan`."""

    @abstractmethod
    async def get_range(self, info: ObjectInfo, offset: int, into: memoryview) -> None:
        """Fill `into`, which is not empty, with the bytes of a listed object from `offset` on.

        Raises `ObjectNotFound` if the listed object is not there any more, or another one has its name.
        """


class RetryingForeignStore(RetryingStore, ForeignStore):
    """The deadlines and retries of `RetryingStore` around a `ForeignStore`."""

    def __init__(self, inner: ForeignStore, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        super().__init__(inner, sleep=sleep)
        self._foreign = inner

    def names(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """List as `inner` does."""
        return flatten(self.resumed(lambda *at: single_pages(self._foreign.names(*at)), prefix, after))

    async def get_range(self, info: ObjectInfo, offset: int, into: memoryview) -> None:
        """Read as `inner` does."""
        allowed_s = into.nbytes / self._slowest
        await self.call(f"get {info.key!a}", allowed_s, lambda: self._foreign.get_range(info, offset, into))


UNNAMED = ": a 404 that names no error of the store: something before it may have answered"


class UnnamedNotFound(StoreUnavailable):
    """A 404 without an error code of the store's."""


@asynccontextmanager
async def confirm_absence(
    names: Callable[[str], AsyncGenerator[ObjectInfo, None]], key: str
) -> AsyncGenerator[None, None]:
    """Confirm an `UnnamedNotFound` of the wrapped request by a listing, because some stores answer so themselves.

    `names` lists the store's objects by their prefix.

    Raises:
        ObjectNotFound: the store's listing does not show the key.
        UnnamedNotFound: the listing shows it, or failed.
    """
    try:
        yield
    except UnnamedNotFound as error:
        try:
            async with aclosing(names(key)) as listing:
                first = await anext(listing, None)  # a key sorts before all others that begin with it
        except TierdError:
            raise error from None
        if first is not None and first.key == key:
            raise
        raise ObjectNotFound(f"{error}; but the store's listing does not show it either") from None
