"""File-system events, used only as a reason to observe the spool again.

Invariant: an event carries no facts. inotify queues overflow silently, so periodic observation finds missed changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from watchdog.events import DirDeletedEvent, DirMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from tierd.spool.spool import Spool

log = logging.getLogger("tierd.daemon")
_OF_WATCHDOG = "watchdog.observers.inotify"  # its logger


class _Waker(FileSystemEventHandler):
    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop, self._wake = loop, wake

    def on_any_event(self, event: FileSystemEvent) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the loop is closing, so there is no task to wake


@contextmanager
def watching(spool: Spool, wake: Callable[[], None]) -> Iterator[None]:
    """Call `wake` on the running loop whenever a stage is committed or abandoned.

    A commit renames a directory out of the spool's `stage/`, so only that directory is watched. If the system has no
    watches left, the daemon logs a warning and relies on periodic observation.
    """
    observer = Observer()
    observer.daemon = True
    observer.schedule(
        _Waker(asyncio.get_running_loop(), wake),
        str(spool.control / "stage"),
        event_filter=[DirMovedEvent, DirDeletedEvent],
    )
    try:
        observer.start()
    except OSError as error:
        log.warning("spool %s: no file-system events (%s); changes are found by the rescan", spool.root, error)
        yield
        return
    try:
        yield
    finally:
        # The observer's thread logs an error if it is stopped between two events, which is nobody's concern.
        logging.getLogger(_OF_WATCHDOG).addFilter(_drop)
        observer.stop()
        observer.join(timeout=5)
        logging.getLogger(_OF_WATCHDOG).removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return False
