"""Compare a tensor between two parts of a checkpoint.

Invariant: two tensors count as equal only if their bytes are the same. The digests in the manifests decide it if they
can, else the verified bytes do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from tierd.client.restoring.ranged_reader import PartRanges
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS
from tierd.spool.direct_io import memory_for
from tierd.spool.file_io import digest
from tierd.state.tensor_file import TensorEntry

_PIECE = 64 << 20  # bytes compared at once

_Piece: TypeAlias = tuple[int, int, str]  # first and last byte of a chunk, relative to a tensor, and its digest


@dataclass(slots=True)
class ComparedPart:
    """A part whose tensors are compared with other parts' tensors."""

    part: PartId
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # of ranges that were already read


def are_equal(
    files: PartRanges,
    first_part: ComparedPart,
    first_entry: TensorEntry,
    second_part: ComparedPart,
    second_entry: TensorEntry,
) -> bool:
    """Whether a tensor of one part equals one of another part: dtype, shape and bytes. Raises as `PartRanges.fill`."""
    if (first_entry.dtype, first_entry.shape) != (second_entry.dtype, second_entry.shape):
        return False
    if not first_entry.nbytes:
        return True
    first_pieces, second_pieces = _pieces(files, first_part, first_entry), _pieces(files, second_part, second_entry)
    if [piece[:2] for piece in first_pieces] != [piece[:2] for piece in second_pieces]:
        return _bytes_are_equal(files, first_part, first_entry, second_part, second_entry, 0, first_entry.nbytes)
    unlike = [a for a, b in zip(first_pieces, second_pieces, strict=True) if a[2] != b[2]]
    if any(begin >= 0 and end <= first_entry.nbytes for begin, end, _ in unlike):
        return False  # this chunk holds only this tensor
    # The other unequal chunks also hold neighbouring tensors, which may be the cause.
    return all(
        _bytes_are_equal(
            files, first_part, first_entry, second_part, second_entry, max(begin, 0), min(end, first_entry.nbytes)
        )
        for begin, end, _ in unlike
    )


def _pieces(files: PartRanges, part: ComparedPart, entry: TensorEntry) -> list[_Piece]:
    """Return the chunks that hold a tensor."""
    span = files.span(part.part, TENSORS, entry.offset, entry.nbytes)
    pieces, offset = list[_Piece](), span.start - entry.offset
    for chunk in span.file.chunks[span.first : span.end]:
        pieces.append((offset, offset + chunk.size, chunk.xxh3_128))
        offset += chunk.size
    return pieces


def _bytes_are_equal(
    files: PartRanges,
    first_part: ComparedPart,
    first_entry: TensorEntry,
    second_part: ComparedPart,
    second_entry: TensorEntry,
    begin: int,
    end: int,
) -> bool:
    return all(
        _digest(files, first_part, first_entry.offset + at, size)
        == _digest(files, second_part, second_entry.offset + at, size)
        for at, size in ((at, min(_PIECE, end - at)) for at in range(begin, end, _PIECE))
    )


def _digest(files: PartRanges, part: ComparedPart, offset: int, size: int) -> str:
    """Return the digest of a verified range of the tensor file. Cached, because rank 0's is compared with
    all others.
    """
    key = offset, size
    if key not in part.digests:
        memory = memory_for(size)
        files.fill(memory, [files.span(part.part, TENSORS, offset, size)], base=offset)
        part.digests[key] = digest(memory[:size])
    return part.digests[key]
