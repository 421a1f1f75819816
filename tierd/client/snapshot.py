"""The arena: memory that a state is copied into, so that training may change the state while the copy is persisted.

Law: between `take` and `release` the arena's content is one save's and nobody else writes to it. It is reused from save
to save, since touching fresh pages costs twenty times the copy (design, section 7).
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Mapping

import torch

from tierd.client.tensorfile import Layout, copy_into


class Arena:
    """One reused buffer of anonymous memory, grown to the largest state it has held."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._taken = threading.Lock()

    def wait(self) -> float:
        """Wait until the arena is free; the seconds that took."""
        begun = time.perf_counter()
        with self._taken:
            return time.perf_counter() - begun

    def take(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> memoryview:
        """Wait until the arena is free, copy the tensors in, and return their file's image, `layout.size` bytes."""
        self._taken.acquire()
        try:
            if self._memory is None or len(self._memory) < layout.size:
                self._memory = mmap.mmap(-1, max(layout.size, mmap.PAGESIZE))
            view = memoryview(self._memory)[: layout.size]
            copy_into(layout, tensors, view)
            return view
        except BaseException:
            self._taken.release()
            raise

    def release(self) -> None:
        """The save that took the arena is done with it."""
        self._taken.release()
