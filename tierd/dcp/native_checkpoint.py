"""Read a checkpoint of `Checkpointer.save` as DCP reads one of its own: any rank's bytes for any rank's shards.

Each part records the positions of its rank's local shards in the whole tensors. Combined, these records are DCP's
metadata. DCP's planner finds from them which bytes of which part a rank needs.

Invariant: values that several ranks saved under one name are either identical or refused. For a DTensor the coordinates
in its mesh prove it, because ranks along a replicated dimension have the same shard by definition. Where two ranks have
one coordinate, and for values other than DTensors, the bytes are compared. One exception: if as many ranks load as
saved, each rank receives its own values other than DTensors, without a comparison.
"""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

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

from tierd.client.restoring.entries import read_tensor
from tierd.client.restoring.ranged_reader import Files, Span
from tierd.client.restoring.tensor_equality import ComparedPart, are_equal
from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS
from tierd.core.shard_placement import REPLICATE, Box
from tierd.dcp.native_leaves import NativeLeaf, SavedArray, SavedTensor, read_leaves
from tierd.state.aliasing import alike
from tierd.state.containers import instances, replaced
from tierd.state.kinds.generators import SavedGenerator
from tierd.state.tensor_file import TensorEntry
from tierd.state.values import fill

# A rank and the value that it saved under a name: a `NativeLeaf`, or a value without tensors.
RankClaim = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a tensor, and the rank whose part it is read from."""

    rank: int
    leaf: NativeLeaf
    box: Box


class SavedState:
    """The state that one checkpoint holds.

    Args:
        files: of the checkpoint.
        rank, world: this process's rank and the number of ranks that load together.

    Attributes:
        metadata: as DCP describes a state.
        tree: rank 0's nested state, and the objects in it by name, as in `Leaves`.

    Raises:
        StateMismatch: a part does not hold a state that `save` wrote.
        Also as `Files.read`.
    """

    def __init__(self, files: Files, rank: int, world: int) -> None:
        self._files, self._rank, self._world = files, rank, world
        self._claims: dict[str, list[RankClaim]] = defaultdict(list)
        self._blocks: dict[MetadataIndex, _Block] = {}
        self._by_name: dict[str, list[_Block]] = defaultdict(list)
        self._sides = {one: ComparedPart(files.part(one)) for one in range(files.world)}
        paths: dict[str, Any] = {}
        for one in range(files.world):
            leaves = read_leaves(files, files.part(one))
            paths |= leaves.paths
            if not one:
                self.tree = leaves.tree, leaves.stand_ins
            for name, value in leaves.values.items():
                self._claims[name].append((one, value))
        try:
            described = {name: self._described(name) for name in self._claims}
        except ValueError as error:
            raise StateMismatch(f"{files.checkpoint}: {error}") from error
        self.metadata = Metadata(state_dict_metadata=described, planner_data=paths, storage_data=dict(self._blocks))

    # -- contents ---------------------------------------------------------------------------------------------------

    def _described(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        rank, value = self.own(name)
        if not isinstance(value, NativeLeaf):
            return BytesStorageMetadata()
        chunks = []
        for rank, leaf in self._read_from(name):
            for box in leaf.boxes:
                offset = torch.Size(box.offset)
                index = MetadataIndex(name, offset)
                if index not in self._blocks:
                    self._blocks[index] = _Block(rank, leaf, box)
                    self._by_name[name].append(self._blocks[index])
                    chunks.append(ChunkStorageMetadata(offset, torch.Size(box.size)))
        return TensorStorageMetadata(TensorProperties(dtype=value.dtype), torch.Size(value.whole), chunks)

    def own(self, name: str) -> RankClaim:
        """Return this rank's value of a name if as many ranks load as saved.

        Otherwise return the value of the first rank that has one.
        """
        claims = self._claims[name]
        return next((claim for claim in claims if self._is_as_before and claim[0] == self._rank), claims[0])

    @property
    def _is_as_before(self) -> bool:
        return self._world == self._files.world

    def _read_from(self, name: str) -> list[RankClaim]:
        """Return the ranks from whose parts a tensor is read, one for each distinct shard.

        If as many ranks load as saved, this rank reads its own shard. Among other ranks with the same shard, each
        loading rank chooses by its number, so that not all request the same part.
        """
        own = self.own(name)
        if own[1].placement is None:
            return [own]
        alike_ones: dict[object, list[RankClaim]] = defaultdict(list)
        for rank, leaf in self._claims[name]:
            if isinstance(leaf, NativeLeaf) and leaf.placement is not None and leaf.placement.coordinate is not None:
                alike_ones[leaf.placement.place].append((rank, leaf))
        return [
            next((one for one in some if self._is_as_before and one[0] == self._rank), some[self._rank % len(some)])
            for some in alike_ones.values()
        ]

    def part(self, rank: int) -> PartId:
        return self._files.part(rank)

    def blocks(self, name: str) -> list[tuple[PartId, NativeLeaf, Box]]:
        """Return the blocks of a tensor, each with the part that it is read from."""
        return [(self._files.part(block.rank), block.leaf, block.box) for block in self._by_name[name]]

    # -- checks -----------------------------------------------------------------------------------------------------

    def prepare(self, plan: LoadPlan) -> None:
        """Fetch everything that the plan needs, and check that it can be loaded.

        Raises:
            StateMismatch: ranks saved different values under one name; the message names it.
            Also as `Files.read`.
        """
        names = dict.fromkeys(item.storage_index.fqn for item in plan.items)
        for name in names:
            if reason := self.contradiction(name):
                raise StateMismatch(f"{self._files.checkpoint}: {name!r}: {reason}")
        self._files.bring(self._spans(plan))
        for name in names:
            rank, value = self.own(name)
            for _, array in instances(value, SavedArray):
                self._stored(rank, array.entry)

    def contradiction(self, name: str) -> str | None:
        """Return why what the ranks saved under a name is not one value; None if it is. Raises as `Files.read`."""
        claims = self._claims[name]
        placements = [
            leaf.placement for _, leaf in claims if isinstance(leaf, NativeLeaf) and leaf.placement is not None
        ]
        if placements:
            if len(placements) < len(claims):
                return "a DTensor on some of the ranks that saved it, and none on others"
            return _misplaced([leaf for _, leaf in claims]) or self._collision(claims)
        _, own = self.own(name)
        if any(True for _ in instances(own, SavedGenerator)):
            return "a torch.Generator, which DCP does not load; leave it out of the state that is loaded"
        if any(tensor.sharded for _, tensor in instances(own, SavedTensor)):
            return "a DTensor in a tuple or deque, which DCP does not enter; save it in a dict or a list"
        if self._is_as_before:
            return None
        others = claims[1:]
        if not isinstance(own, NativeLeaf) and any(not alike(own, value) for _, value in others):
            return self._differs()
        # Each loading rank compares a share of the ranks that saved, because DCP reports a difference to all ranks.
        mine = [claim for claim in others if claim[0] % self._world == self._rank]
        return None if all(self._is_same(claims[0], claim) for claim in mine) else self._differs()

    def _collision(self, claims: list[RankClaim]) -> str | None:
        """Return why ranks with one coordinate do not have the same shard, or None.

        A submesh occurs several times in a larger mesh, so several ranks can have one coordinate. With tensor
        parallelism as the other dimension, each occurrence has the same tensor; with pipeline parallelism, each stage
        has another one.
        """
        first: dict[object, RankClaim] = {}
        for rank, leaf in claims:
            one = first.setdefault(leaf.placement.coordinate, (rank, leaf))
            if one[0] != rank and rank % self._world == self._rank and not self._is_same(one, (rank, leaf)):
                return f"ranks {one[0]} and {rank} saved different shards of one coordinate under this name; {_NAMES}"
        return None

    def _differs(self) -> str:
        return (
            f"it differs between the {self._files.world} ranks that saved it, and {self._world} load: leave it out of "
            "the state that is loaded, or launch as many ranks"
        )

    def _is_same(self, one: RankClaim, other: RankClaim) -> bool:
        """Return whether two ranks' tensors are the same, or the arrays in two values that are otherwise equal."""
        here, there = self._sides[one[0]], self._sides[other[0]]
        if isinstance(one[1], NativeLeaf) != isinstance(other[1], NativeLeaf):
            return False
        if isinstance(one[1], NativeLeaf):
            if (one[1].dtype, one[1].shape) != (other[1].dtype, other[1].shape):
                return False
            pairs = [(one[1].entry, other[1].entry)]
        else:
            found = zip(instances(one[1], SavedArray), instances(other[1], SavedArray), strict=True)
            pairs = [(mine.entry, theirs.entry) for (_, mine), (_, theirs) in found]
        return all(are_equal(self._files, here, mine, there, theirs) for mine, theirs in pairs)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Load the plan's items, each byte of them verified. Raises as `Files.read`."""
        spans = self._spans(plan)
        for span, data in self._files.read(spans):
            for item in spans[span]:
                self._load_tensor(item, data, planner)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                rank, value = self.own(item.storage_index.fqn)
                file = io.BytesIO()
                torch.save(self._with_arrays(rank, value), file)
                file.seek(0)
                planner.load_bytes(item, file)

    def _spans(self, plan: LoadPlan) -> dict[Span, list[ReadItem]]:
        found: dict[Span, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                block = self._blocks[item.storage_index]
                first, last, row = _rows(block, item)
                part, begin = self._files.part(block.rank), block.leaf.entry.offset
                found[self._files.span(part, TENSORS, begin + first * row, (last - first) * row)].append(item)
        return found

    def _load_tensor(self, item: ReadItem, data: memoryview, planner: LoadPlanner) -> None:
        block = self._blocks[item.storage_index]
        leaf, entry = block.leaf, block.leaf.entry
        first, last, _ = _rows(block, item)
        stored = torch.frombuffer(data, dtype=entry.dtype)
        stored = stored.view(last - first, *entry.shape[1:]) if entry.shape else stored.view(())
        if leaf.dtype != entry.dtype:
            stored = torch.view_as_complex(stored) if leaf.dtype.is_complex else stored.view(leaf.dtype)
        begins = [begin + more for begin, more in zip(block.box.local, item.storage_offsets, strict=True)]
        for dim, (begin, length) in enumerate(zip(begins, item.lengths, strict=True)):
            stored = stored.narrow(dim, begin - first if dim == 0 else begin, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != stored.size():
            name = item.storage_index.fqn
            raise StateMismatch(f"{name!r}: {tuple(stored.size())} in the checkpoint, {tuple(target.size())} here")
        if target.dtype == stored.dtype:
            fill(target, stored)
        else:
            target.copy_(stored)
        planner.commit_tensor(item, target)

    def _with_arrays(self, rank: int, value: Any) -> Any:
        """Return a copy of a value with its arrays, which are read now; `value` keeps their stand-ins."""

        def array(saved: SavedArray) -> Any:
            return saved.made(self._stored(rank, saved.entry))

        return replaced(copy.deepcopy(value), SavedArray, array)

    def _stored(self, rank: int, entry: TensorEntry) -> torch.Tensor:
        return read_tensor(self._files, self._files.part(rank), entry)


def _rows(block: _Block, item: ReadItem) -> tuple[int, int, int]:
    """Return the rows of the stored tensor that an item needs: the first, the end, and the bytes of a row.

    Only these rows are read.
    """
    entry = block.leaf.entry
    if not entry.shape:
        return 0, 1, entry.nbytes
    if not item.lengths:  # a complex number without dimensions, which is stored as two numbers
        return 0, entry.shape[0], entry.nbytes // entry.shape[0]
    first = block.box.local[0] + item.storage_offsets[0]
    return first, first + item.lengths[0], entry.nbytes // entry.shape[0]


def _misplaced(leaves: list[NativeLeaf]) -> str | None:
    """Return why the shards of several ranks are not shards of one tensor; None if they are."""
    placements = [leaf.placement for leaf in leaves if leaf.placement is not None]
    first = placements[0]
    if any(
        (one.shape, one.mesh, one.names, one.rules) != (first.shape, first.mesh, first.names, first.rules)
        for one in placements
    ) or any(leaf.dtype != leaves[0].dtype for leaf in leaves):
        return f"ranks saved different tensors under this name; {_NAMES}"
    expected = 1
    for rule, count in zip(first.rules, first.mesh, strict=True):
        expected *= 1 if rule[0] == REPLICATE else count
    found = len({one.place for one in placements if one.coordinate is not None})
    if found < expected:
        return f"{found} of {expected} shards were saved under this name; save the same state on every rank of the mesh"
    return None


_NAMES = (
    "as with optimizer.state_dict() of several pipeline stages, which numbers parameters; save what "
    "torch.distributed.checkpoint.state_dict.get_state_dict gives, which names them"
)
