"""The watches of a daemon: one thread for each `[[watch]]`, at idle priority.

Invariant: a watch that fails delays nothing else; it is tried again. Its thread has ended when `run` has.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from tierd.core.config import WatchConfig
from tierd.core.errors import ConfigError, StoreRefused, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId, pin_key
from tierd.core.planning.place import SPOOL
from tierd.daemon.intake.manifests import first_manifest
from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.daemon.reconcile import Reconciler
from tierd.priority import lower
from tierd.spool.commit import CommittedPart, Room
from tierd.watching.naming import history
from tierd.watching.unit_file import UNIT_NAME

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("tierd.daemon")

_LOOK_S = 3.0  # seconds between two listings
_SHARE = 20  # a listing takes at most one part in this many of the time, because it may be of a network file system
_PATIENCE_S = 60.0  # seconds for which a watch waits for the first observation of a tier
_RETRY_S = 30.0  # seconds until a directory that cannot be listed is tried again


_TRIES = 3  # failed tries in a row after which nothing waits for a directory


class RunNotWatched(ConfigError):
    """The run that a watch names has a trainer's checkpoints."""


class _Stopped(Exception):
    """The daemon ends, or the watch was removed from its configuration."""


@dataclass(slots=True)
class _Watching:
    """A watch at work.

    Attributes:
        ending: whether its thread has to end soon.
        idle: whether its last listing left nothing to take.
        tries: how many times in a row the directory could not be watched.
        error: why it cannot be watched.
        refused: the units that are not taken as they are, by path, and why.
    """

    watch: WatchConfig
    ending: bool = False
    idle: bool = False
    tries: int = 0
    error: Exception | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is left to take, or the directory cannot be watched."""
        return self.idle or self.tries >= _TRIES or isinstance(self.error, RunNotWatched)

    def going(self) -> None:
        if self.ending:
            raise _Stopped


class Intake:
    """Takes units from every directory that the reconciler's configuration names.

    Args:
        reconciler: the reconciler, whose configuration may change.
        room: frees disk space when a commit finds the disk full, as for `HandoffServer`.
    """

    def __init__(self, reconciler: Reconciler, room: Callable[[], Room | None]) -> None:
        self._reconciler, self._room = reconciler, room
        self._watching: dict[WatchConfig, _Watching] = {}

    @property
    def busy(self) -> bool:
        """Whether a directory holds a unit that may still be taken."""
        configured = self._reconciler.config.watch
        return any(one not in self._watching or not self._watching[one].is_at_rest for one in configured)

    @property
    def failure(self) -> TierdError | None:
        """Why a directory cannot be watched, after some tries; at once if its run is another program's."""
        for one in self._watching.values():
            if isinstance(one.error, RunNotWatched):
                return one.error
            if one.error is not None and one.tries >= _TRIES:
                return StoreRefused(f"{one.watch.directory}: it cannot be watched: {one.error}")
        return None

    @property
    def refused(self) -> tuple[str, ...]:
        """The units that are not taken as they are, as paths."""
        return tuple(f"{one.watch.directory}/{path}" for one in self._watching.values() for path in one.refused)

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                wanted = self._reconciler.config.watch
                for watch in self._watching.keys() - set(wanted):
                    await self._end(self._watching.pop(watch))
                for watch in wanted:
                    if watch not in self._watching:
                        one = self._watching[watch] = _Watching(watch)
                        one.task = asyncio.ensure_future(self._watch(one))
                await asyncio.sleep(1.0)
        finally:
            for one in self._watching.values():
                one.ending = True
            for one in self._watching.values():
                await self._end(one)

    async def _end(self, one: _Watching) -> None:
        one.ending = True
        self._reconciler.journal.warnings.pop(("watch", one.watch.run), None)
        if one.task is not None:
            one.task.cancel()
            await asyncio.gather(one.task, return_exceptions=True)

    async def _watch(self, one: _Watching) -> None:
        run = one.watch.run
        reports = _ToReconciler(self._reconciler, run)
        await self._observe(run)
        watch: UnitWatch | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="tierd-watch", initializer=lower) as pool:
            log.info("watching %s as run %s", one.watch.directory, run)
            while True:
                began = time.monotonic()
                self._stay_interested(run)
                known = history(self._reconciler.inventory(), run)
                try:
                    if watch is None:
                        await self._check_run(run)
                        watch = await _run(pool, one, self._make, one, reports)
                    await _run(pool, one, watch.look, known, began)
                    await self._share_pins(run)
                    one.idle, one.tries, one.error = not watch.waiting, 0, None
                    self._warn(one, watch)
                    rest_s = max(_LOOK_S, _SHARE * watch.listing_s)
                except (OSError, StoreRefused, ConfigError) as error:
                    one.tries, one.error = one.tries + 1, error
                    rest_s = min(_RETRY_S, _LOOK_S * 2**one.tries)
                    self._reconciler.journal.failed(("watch", run), "look", SPOOL, one.watch.directory, str(error))
                    log.warning("%s: it cannot be watched now: %s", one.watch.directory, error)
                else:
                    self._reconciler.journal.worked(("watch", run))
                await asyncio.sleep(rest_s)

    async def _check_run(self, run: str) -> None:
        """Raise `RunNotWatched` if a trainer saved the run's newest checkpoint: a watch would prune what it saves."""
        inventory = self._reconciler.inventory()
        found = {part for place in inventory.places.values() for part in place.parts() if part.checkpoint.run == run}
        if not found:
            return
        part = max(found, key=lambda one: one.checkpoint)
        manifest = None
        with suppress(StoreUnavailable):  # as with a tier that cannot be observed
            manifest = await first_manifest(part, self._reconciler.spool, self._reconciler.stores)
        if manifest is not None and all(file.path != UNIT_NAME for file in manifest.files):
            raise RunNotWatched(f"run {run!r}: a trainer saved {part.checkpoint}; give --run another name")

    def _warn(self, one: _Watching, watch: UnitWatch) -> None:
        """Have the status show what is not taken or not readable."""
        directory, thing = one.watch.directory, ("watch", one.watch.run)
        one.refused = dict(watch.refused)
        texts = [f"{path} is not taken: {why}" for path, why in watch.refused.items()]
        texts += [f"{path} cannot be listed, and is skipped" for path in watch.unreadable]
        if texts:
            more = f"; and {len(texts) - 1} more" if texts[1:] else ""
            self._reconciler.journal.warnings[thing] = f"{directory}/{texts[0]}{more}"
        else:
            self._reconciler.journal.warnings.pop(thing, None)

    async def _share_pins(self, run: str) -> None:
        """Put the pins that only the spool has on every tier, because a spool may be lost."""
        for checkpoint in self._reconciler.inventory().local_pins:
            if checkpoint.run == run:
                for name, store in self._reconciler.stores.items():
                    try:
                        await store.put(pin_key(checkpoint), b"")
                    except (StoreUnavailable, StoreRefused) as error:
                        log.info("%s: %s cannot be pinned there yet: %s", name, checkpoint, error)

    def _make(self, one: _Watching, reports: _ToReconciler) -> UnitWatch:
        directory = Path(one.watch.directory)
        return UnitWatch(self._reconciler.spool, directory, one.watch.run, reports, self._find_room, one.going)

    def _find_room(self, part: PartId, size_bytes: int, quota: bool) -> bool:
        room = self._room()
        return room is not None and room(part, size_bytes, quota)

    async def _observe(self, run: str) -> None:
        """Wait for the tiers to be observed, because they show what is taken already, but not for a dead tier."""
        self._stay_interested(run)
        for name in list(self._reconciler.workers):
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._reconciler.look(name)
            except Exception as error:  # its worker reports it
                log.info(
                    "%s does not answer: %s is watched without knowing what that tier has: %s",
                    name,
                    run,
                    error or type(error).__name__,
                )

    def _stay_interested(self, run: str) -> None:
        self._reconciler.requests.interest.add(run)
        self._reconciler.requests.presence.asked(run)


