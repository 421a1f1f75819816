"""A gate between the threads that use weights and the one that replaces them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident

from tierd.core.errors import ConfigError


class SwapGate:
    """Open for any number of threads at a time, or closed by one, which is not kept waiting by new ones."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._inside: Counter[int] = Counter()  # by thread
        self._is_closing = False

    @contextmanager
    def open(self) -> Iterator[None]:
        me = get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._inside[me] or not self._is_closing)
            self._inside[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[me] -= 1
                self._inside += Counter()  # drops threads that are outside
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        with self._changed:
            if self._inside[get_ident()]:
                raise ConfigError("update() inside paused() would wait for itself: call it between two blocks")
            self._is_closing = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._inside.total())
            yield
        finally:
            with self._changed:
                self._is_closing = False
                self._changed.notify_all()
