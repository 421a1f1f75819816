"""Reusable memory for chunks: of one download, or of a daemon's flushes.

The kernel clears a page at its first touch. This took 38 % of a restore's CPU time in the daemon, more than decoding.
So a used buffer is kept for the next chunk of about its size.

Invariant: a buffer has one user at a time, who counts its bytes against the `Budget`. Idle buffers, which no budget
counts, have at most `KEPT` bytes together, or as many as the budget leaves free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tierd.spool.direct_io import memory_for

KEPT = 48 << 20  # bytes
# A buffer is reused for at least four fifths of its size, because the user's budget counts only the bytes used.
_LOOSE = 1.25
_GRAIN = 1 << 20  # bytes; sizes are rounded up to it, so that buffers fit more often


class Buffers:
    """A set of buffers. The methods are for one event loop; the memory may be used in any thread.

    Args:
        budget: the users' budget in bytes, if idle buffers may use what its users do not.
    """

    def __init__(self, budget: int = 0) -> None:
        self._budget, self._used = budget, 0
        self._idle: list[memoryview] = []

    @contextmanager
    def hold(self, size: int) -> Iterator[memoryview]:
        """Provide `size` bytes of uninitialized memory until the context ends.

        Large buffers begin at a page boundary.
        """
        memory = self.take(size)
        try:
            yield memory[:size]
        finally:
            self.give_back(memory)

    def give_back(self, memory: memoryview) -> None:
        """End the use of what `take` returned. The caller must not use it any more."""
        self._used -= len(memory)
        self._idle.append(memory)
        while sum(map(len, self._idle)) > max(KEPT, self._budget - self._used):
            del self._idle[0]

    def clear(self) -> None:
        """Free all idle buffers."""
        self._idle.clear()

    def take(self, size: int) -> memoryview:
        """Return at least `size` bytes of memory, as `hold` provides it, until `give_back`."""
        fitting = [
            number for number, memory in enumerate(self._idle) if size <= len(memory) <= _LOOSE * max(size, _GRAIN)
        ]
        if fitting:
            memory = self._idle.pop(min(fitting, key=lambda number: len(self._idle[number])))
        else:
            memory = memory_for(-(-max(size, 1) // _GRAIN) * _GRAIN if size >= _GRAIN else max(size, 1))
        self._used += len(memory)
        return memory
