"""Spread flushes over the time until the next save: observed save times, and the pauses of one flush.

Invariant: a pause ends within `_SLICE_S` once a request waits for the flush, or a newer checkpoint does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection

from tierd.core.ids import PartId
from tierd.core.planning.flush_window import SAVES, spread_s

_SLICE_S = 0.25


class Cadence:
    """The times at which each run's saves were observed here, monotonic seconds."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._saved: dict[str, deque[float]] = {}
        self._last: dict[str, PartId] = {}

    def saw(self, parts: Collection[PartId]) -> None:
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
                self._saved.setdefault(run, deque(maxlen=SAVES)).append(self._clock())
                self._last[run] = part

    def keep(self, runs: Collection[str]) -> None:
        """Forget all runs except these."""
        for run in self._last.keys() - runs:
            del self._last[run]
            self._saved.pop(run, None)

    def spread_s(self, run: str) -> float:
        """Return `flush_window.spread_s` for a flush that begins now, seconds."""
        return spread_s(tuple(self._saved.get(run, ())), self._clock())


class Spread:
    """The pauses between the chunks of one flush.

    Args:
        over_s: seconds over which the flush is spread.
        hurries: whether the flush must finish without further pauses.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        over_s: float = 0.0,
        hurries: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._over_s, self._hurries, self._clock = over_s, hurries, clock or time.monotonic
        self._started_at = self._clock()
        self._chunks = 0
        self._lock = asyncio.Lock()  # so that waiting chunks begin one after the other

    async def pause(self, chunks: int) -> None:
        """Wait until the next chunk may begin.

        Args:
            chunks: the number of chunks in the flush.
        """
        if not self._over_s:
            return
        async with self._lock:
            at = self._started_at + self._over_s * self._chunks / chunks
            self._chunks += 1
            while (left_s := at - self._clock()) > 0 and not self._hurries():
                await asyncio.sleep(min(left_s, _SLICE_S))
