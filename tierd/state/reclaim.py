"""Release the memory of a restored file that no tensor uses after the load.

Invariant: a page is released only if every tensor in it is gone, by torch's own reference count of the tensor's
storage. The mapping is kept open meanwhile. Released pages of private memory read as zeros.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tierd.state.tensor_file import Buffer


class ReclaimedMemory:
    """Watches tensors that are views of one mapped file, each with a storage of its own as `unflatten` makes them.

    Args:
        file: a mapping or a view of one; memory of any other kind is never released.
        tensors: all tensors in the file; memory outside them is never released.
    """

    def __init__(self, file: Buffer, tensors: Iterable[torch.Tensor]) -> None:
        mapping = file if isinstance(file, mmap.mmap) else memoryview(file).obj
        self._mapping = mapping if isinstance(mapping, mmap.mmap) and len(mapping) else None
        self._watched: dict[tuple[int, int], list[StorageWeakRef]] = {}
        if self._mapping is None:
            return
        first = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            begin = storage.data_ptr() - first
            if 0 <= begin < begin + storage.nbytes() <= len(self._mapping):
                span = begin, begin + storage.nbytes()
                self._watched.setdefault(span, []).append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def release(self) -> int:
        """Release the pages that contain only tensors that are gone. Returns the number of bytes released."""
        if self._mapping is None:
            return 0
        runs: list[tuple[int, int]] = []
        for (begin, end), storages in sorted(self._watched.items()):
            if all(storage.expired() for storage in storages):  # type: ignore[no-untyped-call]
                if runs and runs[-1][1] == begin:
                    runs[-1] = runs[-1][0], end
                else:
                    runs.append((begin, end))
        released = 0
        for begin, end in runs:
            begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
                released += end - begin
        return released
