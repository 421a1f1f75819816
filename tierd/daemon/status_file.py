"""The files in which a daemon leaves word of itself in `.tierd/`: its last known status, and its bounded log.

Invariants: the status is replaced whole. The log is continued in a new file once it has `MAX_LOG_BYTES`, and one older
file is kept. A failure to write either changes nothing else.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tierd.ipc.messages import DAEMON_LOG
from tierd.spool.file_io import private_opener, replace_private

if TYPE_CHECKING:
    from tierd.daemon.daemon_status import Status  # loads the daemon, which `tierd status` does not need

log = logging.getLogger("tierd.daemon")

LAST_STATUS = "status.json"  # in `.tierd/`
_LARGEST = 64 << 20  # bytes
_WRITE_INTERVAL_S = 60.0  # seconds, so that a killed daemon leaves a status that is not older
MAX_LOG_BYTES = 8 << 20  # then some 100,000 lines are kept, at most twice that
_OUT, _ERR = 1, 2  # descriptors, because libraries and a dying interpreter write to them as well


async def keep_status(control: Path, status: Callable[[], Status]) -> None:
    """Write the status now and then, until cancelled."""
    import asyncio  # here, because `tierd status` reads the file without it

    while True:
        await asyncio.sleep(_WRITE_INTERVAL_S)
        await asyncio.to_thread(write_status, control, status())


def write_status(control: Path, status: Status) -> None:
    """Write a status to a spool's `.tierd/`, as the last one of a daemon that may end at any time."""
    try:
        replace_private(control / LAST_STATUS, msgspec.json.encode(replace(status, running=False, pid=None)))
    except OSError as error:  # for example a full disk
        log.info("local: the last status is not recorded: %s", error)


def status_recorded_at(control: Path) -> float:
    """Return when a daemon of the spool last recorded its status, in seconds since 1970; `-inf` if none has."""
    try:
        return (control / LAST_STATUS).lstat().st_mtime
    except OSError:
        return -math.inf


def read_status(control: Path) -> dict[str, Any] | None:
    """Return the last status that a daemon recorded in a spool's `.tierd/`; None if none can be read."""
    try:
        with open(control / LAST_STATUS, "rb", opener=private_opener) as file:
            return msgspec.json.decode(file.read(_LARGEST), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


@contextmanager
def bounded_log(control: Path) -> Iterator[None]:
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
            if os.fstat(_ERR).st_size >= MAX_LOG_BYTES:
                self._rotate()

    def _rotate(self) -> None:
        fresh = self._path.with_name(f"{DAEMON_LOG}.new")
        opened = private_opener(str(fresh), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
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
