"""An event loop in a dedicated thread, for callers without a loop of their own or inside a running one (a notebook)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from threading import Event, Thread
from typing import Any, TypeVar

from tierd.core.errors import ConfigError
from tierd.priority import hasten

T = TypeVar("T")


class LoopThread:
    """Run coroutines until `close`, called from any thread but the loop's own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ready = Event()
        self._closed = False
        self._thread = Thread(target=lambda: asyncio.run(self._run_until_closed()), name="tierd-reader", daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def is_gone(self) -> bool:
        """Whether there is no loop thread: it was closed, or this process was forked from the one that runs it."""
        return self._closed or os.getpid() != self._pid

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. An interrupt (Ctrl-C) cancels the coroutine.

        Raises:
            ConfigError: the loop is closed, or belongs to the process that this one was forked from.
        """
        if self.is_gone:
            coroutine.close()
            if self._closed:
                raise ConfigError("this Reader is closed")
            raise ConfigError("this process was forked from the one that opened the Reader: open one of its own")
        work = asyncio.run_coroutine_threadsafe(_hastily(coroutine), self._loop)
        try:
            return work.result()
        except BaseException:
            work.cancel()
            raise

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _run_until_closed(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._end.wait()


async def _hastily(coroutine: Coroutine[Any, Any, T]) -> T:
    hasten()  # the caller waits for the result
    return await coroutine
