"""Deadlines for checks: of coroutines, and of blocking calls that may hang in a dead mount."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tierd.own_thread import in_own_thread

T = TypeVar("T")


async def in_thread(call: Callable[[], T], deadline_s: float) -> T:
    """Run a blocking call in a thread of its own, which keeps no process from its end.

    Raises:
        TimeoutError: the call has not returned; its thread is left alone.
    """
    return await within(in_own_thread(call, "tierd-doctor"), deadline_s)


async def within(call: Awaitable[T], deadline_s: float) -> T:
    """Await a call for at most `deadline_s` seconds. Raises TimeoutError."""
    async with asyncio.timeout(deadline_s):
        return await call


def output(command: Sequence[str], limit_s: float = 5.0) -> str:
    """Return what another program prints; empty if it is missing, fails, or takes more than `limit_s` seconds."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout
