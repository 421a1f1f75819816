"""What each rank's part from `Checkpointer.save` holds, in DCP's form, and whether the ranks agree on each name.

The form is a flat mapping of names to tensors and values.

Invariant: only trees, headers and packed values are read here; tensors, arrays and long bytes are known by their
position. A name is loaded only if its ranks' values agree: as shards of one tensor, or byte for byte.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from tierd.client.restoring.ranged_reader import PartFiles
from tierd.client.restoring.saved_entries import read_tree
from tierd.client.restoring.tensor_locations import TensorComparison, TensorLocation, TensorLocator
from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.core.shard_placement import REPLICATE, Box, Placement
from tierd.state.aliasing import is_same_content
from tierd.state.kinds import stored_arrays
from tierd.state.kinds.dtensors import SavedDTensor
from tierd.state.kinds.random_generators import SavedRng
from tierd.state.kinds.stored_arrays import BYTES, check_run_form, check_view, logical, unpack
from tierd.state.kinds.wrapper_tensors import SavedWrapper
from tierd.state.state_tree import instances, members, replace_values
from tierd.state.tree_parser import DECODE_ERRORS, StoredCopies, check_depth, decoder, tree_text

Name = str
Path = tuple[str | int, ...]  # of a value in the state, as DCP writes it: a mapping's keys are text


@dataclass(frozen=True, slots=True)
class NativeLeaf:
    """A tensor that a part names, or a DTensor's local shard, which has a `placement`."""

    location: TensorLocation
    dtype: torch.dtype
    shape: tuple[int, ...]
    placement: Placement | None = None

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.shape if self.placement is None else self.placement.shape

    @property
    def boxes(self) -> list[Box]:
        """The blocks of the whole tensor that it covers."""
        if self.placement is not None:
            return self.placement.boxes()
        return [Box((0,) * len(self.shape), (0,) * len(self.shape), self.shape)]


