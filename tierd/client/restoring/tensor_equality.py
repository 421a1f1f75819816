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


def are_equal(files: PartRanges, one: ComparedPart, here: TensorEntry, other: ComparedPart, there: TensorEntry) -> bool:
    """Whether a tensor of one part equals one of another part: dtype, shape and bytes. Raises as `PartRanges.fill`."""
    if (here.dtype, here.shape) != (there.dtype, there.shape):
        return False
    if not here.nbytes:
        return True
    mine, theirs = _pieces(files, one, here), _pieces(files, other, there)
    if [piece[:2] for piece in mine] != [piece[:2] for piece in theirs]:
        return _bytes_are_equal(files, one, here, other, there, 0, here.nbytes)
    unlike = [a for a, b in zip(mine, theirs, strict=True) if a[2] != b[2]]
    if any(begin >= 0 and end <= here.nbytes for begin, end, _ in unlike):
        return False  # this chunk holds only this tensor
    # The other unequal chunks also hold neighbouring tensors, which may be the cause.
    return all(
        _bytes_are_equal(files, one, here, other, there, max(begin, 0), min(end, here.nbytes))
        for begin, end, _ in unlike
    )


def _pieces(files: PartRanges, part: ComparedPart, entry: TensorEntry) -> list[_Piece]:
    """Return the chunks that hold a tensor."""
    span = files.span(part.part, TENSORS, entry.offset, entry.nbytes)
    found, offset = list[_Piece](), span.start - entry.offset
    for chunk in span.file.chunks[span.first : span.end]:
        found.append((offset, offset + chunk.size, chunk.xxh3_128))
        offset += chunk.size
    return found


def _bytes_are_equal(
    files: PartRanges,
    one: ComparedPart,
    here: TensorEntry,
    other: ComparedPart,
    there: TensorEntry,
    begin: int,
    end: int,
) -> bool:
    return all(
        _digest(files, one, here.offset + at, size) == _digest(files, other, there.offset + at, size)
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
