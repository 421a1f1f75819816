"""File-system events, as a reason to look again and nothing more.

Law: an event carries no truth. inotify queues overflow without a word, so the rescan finds what events miss.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from watchdog.events import DirDeletedEvent, DirMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from tierd.spool import Spool

log = logging.getLogger("tierd.daemon")


class _Waker(FileSystemEventHandler):
    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop, self._wake = loop, wake

    def on_any_event(self, event: FileSystemEvent) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the loop is closing; nobody is left to wake


@contextmanager
def watching(spool: Spool, wake: Callable[[], None]) -> Iterator[None]:
    """Call `wake` on the running loop whenever a stage is committed or abandoned.

    A commit is a rename of a directory out of the spool's `stage/`, so that one directory is all there is to watch.
    Where the system has no watches left, the daemon works on by its rescans and says so.
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
        observer.stop()
        observer.join(timeout=5)
