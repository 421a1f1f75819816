"""The composition root of the daemon: it opens what the others only use, and closes it in the right order.

Law: one daemon a spool. It starts by looking, whatever the last one left; SIGTERM and SIGINT drain, then end with 0.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from tierd.commit import Written
from tierd.core.config import Config
from tierd.core.events import Event
from tierd.core.ids import PartId
from tierd.core.rate import rate
from tierd.core.retention import seconds
from tierd.core.urls import parse_url
from tierd.daemon.control import Control
from tierd.daemon.handoff import HandOff
from tierd.daemon.notify import feed_watchdog, notify
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.tell import Teller
from tierd.daemon.watch import watching
from tierd.spool import Spool
from tierd.stores.base import Store
from tierd.stores.keys import read_key
from tierd.stores.open import open_store
from tierd.trust import leave_no_core

log = logging.getLogger("tierd.daemon")

_GRACE = 2.0  # seconds without a trainer before an idle daemon ends: a restarting trainer finds it still there
_FIRST = 120.0  # seconds that a daemon started by a trainer waits for one to attach


async def open_tiers(config: Config, stack: AsyncExitStack) -> dict[str, Store]:
    """Open every tier's store, in order; `stack` closes them. Raises `ConfigError` where a key cannot be used."""
    stores: dict[str, Store] = {}
    for tier in config.tier:
        up, down = (rate(limit) if limit else None for limit in (tier.limit_up, tier.limit_down))
        key = read_key(Path(tier.key_file)) if tier.key_file else None
        stores[tier.name] = open_store(parse_url(tier.url), up, down, key)
        stack.push_async_callback(stores[tier.name].aclose)
    return stores


async def serve(config: Config, *, until_idle: bool = False, told: Callable[[Event], None] | None = None) -> None:
    """Run the daemon until it is told to stop, or with `until_idle` until no trainer is left and all is flushed.

    Args:
        told: called with every event as it happens.

    Raises:
        SpoolUnusable: the spool cannot be used, or another daemon holds it.
        ConfigError: a tier's URL cannot be opened, or its key or what a `[[tell]]` refers to not be used.
    """
    leave_no_core()
    spool = Spool(Path(config.spool))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        stack.enter_context(spool.lock())
        teller = Teller(config.tell, config.spool)
        stack.push_async_callback(teller.close)  # after all that still tells something

        def heard(event: Event) -> None:
            teller.offer(event)
            if told is not None:
                told(event)

        reconciler = Reconciler(config, spool, await open_tiers(config, stack), heard)
        teller.start(reconciler.journal)

        def taken(part: PartId, outcome: Written | Exception) -> None:
            loop.call_soon_threadsafe(reconciler.taken, part, outcome)

        handoff = HandOff(spool, taken)
        reconciler.writers = handoff.lanes
        control = Control(reconciler, handoff, teller)
        stack.enter_context(watching(spool, reconciler.wake))
        stack.enter_context(handoff.listening(seconds(config.drain)))
        await stack.enter_async_context(control.listening())
        work = asyncio.ensure_future(reconciler.run())
        life = asyncio.ensure_future(feed_watchdog())
        idle = asyncio.ensure_future(_idle(reconciler, control, handoff) if until_idle else asyncio.Event().wait())
        notify("READY=1")
        tiers = ", ".join(f"{tier.name} {parse_url(tier.url)}" for tier in config.tier)
        log.info("spool %s to %s", spool.root, tiers)
        if until := reconciler.pause.until:
            log.warning("paused: %s; to go on: tierd resume --spool %s", until, spool.root)
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([stopped, work, idle], return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                notify("STOPPING=1")
                log.info("stopping: flushes in hand have %s", config.drain)
                await reconciler.drain(seconds(config.drain))
        finally:
            for task in (work, life, idle, stopped):
                task.cancel()
            await asyncio.gather(work, life, idle, stopped, return_exceptions=True)
        if work.done() and not work.cancelled() and (failure := work.exception()):
            raise failure
        log.info("ended")


async def _idle(reconciler: Reconciler, control: Control, handoff: HandOff) -> None:
    """Return when every trainer has gone, none is expected back, and nothing is left to flush."""
    end = asyncio.get_running_loop().time() + _FIRST
    while not control.seen and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.2)
    quiet = 0.0
    while quiet < _GRACE:
        await asyncio.sleep(0.2)
        busy = control.trainers or handoff.busy or reconciler.pending()
        quiet = 0.0 if busy else quiet + 0.2
    log.info("no trainer is left and everything is flushed")
