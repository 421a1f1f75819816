"""Pausing: for a while, the tiers are left as they are.

Law: while paused, nothing is flushed, scrubbed or, on a tier, pruned or mended; looking, healing for a restore, taking
snapshots over and the spool's housekeeping go on. A pause is a file in the spool, `.tierd/paused`, empty or holding its
end, so that it outlives the daemon. The wall clock is asked once, at the start; from then on the monotonic one.
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

from tierd.persist import private, sync_directory
from tierd.spool import Spool, translated

log = logging.getLogger("tierd.daemon")

_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK
_LONG = 64  # bytes of the file that are read


Turn: TypeAlias = Callable[[], Awaitable[None]]  # awaited before each chunk


async def at_once() -> None:
    """The turn of who waits for nobody."""


class Pause:
    """Whether the daemon of a spool is paused; it begins as the one before was left."""

    def __init__(self, spool: Spool) -> None:
        self._path = spool.control / "paused"
        self._doing = f"spool {spool.root}: {self._path.name}"
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()  # file and memory change together, and no two changes at once
        self._until: datetime | None = None
        self._end = 0.0  # monotonic seconds
        with translated(self._doing):
            try:
                # O_NONBLOCK: a FIFO in its place would be waited for.
                with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | _PLAIN)) as file:
                    self._load(file.read(_LONG).decode(errors="replace").strip(), os.fstat(file.fileno()).st_mtime)
            except FileNotFoundError:
                pass

    def _load(self, text: str, written: float) -> None:
        left = math.inf
        if text:
            try:
                self._until = datetime.fromisoformat(text).astimezone(UTC)
                left = (self._until - datetime.now(UTC)).total_seconds()
                # A clock that was set back since makes no pause longer than it was.
                left = min(left, self._until.timestamp() - written)
            except (ValueError, OverflowError):
                log.warning("%s: %r is no time, so until resumed", self._doing, text)
        self._end = time.monotonic() + left

    @property
    def left(self) -> float:
        """Seconds until it ends by itself: infinite when it does not, 0 when nothing is paused."""
        return max(0.0, self._end - time.monotonic())

    @property
    def paused(self) -> bool:
        return self.left > 0

    @property
    def until(self) -> str | None:
        """The end in RFC 3339, or "until resumed"; None when nothing is paused."""
        if not self.paused:
            return None
        return self._until.isoformat(timespec="seconds") if self._until else "until resumed"

    async def wait(self) -> None:
        """Return when nothing is paused; at once, if so."""
        while self.paused:
            try:
                async with asyncio.timeout(None if math.isinf(self.left) else self.left):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def begin(self, for_s: float | None) -> None:
        """Pause for `for_s` seconds, or until resumed; in place of a pause that there is. Durable on return."""
        async with self._turn:
            until = None if for_s is None else datetime.now(UTC) + timedelta(seconds=for_s)
            await asyncio.to_thread(self._write, until.isoformat() if until else "")
            self._until = until
            self._change(math.inf if for_s is None else time.monotonic() + for_s)

    async def end(self) -> None:
        """Go on. Durable on return."""
        async with self._turn:
            await asyncio.to_thread(self._remove)
            self._change(0.0)

    def _change(self, end: float) -> None:
        self._end = end
        self._changed.set()  # whoever waits looks again
        self._changed = asyncio.Event()

    def _write(self, text: str) -> None:
        fresh = self._path.with_suffix(".new")
        with translated(self._doing):
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
