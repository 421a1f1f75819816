"""Taking up a changed configuration while the daemon runs: SIGHUP, `systemctl reload`.

Law: a configuration that cannot be used changes nothing. The spool's lock, both sockets and what trainers have handed
over stay as they are; what only a new process can take up is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

from tierd.core.config import Config
from tierd.core.errors import ConfigError, TierdError
from tierd.daemon.control import Control
from tierd.daemon.notify import notify
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.tell import Teller
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

OpenAll = Callable[[Config, AsyncExitStack], Awaitable[tuple[Mapping[str, Store], Teller]]]


class Reload:
    """The configuration that a daemon goes by, what was opened for it, and its successor.

    Args:
        reread: reads the configuration file again; raises `ConfigError`.
        open_all: opens a configuration's stores and receivers.
        opened: holds the stores that are in use.

    Attributes:
        teller: the one in use.
        turn: held while a configuration is taken up.
    """

    def __init__(
        self,
        reread: Callable[[], Config],
        open_all: OpenAll,
        opened: AsyncExitStack,
        teller: Teller,
    ) -> None:
        self._reread, self._open_all = reread, open_all
        self._opened, self.teller = opened, teller
        self._leaving: set[asyncio.Task[None]] = set()
        self.turn = asyncio.Lock()

    async def run(self, asked: asyncio.Event, reconciler: Reconciler, control: Control) -> None:
        """Reload whenever `asked` is set, until cancelled."""
        while True:
            await asked.wait()
            asked.clear()
            async with self.turn:
                await self._reload(reconciler, control)

    async def _reload(self, reconciler: Reconciler, control: Control) -> None:
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            await self._take_up(reconciler, control)
        except (TierdError, OSError) as error:
            log.error("the configuration is not reloaded, nothing is changed: %s", error)
            notify(f"READY=1\nSTATUS=not reloaded: {error}")
        else:
            log.info("the configuration is reloaded: %s", ", ".join(reconciler.stores))
            notify("READY=1\nSTATUS=reloaded")

    async def _take_up(self, reconciler: Reconciler, control: Control) -> None:
        config = self._reread()
        if config.spool != reconciler.config.spool:
            raise ConfigError(f"spool: {config.spool!r}: another spool needs a restart")
        async with AsyncExitStack() as fresh:
            stores, teller = await self._open_all(config, fresh)
            opened, self._opened = self._opened, fresh.pop_all()
        await reconciler.reconfigure(config, stores)
        before, self.teller = self.teller, teller
        teller.start(reconciler.journal)
        control.teller = teller
        leaving = asyncio.ensure_future(_leave(before, opened, set(control.working)))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Close everything that was opened."""
        for leaving in list(self._leaving):
            leaving.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self.teller.close()
        await self._opened.aclose()


async def _leave(teller: Teller, opened: AsyncExitStack, working: set[asyncio.Future[dict[str, object]]]) -> None:
    """Close what the configuration before had opened, once no request uses it any more."""
    try:
        await teller.close()
        if working:
            await asyncio.wait(working)
    finally:
        await opened.aclose()
