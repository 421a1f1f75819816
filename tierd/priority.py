"""Priorities of threads: background work yields to training.

Invariant: work that a save's durability or a restore waits for never runs on a low-priority thread. Such work is marked
as hasty in its context, and the mark passes to every task begun there; unmarked work is background work. On Linux a
priority belongs to a thread, and without privilege can only be lowered. So background work has its own threads, which
lower their own priority. If the system refuses this, background work only runs at normal priority.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

log = logging.getLogger("tierd.daemon")
_hasty: ContextVar[bool] = ContextVar("hasty", default=False)

_NICE = 19
_IDLE = 3 << 13  # IOPRIO_CLASS_IDLE: gets the disk only while no other thread uses it
_THREAD = 1  # IOPRIO_WHO_PROCESS, which means one thread
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "loongarch64": 30, "ppc64le": 273, "s390x": 282}
_STACK = 1 << 20  # bytes
_ARENA_MAX = -8  # mallopt(3)
_libc = ctypes.CDLL(None, use_errno=True)


def hasten() -> None:
    """Mark the rest of this context as hasty, because training or a person waits for it."""
    _hasty.set(True)


def is_hasty() -> bool:
    """Whether this context is marked as hasty."""
    return _hasty.get()


def lower() -> None:
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


def spare_address_space() -> None:
    """Let each thread reserve little address space, if this process's address space is limited.

    By default the C library reserves a stack of 8 MiB and a heap of 64 MiB per thread, most of which is never used.
    Call this before any thread starts.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        threading.stack_size(_STACK)
        with suppress(AttributeError):  # another C library than glibc, without such heaps
            _libc.mallopt(_ARENA_MAX, 2)


class Pools:
    """Two pools of threads for blocking calls: hasty ones at normal priority, and as many polite ones at low priority.

    Args:
        count: the number of threads in each pool.
        name: the prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._hasty = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._polite = ThreadPoolExecutor(count, thread_name_prefix=f"{name}-polite", initializer=lower)

    def here(self) -> ThreadPoolExecutor:
        """The pool for calls of this context."""
        return self._hasty if is_hasty() else self._polite

    def shutdown(self) -> None:
        """Cancel queued calls without waiting for running ones."""
        for pool in (self._hasty, self._polite):
            pool.shutdown(wait=False, cancel_futures=True)


# Background computation uses one core fewer than the machine has, because it must not interrupt training.
POLITE_THREADS = max(1, (os.cpu_count() or 2) - 1)
POLITE = ThreadPoolExecutor(POLITE_THREADS, thread_name_prefix="tierd-polite", initializer=lower)


def cpu_wait_s() -> float:
    """Return for how many seconds this thread has waited for a CPU since it began; 0 if the kernel does not count."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
