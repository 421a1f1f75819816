"""Threads: background work yields to training, and a blocking call that may never return has a thread of its own.

Invariant: work that a save's durability or a restore waits for never runs on a low-priority thread. Such work is marked
as hasty in its context, and the mark passes to every task begun there; unmarked work is background work. On Linux a
priority belongs to a thread, and without privilege can only be lowered. So background work has its own threads, which
lower their own priority. If the system refuses this, background work only runs at normal priority.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import platform
import resource
import subprocess
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

log = logging.getLogger("tierd.daemon")
_hasty: ContextVar[bool] = ContextVar("hasty", default=False)

_NICE = 19
_IDLE = 3 << 13  # IOPRIO_CLASS_IDLE: gets the disk only while no other thread uses it
_THREAD = 1  # IOPRIO_WHO_PROCESS, which means one thread
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "loongarch64": 30, "ppc64le": 273, "s390x": 282}
_STACK = 1 << 20  # bytes
_ARENA_MAX = -8  # mallopt(3)
_libc = ctypes.CDLL(None, use_errno=True)


def mark_foreground() -> None:
    """Mark the rest of this context as hasty, because training or a person waits for it."""
    _hasty.set(True)


def is_foreground() -> bool:
    """Whether this context is marked as hasty."""
    return _hasty.get()


def lower_priority() -> None:
    """Set the calling thread to nice 19 and I/O class idle. A refusal is logged."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    except OSError as error:
        log.warning("nice is not raised to %d: %s", _NICE, error.strerror)
    if refused := _set_idle():
        log.warning("the I/O class is not idle: %s", refused)


def _set_idle() -> str:
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        return f"its system call is not known on {platform.machine()}"
    failed = _libc.syscall(ctypes.c_long(number), ctypes.c_int(_THREAD), ctypes.c_int(0), ctypes.c_int(_IDLE))
    return os.strerror(ctypes.get_errno()) if failed else ""


def limit_thread_memory() -> None:
    """Let each thread reserve little address space, if this process's address space is limited.

    By default the C library reserves a stack of 8 MiB and a heap of 64 MiB per thread, most of which is never used.
    Call this before any thread starts.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        threading.stack_size(_STACK)
        with suppress(AttributeError):  # another C library than glibc, without such heaps
            _libc.mallopt(_ARENA_MAX, 2)


class PriorityPools:
    """Two pools of threads for blocking calls: hasty ones at normal priority, and as many polite ones at low priority.

    Args:
        count: the number of threads in each pool.
        name: the prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._hasty = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._polite = ThreadPoolExecutor(count, thread_name_prefix=f"{name}-polite", initializer=lower_priority)

    def current(self) -> ThreadPoolExecutor:
        """The pool for calls of this context."""
        return self._hasty if is_foreground() else self._polite

    def shutdown(self) -> None:
        """Cancel queued calls without waiting for running ones."""
        for pool in (self._hasty, self._polite):
            pool.shutdown(wait=False, cancel_futures=True)


# Background computation uses one core fewer than the machine has, because it must not interrupt training.
BACKGROUND_THREADS = max(1, (os.cpu_count() or 2) - 1)
BACKGROUND_POOL = ThreadPoolExecutor(BACKGROUND_THREADS, thread_name_prefix="tierd-polite", initializer=lower_priority)


def cpu_wait_s() -> float:
    """Return for how many seconds this thread has waited for a CPU since it began; 0 if the kernel does not count."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


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


async def call_in_thread(call: Callable[[], T], deadline_s: float) -> T:
    """Run a blocking call in a thread of its own, which keeps no process from its end.

    Raises:
        TimeoutError: the call has not returned; its thread is left alone.
    """
    return await within_deadline(in_own_thread(call, "tierd-doctor"), deadline_s)


async def within_deadline(call: Awaitable[T], deadline_s: float) -> T:
    """Await a call for at most `deadline_s` seconds. Raises TimeoutError."""
    async with asyncio.timeout(deadline_s):
        return await call


def command_output(command: Sequence[str], limit_s: float = 5.0) -> str:
    """Return what another program prints; empty if it is missing, fails, or takes more than `limit_s` seconds."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout
