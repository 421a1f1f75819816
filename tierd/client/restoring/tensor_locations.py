"""Where the tensors lie that a part's tree names: in the part's own file, or in that of another rank's part.

Invariants:

- A reader follows one step. A tensor that another rank's file puts elsewhere in its turn is proven corruption, so no
  chain of headers is followed, and none ends where it began.
- The header of a part is read once while it is among the last `_KEPT` ones, however many trees name its tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import torch

from tierd.client.restoring.ranged_reader import PartRanges
from tierd.core.errors import ManifestError
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, Manifest
from tierd.spool.direct_io import memory_for
from tierd.spool.file_io import digest
from tierd.state.tensor_file import TensorEntry, TensorFileLayout
from tierd.state.tensor_header import header_length, parse_header

_KEPT = 64  # headers, which is more than a node has ranks
_PIECE = 64 << 20  # bytes compared at once

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TensorLocation(NamedTuple):
    """The place of a tensor: in the tensor file of `part`."""

    part: PartId
    entry: TensorEntry


class _Computed(Generic[K, V]):
    """Values that several threads need, each computed by one of them. The last `limit` ones are kept; None: all."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._values: OrderedDict[K, V] = OrderedDict()
        self._computing: dict[K, threading.Lock] = {}

    def get(self, key: K, compute: Callable[[], V]) -> V:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            computing = self._computing.setdefault(key, threading.Lock())
        with computing:
            with self._lock:
                if key in self._values:
                    return self._values[key]
            value = compute()
            with self._lock:
                self._values[key] = value
                self._computing.pop(key, None)
                while self._limit is not None and len(self._values) > self._limit:
                    self._values.popitem(last=False)
        return value


class PartTensors:
    """The tensors that the tree of one part names.

    `replicated` are the entries that the part declares to be the same on all ranks.
    """

    def __init__(self, locator: TensorLocator, part: PartId, layout: TensorFileLayout) -> None:
        self._locator, self._part = locator, part
        self._entries, self._elsewhere = layout.entries, layout.elsewhere
        self._locations: dict[str, TensorLocation] = {}
        self.replicated = layout.replicated

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, in the order of the part's file, then those in other ranks' files."""
        return (*self._entries, *self._elsewhere)

    def locate(self, name: str) -> TensorLocation:
        """Return where a tensor lies, as the same object each time.

        Raises:
            KeyError: the part knows no such tensor.
            ManifestError: the part says that it lies in another rank's part, which does not have it.
            StateMismatch, CorruptChunk, …: the other part's header cannot be read, as for `read_layout`.
        """
        if name not in self._locations:
            self._locations[name] = self._find(name)
        return self._locations[name]

    def locate_if_known(self, name: str) -> TensorLocation | None:
        """Return as `locate`, or None if the part knows no such tensor."""
        return self.locate(name) if name in self._elsewhere or name in self._entries else None

    def _find(self, name: str) -> TensorLocation:
        if (rank := self._elsewhere.get(name)) is None:
            return TensorLocation(self._part, self._entries[name])
        sibling = sibling_of(self._part, rank)
        layout = self._locator.sibling_layout(self._part, sibling)
        check_held(self._part, rank, layout, name)
        return TensorLocation(sibling, layout.entries[name])


class TensorLocator:
    """Reads the headers of one checkpoint's parts. Several threads may use it at once."""

    def __init__(self, files: PartRanges) -> None:
        self.files = files
        self._layouts: _Computed[PartId, TensorFileLayout] = _Computed(_KEPT)
        self._tensors: _Computed[TensorLocation, torch.Tensor] = _Computed()

    def tensors_of(self, part: PartId) -> PartTensors:
        """Return the tensors that a part's tree names. Raises as `read_layout`."""
        return PartTensors(self, part, self._layout(part))

    def read(self, part: PartId, location: TensorLocation) -> torch.Tensor:
        """Read a tensor that the tree of `part` names. It is kept if it lies in another rank's part.

        Then several trees name it. So this is for what a reader keeps once per tree anyway, in a form that is no
        smaller. The tensor must not be changed. Raises as `PartRanges.fill`.
        """
        if location.part == part:
            return read_tensor(self.files, location)
        return self._tensors.get(location, lambda: read_tensor(self.files, location))

    def sibling_layout(self, part: PartId, sibling: PartId) -> TensorFileLayout:
        """Return the layout of another rank's file. Raises `ManifestError` if the two parts do not belong together."""
        check_division(self.files.manifest(part), self.files.manifest(sibling))
        return self._layout(sibling)

    def _layout(self, part: PartId) -> TensorFileLayout:
        return self._layouts.get(part, lambda: replace(read_layout(self.files, part), header=b""))


def sibling_of(part: PartId, rank: int) -> PartId:
    """Return another rank's part of the same checkpoint. Raises `ManifestError` if it has no such rank."""
    if not 0 <= rank < part.world or rank == part.rank:
        raise ManifestError(f"{part}: its tensors are said to lie in the part of rank {rank}")
    return PartId(part.checkpoint, rank, part.world)


