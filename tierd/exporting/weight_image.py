"""A checkpoint's tensors in memory, each verified, beside an earlier checkpoint of which equal chunks are reused.

Invariant: the memory of an image does not change once the image is made, so two images may share it. A chunk that is
taken from an earlier image is digested again, because a caller may have written to a tensor that it was given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from tierd.client.restoring.ranged_reader import PartRanges, Span
from tierd.core.errors import ConfigError, CorruptChunk, StateMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import Chunk, ContentId
from tierd.exporting.checkpoint_export import strip_prefix
from tierd.exporting.contents import read_contents
from tierd.exporting.streamed_tensors import ChunkReader, StreamedTensor, TensorPiece, bytes_of
from tierd.exporting.watched_contents import is_watched, read_watched
from tierd.spool.direct_io import memory_for
from tierd.spool.file_io import digest

_READERS = 4  # segments that are filled at once

_File: TypeAlias = tuple[PartId, str]


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """Which tensors an image has, and under which names.

    Attributes:
        only: one entry of the state, whose name is then left out of all names; None for all.
        strip: a prefix that is removed from each name that begins with it, such as `module.`.
        rank: the rank whose tensor is taken where ranks saved different ones under one name; None refuses these.
        names: the tensors that are read; None for all.
    """

    only: str | None = None
    strip: str = ""
    rank: int | None = None
    names: frozenset[str] | None = None


@dataclass(eq=False, frozen=True, slots=True)
class _Segment:
    """Neighbouring chunks of a file in memory. `file` and `start` say where they were read."""

    memory: memoryview
    contents: tuple[ContentId, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """The array from which a piece of a tensor is taken: its segment, and its first byte there."""

    piece: TensorPiece
    segment: _Segment
    offset: int


class WeightImage:
    """The tensors of one checkpoint.

    Attributes:
        tensors: by name. They are views of the image's memory, so nobody may write to them.
        digests: by name, the XXH3-128 of the tensor's bytes in row-major order.
        changed_bytes: the bytes of the tensors that the earlier image did not have.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.digests: dict[str, str] = {}
        self.changed_bytes = 0
        self._sources: dict[str, tuple[Any, ...]] = {}
        self._segments: dict[tuple[ContentId, ...], _Segment] = {}
        self._chunks: dict[ContentId, tuple[_Segment, int]] = {}

    def held_chunk(self, chunk: Chunk) -> memoryview | None:
        """Return the bytes of a chunk that the image has; None if it does not, or if they are not right any more."""
        if (place := self._chunks.get(chunk.content)) is None:
            return None
        raw = place[0].memory[place[1] : place[1] + chunk.size]
        return raw if digest(raw) == chunk.xxh3_128 else None

    def add_segment(self, segment: _Segment) -> _Segment:
        self._segments[segment.contents] = segment
        starts = accumulate((size for _, size in segment.contents), initial=0)
        for content, start in zip(segment.contents, starts, strict=False):
            self._chunks[content] = segment, start
        return segment

    def find_segment(self, contents: tuple[ContentId, ...]) -> _Segment | None:
        return self._segments.get(contents)

    def add_tensor(self, tensor: StreamedTensor, blocks: list[_Block], earlier: WeightImage) -> None:
        """Make a tensor of its blocks, or take the earlier image's if it has the same ones."""
        name = tensor.name
        places = [
            (id(block.segment), block.offset, block.piece.array, block.piece.local, block.piece.begin, block.piece.size)
            for block in blocks
        ]
        self._sources[name] = source = (tensor.dtype, tensor.shape, *places)
        if earlier._sources.get(name) == source:
            self.tensors[name], self.digests[name] = earlier.tensors[name], earlier.digests[name]
            return
        self.tensors[name] = made = _join_blocks(tensor, blocks)
        self.digests[name] = digest(bytes_of(made)) if tensor.nbytes else digest(b"")
        if not self.has_same_tensor(name, earlier):
            self.changed_bytes += tensor.nbytes

    def has_same_tensor(self, name: str, earlier: WeightImage) -> bool:
        """Whether a tensor has the same bytes, dtype and shape in both images."""
        ours, theirs = self.tensors[name], earlier.tensors.get(name)
        is_alike = theirs is not None and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        return is_alike and self.digests[name] == earlier.digests[name]


def read_image(files: PartRanges, first: PartId, selection: TensorSelection, earlier: WeightImage) -> WeightImage:
    """Read the selected tensors of a checkpoint. What `earlier` has, `files` need not fetch.

    Raises `StateMismatch` and `StateRefused` as `read_contents`, or if a selected name is missing; and as
    `PartRanges.fill`.
    """
    if is_watched(files, first):
        contents = read_watched(files, first, selection.only)
    else:
        contents = read_contents(files, first, selection.only, selection.rank, values=False)
    if selection.strip:
        contents = strip_prefix(contents, selection.strip)
    tensors = contents.tensors
    if selection.names is not None:
        if missing := sorted(selection.names - tensors.keys()):
            raise StateMismatch(
                f"{first.checkpoint}: {', '.join(missing[:5])} not in the checkpoint, which has "
                f"{', '.join(sorted(tensors)[:5])} and others; `only` and `strip` change the names"
            )
        tensors = {name: tensors[name] for name in tensors if name in selection.names}
    reader = ChunkReader(files)
    places = {
        name: [(piece, *piece.locate(reader)) for piece in tensor.pieces if math.prod(piece.size)]
        for name, tensor in tensors.items()
    }
    image = WeightImage()
    located: list[tuple[StreamedTensor, list[tuple[TensorPiece, Span]]]] = []
    for name, tensor in tensors.items():
        spans = [
            (piece, files.span(part, path, offset, math.prod(piece.array or (1,)) * tensor.dtype.itemsize))
            for piece, part, path, offset in places[name]
        ]
        located.append((tensor, spans))
    segments = _read_segments(files, [span for _, spans in located for _, span in spans], image, earlier)
    for tensor, spans in located:
        blocks = []
        for piece, span in spans:
            segment, start = segments[span]
            blocks.append(_Block(piece, segment, span.offset - start))
        image.add_tensor(tensor, blocks, earlier)
    return image


