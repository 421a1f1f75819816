"""Pauses, during which the tiers are left as they are.

Invariant: while paused, the daemon flushes and scrubs nothing, and prunes and repairs nothing on a tier. It still
observes, repairs for a restore, takes over snapshots and cleans the spool.

A pause is a file in the spool, `.tierd/paused`, so that it outlives the daemon. The file is empty or holds the end of
the pause. The wall clock is read once, at the start; from then on the monotonic clock counts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from tierd.spool.conditions import translated
from tierd.spool.file_io import private, sync_directory
from tierd.spool.spool import Spool

log = logging.getLogger("tierd.daemon")

_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK
_LONG = 64  # bytes of the file that are read


Pause: TypeAlias = Callable[[], Awaitable[None]]  # awaited before each chunk


async def at_once() -> None:
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
        with translated(self._doing):
            try:
                # O_NONBLOCK, because opening a FIFO in its place would block.
                with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | _PLAIN)) as file:
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
    def left(self) -> float:
        """Seconds until the pause ends by itself: infinite if it does not, 0 if there is no pause."""
        return max(0.0, self._end - time.monotonic())

    @property
    def paused(self) -> bool:
        return self.left > 0

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
                async with asyncio.timeout(None if math.isinf(self.left) else self.left):
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
        fresh = self._path.with_suffix(".new")
        with translated(self._doing):
            fresh.unlink(missing_ok=True)  # of a write that was cut off, or an odd file in its place
            with open(fresh, "w", opener=private) as file:
                file.write(text + "\n" * bool(text))
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(self._path)
            sync_directory(self._path.parent)

    def _remove(self) -> None:
        with translated(self._doing):
            self._path.unlink(missing_ok=True)
            sync_directory(self._path.parent)
