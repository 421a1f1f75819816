"""The machine's own limits, measured in turns with the arms: the copy and the disk.

Invariant: the memcpy floor copies the same tensors as a save, into memory that was touched before. The raw ceilings
write as many bytes from page-aligned memory past the page cache, and include the fsync.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import torch

from tierd.bench.training import Training
from tierd.state import cuda

_PIECE = 16 << 20  # bytes of one pwrite


class Ceilings:
    """Measures the three limits, one after the other, at each call."""

    def __init__(self, training: Training, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._fresh, self._overwritten = directory / "fresh", directory / "kept"
        self._tensors = training.tensors()
        self._size = -(-training.state_bytes() // mmap.PAGESIZE) * mmap.PAGESIZE
        spare = len(self._tensors) * 64  # every target is aligned to a cache line
        self._memory = mmap.mmap(-1, self._size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._targets, offset = [], 0
        for tensor in self._tensors:
            flat = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            self._targets.append(flat.view(tensor.shape))
            offset += -(-tensor.nbytes // 64) * 64
        self._training = training
        if training.device.type == "cuda":  # the floor is a copy into pinned memory
            first = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
            if failed := cuda.api.register(first, len(self._memory), training.device):
                raise OSError(f"CUDA does not pin {len(self._memory)} bytes: error {failed}")
        self._copy()
        self._write(self._overwritten)

    def take(self) -> dict[str, float]:
        """Measure the seconds of each limit."""
        self._fresh.unlink(missing_ok=True)
        copy = self._copy()
        fresh = self._write(self._fresh)
        return {"memcpy_s": copy, "raw_fresh_s": fresh, "raw_overwrite_s": self._write(self._overwritten)}

    @torch.no_grad()
    def _copy(self) -> float:
        start_s = time.perf_counter()
        torch._foreach_copy_(self._targets, self._tensors, non_blocking=True)
        self._training.finish()
        return time.perf_counter() - start_s

    def _write(self, path: Path) -> float:
        view = memoryview(self._memory)[: self._size]
        start_s = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._size)
            for start in range(0, self._size, _PIECE):
                piece = view[start : start + _PIECE]
                if os.pwrite(fd, piece, start) != len(piece):
                    raise OSError(f"{path}: a short write")
            os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - start_s
