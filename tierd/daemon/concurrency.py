"""Bounds on concurrent work: coroutines and threads at a time, a timeout without stops, bytes in memory, buffers.

Invariants: the first failure cancels the rest, and cancelled work has ended when it is raised. Code that reads a chunk
into memory first takes its bytes from a `MemoryBudget`, and gives them back with the memory; requests are served in
order, and a holder never asks for more. A buffer has one user at a time, who counts its bytes against the budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ParamSpec, TypeVar

from tierd.spool.direct_io import memory_for
from tierd.threads import BACKGROUND_POOL, is_foreground

P = ParamSpec("P")
T = TypeVar("T")

_PAGE = 1000  # items that `for_each_limited` collects at a time: a page of a listing
_PARTS = 8  # of a timeout; one that ends late counts as one, so a stop costs an eighth of the time at most
TRANSFER_BYTES = 160 << 20  # for fetches, repairs and scrubs
FLUSH_BYTES = 128 << 20  # for encoded chunks in transfer to tiers, all tiers together
# For chunks that are being encoded. With all three, interpreter and libraries included, the process stays below 512
# MiB.
ENCODING_BYTES = 64 << 20
MAX_IDLE_BYTES = 48 << 20  # bytes
# A buffer is reused for at least four fifths of its size, because the user's budget counts only the bytes used.
_LOOSE = 1.25
_GRAIN = 1 << 20  # bytes; sizes are rounded up to it, so that buffers fit more often


async def gather_limited(limit: int, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run `work` with at most `limit` coroutines at a time, and return the results in order."""
    gate = asyncio.Semaphore(limit)

    async def limited(coroutine: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await coroutine

    tasks = [asyncio.ensure_future(limited(coroutine)) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for coroutine in work:
            coroutine.close()  # closes coroutines that never started
        raise


async def for_each_limited(
    limit: int, do: Callable[[T], Coroutine[Any, Any, object]], items: Iterable[T] | AsyncIterable[T]
) -> None:
    """Run `do` for each of `items` with at most `limit` calls at a time. There may be a million items."""
    page: list[T] = []
    async for item in items if isinstance(items, AsyncIterable) else _iterate_async(items):
        page.append(item)
        if len(page) == _PAGE:
            await gather_limited(limit, [do(item) for item in page])
            page.clear()
    await gather_limited(limit, [do(item) for item in page])


async def _iterate_async(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


async def thread_uncancelled(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call in a thread, and return or raise only when the thread has ended.

    Unlike `asyncio.to_thread`, a cancelled call is awaited, because its thread cannot be stopped. If no request waits
    for the result, the thread is one that yields to training.
    """
    within = functools.partial(contextvars.copy_context().run, call, *args, **kwargs)
    work = asyncio.get_running_loop().run_in_executor(None if is_foreground() else BACKGROUND_POOL, within)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await wait_for_end(work)
        raise


async def wait_for_end(work: asyncio.Future[T]) -> bool:
    """Wait until `work` has ended, also if this wait is cancelled; return whether it was."""
    is_cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            is_cancelled = True
    if not work.cancelled():
        work.exception()  # retrieved, so that asyncio does not warn
    return is_cancelled


@contextlib.asynccontextmanager
async def suspend_aware_timeout(seconds: float) -> AsyncIterator[Callable[[], None]]:
    """Raise TimeoutError in the block after `seconds` in which the loop ran.

    Yields:
        A function that begins the seconds anew.
    """
    loop = asyncio.get_running_loop()
    parts_left = _PARTS
    timer: asyncio.Handle

    def pass_part() -> None:
        nonlocal parts_left, timer
        if parts_left:
            parts_left -= 1
            timer = loop.call_later(seconds / _PARTS, pass_part)
        else:
            limit.reschedule(loop.time())

    def begin_anew() -> None:
        nonlocal parts_left
        parts_left = _PARTS

    async with asyncio.timeout(None) as limit:
        timer = loop.call_soon(pass_part)
        try:
            yield begin_anew
        finally:
            timer.cancel()


class MemoryBudget:
    """`total` bytes, shared by all transfers of chunks.

    `buffers` is memory for what is held. What lies idle there is freed when nothing is held any more.
    """

    def __init__(self, total: int = TRANSFER_BYTES) -> None:
        self._total = self._free = total
        self.buffers = Buffers(total)
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[BudgetHold]:
        """Hold `size` bytes until the context ends. A request for more than the total gets the whole total, alone."""
        hold = BudgetHold(self, min(size, self._total))
        await self._wait_for(hold.size)
        try:
            yield hold
        finally:
            hold.shrink_to(0)

    def try_take(self, size: int) -> BudgetHold | None:
        """Hold `size` bytes until they are given back; None if it would have to wait or overtake a waiting request."""
        if self.has_waiters or size > self._free:
            return None
        self._free -= size
        return BudgetHold(self, size)

    def has_free(self, size: int) -> bool:
        """Whether the bytes that `take` would hold for `size` are free now."""
        return min(size, self._total) <= self._free

    def granted_size(self, size: int) -> int:
        """Return the bytes that `take` holds for a request of `size`."""
        return min(size, self._total)

    @property
    def has_waiters(self) -> bool:
        """Whether a request waits."""
        return any(not admitted.cancelled() for _, admitted in self._waiting)

    def give_back(self, size: int) -> None:
        self._free += size
        self._serve()
        if self._free == self._total:
            self.buffers.clear()

    async def _wait_for(self, size: int) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, admitted))
        self._serve()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.give_back(size)
            elif (size, admitted) in self._waiting:
                self._waiting.remove((size, admitted))
                self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            size, admitted = self._waiting.popleft()
            if not admitted.cancelled():
                self._free -= size
                admitted.set_result(None)


class BudgetHold:
    """Bytes held from a budget. The holder may give back some of them early."""

    def __init__(self, budget: MemoryBudget, size: int) -> None:
        self._budget, self.size = budget, size

    def shrink_to(self, size: int) -> None:
        """Give back all but `size` bytes."""
        if size < self.size:
            self._budget.give_back(self.size - size)
            self.size = size


class Buffers:
    """A set of buffers. The methods are for one event loop; the memory may be used in any thread.

    Args:
        budget: the users' budget in bytes, if idle buffers may use what its users do not.
    """

    def __init__(self, budget: int = 0) -> None:
        self._budget, self._used = budget, 0
        self._idle: list[memoryview] = []

    @contextmanager
    def hold(self, size: int) -> Iterator[memoryview]:
        """Provide `size` bytes of uninitialized memory until the context ends.

        Large buffers begin at a page boundary.
        """
        memory = self.take(size)
        try:
            yield memory[:size]
        finally:
            self.give_back(memory)

    def give_back(self, memory: memoryview) -> None:
        """End the use of what `take` returned. The caller must not use it any more."""
        self._used -= len(memory)
        self._idle.append(memory)
        while sum(map(len, self._idle)) > max(MAX_IDLE_BYTES, self._budget - self._used):
            del self._idle[0]

    def clear(self) -> None:
        """Free all idle buffers."""
        self._idle.clear()

    def take(self, size: int) -> memoryview:
        """Return at least `size` bytes of memory, as `hold` provides it, until `give_back`."""
        new_size = -(-size // _GRAIN) * _GRAIN if size >= _GRAIN else max(size, 1)
        largest = _LOOSE * max(new_size, _GRAIN)
        fitting = [number for number, memory in enumerate(self._idle) if size <= len(memory) <= largest]
        if fitting:
            memory = self._idle.pop(min(fitting, key=lambda number: len(self._idle[number])))
        else:
            memory = memory_for(new_size)
        self._used += len(memory)
        return memory
