"""A thread that runs jobs in order, and latches to wait for it.

Invariant: no lock is held here while Python code runs. A signal handler may run between any two lines of a waiting or
giving thread. It may give and wait itself, and must not meet a lock that the interrupted thread holds.
`threading.Event` and executors hold such locks, so this module uses a queue and locks that are implemented in C.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from tierd.core.errors import ConfigError

log = logging.getLogger("tierd")

_WAIT_S = 1.0  # seconds

# A job is in a list of its own. The thread that takes it out, in one atomic operation, decides what becomes of it.
_Jobs = queue.SimpleQueue[list[Callable[[], None]] | None]


class Latch:
    """Closed at first; opened once, for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._open = False

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        """Open the latch for all waiting threads. Only one thread opens a latch."""
        if not self._open:
            self._open = True
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Return when the latch is open, or after `timeout` seconds; return whether it is open."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._open:
            # Waits in intervals, because an exception right after `acquire` would leave the other threads waiting for
            # ever.
            left_s = _WAIT_S if end is None else end - time.monotonic()
            if self._lock.acquire(timeout=max(0.0, min(left_s, _WAIT_S))):
                self._lock.release()
            elif end is not None and left_s <= _WAIT_S:
                break
        return self._open


class Worker:
    """One thread, which runs jobs in order. Jobs that are left when the interpreter ends are still run."""

    def __init__(self, name: str) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        # A daemon thread, because the interpreter would join other threads before `_end_all` could end them.
        running = _Running(self._jobs, Latch())
        self._thread = threading.Thread(target=_work, args=running, name=name, daemon=True)
        self._thread.start()
        _running[self._thread] = running
        _working.add(self._thread)

    def give(self, job: Callable[[], None]) -> None:
        """Queue a job. Raises `ConfigError` after `close`, or when the interpreter ends."""
        job_box = [job]
        self._jobs.put(job_box)
        # After the put, because `close` in another thread or in a signal handler may come at any moment, and a job
        # behind its None is run by nobody.
        if self._thread not in _working and _take(job_box):
            raise ConfigError("closed, or the interpreter is ending: nothing more runs here; save and restore before")

    def drain(self, timeout_s: float | None = None) -> bool:
        """Return when all queued jobs have run, or after `timeout_s`; return whether all have."""
        if self._thread not in _working:
            return True
        drained = Latch()
        try:
            self.give(drained.open)
        except ConfigError:  # closed meanwhile
            return True
        return drained.wait(timeout_s)

    def close(self) -> None:
        """Run the jobs that are left, and end the thread."""
        _end(self._thread)

    def __del__(self) -> None:
        self._jobs.put(None)  # nobody queues jobs any more; those that are left are run


class _Running(NamedTuple):
    jobs: _Jobs
    ended: Latch


_working: set[threading.Thread] = set()  # that take jobs
_running: dict[threading.Thread, _Running] = {}  # that have not ended


def _work(jobs: _Jobs, exit_latch: Latch) -> None:
    while (job_box := jobs.get()) is not None:
        job = _take(job_box)
        try:
            if job is not None:
                job()
        except Exception:
            log.exception("a bug: this was to be somebody's value")
        del job  # releases what the job holds
    _working.discard(threading.current_thread())
    _running.pop(threading.current_thread(), None)
    exit_latch.open()


def _take(job_box: list[Callable[[], None]]) -> Callable[[], None] | None:
    """Take the job out; None if another thread has taken it."""
    try:
        return job_box.pop()
    except IndexError:
        return None


def _end(thread: threading.Thread) -> None:
    """End a thread and wait for it, also if another caller has begun to, or was interrupted while it did."""
    _working.discard(thread)
    running = _running.get(thread)
    if running is None:
        return
    running.jobs.put(None)
    if thread is threading.current_thread():  # it ends after this job and those behind it
        return
    # Not `join`, which holds a lock between two of its lines. A thread of the parent is not alive in a forked process.
    while thread.is_alive() and not running.ended.wait(_WAIT_S):
        pass


@atexit.register
def _end_all() -> None:
    for thread in reversed(list(_running)):  # the later ones may queue jobs for the earlier ones
        _end(thread)
