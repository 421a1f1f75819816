"""The device meshes of a running job, and DTensors on them made from saved shards.

Invariant: this module never creates a mesh, because every rank would have to create it at the same time. So a shard is
refused if no DTensor of this job lies on a mesh like the one on which it was saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tierd.core.shard_placement import REPLICATE, SHARD, STRIDED
from tierd.state.containers import SEQUENCES, Path, instances, leaves, replaced
from tierd.state.kinds.dtensors import SavedDTensor, is_dtensor, is_whole
from tierd.state.kinds.optimizers import optimizers_in
from tierd.state.kinds.wrapper_tensors import SavedWrapper
from tierd.state.values import show


class Meshes:
    """The device meshes of a running job's state, for saved DTensors that have no live DTensor as their target.

    Args:
        state: values as `Checkpointer.restore` receives them.
    """

    def __init__(self, state: Iterable[object]) -> None:
        self._meshes: dict[int, Any] = {}
        for value in state:
            self._add(value)

    def _add(self, value: object) -> None:
        tensors: Iterable[object] = ()
        if isinstance(value, nn.Module):
            tensors = chain(value.parameters(), value.buffers())
        elif isinstance(value, Optimizer):
            tensors = chain.from_iterable(group["params"] for group in value.param_groups)
        elif isinstance(value, torch.Tensor):
            tensors = (value,)
        for tensor in tensors:
            if is_dtensor(tensor):
                self._meshes[id(tensor.device_mesh)] = tensor.device_mesh

    def first(self, tensor: torch.Tensor) -> Meshes:
        """Return the same meshes with the mesh of `tensor` first.

        The order matters because two meshes of a job may have the same shape and names.
        """
        reordered = Meshes((tensor,))
        reordered._meshes |= self._meshes
        return reordered

    def made(self, saved: SavedDTensor) -> Any:
        """Return a DTensor around the saved shard, on this job's mesh; it shares the shard's memory.

        Raises:
            ValueError: no mesh of this job is the one on which the shard was saved.
        """
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

        mesh = self._mesh_of(saved)
        makers: dict[str | int, Any] = {
            REPLICATE: Replicate,
            SHARD: Shard,
            STRIDED: lambda dim, split: _StridedShard(dim, split_factor=split),
        }
        placements = [makers[name](*numbers) for name, *numbers in saved.placement.rules]
        shape, stride = torch.Size(saved.placement.shape), saved.placement.stride
        local = saved.local.made() if isinstance(saved.local, SavedWrapper) else saved.local
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def misfit(self, saved: SavedDTensor) -> str | None:
        """Return why no DTensor can be made of this shard; None if one can."""
        try:
            self._mesh_of(saved)
        except ValueError as error:
            return str(error)
        return None

    def _mesh_of(self, saved: SavedDTensor) -> Any:
        placement = saved.placement
        if not is_whole(saved):
            raise ValueError(f"{saved}, whose local shard is {tuple(saved.local.shape)}")
        for mesh in self._meshes.values():
            names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
            local_placement = (
                tuple(mesh.shape),
                None if names is None else tuple(names),
                None if coordinate is None else tuple(coordinate),
            )
            if local_placement == (placement.mesh, placement.names, placement.coordinate):
                return mesh
        raise ValueError(f"{saved} in the checkpoint, and no DTensor on such a mesh here")

    def put(self, value: Any) -> Any:
        """Return `value` with a DTensor for each saved shard in it. Containers are kept."""
        return replaced(value, SavedDTensor, self.made)


def meshes_of(state: Mapping[str, object]) -> Meshes:
    """Return the meshes of all objects in the state, those of its optimizers' parameters first."""
    return Meshes(chain(optimizers_in(state), leaves(state)))


def put_beside(optimizer: Optimizer, saved: Any, meshes: Meshes) -> None:
    """Replace shards in an optimizer's saved state by DTensors, each on the mesh of its parameter."""
    saved_state = saved["state"]
    for index, parameter in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        if isinstance(saved_state, dict) and index in saved_state:
            saved_state[index] = meshes.first(parameter).put(saved_state[index])


def shards_in(restored: Mapping[str, object]) -> list[tuple[Path, SavedDTensor]]:
    """Return every saved shard, with its path."""
    return [shard for key, saved in restored.items() for shard in instances(saved, SavedDTensor, (key,))]


def meshless(state: Mapping[str, object], shards: Iterable[tuple[Path, SavedDTensor]]) -> Iterator[str]:
    """Report shards on a mesh that this job does not have, because no DTensor can be made of them."""
    meshes = meshes_of(state)
    for path, shard in shards:
        if not _has_place(state.get(str(path[0])), path[1:]) and (reason := meshes.misfit(shard)):
            yield f"{show(path)}: {reason}"


def _has_place(target: object, path: Path) -> bool:
    """Return whether the path leads to a live tensor or a module, for which other checks report a mismatch."""
    for part in path:
        if isinstance(target, dict):
            target = target.get(part)
        elif isinstance(target, SEQUENCES) and isinstance(part, int) and part < len(target):
            target = target[part]
    return isinstance(target, torch.Tensor | nn.Module)
