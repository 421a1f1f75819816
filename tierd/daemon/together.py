"""Running a bounded number of coroutines at once, and calls in threads.

Law: the first failure ends the rest and is raised as itself, not wrapped in a group: callers name one condition. What
was cancelled is at rest when that is raised: no thread goes on with its buffers and files.
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

_PAGE = 1000  # items that `each` lines up: a page of a listing


async def together(limit: int, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of `work`, in order; at most `limit` run at a time."""
    gate = asyncio.Semaphore(limit)

    async def one(coroutine: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await coroutine

    tasks = [asyncio.ensure_future(one(coroutine)) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for coroutine in work:
            coroutine.close()  # one that never got through the gate
        raise


async def each(
    limit: int, do: Callable[[T], Coroutine[Any, Any, object]], items: Iterable[T] | AsyncIterable[T]
) -> None:
    """`do` for each of `items`, of which there may be a million; at most `limit` run at a time."""
    page: list[T] = []
    async for item in items if isinstance(items, AsyncIterable) else _one_by_one(items):
        page.append(item)
        if len(page) == _PAGE:
            await together(limit, [do(one) for one in page])
            page.clear()
    await together(limit, [do(one) for one in page])


async def _one_by_one(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


async def to_the_end(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, which returns or raises only when the thread has: one that is cancelled cannot stop. Where
    nobody waits for it, it is a thread that yields to training."""
    within = functools.partial(contextvars.copy_context().run, call, *args, **kwargs)
    work = asyncio.get_running_loop().run_in_executor(None if is_hasty() else POLITE, within)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue  # once more: it still cannot stop
        if not work.cancelled():
            work.exception()  # seen; that it was cancelled is what counts
        raise
