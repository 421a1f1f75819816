"""The notices that reach this rank, by signal or from a cloud, and the threads that agree on them with other ranks.

Invariants:

- A signal handler only queues the signal's name, by a call that may interrupt itself, and takes no lock. Then it calls
  the handler that was there before. In a process that was forked from the one that asked, such as a data loader's
  worker, and after `close`, a signal does what it did before.
- Training waits for a thread only while the ranks agree on the step of a notice. What no notice needs is not done: one
  rank has no thread for other ranks, and a machine of no known cloud none for a metadata server.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from tierd.client.preemption.agreement import Notice, StepAgreement
from tierd.client.ranks.boards import Board
from tierd.client.ranks.ranks import Ranks
from tierd.core.errors import ConfigError, TierdError

if TYPE_CHECKING:
    from tierd.client.preemption.cloud_notices import Cloud

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class PreemptionSignals:
    """The handlers of one `Checkpointer`, which call `heard` with a signal's name.

    Raises `ConfigError` in another thread than the main one, which alone may set handlers; or if code outside of Python
    has set one.
    """

    def __init__(self, heard: Callable[[str], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "When(preemption=...): only the main thread can take SIGTERM and SIGUSR1, and this is thread "
                f"{threading.current_thread().name}: make the Checkpointer in the main thread"
            )
        for number in SIGNALS:
            if signal.getsignal(number) is None:
                raise ConfigError(
                    f"When(preemption=...): {number.name} has a handler that is not of Python, which tierd could not "
                    "call: make the Checkpointer before the library that sets it is loaded"
                )
        self._heard, self._pid = heard, os.getpid()
        _asking.add(self)
        self._before: dict[int, Any] = {}
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)

    def close(self) -> None:
        """Listen no more, and put the handlers of before back.

        Where another handler was set since, or in another thread than the main one, this one passes signals on.
        """
        was_listening = self in _asking
        _asking.discard(self)
        if not was_listening or threading.current_thread() is not threading.main_thread() or os.getpid() != self._pid:
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self in _asking and os.getpid() == self._pid:
            self._heard(signal.Signals(number).name)
        before: Any = self._before.get(number, signal.SIG_DFL)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and not any(listener._pid == os.getpid() for listener in _asking):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_asking: set[PreemptionSignals] = set()


log = logging.getLogger("tierd")

CLOUD_POLL_S = 5.0  # between two reads of a metadata server, as EC2's documentation recommends
_READ_S = 0.01  # between two reads of notes while the ranks agree
_END_S = 2.0  # how long `close` waits for a thread
_HOST = socket.gethostname()


class Preemption:
    """The notices of one `Checkpointer`. Handlers and threads begin with `begin`.

    Raises `ConfigError` if the ranks cannot talk to each other, or the environment's address of a metadata server is
    wrong.
    """

    def __init__(self, setting: bool | str, ranks: Ranks) -> None:
        if not ranks.can_communicate:
            raise ConfigError(
                f"When(preemption={setting!r}): {ranks.world} ranks have no way to agree on the step of a notice: "
                "initialise torch.distributed first"
            )
        self._ranks, self._rank, self._world = ranks, ranks.rank, ranks.world
        self._cloud: Cloud | None = None
        if setting:
            from tierd.client.preemption.cloud_notices import cloud  # loads an HTTP client

            self._cloud = cloud(setting)
        self._notes: Board | None = None
        board, name = ranks.notes()
        if board is not None:
            self._notes, self._pause_s = board, max(board.beat_s / 2, ranks.world / 1000)
            self._quick_s = max(_READ_S, ranks.world / 2000, board.poll_s / 4)
            self.agreement = StepAgreement(ranks.rank, ranks.world, name, self._pause_s)
        else:
            self.agreement = StepAgreement(0, 1)
        self._arrived: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._signals: PreemptionSignals | None = None
        self._agreeing: threading.Thread | None = None
        self._logged = ""  # the last failure that was logged

    def begin(self) -> None:
        self._signals = PreemptionSignals(self._heard)
        if self._notes is not None:
            self._agreeing = threading.Thread(target=self._agree, name="tierd-notices", daemon=True)
            self._agreeing.start()
        if self._cloud is not None:
            threading.Thread(target=self._read_cloud, name="tierd-metadata", daemon=True).start()
        atexit.register(self.close)  # so that no note is read while the interpreter exits

    @property
    def why(self) -> str | None:
        return self.agreement.why

    def due(self, step: int) -> bool:
        if self._notes is None:
            self._drain()
        return self.agreement.due(step)

    def restored(self) -> None:
        self.agreement.restored(self._ranks.turn)

    def begun_s(self) -> float:
        """Return when the last notice was given, monotonic seconds; without one, now."""
        return time.monotonic() if self.why is None else self.agreement.since_s

    def close(self) -> None:
        """Put the earlier handlers back, and end the threads. The one that reads a server ends after its answer."""
        atexit.unregister(self.close)
        if self._signals is not None:
            self._signals.close()
        self._closed.set()
        self._arrived.put(None)
        if self._agreeing is not None:
            self._agreeing.join(_END_S)
            self._agreeing = None

    def _heard(self, signal_name: str) -> None:
        """Take a signal. Runs inside its handler, wherever the training thread is: `put` of this queue is reentrant."""
        to = f" to rank {self._rank}" if self._world > 1 else ""
        self._arrived.put(Notice(signal_name, f"{signal_name}{to} on {_HOST}", time.monotonic()))

    def _read_cloud(self) -> None:
        assert self._cloud is not None
        while not self._closed.is_set():
            begun_s = time.monotonic()
            try:
                for cloud_notice in self._cloud.read():
                    self._arrived.put(Notice(cloud_notice.key, f"{cloud_notice.why} (node {_HOST})", begun_s))
                self._logged = ""
            except OSError as error:
                self._warn(f"{self._cloud.name}'s metadata server: {error or repr(error)}")
            self._closed.wait(max(0.0, CLOUD_POLL_S - (time.monotonic() - begun_s)))

    def _warn(self, why: str) -> None:
        if why != self._logged:
            log.warning("no notice of preemption can be read from %s; asked again every %g s", why, CLOUD_POLL_S)
        self._logged = why

    def _drain(self, wait_s: float = 0.0) -> None:
        """Take the notices that have arrived, after at most `wait_s` for the first of them."""
        try:
            while True:
                notice = self._arrived.get(timeout=wait_s) if wait_s else self._arrived.get_nowait()
                if notice is not None:
                    self.agreement.offer(notice)
                wait_s = 0.0
        except queue.Empty:
            return

    def _agree(self) -> None:
        assert self._notes is not None
        while not self._closed.is_set():
            self._drain(self._pause_s if self.agreement.is_idle else self._quick_s)
            if self._closed.is_set():
                return
            idle = self.agreement.is_idle
            try:
                self.agreement.advance(self._notes, time.monotonic())
            except (RuntimeError, OSError, ValueError, TierdError, msgspec.MsgspecError) as error:
                if not idle:  # otherwise nobody waits, and the ranks that have a notice say so
                    log.warning("notice: the other ranks cannot be told yet: %s", str(error).partition("\n")[0])
                self._closed.wait(self._pause_s)
