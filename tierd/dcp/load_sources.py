"""What `dcp.load` reads: entries of DCP's own checkpoints, and a checkpoint of `Checkpointer.save` in DCP's form.

Each part of the latter records the positions of its rank's local shards in the whole tensors. Combined, these records
are DCP's metadata. DCP's planner finds from them which bytes of which part a rank needs. A tensor that the ranks of a
node divided among them lies in one rank's part, and is read from there for whichever rank named it.

Invariants:

- Torch's weights-only reader unpickles an entry. Before DCP's planner unpickles one without it, that reader has read
  it.
- Values that several ranks saved under one name are either identical or refused. For a DTensor the coordinates in its
  mesh prove it, because ranks along a replicated dimension have the same shard by definition. Where two ranks have one
  coordinate, and for values other than DTensors, the bytes are compared. One exception: if as many ranks load as saved,
  each rank receives its own values other than DTensors, without a comparison.
"""

from __future__ import annotations

import copy
import io
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from tierd.client.restoring.ranged_reader import PartFiles, Span
from tierd.client.restoring.tensor_locations import TensorLocation, TensorLocator, read_tensor
from tierd.core.errors import ManifestError, StateMismatch, StateRefused
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS
from tierd.core.shard_placement import Box
from tierd.dcp.rank_contents import NativeLeaf, RankClaims, SavedArray, read_leaves
from tierd.spool.file_io import flat_bytes
from tierd.state.single_values import fill_tensor
from tierd.state.state_tree import instances, replace_values


def position_of(
    storage: Mapping[Any, Any] | None, index: MetadataIndex, first: PartId, base: str = ""
) -> tuple[PartId, str, int, int]:
    """Return the part, the file, the offset and the length of an entry.

    It lies in the part named at the start of its path, or else in `first`, the coordinator's part.

    Args:
        storage: `storage_data` of DCP's metadata, which has a `_StorageInfo` for each entry.
        base: the directory of all files in that part, of a checkpoint that DCP wrote by itself; it ends in `/`.

    Raises:
        ManifestError: the metadata does not say where the entry lies.
        StateMismatch: an extension of DCP has transformed its bytes.
    """
    info: Any = (storage or {}).get(index)
    path = getattr(info, "relative_path", None)
    if not isinstance(path, str):
        raise ManifestError(f"{first.checkpoint}: its metadata does not say where {index.fqn!r} lies")
    if getattr(info, "transform_descriptors", None):
        raise StateMismatch(f"{first.checkpoint}: {index.fqn!r} was written through an extension")
    head, _, file_path = path.partition("/")
    part = PartId.parse(first.checkpoint.run, first.checkpoint.name, head)
    if base or part is None or not file_path or part.world != first.world:
        part, file_path = first, base + path
    return part, file_path, info.offset, info.length


def load_tensor(item: ReadItem, data: memoryview, planner: LoadPlanner) -> None:
    tensor = torch.load(
        cast(IO[bytes], RangeStream(len(data), lambda at, count: data[at : at + count])),
        map_location="cpu",
        weights_only=True,
    )
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if tensor.size(dimension) != length:
            tensor = tensor.narrow(dimension, offset, length)
    target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        name = item.storage_index.fqn
        raise StateMismatch(f"{name!r}: {tuple(tensor.size())} in the checkpoint, {tuple(target.size())} in the state")
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def check_plain(item: ReadItem, data: memoryview) -> None:
    """Check that loading this entry calls only functions that torch considers safe.

    Without the check DCP's planner would call any function that the entry names.
    """
    try:
        plain_value(data)
    except Exception as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        problem = f"holds {match[1]}" if match else f"cannot be read: {str(error).splitlines()[0]}"
        raise StateRefused(
            f"{item.storage_index.fqn!r} {problem}, which torch's weights-only unpickler refuses. If you trust it: "
            "torch.serialization.add_safe_globals([…]), or weights_only=False"
        ) from error


