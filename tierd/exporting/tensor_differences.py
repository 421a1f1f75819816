"""How far two tensors of two checkpoints are apart, read in slabs of bounded size.

Invariant: two tensors count as equal only if their bytes are. Where the digests of two chunks that lie alike in both
prove it, the second tensor is not read there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from tierd.exporting.streamed_tensors import ChunkReader, StreamedTensor, read_ahead

_BLOCK = 1 << 16  # elements that are computed with at a time, so that a core's cache holds them in 64 bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes, to compare bits
_Place = tuple[str, int, int, str]  # of a chunk: a piece's number, first and last byte in it, and its digest
_Pair = tuple[memoryview, memoryview | None]  # of one slab, the second None if it is known to be equal


@contextmanager
def single_thread() -> Iterator[None]:
    """Have torch compute in the calling thread: on blocks of this size its other threads wait more than they work."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@dataclass(slots=True)
class TensorDistance:
    """How far two tensors of one dtype and shape are apart."""

    elements: int = 0  # how many elements differ in their bits
    # the largest absolute difference; nan if one is not finite, or if the dtype is not computed with
    max_abs: float = 0.0
    squares: float = 0.0  # the sum of the squares of the first tensor's elements
    difference_squares: float = 0.0  # the sum of the squares of the differences

    @property
    def relative_norm(self) -> float | None:
        """The norm of the difference, divided by that of the first tensor; None if that is 0 or not finite."""
        ratio = math.sqrt(self.difference_squares / self.squares) if self.squares else math.nan
        return ratio if math.isfinite(ratio) else None

    def add(self, other: TensorDistance) -> None:
        """Add the distance of other elements of the same entry."""
        self.elements += other.elements
        self.max_abs = _larger(self.max_abs, other.max_abs)
        self.squares += other.squares
        self.difference_squares += other.difference_squares


def compare_tensors(
    first: StreamedTensor,
    first_reader: ChunkReader,
    second: StreamedTensor,
    second_reader: ChunkReader,
    on_read: Callable[[int], None],
) -> TensorDistance | None:
    """Compare two tensors of one dtype and shape; None if they are equal. Raises as `StreamedTensor.slabs`.

    `on_read` is called with the bytes of each slab that was compared.
    """
    chunks, other_chunks = _chunks(first, first_reader), _chunks(second, second_reader)
    if chunks == other_chunks:
        return None
    distance = TensorDistance()
    item = first.dtype.itemsize
    for data, other in read_ahead(_pairs(first, first_reader, second, second_reader, chunks, other_chunks)):
        size = len(data)
        if first.foreign or size % item:
            _add_bytes(distance, data, other)
        else:
            _add_elements(distance, data, other, first.dtype)
        on_read(size)
        first_reader.recycle(data)
        if other is not None:
            second_reader.recycle(other)
    return distance if distance.elements else None


def _chunks(tensor: StreamedTensor, reader: ChunkReader) -> set[_Place]:
    """Return the chunks that hold a tensor's pieces, with their bytes relative to each piece."""
    chunks = set[_Place]()
    for piece in tensor.pieces:
        size = math.prod(piece.array or (1,)) * tensor.dtype.itemsize
        if size:
            name = str((piece.array, piece.local, piece.begin, piece.size))
            chunks |= {(name, *chunk) for chunk in reader.chunks(*piece.locate(reader), size)}
    return chunks


def _pairs(
    first: StreamedTensor,
    first_reader: ChunkReader,
    second: StreamedTensor,
    second_reader: ChunkReader,
    chunks: set[_Place],
    other_chunks: set[_Place],
) -> Iterator[Callable[[], _Pair]]:
    """Yield calls that read the same elements of both tensors."""
    if not (_is_whole(first) and _is_whole(second)):
        slabs = first.slabs(first_reader, by_rows=True), second.slabs(second_reader, by_rows=True)
        for read, read_other in zip(*slabs, strict=True):
            yield partial(_read_both, read, read_other)
        return
    (part, path, offset), other_place = (
        tensor.pieces[0].locate(reader) for tensor, reader in ((first, first_reader), (second, second_reader))
    )
    differing = [(begin, end) for _, begin, end, _ in chunks ^ other_chunks]
    for start, stop in first_reader.ranges(part, path, offset, first.nbytes, first.dtype.itemsize):
        begin, size = start - offset, stop - start
        read = partial(first_reader.read, part, path, start, size)
        is_equal = not any(at < begin + size and end > begin for at, end in differing)
        read_other = partial(second_reader.read, *other_place[:2], other_place[2] + begin, size)
        yield partial(_read_both, read, None if is_equal else read_other)


def _is_whole(tensor: StreamedTensor) -> bool:
    return len(tensor.pieces) == 1 and (tensor.pieces[0].array or (1,)) == (tensor.shape or (1,))


def _read_both(read: Callable[[], memoryview], read_other: Callable[[], memoryview] | None) -> _Pair:
    return read(), None if read_other is None else read_other()


def _add_bytes(distance: TensorDistance, data: memoryview, other: memoryview | None) -> None:
    if other is not None and data != other:
        first, second = (torch.frombuffer(bytes_, dtype=torch.uint8) for bytes_ in (data, other))
        distance.elements += int((first != second).sum())
        distance.max_abs = math.nan


def _add_elements(distance: TensorDistance, data: memoryview, other: memoryview | None, dtype: torch.dtype) -> None:
    first = torch.frombuffer(data, dtype=dtype)
    second = first if other is None else torch.frombuffer(other, dtype=dtype)
    for at in range(0, len(first), _BLOCK):
        block, other_block = first[at : at + _BLOCK], second[at : at + _BLOCK]
        try:
            wide = block.to(torch.complex128 if dtype.is_complex else torch.float64)
        except (RuntimeError, NotImplementedError):  # a packed dtype, with which torch does not compute
            _add_bytes(distance, data, other)
            return
        distance.squares += _square_sum(wide)
        unlike = None if other is None else _bits(block) != _bits(other_block)
        unlike = unlike.any(dim=1) if unlike is not None and dtype.is_complex else unlike
        if unlike is None or not (count := int(unlike.count_nonzero())):
            continue
        apart = other_block.to(wide.dtype) - wide
        apart.masked_fill_(~unlike, 0)  # where both are the same nan
        distance.elements += count
        distance.max_abs = _larger(distance.max_abs, float(apart.abs().max()))
        distance.difference_squares += _square_sum(apart)


def _square_sum(elements: torch.Tensor) -> float:
    return float(torch.vdot(elements, elements).real) if elements.is_complex() else float(elements.dot(elements))


def _bits(block: torch.Tensor) -> torch.Tensor:
    """Return integers of the elements' bits; of a complex one both, which then are one row."""
    if block.is_complex():
        parts = torch.view_as_real(block)
        return parts.view(_INTEGERS[parts.dtype.itemsize])
    return block.view(_INTEGERS[block.dtype.itemsize])


def _larger(first: float, second: float) -> float:
    return math.nan if not (math.isfinite(first) and math.isfinite(second)) else max(first, second)
