"""Reusable memory for the chunks of one download.

The kernel clears a page at its first touch. This took 38 % of a restore's CPU time in the daemon, more than decoding.
So a used buffer is kept for the next chunk of about its size.

Invariant: a buffer has one user at a time, who counts its bytes against the `Budget`. Idle buffers, which no budget
counts, have at most `KEPT` bytes together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tierd.spool.direct_io import memory_for

KEPT = 48 << 20  # bytes
# A buffer is reused for at least this fraction (1/2) of its size, because the user's budget counts only the bytes used.
_LOOSE = 2
_GRAIN = 1 << 20  # bytes; sizes are rounded up to it, so that buffers fit more often


class Buffers:
    """Buffers of one download. The methods are for one event loop; the memory may be used in any thread."""

    def __init__(self) -> None:
        self._idle: list[memoryview] = []

    @contextmanager
    def lend(self, size: int) -> Iterator[memoryview]:
        """Provide `size` bytes of uninitialized memory until the context ends.

        Large buffers begin at a page boundary.
        """
        memory = self._taken(size)
        try:
            yield memory[:size]
        finally:
            self._idle.append(memory)
            while sum(map(len, self._idle)) > KEPT:
                del self._idle[0]

    def _taken(self, size: int) -> memoryview:
        fits = [number for number, one in enumerate(self._idle) if size <= len(one) <= _LOOSE * max(size, _GRAIN)]
        if fits:
            return self._idle.pop(min(fits, key=lambda number: len(self._idle[number])))
        return memory_for(-(-max(size, 1) // _GRAIN) * _GRAIN if size >= _GRAIN else max(size, 1))
