"""A whole tensor as the pieces that ranks saved, and its bytes in order, in slabs of bounded size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.exporting.chunk_reader import ChunkReader

SLAB_BYTES = 64 << 20  # of a tensor in memory at a time
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor.

    Attributes:
        locate: returns the rank's part, the file, and the offset in it at which the array that holds the block begins.
            The array is row-major, in the tensor's dtype.
        array: the array's shape.
        local: the block's offset in the array.
        begin, size: the block's offset in the whole tensor, and its shape.
    """

    locate: Callable[[ChunkReader], tuple[PartId, str, int]]
    array: tuple[int, ...]
    local: tuple[int, ...]
    begin: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A tensor of a checkpoint.

    Attributes:
        order: sorts tensors by the place of their bytes, so that files are read in order.
        foreign: its dtype and shape in safetensors if torch lacks the dtype; then `dtype` and `shape` are its bytes'.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    order: tuple[PartId | str | int, ...]
    foreign: tuple[str, tuple[int, ...]] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def slabs(self, reader: ChunkReader) -> Iterator[memoryview]:
        """Yield the tensor's bytes, row-major, in slabs of at most `SLAB_BYTES`. Raises as `PartRanges.fill`.

        Raises:
            StateMismatch: the pieces do not cover the tensor exactly.
        """
        if not self.nbytes:
            return
        dims = self.shape or (1,)
        covered = sum(math.prod(piece.size) for piece in self.pieces)
        if covered != math.prod(dims):
            raise StateMismatch(f"{self.name!r}: {covered} of its {math.prod(dims)} elements were saved")
        dim, row = 0, self.dtype.itemsize * math.prod(dims[1:])
        while row > SLAB_BYTES and dim + 1 < len(dims):
            dim += 1
            row //= dims[dim]
        rows = max(1, SLAB_BYTES // row)
        places = [(piece, piece.locate(reader)) for piece in self.pieces if math.prod(piece.size)]
        for above in itertools.product(*map(range, dims[:dim])):
            for first in range(0, dims[dim], rows):
                yield self._slab(reader, places, above, first, min(first + rows, dims[dim]))

    def _slab(
        self,
        reader: ChunkReader,
        places: list[tuple[Piece, tuple[PartId, str, int]]],
        above: tuple[int, ...],
        first: int,
        end: int,
    ) -> memoryview:
        """Return the rows `first` to `end` of the dimension below the indices `above`."""
        dims, dim, item = self.shape or (1,), len(above), self.dtype.itemsize
        target: torch.Tensor | None = None
        for piece, (part, path, offset) in places:
            array, local, begin, size = (
                coordinates or (1,) for coordinates in (piece.array, piece.local, piece.begin, piece.size)
            )
            begin, local = (begin, local) if self.shape else ((0,), (0,))
            low, high = max(first, begin[dim]), min(end, begin[dim] + size[dim])
            outside = any(not at <= index < at + extent for index, at, extent in zip(above, begin, size, strict=False))
            if outside or low >= high:
                continue
            row = item * math.prod(array[dim + 1 :])
            number = 0
            for index, at, inner, length in zip(above, begin, local, array, strict=False):
                number = number * length + index - at + inner
            number = number * array[dim] + local[dim] + low - begin[dim]
            data = reader.read(part, path, offset + number * row, (high - low) * row)
            if len(places) == 1 and array == dims:
                return data
            if target is None:
                target = torch.empty((end - first, *dims[dim + 1 :], item), dtype=torch.uint8)
            source = torch.frombuffer(data, dtype=torch.uint8).view(high - low, *array[dim + 1 :], item)
            into = target[low - first : high - first]
            for below in range(dim + 1, len(dims)):
                source = source.narrow(below - dim, local[below], size[below])
                into = into.narrow(below - dim, begin[below], size[below])
            into.copy_(source)
        assert target is not None
        return _bytes_of(target)


def converted(slab: memoryview, source_dtype: torch.dtype, target_dtype: torch.dtype) -> tuple[memoryview, bool]:
    """Return the slab's elements in another dtype, and whether a finite one is infinite there."""
    if source_dtype == target_dtype:
        return slab, False
    elements = torch.frombuffer(slab, dtype=source_dtype)
    target = elements.to(target_dtype)
    infinite = target.isinf()
    overflows = bool(infinite.any()) and bool((infinite & elements.isfinite()).any())
    return _bytes_of(target), overflows


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield `items`, each made in a thread while the caller uses the one before."""
    source = iter(items)
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="tierd-export") as thread:
        coming = thread.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, source, end)
            yield item  # type: ignore[misc]
