"""The contents of one rank's part from `Checkpointer.save`, in DCP's form: a flat mapping of names to tensors and
values.

Invariant: only trees, headers and packed values are read here; tensors, arrays and long bytes are known by their
position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from tierd.client.restoring.entries import read_header, read_tensor, read_tree
from tierd.client.restoring.ranged_reader import PartRanges
from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.core.shard_placement import Box, Placement
from tierd.state.containers import members, replaced
from tierd.state.kinds import numpy_arrays
from tierd.state.kinds.dtensors import SavedDTensor
from tierd.state.kinds.packed_tensors import BYTES, check_form, unpack
from tierd.state.kinds.wrapper_tensors import SavedWrapper
from tierd.state.stored_dtypes import check_view, logical
from tierd.state.tensor_file import TensorEntry
from tierd.state.tree_parser import DEFECTS, Copies, check_depth, decoder, tree_text

Name = str
Path = tuple[str | int, ...]  # of a value in the state, as DCP writes it: a mapping's keys are text


@dataclass(frozen=True, slots=True)
class NativeLeaf:
    """A tensor in a part.

    Attributes:
        entry: its position in the tensor file.
        dtype, shape: of the tensor, or of a DTensor's local shard.
        placement: of a DTensor's local shard; None for a plain tensor.
    """

    entry: TensorEntry
    dtype: torch.dtype
    shape: tuple[int, ...]
    placement: Placement | None = None

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.shape if self.placement is None else self.placement.shape

    @property
    def boxes(self) -> list[Box]:
        """The blocks of the whole tensor that it covers."""
        if self.placement is not None:
            return self.placement.boxes()
        return [Box((0,) * len(self.shape), (0,) * len(self.shape), self.shape)]


@dataclass(frozen=True, slots=True)
class SavedArray:
    """A NumPy array in a part. It equals any array of the same dtype and shape, because its values are not compared."""

    entry: TensorEntry = field(compare=False, repr=False)
    dtype: str
    shape: tuple[int, ...]

    def made(self, stored: torch.Tensor) -> Any:
        """Return the array from its stored tensor."""
        return numpy_arrays.array_of(stored, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class SavedBytes(SavedArray):
    """`bytes` or a `bytearray` in a part; `dtype` says which. Read only on demand, because they may be of any size."""

    def made(self, stored: torch.Tensor) -> Any:
        return unpack(stored, self.dtype, self.shape[0])


@dataclass(frozen=True, slots=True)
class SavedTensor(SavedArray):
    """A tensor in a container that DCP takes as one value, such as a tuple.

    Attributes:
        sharded: whether it is a DTensor's local shard.
    """

    sharded: bool

    def made(self, stored: torch.Tensor) -> Any:
        dtype = getattr(torch, self.dtype)
        return stored if stored.dtype == dtype else logical(stored, dtype)


@dataclass(frozen=True, slots=True)
class Leaves:
    """The state in one part.

    Attributes:
        values: by DCP's name, a `NativeLeaf` or another value. In such a value a `SavedArray` stands for each tensor,
            for each array and for long bytes.
        paths: by the same names, the path that DCP's planner keeps as its own data.
        tree: the nested state, with the keys that were saved.
        stand_ins: by name, the objects in `tree`: a meta tensor in the place of each tensor that has a name.
    """

    values: dict[Name, Any]
    paths: dict[Name, Path]
    tree: dict[Any, Any]
    stand_ins: dict[Name, Any]


def read_leaves(files: PartRanges, part: PartId) -> Leaves:
    """Read a part's tree and header, and its packed values.

    Raises:
        StateMismatch: tierd did not write them; or two values of the state have one name.
        Also as `PartRanges.fill`.
    """
    tree = read_tree(files, part)
    _, layout = read_header(files, part)
    leaf_by_id: dict[int, NativeLeaf] = {}
    copies = Copies()
    stand_ins: list[torch.Tensor] = []  # kept alive, because `leaf_by_id` distinguishes them by address

    def stand_in(leaf: NativeLeaf) -> torch.Tensor:
        # A meta tensor, because DCP's own flatten_state_dict enters a list only if it contains a tensor.
        tensor = torch.empty(leaf.whole, dtype=leaf.dtype, device="meta")
        leaf_by_id[id(tensor)] = leaf
        stand_ins.append(tensor)
        return tensor

    def stored(name: str) -> torch.Tensor:
        entry = layout.entries[name]
        return stand_in(NativeLeaf(entry, entry.dtype, entry.shape))

    def viewed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        entry = leaf_by_id[id(tensor)].entry
        check_view(entry.dtype, entry.shape, dtype)
        return stand_in(NativeLeaf(entry, dtype, entry.shape[:-1] if dtype.is_complex else entry.shape))

    def array(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> SavedArray:
        entry = leaf_by_id[id(tensor)].entry
        copies.claim(entry)
        return SavedArray(entry, dtype, shape)

    def values(tensor: torch.Tensor, kind: str, size: int) -> Any:
        # Read now, as JSON values are, because a mapping's keys become DCP's names.
        entry = leaf_by_id[id(tensor)].entry
        copies.claim(entry)
        check_form(entry.dtype, entry.shape, kind, size)
        if kind in BYTES:
            return SavedBytes(entry, kind, (size,))
        return copies.values(read_tensor(files, part, entry), kind, size)

    def sharded(saved: SavedDTensor) -> Any:
        if isinstance(saved.local, SavedWrapper):
            return saved.local  # as this rank's own tensors, because no placement is known of the inner ones
        local = leaf_by_id[id(saved.local)]
        if saved.placement.coordinate is not None and saved.placement.local_shape != local.shape:
            raise ValueError(f"{saved}, whose local shard is {local.shape}")
        return stand_in(NativeLeaf(local.entry, local.dtype, local.shape, saved.placement))

    def nameless(tensor: torch.Tensor) -> SavedTensor:
        leaf = leaf_by_id[id(tensor)]
        dtype = str(leaf.dtype).removeprefix("torch.")
        return SavedTensor(leaf.entry, dtype, leaf.shape, leaf.placement is not None)

    try:
        state = decoder(stored, viewed, array, values).decode(tree_text(tree))
        check_depth(state)
        if type(state) is not dict:
            raise ValueError("its root is no mapping of names")
        state = replaced(replaced(state, SavedDTensor, sharded), SavedWrapper, SavedWrapper.nested)
        state = _with_whole_values(state, nameless)
        flat, paths = flatten_state_dict(state)
    except (*DEFECTS, RecursionError) as error:
        raise StateMismatch(f"{part}: the state tree: {str(error)[:300] or type(error).__name__}") from error
    leaves = {name: leaf_by_id[id(value)] if isinstance(value, torch.Tensor) else value for name, value in flat.items()}
    return Leaves(leaves, dict(paths), state, flat)


def _with_whole_values(value: Any, by: Callable[[torch.Tensor], SavedTensor]) -> Any:
    """Replace the tensors that DCP's `flatten_state_dict` does not name, because it enters only mappings and lists."""
    if isinstance(value, tuple | deque):
        return replaced(value, torch.Tensor, by)
    if isinstance(value, dict | list):
        for key, inner in members(value) or ():
            if (new := _with_whole_values(inner, by)) is not inner:
                value[key] = new
    return value
