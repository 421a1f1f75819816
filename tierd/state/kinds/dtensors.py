"""DTensors: find the local shard and placement that a save stores, and check whether a live DTensor can load a saved
shard.

Invariant: no collective is called and no element of another rank is read. A live DTensor loads a shard only if this
rank has the same part of the same tensor. The meshes must have the same shape and names. Resharding is left to
`tierd.dcp.load`.

`torch.distributed.tensor` is imported only if a DTensor exists already, because importing it takes longer than
importing tierd.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from tierd.core.shard_placement import REPLICATE, SHARD, STRIDED, Placement, Rule
from tierd.state.kinds.wrapper_tensors import SavedWrapper, parts_of
from tierd.state.state_tree import leaves

RESHARD = "tierd.dcp.load(state, checkpointer) loads DTensors onto another mesh, placement or number of ranks"


@dataclass(frozen=True, slots=True, eq=False)
class SavedDTensor:
    """One rank's shard in a checkpoint: a tensor or a `SavedWrapper`, perhaps a view of the restored file."""

    local: Any
    placement: Placement

    def __post_init__(self) -> None:
        if not isinstance(getattr(self.local, "dtype", None), torch.dtype):
            raise ValueError("a DTensor's local shard is a tensor")

    def __str__(self) -> str:
        return f"a DTensor of {str(self.local.dtype).removeprefix('torch.')} {self.placement}"


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Whether `value` is exactly a DTensor; a subclass is not."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(value) is getattr(module, "DTensor", None)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local shard, or any other tensor unchanged."""
    # Not `to_local()`, because it builds a graph if gradients are enabled. torch's own FSDP and DCP use this member,
    # too.
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def tensors_held_by(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that hold this rank's values: of a DTensor's local shard, or of a wrapper."""
    return parts_of(local_of(tensor))


def placement_of(dtensor: Any) -> Placement:
    """Return the placement of a live DTensor's local shard.

    Raises `ValueError`, with the reason and a remedy, if the placement is unknown, or elements are missing.
    """
    spec = dtensor._spec
    mesh = spec.mesh
    rules = tuple(_rule(dim_placement) for dim_placement in spec.placements)
    if _is_ordered_otherwise(spec, rules):
        raise ValueError("a DTensor whose dimensions were split in an order of its own; pass .redistribute(mesh, …)")
    coordinate = mesh.get_coordinate()
    names = mesh.mesh_dim_names
    placement = Placement(
        tuple(spec.shape),
        tuple(spec.stride),
        tuple(mesh.shape),
        None if names is None else tuple(names),
        rules,
        None if coordinate is None else tuple(coordinate),
    )
    local = tuple(dtensor._local_tensor.shape)
    if coordinate is not None and placement.local_shape != local:
        raise ValueError(
            f"a DTensor {placement}, whose local shard should be {placement.local_shape} and is {local}; "
            "give DTensor.from_local the shape= and stride= of the whole tensor"
        )
    return placement


def ranks_with_shard(dtensor: Any) -> tuple[int, ...]:
    """Return the global ranks whose local shard of a live DTensor is the same as this rank's, in ascending order; none
    for a rank outside the mesh.
    """
    mesh, placements = dtensor._spec.mesh, dtensor._spec.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    along = [
        slice(None) if placement.is_replicate() else at for placement, at in zip(placements, coordinate, strict=True)
    ]
    return tuple(sorted(mesh.mesh[tuple(along)].flatten().tolist()))


def _rule(placement: Any) -> Rule:
    from torch.distributed.tensor import placement_types as kinds

    kind = type(placement)
    if kind is kinds.Replicate:
        return (REPLICATE,)
    if kind is kinds._StridedShard:  # the exact type, because in torch 2.6 it is a subclass of Shard
        return STRIDED, int(placement.dim), int(placement.split_factor)
    if kind is kinds.Shard:
        return SHARD, int(placement.dim)
    if isinstance(placement, kinds.Partial):
        raise ValueError(
            f"a DTensor with a sum that is still pending ({placement}); pass .redistribute(placements=[Replicate(), …])"
        )
    raise ValueError(f"a DTensor with the placement {placement}; pass .redistribute() to Shard or Replicate")


def _is_ordered_otherwise(spec: Any, rules: Sequence[Rule]) -> bool:
    """Whether several mesh dimensions split one tensor dimension in an order that the placements do not show.

    The usual order is from first to last; strided placements show another one. Newer versions of torch store the order
    separately from the placements. Some of them also derive it from strided placements, which are skipped because they
    show it themselves.
    """
    order = getattr(spec, "shard_order", None) or ()
    strided_dims = {rule[1] for rule in rules if rule[0] == STRIDED}
    return any(
        list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order if entry.tensor_dim not in strided_dims
    )


def is_placed_alike(spec: Any, other_spec: Any) -> bool:
    """Whether two DTensors' specs are equal.

    Types are compared as well, because up to about torch 2.8 a strided placement equals a plain one.
    """
    kinds = [[type(placement) for placement in dtensor_spec.placements] for dtensor_spec in (spec, other_spec)]
    return bool(spec == other_spec) and kinds[0] == kinds[1]


def dtensor_misfit(target: Any, saved: object) -> str | None:
    """Return why a live DTensor cannot load `saved`; None if it can."""
    try:
        target_placement = placement_of(target)
    except ValueError as error:
        return str(error)
    dtype = str(target.dtype).removeprefix("torch.")
    if not isinstance(saved, SavedDTensor):
        saved_kind = "a whole tensor" if isinstance(saved, torch.Tensor) else type(saved).__name__
        return f"{saved_kind} in the checkpoint, a DTensor of {dtype} {target_placement} here"
    if isinstance(saved.local, SavedWrapper) and (reason := saved.local.misfit(target._local_tensor)):
        return reason
    if saved.placement != target_placement or saved.local.dtype != target.dtype or not has_whole_shard(saved):
        return f"{saved} in the checkpoint, {dtype} {target_placement} here"
    return None


def has_whole_shard(saved: SavedDTensor) -> bool:
    """Whether the local shard has the shape that its placement gives."""
    return saved.placement.coordinate is None or tuple(saved.local.shape) == saved.placement.local_shape


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers, live or saved; for a DTensor its local shard, for a wrapper the inner
    ones.
    """
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from tensors_held_by(leaf)
        elif isinstance(leaf, SavedWrapper):
            yield from leaf.tensors()
        elif isinstance(leaf, SavedDTensor):
            yield from leaf.local.tensors() if isinstance(leaf.local, SavedWrapper) else (leaf.local,)
