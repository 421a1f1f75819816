"""Pinning: telling CUDA of an arena, slice by slice, so that copies into it run beside the host.

Law: what CUDA was told of an arena is taken back before the arena's memory is unmapped, whoever lets go of it last. A
device that writes by the old registration would write into pages that nobody has any more, and the next arena, which
often gets the same address, would keep what was there: wrong bytes, digested as if they were right.

A registration takes locks that training's launches need as well, so it goes by slices, and saves come first. A copy
into a slice that is not pinned yet is right, and slower.
"""

from __future__ import annotations

import logging
import os
import sys

import torch

from tierd.arena import Arena
from tierd.client import cuda
from tierd.client.copies import GRAIN
from tierd.device import PAGE

log = logging.getLogger("tierd")

SLICE = 4 * GRAIN  # bytes; a multiple, so that no copy lies in two of them


class Pinning:
    """What CUDA knows of the first `size` bytes of an arena. One thread at a time has the slot that this belongs to.

    Attributes:
        size: bytes that are pinned.
        device: in whose name that was done; the memory is pinned for all.
    """

    def __init__(self, arena: Arena, size: int, device: torch.device) -> None:
        self.size = 0
        self.device = device
        self._api = cuda.api
        self._pid = os.getpid()
        self._next = torch.frombuffer(arena.view, dtype=torch.uint8, count=1).data_ptr()
        self._end = self._next + -(-size // PAGE) * PAGE
        self._known: list[int] = []
        arena.before_unmapping = self.undo

    @property
    def left(self) -> bool:
        """Whether there is a slice that can still be pinned."""
        return self._next < self._end

    def go_on(self) -> None:
        """Pin the next slice. If CUDA refuses one, it would refuse the others, and they are not tried again."""
        begin = self._next
        end = min(self._end, begin - begin % SLICE + SLICE)
        if failed := self._api.register(begin, end - begin, self.device):
            self._next = self._end
            self._api.say_once(
                f"CUDA does not pin memory (error {failed}): copies into {self._end - begin} bytes of an arena will be "
                "slower, and take the time of the thread that copies"
            )
            return
        self._known.append(begin)
        self.size += end - begin
        self._next = end

    def undo(self) -> None:
        """Take back what CUDA was told. Any thread, even one that collects garbage."""
        known, self._known, self.size, self._next = self._known, [], 0, self._end
        if os.getpid() != self._pid or sys.is_finalizing():  # nothing of CUDA works there
            return
        for address in known:
            self._api.unregister(address, self.device)
