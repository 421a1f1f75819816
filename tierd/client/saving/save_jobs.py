"""One save's result, and the thread that runs saves in order, with latches to wait for it.

A thread that asks for the interpreter's lock gets it from one computing thread after 5 ms, and from four of them after
20 ms. `save` releases the lock dozens of times, because torch does so in most of its operators. So computing threads
could delay a call of one millisecond by a quarter of a second, and `short_switches` shortens their turns.

Invariants:

- A `Save` ends exactly once, durable or failed, and reports the same result to every caller, however often.
- No lock is held here while Python code runs. A signal handler may run between any two lines of a waiting or giving
  thread. It may give and wait itself, and must not meet a lock that the interrupted thread holds. `threading.Event`
  and executors hold such locks, so this module uses a queue and locks that are implemented in C.
- When the last thread leaves `short_switches`, the interpreter's switch interval is the one that the process had set.
"""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tierd.core.errors import ConfigError, SaveFailed, SaveSkipped
from tierd.core.ids import PartId
from tierd.core.manifest import MAX_METRICS, is_metric_name
from tierd.core.planning.place import SPOOL
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Wait
from tierd.spool.spool import Spool

_SHORT_S = 127e-6  # a value that no other code would set
_GIVEN_S = 50e-6  # a woken thread has the lock by then

_waiting: list[None] = []  # one entry for each thread or handler inside; its methods are atomic
_usual_s = 0.0


class _ShortSwitches:
    def __enter__(self) -> None:
        global _usual_s
        _waiting.append(None)
        interval_s = sys.getswitchinterval()
        if interval_s > 1.01 * _SHORT_S:
            _usual_s = interval_s
            sys.setswitchinterval(_SHORT_S)

    def __exit__(self, *_: object) -> None:
        _waiting.pop()
        if not _waiting and _usual_s and abs(sys.getswitchinterval() - _SHORT_S) < 0.01 * _SHORT_S:
            sys.setswitchinterval(_usual_s)


short_switches = _ShortSwitches()


def give_way() -> None:
    """Release the interpreter's lock to a waiting thread. Background work calls this after every millisecond."""
    time.sleep(_GIVEN_S)


log = logging.getLogger("tierd")

_WAIT_S = 1.0  # seconds

# A job is in a list of its own. The thread that takes it out, in one atomic operation, decides what becomes of it.
_Jobs = queue.SimpleQueue[list[Callable[[], None]] | None]


class Latch:
    """Closed at first; opened once, for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_open = False

    def open(self) -> None:
        """Open the latch for all waiting threads. Only one thread opens a latch."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Return when the latch is open, or after `timeout` seconds; return whether it is open."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_open:
            # Waits in intervals, because an exception right after `acquire` would leave the other threads waiting for
            # ever.
            left_s = _WAIT_S if end is None else end - time.monotonic()
            if self._lock.acquire(timeout=max(0.0, min(left_s, _WAIT_S))):
                self._lock.release()
            elif end is not None and left_s <= _WAIT_S:
                break
        return self.is_open


class JobThread:
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


@dataclass(slots=True)
class Stats:
    """Counts since the `Checkpointer` was made. Times are in seconds.

    Attributes:
        saves: calls of `save` and `stage` that took their snapshot, also those that failed later.
        failed: saves that could not be made durable.
        skipped: calls that took no snapshot, because an earlier one was still being persisted (`when_busy`).
        blocked_s: time inside `save`, which training loses. It includes the time in which `dcp.async_save` copied.
        first_blocked_s: the share of `blocked_s` of the first save, which plans the layout.
        waited_s: the share of `blocked_s` that waited for the previous save, or for memory that was being prepared.
        step_waited_s: time that steps of attached optimizers waited for a copy, which training loses as well.
        persisted_bytes: bytes made durable in the spool.
        handed_over: saves that the daemon persisted from this process's memory.
        direct: saves written past the page cache (O_DIRECT).
        recycled: saves written with O_DIRECT over the blocks of a pruned checkpoint.
        pinned_bytes: memory that is pinned for a GPU now, so that copies into it run concurrently with the host.
        durable: saves that became durable in the spool.
    """

    saves: int = 0
    failed: int = 0
    skipped: int = 0
    blocked_s: float = 0.0
    first_blocked_s: float = 0.0
    waited_s: float = 0.0
    step_waited_s: float = 0.0
    persisted_bytes: int = 0
    handed_over: int = 0
    direct: int = 0
    recycled: int = 0
    pinned_bytes: int = 0
    durable: int = 0


