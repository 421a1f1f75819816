"""Times in which little or nothing goes to a tier: a person's pause, the pacing of flushes, and a tier's silence.

Invariants: while paused, the daemon flushes and scrubs nothing, and prunes and repairs nothing on a tier. A pause is
the file `.tierd/paused`, so that it outlives the daemon. A paced flush goes on within `_SLICE_S` once a request waits
for it. Silence counts only while this process runs and a request waits; any byte that moves ends it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from tierd.core.ids import PartId
from tierd.core.planning.background_schedule import COUNTED_SAVES, flush_spread_s
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.events.journal import Journal
from tierd.spool.file_io import private_opener, replace_private, sync_directory
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

_LONG = 64  # bytes of the file that are read
Pause: TypeAlias = Callable[[], Awaitable[None]]  # awaited before each chunk
_SLICE_S = 0.25  # seconds after which a paced flush asks again whether it must hurry


async def no_pause() -> None:
    """The `Pause` of an operation that never waits."""


class TierPause:
    """Whether the daemon of a spool is paused; initially as the last daemon left it."""

    def __init__(self, spool: Spool) -> None:
        self._path = spool.control / "paused"
        self._doing = f"spool {spool.root}: {self._path.name}"
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()  # serializes changes, so that file and memory agree
        self._until: datetime | None = None
        self._end = 0.0  # monotonic seconds
        with spool_errors(self._doing):
            try:
                with open(self._path, "rb", opener=private_opener) as file:
                    self._load(file.read(_LONG).decode(errors="replace").strip(), os.fstat(file.fileno()).st_mtime)
            except FileNotFoundError:
                pass

    def _load(self, text: str, recorded_at: float) -> None:
        left_s = math.inf
        if text:
            try:
                self._until = datetime.fromisoformat(text).astimezone(UTC)
                left_s = (self._until - datetime.now(UTC)).total_seconds()
                # If the clock was set back since, the pause must not become longer.
                left_s = min(left_s, self._until.timestamp() - recorded_at)
            except (ValueError, OverflowError):
                log.warning("%s: %r is no time, so until resumed", self._doing, text)
        self._end = time.monotonic() + left_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the pause ends by itself: infinite if it does not, 0 if there is no pause."""
        return max(0.0, self._end - time.monotonic())

    @property
    def paused(self) -> bool:
        return self.remaining_s > 0

    @property
    def until(self) -> str | None:
        """The end in RFC 3339, or "until resumed"; None if there is no pause."""
        if not self.paused:
            return None
        return self._until.isoformat(timespec="seconds") if self._until else "until resumed"

    async def wait(self) -> None:
        """Return when there is no pause."""
        while self.paused:
            try:
                async with asyncio.timeout(None if math.isinf(self.remaining_s) else self.remaining_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def begin(self, for_s: float | None) -> None:
        """Pause for `for_s` seconds, or until resumed if None, in place of any present pause. Durable on return."""
        async with self._lock:
            until = None if for_s is None else datetime.now(UTC) + timedelta(seconds=for_s)
            await asyncio.to_thread(self._write, until.isoformat() if until else "")
            self._until = until
            self._change(math.inf if for_s is None else time.monotonic() + for_s)

    async def end(self) -> None:
        """End the pause. Durable on return."""
        async with self._lock:
            await asyncio.to_thread(self._remove)
            self._change(0.0)

    def _change(self, end: float) -> None:
        self._end = end
        self._changed.set()  # wake all waiters, so that they check again
        self._changed = asyncio.Event()

    def _write(self, text: str) -> None:
        with spool_errors(self._doing):
            replace_private(self._path, (text + "\n" * bool(text)).encode(), durable=True)

    def _remove(self) -> None:
        with spool_errors(self._doing):
            self._path.unlink(missing_ok=True)
            sync_directory(self._path.parent)


class SaveCadence:
    """The times at which each run's saves were observed here, monotonic seconds."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._saved: dict[str, deque[float]] = {}
        self._last: dict[str, PartId] = {}

    def note_saves(self, parts: Collection[PartId]) -> None:
        """Record the parts that were committed since the last observation. One run's parts in it count as one save."""
        newest: dict[str, PartId] = {}
        for part in parts:
            run = part.checkpoint.run
            newest[run] = max(part, newest.get(run, part), key=lambda candidate: candidate.checkpoint)
        for run, part in newest.items():
            last = self._last.get(run)
            if last is not None and last.checkpoint.attempt != part.checkpoint.attempt:
                self._saved.pop(run, None)  # a pause between two launches is not a save interval
            if last is None or last.checkpoint < part.checkpoint:  # not another rank's part of the same checkpoint
                self._saved.setdefault(run, deque(maxlen=COUNTED_SAVES)).append(self._clock())
                self._last[run] = part

    def keep_only(self, runs: Collection[str]) -> None:
        """Forget all runs except these."""
        for run in self._last.keys() - runs:
            del self._last[run]
            self._saved.pop(run, None)

    def spread_s(self, run: str) -> float:
        """Return `flush_spread_s` for a flush that begins now, seconds."""
        return flush_spread_s(tuple(self._saved.get(run, ())), self._clock())


class FlushSpread:
    """The pauses between the chunks of one flush. `hurries`: whether the flush must finish without further pauses."""

    def __init__(
        self, over_s: float = 0.0, hurries: Callable[[], bool] = lambda: True, clock: Callable[[], float] | None = None
    ) -> None:
        self._over_s, self._hurries, self._clock = over_s, hurries, clock or time.monotonic
        self._started_at = self._clock()
        self._chunks = 0
        self._lock = asyncio.Lock()  # so that waiting chunks begin one after the other

    async def pause(self, chunks: int) -> None:
        """Wait until the next chunk may begin."""
        if not self._over_s:
            return
        async with self._lock:
            at = self._started_at + self._over_s * self._chunks / chunks
            self._chunks += 1
            while (left_s := at - self._clock()) > 0 and not self._hurries():
                await asyncio.sleep(min(left_s, _SLICE_S))


class _Tier:
    def __init__(self, store: Store) -> None:
        self.store, self.signs = store, store.signs_of_life
        self.silent_s = 0.0
        self.counted_at = 0.0  # wall clock, seconds
        self.reported = 0  # times `alert_s` has passed


class SilenceMonitor:
    """The silence of every tier of a configuration."""

    def __init__(self, stores: Mapping[str, Store], journal: Journal, timings: DaemonTimings) -> None:
        self._tiers = {name: _Tier(store) for name, store in stores.items()}
        self._journal, self._timings = journal, timings
        self._checked_at = time.monotonic()

    async def run(self) -> None:
        """Check the tiers every `listen_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(self._timings.listen_s)
            self._check()

    def _check(self) -> None:
        now = time.monotonic()
        # A longer time between two checks is one in which this process did not run.
        passed_s = min(now - self._checked_at, 2 * self._timings.listen_s)
        self._checked_at = now
        for name, tier in self._tiers.items():
            count = tier.store.signs_of_life
            if count != tier.signs:
                tier.signs, tier.silent_s, tier.reported = count, 0.0, 0
                self._journal.record_answer(name)
            elif tier.store.is_waiting:
                tier.silent_s += passed_s
                tier.counted_at = time.time()
                if tier.silent_s >= (tier.reported + 1) * self._timings.unanswered_alert_s:
                    tier.reported += 1
                    self._journal.record_silence(name, self.describe(name))

    def since(self, name: str) -> datetime | None:
        """Since when requests to a tier wait for an answer; None if the tier answered lately."""
        tier = self._tiers[name]
        if tier.silent_s < self._timings.unanswered_shown_s:
            return None
        return datetime.fromtimestamp(tier.counted_at, UTC) - timedelta(seconds=tier.silent_s)

    def is_problem(self, name: str) -> bool:
        """Whether a tier has been silent for so long that a person should know."""
        return self._tiers[name].silent_s >= self._timings.unanswered_problem_s

    def describe(self, name: str) -> str:
        """Describe the silence of a tier for people."""
        return (
            f"no answer for {self._tiers[name].silent_s:.0f} s: the server, or a mount, accepts requests and does not "
            "answer them; they are sent again until it does"
        )
