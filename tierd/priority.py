"""Training owns the machine: what nobody waits for yields to it.

Law: haste is a context's, and of every task begun in it; who says nothing is in no hurry. On Linux a priority is a
thread's and, without privilege, never raised again: so what is not hasty has threads of its own, which lower
themselves, and what a save's durability or a restore waits for never runs on them. A system that refuses costs
politeness only.
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

log = logging.getLogger("tierd.daemon")
_hasty: ContextVar[bool] = ContextVar("hasty", default=False)

_NICE = 19
_IDLE = 3 << 13  # IOPRIO_CLASS_IDLE: the disk's turn comes when nobody else wants it
_THREAD = 1  # IOPRIO_WHO_PROCESS, which is a thread
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "loongarch64": 30, "ppc64le": 273, "s390x": 282}
_STACK = 1 << 20  # bytes
_ARENA_MAX = -8  # mallopt(3)
_libc = ctypes.CDLL(None, use_errno=True)


def hasten() -> None:
    """From here on in this context: training, or somebody at a terminal, waits for it."""
    _hasty.set(True)


def is_hasty() -> bool:
    """Whether somebody waits for what is done in this context."""
    return _hasty.get()


def lower() -> None:
    """Lower the calling thread: nice to 19, I/O class to idle. What is refused is logged."""
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
    """Where this process's address space is limited, have each thread take little of it.

    By default a stack of 8 MiB and a heap of 64 MiB are set apart for each, and most of that is never used. To be
    called before there are threads.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        threading.stack_size(_STACK)
        with suppress(AttributeError):  # another C library, which has no such heaps
            _libc.mallopt(_ARENA_MAX, 2)


class Pools:
    """Threads for calls that block: `hasty` ones at normal priority, and as many polite ones.

    Args:
        count: of each.
        name: what they are called.
    """

    def __init__(self, count: int, name: str) -> None:
        self._hasty = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._polite = ThreadPoolExecutor(count, thread_name_prefix=f"{name}-polite", initializer=lower)

    def here(self) -> ThreadPoolExecutor:
        """The pool for what is done in this context."""
        return self._hasty if is_hasty() else self._polite

    def shutdown(self) -> None:
        """Begin nothing more; what runs is left to itself."""
        for pool in (self._hasty, self._polite):
            pool.shutdown(wait=False, cancel_futures=True)


# What computes: on one core fewer than there are, since training beside it must not be interrupted for it.
POLITE = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1), thread_name_prefix="tierd-polite", initializer=lower)
