"""Reload of a changed configuration while the daemon runs (SIGHUP, `systemctl reload`), and the tiers of a new launch.

Invariants:

- An unusable configuration changes nothing. A change that needs a new process is refused.
- The spool's lock, both sockets and handed-over snapshots stay as they are.
- A launch only adds tiers. One that it does not name is kept until the daemon ends, because copies may exist that only
  this tier wants.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from tierd.core.config import Config, with_urls
from tierd.core.errors import ConfigError, TierdError
from tierd.daemon.control import Control
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.systemd import notify
from tierd.events.journal import Journal
from tierd.events.notifier import Notifier
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

OpenAll = Callable[[Config, AsyncExitStack], Awaitable[tuple[Mapping[str, Store], Notifier]]]


class Reload:
    """The daemon's present configuration and the stores opened for it, and their replacement.

    Args:
        reread: reads the configuration file again; raises `ConfigError`.
        open_all: opens a configuration's stores and receivers.
        opened: holds the stores that are in use.
        notifier: the notifier that is in use.

    Attributes:
        notifier: the notifier that is in use.
        lock: a lock that is held during a reload.
    """

    def __init__(
        self,
        reread: Callable[[], Config],
        open_all: OpenAll,
        opened: AsyncExitStack,
        notifier: Notifier,
    ) -> None:
        self._reread, self._open_all = reread, open_all
        self._opened, self.notifier = opened, notifier
        self._leaving: set[asyncio.Task[None]] = set()
        self.lock = asyncio.Lock()

    async def run(self, reload_requested: asyncio.Event, reconciler: Reconciler, control: Control) -> None:
        """Reload whenever `reload_requested` is set, until cancelled."""
        while True:
            await reload_requested.wait()
            reload_requested.clear()
            async with self.lock:
                await self._reload(reconciler, control)

    async def _reload(self, reconciler: Reconciler, control: Control) -> None:
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            await self._take_up(self._reread(), reconciler, control)
        except (TierdError, OSError) as error:
            log.error("the configuration is not reloaded, nothing is changed: %s", error)
            notify(f"READY=1\nSTATUS=not reloaded: {error}")
        else:
            log.info("the configuration is reloaded: %s", ", ".join(reconciler.stores))
            notify("READY=1\nSTATUS=reloaded")

    async def add_tiers(self, urls: Sequence[str], reconciler: Reconciler, control: Control) -> None:
        """Take up the tiers that a trainer names, and keep the ones that are there.

        The tiers of `urls` become the first ones, from which restores read first, unless another trainer is attached.

        Raises:
            ConfigError: the tiers cannot be used.
        """
        async with self.lock:
            config = with_urls(reconciler.config, urls, first=control.trainers <= 1)
            if config is not reconciler.config:
                await self._take_up(config, reconciler, control)
                log.info("a trainer's tiers are taken up: %s", ", ".join(reconciler.stores))

    async def _take_up(self, config: Config, reconciler: Reconciler, control: Control) -> None:
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
            journal.worked(("notify", name))
        if working:
            await asyncio.wait(working)
    finally:
        await opened.aclose()
