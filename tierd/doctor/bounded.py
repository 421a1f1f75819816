"""Deadlines for checks: of coroutines, and of blocking calls that may hang in a dead mount."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

_COMMAND_S = 5.0


async def in_thread(call: Callable[[], T], deadline_s: float) -> T:
    """Run a blocking call in a thread of its own, which keeps no process from its end.

    Raises:
        TimeoutError: the call has not returned; its thread is left alone.
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
        try:
            loop.call_soon_threadsafe(settle, value, failed)
        except RuntimeError:  # the loop has ended
            pass

    threading.Thread(target=work, name="tierd-doctor", daemon=True).start()
    return await within(answer, deadline_s)


async def within(call: Awaitable[T], deadline_s: float) -> T:
    """Await a call for at most `deadline_s` seconds. Raises TimeoutError."""
    async with asyncio.timeout(deadline_s):
        return await call


def output(command: Sequence[str]) -> str:
    """Return what another program prints; empty if it is missing, fails, or takes more than 5 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
