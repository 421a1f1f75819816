"""A timeout that does not count the time in which this process was stopped.

A node that was frozen while a restore waits for its tiers would otherwise find each deadline past when it wakes, drop
answers that have arrived, and continue from an older checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

_PARTS = 8  # of a timeout; one that ends late counts as one, so a stop costs an eighth of the time at most


@contextlib.asynccontextmanager
async def awake_timeout(seconds: float) -> AsyncIterator[Callable[[], None]]:
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