async def _run(pool: ThreadPoolExecutor, one: _Watching, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call in the watch's thread. If cancelled, have the call end, and wait for that."""
    work = asyncio.get_running_loop().run_in_executor(pool, functools.partial(call, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        one.ending = True
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # retrieved, so that asyncio does not warn
        raise


class _ToReconciler:
    """Passes a watch's reports on to the event loop."""

    def __init__(self, reconciler: Reconciler, run: str) -> None:
        self._reconciler, self._run = reconciler, run
        self._loop = asyncio.get_running_loop()

    def taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        self._loop.call_soon_threadsafe(self._reconciler.taken, part, outcome)

    def not_taken(self, path: str, why: str) -> None:
        def tell() -> None:
            self._reconciler.journal.tell("not taken", SPOOL, path, why, run=self._run)

        self._loop.call_soon_threadsafe(tell)

    def in_doubt(self, path: str, checkpoint: CheckpointId) -> None:
        why = (
            f"{path} has a later step and an earlier time than other checkpoints: its program went back, or the times "
            "are wrong. Each such one is pinned, so that nothing is lost; `tierd unpin` frees it"
        )

        def tell() -> None:
            self._reconciler.journal.tell("in doubt", SPOOL, checkpoint, why)

        self._loop.call_soon_threadsafe(tell)