class Save:
    """The handle that `Checkpointer.save` returns. `step` and `part` name this rank's part of the checkpoint."""

    def __init__(self, part: PartId, spool: Spool) -> None:
        self.part = part
        self._spool = spool
        self.begun_s = time.perf_counter()
        self.blocked_s: float | None = None  # inside `save`; None until it returns
        self._ended = Latch()
        self._error: Exception | None = None
        # Called in the thread of a caller of `done` or `wait`; may wait.
        self.confirm_copy: Callable[[float | None], None] = _nothing

    def __repr__(self) -> str:
        if not self._ended.is_open:
            state = "running"
        else:
            state = "durable" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<Save of {self.part}: {state}>"

    @property
    def step(self) -> int:
        """The step of the saved checkpoint."""
        return self.part.checkpoint.step

    def done(self) -> bool:
        """Return whether the save has ended, durable or failed."""
        self.confirm_copy(0.0)
        return self._ended.is_open

    def error(self) -> Exception | None:
        """Why the save failed; None while it runs or when it is durable."""
        return self._error

    def wait(self, tier: str = SPOOL, timeout: float | None = None) -> None:
        """Return when a place holds this checkpoint, verified.

        Args:
            tier: `"local"` waits for the spool: a power cut cannot lose the checkpoint any more. A tier's name waits
                until the tier's copy was read back and compared.
            timeout: seconds to wait; None waits as long as the daemon works.

        Raises:
            SaveFailed: the checkpoint could not be made durable; the cause is chained.
            SaveSkipped: no snapshot was taken (`when_busy="skip"`).
            StoreRefused: the tier refuses (credentials, bucket); the daemon keeps trying.
            CheckpointNotFound: the checkpoint will not reach the tier, because retention keeps newer ones instead, or
                because it was quarantined.
            ConfigError: the daemon has no tier of that name.
            DaemonUnavailable: a tier was asked for, and no daemon answers.
            TimeoutError: the tier does not hold the checkpoint after `timeout`; the message has the tier's last error.
        """
        end = None if timeout is None else time.monotonic() + timeout
        self.confirm_copy(timeout)
        if not self._ended.wait(None if end is None else max(0.0, end - time.monotonic())):
            raise TimeoutError(f"{self.part} is not durable after {timeout:g} s")
        if isinstance(self._error, SaveSkipped):
            raise self._error
        if self._error is not None:
            raise SaveFailed(f"{self.part}: {self._error}") from self._error
        if tier == SPOOL:
            return
        left_s = None if end is None else max(0.0, end - time.monotonic())
        try:
            with DaemonConnection(self._spool) as link:
                link.ask(Wait(part=self.part, tier=tier, timeout_s=left_s), None if left_s is None else left_s + 10)
        except TimeoutError as error:
            raise TimeoutError(f"not within {timeout:g} s: {error}") from error

    def finish(self, error: Exception | None) -> None:
        """End the save: durable if `error` is None. Called once, by the thread that persists."""
        self._error = error
        self.confirm_copy = _nothing
        self._ended.open()


def _nothing(timeout: float | None) -> None:
    pass


def checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as floats; NumPy scalars and 0-d tensors are accepted.

    Raises `ConfigError`, which names the metric, if a name cannot be used or a value is no number.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics={metrics!r}: a dict of names and numbers, such as {{'loss': 0.5}}")
    if len(metrics) > MAX_METRICS:
        raise ConfigError(f"{len(metrics)} metrics; a checkpoint holds at most {MAX_METRICS}")
    numbers = {}
    for name, value in metrics.items():
        if not is_metric_name(name):
            raise ConfigError(f"metrics[{name!r}]: a name is 1 to 256 characters, none of them a control character")
        try:
            numbers[name] = float(value.item() if hasattr(value, "item") else value)  # NumPy scalars, 0-d tensors
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"metrics[{name!r}]: {type(value).__name__} is not a number") from error
    return numbers
