"""The composition root of the daemon: it opens stores, locks and sockets, and closes them in the right order.

Invariant: a spool has at most one daemon. The daemon starts by observing the spool, however the last daemon ended.
SIGTERM and SIGINT drain; the parts that are left then are returned, logged and shown to systemd. The packages of the
HTTP server are loaded only if a `[http]` table asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tierd.core.config import Config, HttpConfig
from tierd.core.errors import ConfigError, importing_extras
from tierd.core.event_kinds import Event
from tierd.core.ids import PartId
from tierd.core.planning.plan import ForeignRunBacklog
from tierd.core.planning.unflushed_parts import UnflushedPart
from tierd.core.retention.policy import parse_duration
from tierd.core.urls import parse_url
from tierd.daemon import daemon_timings, status_file
from tierd.daemon.control_socket import ControlServer
from tierd.daemon.handoff_socket import HandoffServer
from tierd.daemon.host_events import ConfigReloader, feed_watchdog, notify, watch_stages
from tierd.daemon.intake.active_watch import NothingTaken, RunNotWatched
from tierd.daemon.intake.intake import Intake
from tierd.daemon.last_verified import LastVerified
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.status_file import bounded_log
from tierd.daemon.tiers.tier_identity import check_identities
from tierd.events.notifier import Notifier
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool
from tierd.spool.spool_access import forbid_core_dumps
from tierd.stores.base import Store
from tierd.stores.mounted_directories import check_no_overlap
from tierd.stores.open import open_tiers
from tierd.threads import limit_thread_memory

if TYPE_CHECKING:
    from tierd.daemon.http.http_server import HttpServer

log = logging.getLogger("tierd.daemon")

_RELOADING = 15.0  # seconds that SIGTERM waits for a reload under way
_STATUS_INTERVAL_S = 1.0  # seconds between two lines for systemd while the daemon drains
_FIRST = 120.0  # seconds that a daemon started by a trainer waits for one to attach


def make_http_server(http: HttpConfig | None) -> HttpServer | None:
    """Make the server of a `[http]` table, not yet listening; None without a table.

    Raises:
        ConfigError: a package is not installed; or the token, the certificate or its key cannot be used.
    """
    if http is None:
        return None
    try:
        with importing_extras("the HTTP server", "metrics"):
            from tierd.daemon.http.http_server import HttpServer
    except ImportError as error:
        raise ConfigError(f"http: {error}") from error
    return HttpServer(http)


async def open_all(config: Config, stack: AsyncExitStack, *, trial: bool = False) -> tuple[dict[str, Store], Notifier]:
    """Open all that a configuration refers to. A check of a configuration does the same for a `trial`, so it predicts
    a start.

    Raises:
        ConfigError: a tier's URL cannot be opened; its key, a file or command of a `[[notify]]`, or a file of `[http]`
            cannot be used; or a tier's directory overlaps with the spool's or another tier's.
    """
    await check_no_overlap(config)
    usual = daemon_timings.given()
    notifier = Notifier(config.notify, config.spool, again_s=usual.notify_again_s, end_s=usual.notify_end_s)
    make_http_server(config.http)
    return await open_tiers(config, stack, trial=trial), notifier


async def open_compared(config: Config, stack: AsyncExitStack) -> tuple[dict[str, Store], Notifier]:
    """Open all that a configuration refers to, for a reload. Raises as `open_all` and `check_identities`."""
    stores, notifier = await open_all(config, stack)
    await check_identities(config.urls(), stores)
    return stores, notifier


async def serve(
    config: Config,
    *,
    until_idle: bool = False,
    await_trainer: bool = False,
    reread: Callable[[], Config] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> tuple[UnflushedPart | str, ...]:
    """Run the daemon until a signal ends it, or with `until_idle` until no trainer is left and all is flushed.

    Args:
        await_trainer: with `until_idle`: also wait 120 s for a first trainer, because a trainer started this daemon.
        reread: reads the configuration again, for SIGHUP; None: SIGHUP ends the daemon as SIGTERM does.

    Returns:
        The parts that some tier still lacked when `drain` was over after a signal; with `until_idle` the paths of
        checkpoints in watched directories that are not taken, because they are damaged.

    Raises:
        SpoolUnusable: the spool cannot be used, or another daemon holds it.
        ConfigError: as `open_all`; or two tiers are one place under two names; or a watched run is a trainer's, and
            nothing else can be served.
        StoreRefused: with `until_idle`: a watched directory cannot be watched.
        NothingTaken: with `until_idle`: no checkpoint of a watched directory was ever taken, and nothing else is wrong.
    """
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        stop, hup = stack.enter_context(_signals(has_configuration=reread is not None))
        forbid_core_dumps()
        limit_thread_memory()
        await check_no_overlap(config)  # before a spool is created inside a tier's directory
        spool = Spool(Path(config.spool))
        stack.enter_context(spool.lock())
        stack.enter_context(bounded_log(spool.control))
        opened = await stack.enter_async_context(AsyncExitStack())
        stores, notifier = await open_all(config, opened)
        if await_trainer:  # before it listens, so that the trainer's start raises, and not only its tiers stay empty
            await check_identities(config.urls(), stores)
        http = make_http_server(config.http)
        reload = ConfigReloader(reread or (lambda: config), open_compared, opened, notifier)

        def heard(event: Event) -> None:
            reload.notifier.offer(event)
            if http is not None:
                http.note_event(event)
            if on_event is not None:
                on_event(event)

        stack.push_async_callback(reload.close)  # closed after every source of events
        reconciler = Reconciler(config, spool, stores, heard)
        reconciler.requests.trainer_activity.watched_until = status_file.status_recorded_at(spool.control)
        reload.notifier.start(reconciler.journal)

        def on_committed(part: PartId, outcome: CommittedPart | Exception) -> None:
            loop.call_soon_threadsafe(reconciler.note_commit, part, outcome)

        def persisting(part: PartId, under_way: bool) -> None:
            # The loop runs this before it processes any observation that shows the part, because it keeps the order.
            loop.call_soon_threadsafe(reconciler.save_events.set_persisting, part, under_way)

        handoff = HandoffServer(spool, on_committed, reconciler.timings, persisting)
        reconciler.requests.writers = handoff.writers
        control = ControlServer(reconciler, handoff, reload.notifier)
        if await_trainer:
            control.handler.add_tiers = lambda urls: reload.add_tiers(urls, reconciler, control)
        stack.enter_context(watch_stages(spool, reconciler.wake))
        stack.enter_context(handoff.listening(parse_duration(config.drain)))
        await stack.enter_async_context(control.listening())
        intake = Intake(reconciler, lambda: handoff.room)
        work = asyncio.ensure_future(reconciler.run())
        recording = asyncio.ensure_future(status_file.keep_status(spool.control, control.status))
        naming = asyncio.ensure_future(LastVerified(spool.control, reconciler.inventory).keep())
        answering = asyncio.ensure_future(_answer(http, reconciler, control))
        taking = asyncio.ensure_future(intake.run())
        life = asyncio.ensure_future(feed_watchdog())
        end_condition = (
            _idle(reconciler, control, handoff, intake, await_trainer) if until_idle else asyncio.Event().wait()
        )
        idle = asyncio.ensure_future(end_condition)
        refusing = asyncio.ensure_future(_refused(intake) if reread is None else asyncio.Event().wait())
        comparing = asyncio.ensure_future(asyncio.Event().wait() if await_trainer else _stay_apart(config, stores))
        reloading = asyncio.ensure_future(reload.run(hup, reconciler, control))
        notify("READY=1")
        tiers = ", ".join(f"{tier.name} {parse_url(tier.url)}" for tier in config.tier)
        log.info("spool %s to %s", spool.root, tiers)
        if until := reconciler.pause.until:
            log.warning("paused: %s; to go on: tierd resume --spool %s", until, spool.root)
        stopped = asyncio.ensure_future(stop.wait())
        failure: BaseException | None = None
        remaining: tuple[UnflushedPart | str, ...] = ()
        undone: tuple[ForeignRunBacklog, ...] = ()
        try:
            await asyncio.wait([stopped, work, idle, refusing, comparing], return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                notify("STOPPING=1")
                taking.cancel()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RELOADING):
                        await reload.lock.acquire()  # let a reload under way end, and prevent another
                log.info("stopping: flushes in hand have %s", reconciler.config.drain)
                remaining = await _drain(reconciler, parse_duration(reconciler.config.drain))
            elif comparing.done():
                failure = comparing.exception()
            elif not work.done():
                failure, remaining = intake.failure, intake.refused
                undone = tuple(reconciler.unsent())
                if not (failure or remaining or undone) and (why := intake.untaken):
                    failure = NothingTaken("; ".join(why))
        finally:
            tasks = (work, taking, life, idle, refusing, comparing, stopped, reloading, recording, naming, answering)
            for task in tasks:
                if not task.cancelling():  # a second time would cut off how the watches end on the tier
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(status_file.write_status, spool.control, control.status())
        if work.done() and not work.cancelled():
            failure = failure or work.exception()
        if failure is not None:
            raise failure
        for path in remaining:
            if isinstance(path, str):
                log.error("%s was not taken", path)
        for entry in undone:
            log.error("%s: %s", entry.tier, entry)
        log.info("ended")
    return (*remaining, *map(str, undone))


@contextmanager
def _signals(*, has_configuration: bool) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Handle signals, also those that `__main__` held back during the imports.

    Yields:
        An event that is set by each signal that ends the daemon, and one that SIGHUP sets if there is a configuration
        to read again. A SIGHUP that `nohup` has ignored stays so without one.
    """
    stop, hup = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def hang_up(*_: object) -> None:
        loop.call_soon_threadsafe(hup.set if has_configuration else stop.set)

    former = signal.getsignal(signal.SIGHUP) or signal.SIG_DFL  # None: another language set it
    if has_configuration or former is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)
    masked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
    try:
        yield stop, hup
    finally:
        # A process whose signals `__main__` held back ends now; a SIGHUP would replace its exit code.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if signal.SIGHUP in masked else former)


