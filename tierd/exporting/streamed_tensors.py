"""A whole tensor as the pieces that ranks saved: its dtype, and its bytes in order, read in slabs of bounded size."""

from __future__ import annotations

import itertools
import math
import mmap
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TypeVar

import torch

from tierd.client.restoring.ranged_reader import PartRanges, Span
from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.dcp.load_sources import RangeStream
from tierd.spool.direct_io import LARGE, memory_for
from tierd.state.tensor_file import DTYPES

CACHED_BYTES = 192 << 20  # of chunks that are kept

_Key = tuple[PartId, str, int]  # a file, and the offset of a chunk in it


class ChunkReader:
    """Verified ranges of files. Each chunk of a file that is read in order is fetched once. For several threads.

    Raises (each method): as `PartRanges.fill`.
    """

    def __init__(self, files: PartRanges) -> None:
        self._files = files
        self._kept: OrderedDict[_Key, bytes] = OrderedDict()
        self._size = 0
        self._sharing = Lock()  # held by reads that leave a part of a chunk to others
        self._spares: list[memoryview] = []  # memory for slabs, which was touched

    def read(self, part: PartId, path: str, offset: int, length: int) -> memoryview:
        """Return `length` bytes at `offset`, in memory that nothing else writes to until `recycle`."""
        if not length:
            return memoryview(b"")
        span = self._files.span(part, path, offset, length)
        memory = self._memory(span.stop - span.start)
        with nullcontext() if (span.start, span.stop) == (offset, offset + length) else self._sharing:
            self._fill(span, memory)
        return memory[offset - span.start : offset - span.start + length]

    def recycle(self, memory: memoryview) -> None:
        """Let later reads use the memory of a `read` that its caller does not need any more."""
        if isinstance(memory.obj, mmap.mmap):
            self._spares.append(memoryview(memory.obj))

    def _memory(self, size: int) -> memoryview:
        while size >= LARGE:
            try:
                spare = self._spares.pop()
            except IndexError:
                break
            if len(spare) >= size:  # a smaller one is dropped, so that soon all are as large as the largest slab
                return spare
        return memory_for(size)

    def ranges(self, part: PartId, path: str, offset: int, length: int, item: int) -> Iterator[tuple[int, int]]:
        """Yield the bytes from `offset` on as ranges of at most `SLAB_BYTES`, which end with chunks if they can.

        Each range has whole elements of `item` bytes.
        """
        span = self._files.span(part, path, offset, length)
        ends = list(itertools.accumulate((c.size for c in span.file.chunks[span.first : span.end]), initial=span.start))
        begin, stop = offset, offset + length
        while begin < stop:
            limit = min(begin + max(SLAB_BYTES // item, 1) * item, stop)
            chunk_end = ends[bisect_right(ends, limit) - 1]
            end = chunk_end if begin < chunk_end and (chunk_end - offset) % item == 0 else limit
            yield begin, end
            begin = end

    def chunks(self, part: PartId, path: str, offset: int, length: int) -> Iterator[tuple[int, int, str]]:
        """Yield the first and last byte, relative to `offset`, and the digest of each chunk of a range."""
        span = self._files.span(part, path, offset, length)
        at = span.start - offset
        for chunk in span.file.chunks[span.first : span.end]:
            yield at, at + chunk.size, chunk.xxh3_128
            at += chunk.size

    def _fill(self, span: Span, memory: memoryview) -> None:
        part, path, offset, length = span.part, span.path, span.offset, span.length
        missing: list[Span] = []
        at = span.start
        edges: list[tuple[int, int]] = []
        for chunk in span.file.chunks[span.first : span.end]:
            cached = self._kept.get((part, path, at))
            if cached is not None:
                memory[at - span.start : at - span.start + len(cached)] = cached
                self._kept.move_to_end((part, path, at))
            else:
                missing.append(self._files.span(part, path, at, chunk.size))
            edges.append((at, chunk.size))
            at += chunk.size
        if missing:
            self._files.fill(memory, missing, base=span.start)
        for begin, size in {edges[0], edges[-1]}:
            if begin < offset or begin + size > offset + length:  # a neighbouring range shares no other chunk
                self._cache_chunk((part, path, begin), memory[begin - span.start : begin - span.start + size])

    def size(self, part: PartId, path: str) -> int:
        return self._files.span(part, path).length

    def _cache_chunk(self, key: _Key, chunk: memoryview) -> None:
        if key in self._kept or len(chunk) > CACHED_BYTES:
            return
        self._kept[key] = bytes(chunk)
        self._size += len(chunk)
        while self._size > CACHED_BYTES:
            _, old = self._kept.popitem(last=False)
            self._size -= len(old)

    def stream(self, part: PartId, path: str, offset: int, length: int) -> RangeStream:
        """Return a range of a file as a stream."""
        return RangeStream(length, lambda at, count: self.read(part, path, offset + at, count))


SLAB_BYTES = 32 << 20  # of a tensor in memory at a time; a chunk of a large tensor has as many
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorPiece:
    locate: Callable[[ChunkReader], tuple[PartId, str, int]]  # where the row-major array begins
    array: tuple[int, ...]  # the array's shape
    local: tuple[int, ...]  # the block's offset in the array
    begin: tuple[int, ...]  # the block's offset in the whole tensor
    size: tuple[int, ...]  # the block's shape


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]
    order: tuple[PartId | str | int, ...]  # sorts tensors by the place of their bytes, so that files are read in order
    foreign: tuple[str, tuple[int, ...]] | None = None  # in safetensors, if torch lacks the dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def slabs(self, reader: ChunkReader, *, by_rows: bool = False) -> Iterator[Callable[[], memoryview]]:
        """Yield calls, each of which reads the next slab of the tensor's bytes, row-major, of at most `SLAB_BYTES`.

        With `by_rows`, slabs of two tensors of one dtype and shape have the same elements. Several threads may make the
        calls. This and each call raise as `PartRanges.fill`; this raises `StateMismatch` if the pieces do not cover the
        tensor exactly.
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
        if not by_rows and len(places) == 1 and (places[0][0].array or (1,)) == dims:
            part, path, offset = places[0][1]
            for begin, end in reader.ranges(part, path, offset, self.nbytes, self.dtype.itemsize):
                yield partial(reader.read, part, path, begin, end - begin)
            return
        for above in itertools.product(*map(range, dims[:dim])):
            for first in range(0, dims[dim], rows):
                yield partial(self._slab, reader, places, above, first, min(first + rows, dims[dim]))

    def _slab(
        self,
        reader: ChunkReader,
        places: list[tuple[TensorPiece, tuple[PartId, str, int]]],
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
            if target is None:
                target = torch.empty((end - first, *dims[dim + 1 :], item), dtype=torch.uint8)
            source = torch.frombuffer(data, dtype=torch.uint8).view(high - low, *array[dim + 1 :], item)
            into = target[low - first : high - first]
            for below in range(dim + 1, len(dims)):
                source = source.narrow(below - dim, local[below], size[below])
                into = into.narrow(below - dim, begin[below], size[below])
            into.copy_(source)
            del source
            reader.recycle(data)
        assert target is not None
        return bytes_of(target)


def convert_elements(slab: memoryview, source_dtype: torch.dtype, target_dtype: torch.dtype) -> tuple[memoryview, bool]:
    """Return the slab's elements in another dtype, and whether a finite one is infinite there."""
    if source_dtype == target_dtype:
        return slab, False
    elements = torch.frombuffer(slab, dtype=source_dtype)
    target = elements.to(target_dtype)
    infinite = target.isinf()
    overflows = bool(infinite.any()) and bool((infinite & elements.isfinite()).any())
    return bytes_of(target), overflows


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data


_READERS = 3  # slabs that are read at once, because one is mostly one chunk, which one thread decodes


def read_ahead(reads: Iterable[Callable[[], T]], recycle: Callable[[T], None] = lambda item: None) -> Iterator[T]:
    """Yield what `reads` return, in order, made by threads while the caller uses the one before. `recycle` is called
    with each that the caller does not use any more.
    """
    source = iter(reads)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="tierd-export") as threads:
        coming = deque(threads.submit(read) for read in itertools.islice(source, _READERS))
        while coming:
            item = coming.popleft().result()
            coming.extend(threads.submit(read) for read in itertools.islice(source, 1))
            yield item
            recycle(item)


_NEWER_DTYPES = {  # that safetensors 0.5 does not hold
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_TORCH = DTYPES | {
    name: getattr(torch, torch_name) for name, torch_name in _NEWER_DTYPES.items() if hasattr(torch, torch_name)
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}
_PAIRS = getattr(torch, "float4_e2m1fn_x2", None)


def as_torch(name: str, shape: tuple[int, ...], nbytes: int) -> tuple[torch.dtype, tuple[int, ...], bool]:
    """Return dtype and shape in torch of a tensor in safetensors, and whether they are its own, not only its bytes."""
    if name in _TORCH and math.prod(shape) * _TORCH[name].itemsize == nbytes:
        return _TORCH[name], shape, True
    if name == "F4" and _PAIRS is not None and shape and shape[-1] % 2 == 0:
        return _PAIRS, (*shape[:-1], shape[-1] // 2), True
    return torch.uint8, (nbytes,), False


def as_safetensors(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return a tensor's dtype and shape in safetensors; None if the format does not hold the dtype."""
    if dtype is _PAIRS and shape:
        return "F4", (*shape[:-1], shape[-1] * 2)
    return (_NAMES[dtype], shape) if dtype in _NAMES else None
