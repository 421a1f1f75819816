"""Bound the bytes of checkpoints that the daemon has in memory at once, regardless of the checkpoints' size.

Invariant: code that reads a chunk into memory first takes its bytes from a `Budget`, and gives them back with the
memory. This holds for the spool and for tiers. Requests are served in order, so that none starves. A holder never asks
for more, so that holders cannot deadlock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

BYTES = 160 << 20  # for fetches, repairs and scrubs
FLUSHES = 128 << 20  # for encoded chunks in transfer to tiers, all tiers together
# For chunks that are being encoded. With all three, interpreter and libraries included, the process stays below 512
# MiB.
ENCODING = 64 << 20


class Budget:
    """`total` bytes, shared by all transfers of chunks."""

    def __init__(self, total: int = BYTES) -> None:
        self._total = self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[Hold]:
        """Hold `size` bytes until the context ends. A request for more than the total gets the whole total, alone."""
        hold = Hold(self, min(size, self._total))
        await self._wait_for(hold.size)
        try:
            yield hold
        finally:
            hold.keep(0)

    def take_at_once(self, size: int) -> Hold | None:
        """Hold `size` bytes until they are given back; None if it would have to wait or overtake a waiting request."""
        if self.is_wanted or size > self._free:
            return None
        self._free -= size
        return Hold(self, size)

    def has(self, size: int) -> bool:
        """Whether the bytes that `take` would hold for `size` are free now."""
        return min(size, self._total) <= self._free

    def share(self, size: int) -> int:
        """Return the bytes that `take` holds for a request of `size`."""
        return min(size, self._total)

    @property
    def is_wanted(self) -> bool:
        """Whether a request waits."""
        return any(not admitted.cancelled() for _, admitted in self._waiting)

    def give_back(self, size: int) -> None:
        self._free += size
        self._serve()

    async def _wait_for(self, size: int) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, admitted))
        self._serve()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.give_back(size)
            elif (size, admitted) in self._waiting:
                self._waiting.remove((size, admitted))
                self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            size, admitted = self._waiting.popleft()
            if not admitted.cancelled():
                self._free -= size
                admitted.set_result(None)


class Hold:
    """Bytes held from a budget. The holder may give back some of them early."""

    def __init__(self, budget: Budget, size: int) -> None:
        self._budget, self.size = budget, size

    def keep(self, size: int) -> None:
        """Give back all but `size` bytes."""
        if size < self.size:
            self._budget.give_back(self.size - size)
            self.size = size