@dataclass(frozen=True, slots=True)
class SavedArray:
    """A NumPy array of a state. It equals any of the same dtype and shape, because its values are not compared."""

    location: TensorLocation = field(compare=False, repr=False)
    dtype: str
    shape: tuple[int, ...]

    def rebuild(self, stored: torch.Tensor) -> Any:
        return stored_arrays.array_of(stored, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class SavedBytes(SavedArray):
    """`bytes` or a `bytearray` of a state; `dtype` says which. Read only on demand, because they may be of any size."""

    def rebuild(self, stored: torch.Tensor) -> Any:
        return unpack(stored, self.dtype, self.shape[0])


@dataclass(frozen=True, slots=True)
class SavedTensor(SavedArray):
    """A tensor in a container that DCP takes as one value, such as a tuple. `sharded`: a DTensor's local shard."""

    sharded: bool

    def rebuild(self, stored: torch.Tensor) -> Any:
        dtype = getattr(torch, self.dtype)
        return stored if stored.dtype == dtype else logical(stored, dtype)


@dataclass(frozen=True, slots=True)
class PartLeaves:
    """The state that one part's tree describes."""

    # By DCP's name: a `NativeLeaf`, or a value with a `SavedArray` for each tensor, array and long bytes in it
    values: dict[Name, Any]
    paths: dict[Name, Path]  # by the same names, as DCP's planner keeps them as its own data
    tree: dict[Any, Any]  # the nested state, with the keys that were saved
    # By name, the objects in `tree`: a meta tensor in the place of each tensor that has a name
    stand_ins: dict[Name, Any]


def read_leaves(locator: TensorLocator, part: PartId) -> PartLeaves:
    """Read a part's tree and header, and its packed values.

    Raises `StateMismatch` if tierd did not write them, or two values have one name; also as `PartTensors.locate` and
    `PartRanges.fill`.
    """
    tree = read_tree(locator.files, part)
    tensors = locator.tensors_of(part)
    leaf_by_id: dict[int, NativeLeaf] = {}
    copies = StoredCopies()
    stand_ins: list[torch.Tensor] = []  # kept alive, because `leaf_by_id` distinguishes them by address

    def stand_in(leaf: NativeLeaf) -> torch.Tensor:
        # A meta tensor, because DCP's own flatten_state_dict enters a list only if it contains a tensor.
        tensor = torch.empty(leaf.global_shape, dtype=leaf.dtype, device="meta")
        leaf_by_id[id(tensor)] = leaf
        stand_ins.append(tensor)
        return tensor

    def stored(name: str) -> torch.Tensor:
        location = tensors.locate(name)
        return stand_in(NativeLeaf(location, location.entry.dtype, location.entry.shape))

    def viewed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        location = leaf_by_id[id(tensor)].location
        stored_shape = location.entry.shape
        check_view(location.entry.dtype, stored_shape, dtype)
        return stand_in(NativeLeaf(location, dtype, stored_shape[:-1] if dtype.is_complex else stored_shape))

    def array(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> SavedArray:
        location = leaf_by_id[id(tensor)].location
        copies.claim(location)
        return SavedArray(location, dtype, shape)

    def values(tensor: torch.Tensor, kind: str, size: int) -> Any:
        # Read now, as JSON values are, because a mapping's keys become DCP's names.
        location = leaf_by_id[id(tensor)].location
        copies.claim(location)
        check_run_form(location.entry.dtype, location.entry.shape, kind, size)
        if kind in BYTES:
            return SavedBytes(location, kind, (size,))
        return copies.values(locator.read(part, location), kind, size)

    def sharded(saved: SavedDTensor) -> Any:
        if isinstance(saved.local, SavedWrapper):
            return saved.local  # as this rank's own tensors, because no placement is known of the inner ones
        local = leaf_by_id[id(saved.local)]
        if saved.placement.coordinate is not None and saved.placement.local_shape != local.shape:
            raise ValueError(f"{saved}, whose local shard is {local.shape}")
        return stand_in(NativeLeaf(local.location, local.dtype, local.shape, saved.placement))

    def nameless(tensor: torch.Tensor) -> SavedTensor:
        leaf = leaf_by_id[id(tensor)]
        dtype = str(leaf.dtype).removeprefix("torch.")
        return SavedTensor(leaf.location, dtype, leaf.shape, leaf.placement is not None)

    try:
        state = decoder(stored, viewed, array, values).decode(tree_text(tree))
        check_depth(state)
        if type(state) is not dict:
            raise ValueError("its root is no mapping of names")
        state = replace_values(replace_values(state, SavedDTensor, sharded), SavedWrapper, SavedWrapper.nested)
        state = _with_whole_values(state, nameless)
        flat, paths = flatten_state_dict(state)
    except (*DECODE_ERRORS, RecursionError) as error:
        raise StateMismatch(f"{part}: the state tree: {str(error)[:300] or type(error).__name__}") from error
    leaves = {name: leaf_by_id[id(value)] if isinstance(value, torch.Tensor) else value for name, value in flat.items()}
    return PartLeaves(leaves, dict(paths), state, flat)


def _with_whole_values(value: Any, by: Callable[[torch.Tensor], SavedTensor]) -> Any:
    """Replace the tensors that DCP's `flatten_state_dict` does not name, because it enters only mappings and lists."""
    if isinstance(value, tuple | deque):
        return replace_values(value, torch.Tensor, by)
    if isinstance(value, dict | list):
        for key, inner in members(value) or ():
            if (new := _with_whole_values(inner, by)) is not inner:
                value[key] = new
    return value


# A rank and the value that it saved under a name: a `NativeLeaf`, or a value without tensors.
RankClaim = tuple[int, Any]


class RankClaims:
    """The values of all ranks that saved, by name.

    Args:
        chosen: the rank whose value counts where ranks saved different ones; None: such a name is a contradiction.
        remedy: what a caller can do about values that differ; empty: what a load can do.
    """

    def __init__(self, files: PartFiles, rank: int, world: int, chosen: int | None = None, *, remedy: str = "") -> None:
        self._files, self._rank, self._world = files, rank, world
        self._remedy = remedy or f"{world} load: leave it out of the state that is loaded, or launch as many ranks"
        self._own = chosen if chosen is not None else rank if self._is_as_before else None
        self._claims: dict[str, list[RankClaim]] = defaultdict(list)
        self._comparison = TensorComparison(files)

    def add(self, rank: int, name: str, value: Any) -> None:
        """Add what a rank saved under a name. Ranks are added in order."""
        self._claims[name].append((rank, value))

    @property
    def names(self) -> Iterable[str]:
        return self._claims.keys()

    def own_claim(self, name: str) -> RankClaim:
        """Return the value of the chosen rank, or of this one if as many load as saved; else the first rank's."""
        claims = self._claims[name]
        return next((claim for claim in claims if claim[0] == self._own), claims[0])

    def value(self, name: str) -> Any:
        """Return what `own_claim` does, without the rank; None if no rank saved this name."""
        return self.own_claim(name)[1] if name in self._claims else None

    @property
    def _is_as_before(self) -> bool:
        return self._world == self._files.world

    def read_from(self, name: str) -> list[RankClaim]:
        """Return the ranks from whose parts a tensor is read, one for each distinct shard.

        If as many ranks load as saved, this rank reads its own shard. Among other ranks with the same shard, each
        loading rank chooses by its number, so that not all request the same part.
        """
        own_claim = self.own_claim(name)
        if own_claim[1].placement is None:
            return [own_claim]
        alike_ones: dict[object, list[RankClaim]] = defaultdict(list)
        for rank, leaf in self._claims[name]:
            if isinstance(leaf, NativeLeaf) and leaf.placement is not None and leaf.placement.coordinate is not None:
                alike_ones[leaf.placement.place].append((rank, leaf))
        return [
            next(
                (claim for claim in claims if self._is_as_before and claim[0] == self._rank),
                claims[self._rank % len(claims)],
            )
            for claims in alike_ones.values()
        ]

    def contradiction(self, name: str) -> str | None:
        """Return why what the ranks saved under a name is not one value; None if it is. Raises as `PartFiles.read`."""
        claims = self._claims[name]
        placements = [
            leaf.placement for _, leaf in claims if isinstance(leaf, NativeLeaf) and leaf.placement is not None
        ]
        if placements:
            if len(placements) < len(claims):
                return "a DTensor on some of the ranks that saved it, and none on others"
            return _misplaced([leaf for _, leaf in claims]) or self._collision(claims)
        owner, own_value = self.own_claim(name)
        if generator := next((saved for _, saved in instances(own_value, SavedRng)), None):
            return f"{generator.label}, which DCP does not load; leave it out of the state that is loaded"
        if any(tensor.sharded for _, tensor in instances(own_value, SavedTensor)):
            return "a DTensor in a tuple or deque, which DCP does not enter; save it in a dict or a list"
        if self._is_as_before or owner == self._own:
            return None
        other_claims = claims[1:]
        if not isinstance(own_value, NativeLeaf) and any(
            not is_same_content(own_value, value) for _, value in other_claims
        ):
            return self._differs()
        # Each loading rank compares a share of the ranks that saved, because DCP reports a difference to all ranks.
        share = [claim for claim in other_claims if claim[0] % self._world == self._rank]
        return None if all(self._is_same(claims[0], claim) for claim in share) else self._differs()

    def _collision(self, claims: list[RankClaim]) -> str | None:
        """Return why ranks with one coordinate do not have the same shard, or None.

        A submesh occurs several times in a larger mesh, so several ranks can have one coordinate. With tensor
        parallelism as the other dimension, each occurrence has the same tensor; with pipeline parallelism, each stage
        has another one.
        """
        first: dict[object, RankClaim] = {}
        for rank, leaf in claims:
            first_claim = first.setdefault(leaf.placement.coordinate, (rank, leaf))
            if (
                first_claim[0] != rank
                and rank % self._world == self._rank
                and not self._is_same(first_claim, (rank, leaf))
            ):
                return (
                    f"ranks {first_claim[0]} and {rank} saved different shards of one coordinate under this "
                    f"name; {_NAMES}"
                )
        return None

    def _differs(self) -> str:
        return f"it differs between the {self._files.world} ranks that saved it, and {self._remedy}"

    def _is_same(self, first_claim: RankClaim, second_claim: RankClaim) -> bool:
        """Whether two ranks' tensors are the same, or the arrays in two values that are otherwise equal."""
        if isinstance(first_claim[1], NativeLeaf) != isinstance(second_claim[1], NativeLeaf):
            return False
        if isinstance(first_claim[1], NativeLeaf):
            if (first_claim[1].dtype, first_claim[1].shape) != (second_claim[1].dtype, second_claim[1].shape):
                return False
            pairs = [(first_claim[1].location, second_claim[1].location)]
        else:
            arrays = zip(instances(first_claim[1], SavedArray), instances(second_claim[1], SavedArray), strict=True)
            pairs = [(first.location, second.location) for (_, first), (_, second) in arrays]
        return all(self._comparison.are_equal(first, second) for first, second in pairs)


def _misplaced(leaves: list[NativeLeaf]) -> str | None:
    """Return why the shards of several ranks are not shards of one tensor; None if they are."""
    placements = [leaf.placement for leaf in leaves if leaf.placement is not None]
    first = placements[0]
    if any(
        (placement.shape, placement.mesh, placement.names, placement.rules)
        != (first.shape, first.mesh, first.names, first.rules)
        for placement in placements
    ) or any(leaf.dtype != leaves[0].dtype for leaf in leaves):
        return f"ranks saved different tensors under this name; {_NAMES}"
    expected = 1
    for rule, count in zip(first.rules, first.mesh, strict=True):
        expected *= 1 if rule[0] == REPLICATE else count
    shards = len({placement.place for placement in placements if placement.coordinate is not None})
    if shards < expected:
        return (
            f"{shards} of {expected} shards were saved under this name; save the same state on every rank of the mesh"
        )
    return None


_NAMES = (
    "as with optimizer.state_dict() of several pipeline stages, which numbers parameters; save what "
    "torch.distributed.checkpoint.state_dict.get_state_dict gives, which names them"
)
