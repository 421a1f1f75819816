"""Take SIGTERM and SIGUSR1 as notices, for as long as a `Checkpointer` asks for them.

Invariant: a handler only queues the signal's name, by a call that may interrupt itself, and takes no lock. Then it
calls the handler that was there before. In a process that was forked from the one that asked, such as a data loader's
worker, and after `close`, a signal does what it did before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tierd.core.errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Signals:
    """The handlers of one `Checkpointer`.

    Args:
        heard: called with a signal's name, inside the handler.

    Raises:
        ConfigError: this is not the main thread, which alone may set handlers; or code outside of Python has set one.
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
        """Listen no more, and put the handlers of before back. Where another handler was set since, or in another
        thread than the main one, this one passes signals on.
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


_asking: set[Signals] = set()
