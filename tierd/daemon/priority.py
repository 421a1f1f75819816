"""Training owns the machine: what nobody waits for yields to it.

Law: on Linux a priority is a thread's and, without privilege, never raised again. So reading, encoding and comparing
for a flush or a scrub have threads of their own, which lower themselves; what a save's durability or a restore waits
for never runs on them, nor does what only hands bytes over. A system that refuses costs politeness only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from concurrent.futures import ThreadPoolExecutor

_THREADS = 8
log = logging.getLogger("tierd.daemon")

_NICE = 10
_IDLE = 3 << 13  # IOPRIO_CLASS_IDLE: the disk's turn comes when nobody else wants it
_THREAD = 1  # IOPRIO_WHO_PROCESS, which is a thread
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "loongarch64": 30, "ppc64le": 273, "s390x": 282}
_libc = ctypes.CDLL(None, use_errno=True)


def lower() -> None:
    """Lower the calling thread: nice to 10 unless it is higher, I/O class to idle. What is refused is logged."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
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


POLITE = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierd-polite", initializer=lower)