def check_division(manifest: Manifest, sibling: Manifest) -> None:
    """Raise `ManifestError` if two parts do not belong together, because their ranks divided different states.

    A part that has all of its tensors says nothing of the division.
    """
    if manifest.division and sibling.division and manifest.division != sibling.division:
        raise ManifestError(
            f"{manifest.part}: tensors of its state lie in the part of rank {sibling.rank}, which divided another state"
        )


def check_held(part: PartId, rank: int, layout: TensorFileLayout, *names: str) -> None:
    """Raise `ManifestError` unless the file of `rank`, to which `part` refers, has these tensors itself."""
    missing = [name for name in names if name not in layout.entries]
    if missing:
        more = f" and {len(missing) - 1} more tensors are" if len(missing) > 1 else " is"
        third = layout.elsewhere.get(missing[0])
        where = "" if third is None else f", which says that rank {third} has it"
        raise ManifestError(f"{part}: {missing[0][:100]!r}{more} not in the part of rank {rank}{where}")


def read_layout(files: PartRanges, part: PartId) -> TensorFileLayout:
    """Read the header of a part's tensor file, and no more than the chunks that hold it.

    Raises `StateMismatch` if tierd cannot have written this file; and as `PartRanges.fill`.
    """
    whole = files.span(part, TENSORS)
    first = files.span(part, TENSORS, 0, files.span(part, TENSORS, 0, 1).stop)  # a chunk is read whole
    memory = memory_for(first.length)
    files.fill(memory, [first])
    length = header_length(memory[: min(8, first.length)], whole.length, str(part))
    header = bytearray(memory[: min(length, first.length)])
    if length > first.length:
        header += bytes(length - first.length)
        with memoryview(header) as target:
            files.fill(target, [files.span(part, TENSORS, first.length, length - first.length)])
    return parse_header(bytes(header), whole.length, str(part))


def read_tensor(files: PartRanges, location: TensorLocation) -> torch.Tensor:
    """Return a copy of a tensor, in memory of its own. Raises as `PartRanges.fill`."""
    part, entry = location
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    memory = memory_for(entry.nbytes)
    files.fill(memory, [files.span(part, TENSORS, entry.offset, entry.nbytes)], base=entry.offset)
    return torch.frombuffer(memory[: entry.nbytes], dtype=entry.dtype).view(entry.shape)


class TensorComparison:
    """Compares tensors of one checkpoint's parts. Several threads may use it at once.

    Invariant: two tensors count as equal only if their bytes are the same, or they are one tensor that two ranks' trees
    name: the digests in the manifests decide it if they can, else the verified bytes do.
    """

    def __init__(self, files: PartRanges) -> None:
        self._files = files
        # Of ranges that were read: a part's offset and size. Kept, because one rank's are compared with all others.
        self._digests: _Computed[tuple[PartId, int, int], str] = _Computed()

    def are_equal(self, first: TensorLocation, second: TensorLocation) -> bool:
        """Whether two tensors have the same dtype, shape and bytes. Raises as `PartRanges.fill`."""
        if first == second:
            return True
        if (first.entry.dtype, first.entry.shape) != (second.entry.dtype, second.entry.shape):
            return False
        nbytes = first.entry.nbytes
        if not nbytes:
            return True
        first_chunks, second_chunks = self._chunks(first), self._chunks(second)
        if [chunk[:2] for chunk in first_chunks] != [chunk[:2] for chunk in second_chunks]:
            return self._have_same_bytes(first, second, 0, nbytes)
        unlike = [a for a, b in zip(first_chunks, second_chunks, strict=True) if a[2] != b[2]]
        if any(begin >= 0 and end <= nbytes for begin, end, _ in unlike):
            return False  # this chunk holds only this tensor
        # The other unequal chunks also hold neighbouring tensors, which may be the cause.
        return all(self._have_same_bytes(first, second, max(begin, 0), min(end, nbytes)) for begin, end, _ in unlike)

    def _chunks(self, location: TensorLocation) -> list[tuple[int, int, str]]:
        """Return the chunks that hold a tensor: their first and last byte, relative to the tensor, and their digest."""
        part, entry = location
        span = self._files.span(part, TENSORS, entry.offset, entry.nbytes)
        chunks, offset = list[tuple[int, int, str]](), span.start - entry.offset
        for chunk in span.file.chunks[span.first : span.end]:
            chunks.append((offset, offset + chunk.size, chunk.xxh3_128))
            offset += chunk.size
        return chunks

    def _have_same_bytes(self, first: TensorLocation, second: TensorLocation, begin: int, end: int) -> bool:
        ranges = ((at, min(_PIECE, end - at)) for at in range(begin, end, _PIECE))
        return all(self._digest(first, at, size) == self._digest(second, at, size) for at, size in ranges)

    def _digest(self, location: TensorLocation, at: int, size: int) -> str:
        """Return the digest of a verified range of a tensor."""
        part, offset = location.part, location.entry.offset + at

        def read() -> str:
            memory = memory_for(size)
            self._files.fill(memory, [self._files.span(part, TENSORS, offset, size)], base=offset)
            return digest(memory[:size])

        return self._digests.get((part, offset, size), read)