async def _stay_apart(config: Config, stores: Mapping[str, Store]) -> None:
    """Return only by an error: `ConfigError` if two tiers are one place. Beside the work, because a tier may be slow.

    Prunes do not rely on this: each compares its tier before it deletes.
    """
    await check_identities(config.urls(), stores)
    await asyncio.Event().wait()


async def _answer(http: HttpServer | None, reconciler: Reconciler, control: ControlServer) -> None:
    """Answer HTTP requests until cancelled. A failure ends only this, because training needs the rest."""
    try:
        if http is not None:
            await http.run(reconciler, control.status)
    except Exception:
        log.exception("http: ended")


async def _drain(reconciler: Reconciler, timeout_s: float) -> tuple[UnflushedPart, ...]:
    """Drain, and show systemd meanwhile and at the end which parts are left."""

    async def show() -> None:
        while True:
            notify(f"STATUS=draining: {reconciler.backlog.describe()}")
            await asyncio.sleep(_STATUS_INTERVAL_S)

    showing = asyncio.ensure_future(show())
    try:
        remaining = await reconciler.drain(timeout_s)
    finally:
        showing.cancel()
    notify(f"STATUS={'not ' if remaining else ''}drained: {reconciler.backlog.describe()}")
    return remaining


async def _refused(intake: Intake) -> None:
    """Return when a watch's run is a trainer's, which no further try changes."""
    while not isinstance(intake.failure, RunNotWatched):
        await asyncio.sleep(0.2)


async def _idle(
    reconciler: Reconciler, control: ControlServer, handoff: HandoffServer, intake: Intake, await_trainer: bool
) -> None:
    """Return when every trainer has left, none is expected back, and nothing is left to take or to flush."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _FIRST
    while await_trainer and not control.had_trainer and loop.time() < end:
        await asyncio.sleep(0.2)
    # Observe first, because `pending` knows no parts before. A tier that fails counts as lacking all of them.
    await asyncio.gather(*(reconciler.observe(name) for name in reconciler.workers), return_exceptions=True)
    quiet = 0.0
    while quiet < (reconciler.timings.grace_s if control.had_trainer else 0.2):
        await asyncio.sleep(0.2)
        sending = reconciler.backlog.parts() or not reconciler.is_backfilled
        busy = control.trainers or handoff.busy or intake.busy or sending
        quiet = 0.0 if busy else quiet + 0.2
    log.info("everything is flushed, and no trainer is attached")
