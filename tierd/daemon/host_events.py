"""What the daemon exchanges with its host: reloads by SIGHUP, notifications to systemd, events of the file system.

Invariants: an unusable configuration changes nothing, and a change that needs a new process is refused. The spool's
lock, both sockets and handed-over snapshots survive a reload. A launch only adds tiers: one that it does not name is
kept until the daemon ends, because copies may exist that only this tier wants. The event loop itself feeds systemd's
watchdog, so a hanging loop is restarted. A file-system event carries no facts, because inotify's queues overflow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager

from watchdog.events import DirDeletedEvent, DirMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from tierd.core.config import Config, with_urls
from tierd.core.errors import ConfigError, TierdError, printable
from tierd.daemon.control_socket import ControlServer
from tierd.daemon.reconciler import Reconciler
from tierd.events.journal import Journal
from tierd.events.notifier import Notifier
from tierd.spool.spool import Spool
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

_PATIENCE = 5.0  # seconds; without READY=1 systemd would end the daemon as one that did not start
OpenAll = Callable[[Config, AsyncExitStack], Awaitable[tuple[Mapping[str, Store], Notifier]]]
_OF_WATCHDOG = "watchdog.observers.inotify"  # its logger


def notify(state: str) -> None:
    """Send one `sd_notify` state, such as ``READY=1``; unprintable characters and line feeds are escaped.

    If the supervisor does not read and its queue is full, READY=1 waits 5 s, and all else is dropped at once, because
    a supervisor that hangs must not hold the daemon.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(_PATIENCE if state.startswith("READY=1") else 0.0)
            connection.sendto(printable(state).encode(), address)
    except OSError:
        pass  # the daemon continues without its supervisor


def watchdog_interval() -> float | None:
    """Return the seconds between signs of life, half of systemd's limit; None if systemd expects none."""
    allowed = os.environ.get("WATCHDOG_USEC", "")
    is_own_process = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(allowed) / 2e6 if allowed.isdigit() and int(allowed) > 0 and is_own_process else None


async def feed_watchdog() -> None:
    """Send signs of life until cancelled; return at once if systemd expects none."""
    interval = watchdog_interval()
    while interval is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval)


class ConfigReloader:
    """The daemon's present configuration and the stores opened for it, and their replacement."""

    def __init__(
        self, reread: Callable[[], Config], open_all: OpenAll, opened: AsyncExitStack, notifier: Notifier
    ) -> None:
        self._reread, self._open_all = reread, open_all
        self._opened, self.notifier = opened, notifier
        self._leaving: set[asyncio.Task[None]] = set()
        self.lock = asyncio.Lock()

    async def run(self, reload_requested: asyncio.Event, reconciler: Reconciler, control: ControlServer) -> None:
        """Reload whenever `reload_requested` is set, until cancelled."""
        while True:
            await reload_requested.wait()
            reload_requested.clear()
            async with self.lock:
                await self._reload(reconciler, control)

    async def _reload(self, reconciler: Reconciler, control: ControlServer) -> None:
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            await self._take_up(self._reread(), reconciler, control)
        except (TierdError, OSError) as error:
            log.error("the configuration is not reloaded, nothing is changed: %s", error)
            notify(f"READY=1\nSTATUS=not reloaded: {error}")
        else:
            log.info("the configuration is reloaded: %s", ", ".join(reconciler.stores))
            notify("READY=1\nSTATUS=reloaded")

    async def add_tiers(self, urls: Sequence[str], reconciler: Reconciler, control: ControlServer) -> None:
        """Take up the tiers that a trainer names, and keep the ones that are there.

        The tiers of `urls` become the first ones, from which restores read first, unless another trainer is attached.
        """
        async with self.lock:
            config = with_urls(reconciler.config, urls, first=control.trainers <= 1)
            if config is not reconciler.config:
                await self._take_up(config, reconciler, control)
                log.info("a trainer's tiers are taken up: %s", ", ".join(reconciler.stores))

    async def _take_up(self, config: Config, reconciler: Reconciler, control: ControlServer) -> None:
        if config.spool != reconciler.config.spool:
            raise ConfigError(f"spool: {config.spool!r}: another spool needs a restart")
        if config.http != reconciler.config.http:
            raise ConfigError("http: a change needs a restart")
        async with AsyncExitStack() as fresh:
            stores, notifier = await self._open_all(config, fresh)
            opened, self._opened = self._opened, fresh.pop_all()
        await reconciler.reconfigure(config, stores)
        before, self.notifier = self.notifier, notifier
        notifier.start(reconciler.journal)
        control.notifier = notifier
        removed = _receivers(before) - _receivers(notifier)
        leaving = asyncio.ensure_future(_leave(before, opened, set(control.working), removed, reconciler.journal))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Close everything that was opened."""
        for leaving in list(self._leaving):
            leaving.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self.notifier.close()
        await self._opened.aclose()


def _receivers(notifier: Notifier) -> set[tuple[str, str]]:
    """The name and address of every receiver. The name alone is only its place in the configuration."""
    return {(receiver.name, receiver.to) for receiver in notifier.status()}


async def _leave(
    notifier: Notifier,
    opened: AsyncExitStack,
    working: set[asyncio.Future[dict[str, object]]],
    removed: set[tuple[str, str]],
    journal: Journal,
) -> None:
    """Close the stores and receivers of the former configuration, once no request uses them any more.

    The alerts of the receivers in `removed` end, because no later delivery would end them.
    """
    try:
        await notifier.close()
        await asyncio.sleep(0)  # the loop records the last tries of the receivers' threads first
        for name, _ in removed:
            journal.record_success(("notify", name))
        if working:
            await asyncio.wait(working)
    finally:
        await opened.aclose()


class _Waker(FileSystemEventHandler):
    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop, self._wake = loop, wake

    def on_any_event(self, event: FileSystemEvent) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the loop is closing, so there is no task to wake


@contextmanager
def watch_stages(spool: Spool, wake: Callable[[], None]) -> Iterator[None]:
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
