"""The arena: memory that a state is copied into, so that training may change the state while the copy is persisted.

Law: the arena belongs to the one thread that persists, which takes saves one after the other: so its content is one
save's until that save has ended, and no interrupted caller can leave it locked. It is reused from save to save, since
touching fresh pages costs twenty times the copy (design, section 7).
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch

from tierd.client.tensorfile import Layout, copy_into


class Arena:
    """One reused buffer of private memory, grown to the largest state it has held."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def copy(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> memoryview:
        """Copy the tensors in and return their file's image, `layout.size` bytes, good until the next copy."""
        if self._memory is None or len(self._memory) < layout.size:
            # Private: a forked child that writes to it must not reach the parent's checkpoint.
            size = max(layout.size, mmap.PAGESIZE)
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(self._memory)[: layout.size]
        copy_into(layout, tensors, view)
        return view
