"""The bound on the log of a daemon that a trainer started, whose standard error is `.tierd/daemon.log` of its spool.

Invariant: the log is continued in a new file once it has `LARGEST_BYTES`, and one older file is kept. Only the daemon
that holds the spool does this. A failure leaves the log as it is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierd.ipc.messages import DAEMON_LOG

LARGEST_BYTES = 8 << 20  # then some 100,000 lines are kept, at most twice that
_OUT, _ERR = 1, 2  # descriptors, because libraries and a dying interpreter write to them as well


@contextmanager
def bounded(control: Path) -> Iterator[None]:
    """While the context lasts, bound the log in a spool's `.tierd/`, if this process's standard error goes there."""
    handler = _Bound(control / DAEMON_LOG)
    if handler.is_ours():
        logging.getLogger().addHandler(handler)  # behind the handler that writes the lines
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


class _Bound(logging.Handler):
    """Checks the size of the log after each line."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def is_ours(self) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(_ERR), self._path.lstat())
        return False

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # for example a full disk, of which the daemon says more by itself
            if os.fstat(_ERR).st_size >= LARGEST_BYTES:
                self._rotate()

    def _rotate(self) -> None:
        fresh = self._path.with_name(f"{DAEMON_LOG}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        opened = os.open(fresh, flags, 0o600)
        try:
            current_log = os.fstat(_ERR)
            with suppress(FileNotFoundError):  # somebody deleted it
                self._path.replace(self._path.with_name(f"{DAEMON_LOG}.1"))
            fresh.replace(self._path)
            if os.path.samestat(os.fstat(_OUT), current_log):
                os.dup2(opened, _OUT)
            os.dup2(opened, _ERR)
        finally:
            os.close(opened)