def _read_segments(
    files: PartRanges, spans: Iterable[Span], image: WeightImage, earlier: WeightImage
) -> dict[Span, tuple[_Segment, int]]:
    """Return for each span the segment that has it, and the offset in the file at which that segment begins."""
    groups: list[list[Span]] = []
    for span in sorted(set(spans), key=lambda span: (span.part, span.path, span.start, span.stop)):
        last = groups[-1] if groups else []
        is_next = last and (last[0].part, last[0].path) == (span.part, span.path)
        if is_next and span.start < max(other.stop for other in last):
            last.append(span)
        else:
            groups.append([span])

    def load(group: list[Span]) -> tuple[_Segment, int]:
        start, stop, file = group[0].start, max(span.stop for span in group), group[0].file
        chunks = file.chunks[group[0].first : max(span.end for span in group)]
        contents = tuple(chunk.content for chunk in chunks)
        if (segment := earlier.find_segment(contents)) is None:
            memory = memory_for(stop - start)[: stop - start]
            whole = files.span(group[0].part, group[0].path, start, stop - start)
            files.fill(memory, [whole], base=start)
            segment = _Segment(memory, contents)
        return segment, start

    with ThreadPoolExecutor(_READERS, thread_name_prefix="tierd-live") as threads:
        loaded = list(threads.map(load, groups))
    for segment, _ in loaded:
        image.add_segment(segment)
    return {span: place for group, place in zip(groups, loaded, strict=True) for span in group}


def _join_blocks(tensor: StreamedTensor, blocks: list[_Block]) -> torch.Tensor:
    """Return a view of a tensor that lies whole in memory, or a new tensor of several ranks' shards."""
    covered = sum(math.prod(block.piece.size) for block in blocks)
    if covered != math.prod(tensor.shape):
        raise StateMismatch(f"{tensor.name!r}: {covered} of its {math.prod(tensor.shape)} elements were saved")
    arrays = [_array_of(block, tensor.dtype) for block in blocks]
    if len(blocks) == 1 and arrays[0].numel() == covered:
        return arrays[0].view(tensor.shape)
    joined = torch.empty(tensor.shape, dtype=tensor.dtype)
    for block, array in zip(blocks, arrays, strict=True):
        piece, target = block.piece, joined
        for dim, size in enumerate(piece.size):
            array = array.narrow(dim, piece.local[dim], size)
            target = target.narrow(dim, piece.begin[dim], size)
        target.copy_(array)
    return joined


def _array_of(block: _Block, dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(block.piece.array or (1,)) * dtype.itemsize
    data = torch.frombuffer(block.segment.memory, dtype=torch.uint8, count=size, offset=block.offset)
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(block.piece.array)


def live_tensors(state: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, or of a mapping by name, into which weights are copied.

    Raises:
        ConfigError: the argument is neither, or has a tensor into which a whole one cannot be copied.
    """
    mapping = state.state_dict(keep_vars=True) if isinstance(state, torch.nn.Module) else state
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"live(state): a module or a mapping of names to tensors, not a {type(state).__name__}")
    tensors = {name: value for name, value in mapping.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise ConfigError(
                f"live(state): {name!r} is a {type(tensor).__name__}; pass no state, and load the tensors"
            )
    return tensors


def copy_into(targets: Mapping[str, torch.Tensor], image: WeightImage, names: Collection[str]) -> None:
    """Copy tensors of an image into live ones, and compare the digest of each live tensor afterwards.

    Raises:
        StateMismatch: a dtype or a shape differs; nothing was copied.
        CorruptChunk: a live tensor has other bytes than the image after the copy.
    """
    for name in names:
        source, target = image.tensors[name], targets[name]
        if (source.dtype, source.shape) != (target.dtype, target.shape):
            raise StateMismatch(
                f"{name!r} is {source.dtype} {list(source.shape)} in the checkpoint, and {target.dtype} "
                f"{list(target.shape)} here; save it in the follower's dtype"
            )
    with torch.no_grad():
        for name in names:
            targets[name].copy_(image.tensors[name])
        for name in names:
            copied = targets[name].detach().cpu().contiguous()
            if copied.numel() and digest(bytes_of(copied)) != image.digests[name]:
                raise CorruptChunk(f"{name!r}: the live tensor differs from the checkpoint after it was copied there")
