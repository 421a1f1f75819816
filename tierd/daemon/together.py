"""Running a bounded number of coroutines at once.

Law: the first failure ends the rest and is raised as itself, not wrapped in a group: callers name one condition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


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
