"""Blocking calls that may never return, as on a dead mount, each in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_own_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Begin a blocking call, and return the future of its result.

    The thread keeps no process from its end: the loop's pool, as of `asyncio.to_thread`, would wait for it. A caller
    that gives up leaves the thread alone.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]  # None is one of T's values then

    def work() -> None:
        value, failed = None, None
        try:
            value = call()
        except Exception as error:
            failed = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=work, name=name, daemon=True).start()
    return answer