def plain_value(data: memoryview) -> Any:
    """Return the value of an entry. Raises if torch's weights-only unpickler refuses it."""
    with torch.serialization.safe_globals([io.BytesIO]):  # safe, because it holds bytes and calls nothing
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class RangeStream(io.RawIOBase):
    """A stream of `length` bytes, of which `read`, given an offset and a length, returns those that are asked for."""

    def __init__(self, length: int, read: Callable[[int, int], memoryview]) -> None:
        super().__init__()
        self._length, self._read, self._at = length, read, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = flat_bytes(buffer)
        count = max(0, min(len(into), self._length - self._at))
        into[:count] = self._read(self._at, count)
        self._at += count
        return count


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a tensor, and the tensor that it is read from."""

    leaf: NativeLeaf
    box: Box


class SavedState:
    """The state that one checkpoint holds.

    Attributes:
        metadata: as DCP describes a state.
        claims: what the ranks saved under each name.
        tree: the chosen rank's nested state, or rank 0's, and the objects in it by name, as in `PartLeaves`.

    Args:
        chosen, remedy: as for `RankClaims`.

    Raises:
        StateMismatch: a part does not hold a state that `save` wrote.
        Also as `PartFiles.read`.
    """

    def __init__(self, files: PartFiles, rank: int, world: int, chosen: int | None = None, *, remedy: str = "") -> None:
        self._files = files
        self.claims = RankClaims(files, rank, world, chosen, remedy=remedy)
        self._blocks: dict[MetadataIndex, _Block] = {}
        self._by_name: dict[str, list[_Block]] = defaultdict(list)
        paths: dict[str, Any] = {}
        locator = TensorLocator(files)
        for saved_rank in range(files.world):
            leaves = read_leaves(locator, files.part(saved_rank))
            paths |= leaves.paths
            if saved_rank == (chosen or 0):
                self.tree = leaves.tree, leaves.stand_ins
            for name, value in leaves.values.items():
                self.claims.add(saved_rank, name, value)
        try:
            described = {name: self._described(name) for name in self.claims.names}
        except ValueError as error:
            raise StateMismatch(f"{files.checkpoint}: {error}") from error
        self.metadata = Metadata(state_dict_metadata=described, planner_data=paths, storage_data=dict(self._blocks))

    def _described(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        _, value = self.claims.own_claim(name)
        if not isinstance(value, NativeLeaf):
            return BytesStorageMetadata()
        chunks = []
        for _, leaf in self.claims.read_from(name):
            for box in leaf.boxes:
                offset = torch.Size(box.offset)
                index = MetadataIndex(name, offset)
                if index not in self._blocks:
                    self._blocks[index] = _Block(leaf, box)
                    self._by_name[name].append(self._blocks[index])
                    chunks.append(ChunkStorageMetadata(offset, torch.Size(box.size)))
        return TensorStorageMetadata(TensorProperties(dtype=value.dtype), torch.Size(value.global_shape), chunks)

    def blocks(self, name: str) -> list[tuple[NativeLeaf, Box]]:
        """Return the blocks of a tensor, each with the tensor that it is read from."""
        return [(block.leaf, block.box) for block in self._by_name[name]]

    def prepare(self, plan: LoadPlan) -> None:
        """Fetch everything that the plan needs, and check that it can be loaded.

        Raises `StateMismatch`, which names the value, if ranks saved different ones under one name; also as
        `PartFiles.read`.
        """
        names = dict.fromkeys(item.storage_index.fqn for item in plan.items)
        for name in names:
            if reason := self.claims.contradiction(name):
                raise StateMismatch(f"{self._files.checkpoint}: {name!r}: {reason}")
        self._files.prefetch(self._spans(plan))
        for name in names:
            for _, array in instances(self.claims.value(name), SavedArray):
                self._stored(array.location)

    def load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Load the plan's items, each byte of them verified. Raises as `PartFiles.read`."""
        spans = self._spans(plan)
        for span, data in self._files.read(spans):
            for item in spans[span]:
                self._load_tensor(item, data, planner)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                file = io.BytesIO()
                torch.save(self._with_arrays(self.claims.value(item.storage_index.fqn)), file)
                file.seek(0)
                planner.load_bytes(item, file)

    def _spans(self, plan: LoadPlan) -> dict[Span, list[ReadItem]]:
        by_span: dict[Span, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                block = self._blocks[item.storage_index]
                first, last, row = _rows(block, item)
                part, entry = block.leaf.location
                by_span[self._files.span(part, TENSORS, entry.offset + first * row, (last - first) * row)].append(item)
        return by_span

    def _load_tensor(self, item: ReadItem, data: memoryview, planner: LoadPlanner) -> None:
        block = self._blocks[item.storage_index]
        leaf, entry = block.leaf, block.leaf.location.entry
        first, last, _ = _rows(block, item)
        stored = torch.frombuffer(data, dtype=entry.dtype)
        stored = stored.view(last - first, *entry.shape[1:]) if entry.shape else stored.view(())
        if leaf.dtype != entry.dtype:
            stored = torch.view_as_complex(stored) if leaf.dtype.is_complex else stored.view(leaf.dtype)
        begins = [begin + item_offset for begin, item_offset in zip(block.box.local, item.storage_offsets, strict=True)]
        for dim, (begin, length) in enumerate(zip(begins, item.lengths, strict=True)):
            stored = stored.narrow(dim, begin - first if dim == 0 else begin, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != stored.size():
            name = item.storage_index.fqn
            raise StateMismatch(f"{name!r}: {tuple(stored.size())} in the checkpoint, {tuple(target.size())} here")
        if target.dtype == stored.dtype:
            fill_tensor(target, stored)
        else:
            target.copy_(stored)
        planner.commit_tensor(item, target)

    def _with_arrays(self, value: Any) -> Any:
        """Return a copy of a value with its arrays, which are read now; `value` keeps their stand-ins."""

        def array(saved: SavedArray) -> Any:
            return saved.rebuild(self._stored(saved.location))

        return replace_values(copy.deepcopy(value), SavedArray, array)

    def _stored(self, location: TensorLocation) -> torch.Tensor:
        return read_tensor(self._files, location)


def _rows(block: _Block, item: ReadItem) -> tuple[int, int, int]:
    """Return the only rows of the stored tensor that an item needs: the first, the end, and the bytes of a row."""
    entry = block.leaf.location.entry
    if not entry.shape:
        return 0, 1, entry.nbytes
    if not item.lengths:  # a complex number without dimensions, which is stored as two numbers
        return 0, entry.shape[0], entry.nbytes // entry.shape[0]
    first = block.box.local[0] + item.storage_offsets[0]
    return first, first + item.lengths[0], entry.nbytes // entry.shape[0]
