"""How many bytes of checkpoints the daemon has in memory at once, whatever their size.

Law: whoever reads a chunk into memory, from the spool or from a tier, first takes its bytes here and gives them back
when it lets go of them. First come, first served, so that nobody starves; who holds some never asks for more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

BYTES = 160 << 20  # for fetching, healing and scrubbing
FLUSHES = 192 << 20  # for flushing, all tiers together; with both, the interpreter and its libraries stay below 512 MiB


class Budget:
    """`total` bytes, shared by everything that moves chunks."""

    def __init__(self, total: int = BYTES) -> None:
        self._total = self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[Hold]:
        """Have `size` bytes while the context lasts; who wants more than there are in all is given all, alone."""
        hold = Hold(self, min(size, self._total))
        await self._wait_for(hold.size)
        try:
            yield hold
        finally:
            hold.keep(0)

    def give_back(self, size: int) -> None:
        self._free += size
        self._serve()

    async def _wait_for(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size)
            elif (size, turn) in self._waiting:
                self._waiting.remove((size, turn))
                self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= size
                turn.set_result(None)


class Hold:
    """What somebody has of a budget, bytes; part of it may go back early."""

    def __init__(self, budget: Budget, size: int) -> None:
        self._budget, self.size = budget, size

    def keep(self, size: int) -> None:
        """Give back all but `size` bytes."""
        if size < self.size:
            self._budget.give_back(self.size - size)
            self.size = size
