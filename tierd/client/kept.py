"""What is left in use of a file's memory after its tensors were loaded.

Law: a page is given back only if every tensor in it is gone, by torch's own count of those who use the tensor's memory;
the mapping is held meanwhile. Private memory that is given back reads as zeros.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tierd.client.tensorfile import Buffer


class Kept:
    """Watches tensors that are views of one file in memory, each with a storage of its own as `unflatten` makes them.

    Args:
        file: a mapping or a view of one; in memory of any other kind nothing is given back.
        tensors: all of them that there are; others of the file are never given back.
    """

    def __init__(self, file: Buffer, tensors: Iterable[torch.Tensor]) -> None:
        whole = file if isinstance(file, mmap.mmap) else memoryview(file).obj
        self._mapping = whole if isinstance(whole, mmap.mmap) and len(whole) else None
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
        """Give the pages back that hold nothing but tensors that are gone; returns how many bytes that was."""
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
