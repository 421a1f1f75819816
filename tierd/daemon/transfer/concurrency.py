"""Run a bounded number of coroutines at once, and run calls in threads.

Invariant: the first failure cancels the rest and is raised as itself, not in an exception group, because callers catch
one condition. Cancelled work has ended when the failure is raised, so no thread still uses its buffers or files.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from tierd.priority import POLITE, is_hasty

P = ParamSpec("P")
T = TypeVar("T")

_PAGE = 1000  # items that `each` collects at a time: a page of a listing


async def together(limit: int, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
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


async def each(
    limit: int, do: Callable[[T], Coroutine[Any, Any, object]], items: Iterable[T] | AsyncIterable[T]
) -> None:
    """Run `do` for each of `items` with at most `limit` calls at a time. There may be a million items."""
    page: list[T] = []
    async for item in items if isinstance(items, AsyncIterable) else _iterate_async(items):
        page.append(item)
        if len(page) == _PAGE:
            await together(limit, [do(item) for item in page])
            page.clear()
    await together(limit, [do(item) for item in page])


async def _iterate_async(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


async def to_the_end(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call in a thread, and return or raise only when the thread has ended.

    Unlike `asyncio.to_thread`, a cancelled call is awaited, because its thread cannot be stopped. If no request waits
    for the result, the thread is one that yields to training.
    """
    within = functools.partial(contextvars.copy_context().run, call, *args, **kwargs)
    work = asyncio.get_running_loop().run_in_executor(None if is_hasty() else POLITE, within)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue  # wait again, because the thread still cannot be stopped
        if not work.cancelled():
            work.exception()  # retrieved, so that asyncio does not warn; the cancellation is raised instead
        raise
