"""Pinning: register an arena with CUDA, slice by slice, so that copies into it run concurrently with the host.

Invariant: every registration of an arena is undone before the arena's memory is unmapped, whichever code releases it
last. Otherwise a device could write through the old registration into pages that nobody owns. The next arena, which
often gets the same address, would keep its earlier content: wrong bytes, digested as if they were right.

A registration takes locks that training's kernel launches need as well, so it is done in slices, and saves run first. A
copy into a slice that is not pinned yet is correct, but slower.
"""

from __future__ import annotations

import logging
import os
import sys

import torch

from tierd.client.saving.device_copies import GRAIN
from tierd.spool.arena import Arena
from tierd.spool.direct_io import PAGE
from tierd.state import cuda

log = logging.getLogger("tierd")

SLICE = 4 * GRAIN  # bytes; a multiple of `GRAIN`, so that no copy lies in two slices


class Pinning:
    """CUDA's registrations of the first `size` bytes of an arena. Only the thread that has the arena's slot may use it.

    Attributes:
        size: bytes that are pinned.
        device: the device in whose context they were registered; the memory is pinned for all devices.
    """

    def __init__(self, arena: Arena, size: int, device: torch.device) -> None:
        self.size = 0
        self.device = device
        self._api = cuda.api
        self._pid = os.getpid()
        self._next = torch.frombuffer(arena.view, dtype=torch.uint8, count=1).data_ptr()
        self._end = self._next + -(-size // PAGE) * PAGE
        self._registered: list[int] = []
        arena.before_unmapping = self.undo

    @property
    def left(self) -> bool:
        """Whether a slice is left that can be pinned."""
        return self._next < self._end

    def go_on(self) -> None:
        """Pin the next slice. If CUDA refuses one, it would refuse the others, so they are not tried."""
        begin = self._next
        end = min(self._end, begin - begin % SLICE + SLICE)
        if failed := self._api.register(begin, end - begin, self.device):
            self._next = self._end
            self._api.say_once(
                f"CUDA does not pin memory (error {failed}): copies into {self._end - begin} bytes of an arena will be "
                "slower, and take the time of the thread that copies"
            )
            return
        self._registered.append(begin)
        self.size += end - begin
        self._next = end

    def undo(self) -> None:
        """Undo all registrations. Any thread may call this, even during garbage collection."""
        registered, self._registered, self.size, self._next = self._registered, [], 0, self._end
        # CUDA does not work in a forked child or at the interpreter's end.
        if os.getpid() != self._pid or sys.is_finalizing():
            return
        for address in registered:
            self._api.unregister(address, self.device)
