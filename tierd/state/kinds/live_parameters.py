"""The parameters of the running job: what optimizers change, names under wrappers, and the device meshes.

`torch.compile`, DDP, FSDP1 and activation checkpointing each add a prefix to names. Sources of the prefixes:
`torch/_dynamo/eval_frame.py` (`OptimizedModule._orig_mod`), `torch/nn/parallel/distributed.py` and
`torch/nn/parallel/data_parallel.py` (`module`), `torch/distributed/fsdp/_common_utils.py` (`_fsdp_wrapped_module`),
`torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py` (`_checkpoint_wrapped_module`).

Invariants:

- Only attributes of objects are read to find an optimizer's tensors; no `state_dict()` is called and no tensor's values
  are read.
- No mesh is created here, because every rank would have to create it at the same time. So a shard is refused if no
  DTensor of this job lies on a mesh like the one on which it was saved.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tierd.core.shard_placement import REPLICATE, SHARD, STRIDED
from tierd.state.kinds import wrapper_tensors
from tierd.state.kinds.dtensors import SavedDTensor, has_whole_shard, is_dtensor, local_of, tensors_held_by, tensors_in
from tierd.state.kinds.wrapper_tensors import SavedWrapper
from tierd.state.single_values import is_storable, path_text
from tierd.state.state_tree import SEQUENCES, Path, instances, leaves, replace_values
from tierd.state.value_kinds import IMMUTABLE

_MAX_MEMBERS = 64  # items; larger containers are not searched, because nobody keeps optimizers in them
_DEPTH = 3  # levels of nested containers and objects that are searched for optimizers

_NO_PLACE = (torch.Tensor, nn.Module)
_requires_grad = operator.attrgetter("requires_grad")


def address_and_size(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def optimizer_tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that `step()` may change; for a DTensor its local shard.

    Wrappers are left out, because a write to one does not raise the version counters of its inner tensors.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for tensor in chain(parameters, leaves(optimizer.state)):
        if isinstance(tensor, torch.Tensor) and wrapper_tensors.wrapper_name_of(local_of(tensor)) is None:
            yield local_of(tensor)


def optimizers_in(state: Mapping[str, object]) -> list[Optimizer]:
    """Return the optimizers among a state's values, in small containers there, and in attributes of objects there."""
    optimizers: dict[int, Optimizer] = {}
    level: list[object] = list(state.values())
    for _ in range(_DEPTH):
        inner: list[object] = []
        for value in level:
            if type(value) in IMMUTABLE or isinstance(value, _NO_PLACE):
                continue
            if isinstance(value, Optimizer):
                optimizers[id(value)] = value
            parts = value if isinstance(value, (dict, *SEQUENCES)) else _attributes(value)
            if len(parts) <= _MAX_MEMBERS:
                inner += parts.values() if isinstance(parts, dict) else parts
        level = inner
    return list(optimizers.values())


def trained_parameters(optimizers: list[Optimizer]) -> list[bool]:
    """Return for each parameter whether these optimizers change it; their groups may also list frozen ones."""
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return list(map(_requires_grad, chain.from_iterable(groups)))


def names_changed_by_step(optimizers: list[Optimizer], tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    changed_places = {
        address_and_size(tensor)
        for optimizer in optimizers
        for tensor in _changed_tensors(optimizer)
        if is_storable(tensor)
    }
    return frozenset(
        name
        for name, tensor in tensors.items()
        if changed_places and tensor.nbytes and address_and_size(tensor) in changed_places
    )


def _changed_tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield from tensors_held_by(parameter)
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor) or key.requires_grad:
            yield from tensors_in(value)


def _attributes(value: object) -> dict[str, object]:
    try:
        attributes: dict[str, object] = getattr(value, "__dict__", {})
        return attributes
    except Exception:  # some objects raise when their attributes are read; no optimizer is found in them
        return {}


WAY_OUT = "pass ignore_prefixes=True to load it all the same"
_ANYWHERE = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_IN_FRONT = "module"  # only in front of every name, because models have submodules of this name


def wrapper_difference(target: Iterable[object], saved: Iterable[object]) -> str | None:
    """Say how two sets of names differ, if they differ by wrappers' prefixes alone; else None."""
    target_names, saved_names = list(target), list(saved)
    pairs = _pairs(target_names, saved_names)
    if pairs is None:
        return None
    saved_name, target_name = next((old, new) for old, new in pairs.items() if old != new)
    return (
        f"the names differ by prefixes of wrappers alone: {saved_name!r} in the checkpoint is {target_name!r} here; "
        f"{WAY_OUT}"
    )


def rename_like(state: Mapping[str, object], restored: dict[str, Any]) -> dict[str, Any]:
    """Return a restored state in which modules' parameters, and mappings, have the names that they have in `state`.

    Only names that differ by wrappers' prefixes alone are changed. Tensors are neither copied nor changed.
    """
    return {key: _rename(state[key], saved) if key in state else saved for key, saved in restored.items()}


def _rename(target: object, saved: Any) -> Any:
    if not isinstance(saved, dict):
        return saved
    if isinstance(target, nn.Module):
        module_state = target.state_dict()
        pairs = _pairs(module_state, saved)
        return saved if pairs is None else _rename_keys(saved, pairs, module_state)
    if not isinstance(target, dict):
        return saved
    pairs = _pairs(target, saved)
    renamed = saved if pairs is None else _rename_keys(saved, pairs, target)
    for name in renamed.keys() & target.keys():
        inner = _rename(target[name], renamed[name])
        if inner is not renamed[name]:
            renamed = copy.copy(renamed) if renamed is saved else renamed
            renamed[name] = inner
    return renamed


def _rename_keys(saved: dict[str, Any], pairs: Mapping[str, str], target: Mapping[str, Any]) -> dict[str, Any]:
    """Return `saved` under other names; an `OrderedDict` keeps torch's `_metadata`, under its modules' other names."""
    renamed: dict[str, Any] = OrderedDict() if isinstance(saved, OrderedDict) else {}
    renamed.update((pairs[name], value) for name, value in saved.items())
    metadata, target_metadata = getattr(saved, "_metadata", None), getattr(target, "_metadata", None)
    if isinstance(metadata, dict) and isinstance(target_metadata, dict):
        # A wrapper has an entry of its own, which comes first; that of what it wraps counts.
        front = _is_in_front(saved)
        entries_by_name = {_bare(name, front): entry for name, entry in metadata.items()}
        front = _is_in_front(target)
        entries = ((name, entries_by_name.get(_bare(name, front))) for name in target_metadata)
        renamed._metadata = OrderedDict((name, entry) for name, entry in entries if entry is not None)  # type: ignore[attr-defined]
    return renamed


def _pairs(target: Iterable[object], saved: Iterable[object]) -> dict[str, str] | None:
    """Return each saved name with the name that it has here; None if they are equal, or differ by more."""
    target_names, saved_names = list(target), list(saved)
    if len(target_names) != len(saved_names) or set(target_names) == set(saved_names):
        return None
    names = [name for name in (*target_names, *saved_names) if isinstance(name, str)]
    if len(names) != len(target_names) + len(saved_names):
        return None
    target_by_bare, saved_by_bare = _by_bare_name(names[: len(target_names)]), _by_bare_name(names[len(target_names) :])
    if len(target_by_bare) != len(target_names) or target_by_bare.keys() != saved_by_bare.keys():
        return None
    return {saved_by_bare[bare]: name for bare, name in target_by_bare.items()}


def strip_wrapper_prefixes(names: list[str]) -> list[str]:
    front = _is_in_front(names)
    return [_bare(name, front) for name in names]


def _by_bare_name(names: list[str]) -> dict[str, str]:
    return dict(zip(strip_wrapper_prefixes(names), names, strict=True))


def _is_in_front(names: Iterable[str]) -> bool:
    return all(_bare(name, False).startswith(f"{_IN_FRONT}.") for name in names)


def _bare(name: str, front: bool) -> str:
    words = [word for word in name.split(".") if word not in _ANYWHERE]
    if front and words[:1] == [_IN_FRONT]:
        words = words[1:]
    return ".".join(words)


class Meshes:
    """The device meshes of a running job's state, for saved DTensors that have no live DTensor as their target."""

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

    def with_first(self, tensor: torch.Tensor) -> Meshes:
        """Return the same meshes with that of `tensor` first: two of a job may have the same shape and names."""
        reordered = Meshes((tensor,))
        reordered._meshes |= self._meshes
        return reordered

    def dtensor_of(self, saved: SavedDTensor) -> Any:
        """Return a DTensor around the saved shard, on this job's mesh; it shares the shard's memory.

        Raises `ValueError` if no mesh of this job is the one on which the shard was saved.
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
        local = saved.local.rebuild() if isinstance(saved.local, SavedWrapper) else saved.local
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
        if not has_whole_shard(saved):
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

    def place_shards(self, value: Any) -> Any:
        """Return `value` with a DTensor for each saved shard in it. Containers are kept."""
        return replace_values(value, SavedDTensor, self.dtensor_of)


def meshes_of(state: Mapping[str, object]) -> Meshes:
    """Return the meshes of all objects in the state, those of its optimizers' parameters first."""
    return Meshes(chain(optimizers_in(state), leaves(state)))


def place_optimizer_shards(optimizer: Optimizer, saved: Any, meshes: Meshes) -> None:
    """Replace shards in an optimizer's saved state by DTensors, each on the mesh of its parameter."""
    saved_state = saved["state"]
    for index, parameter in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        if isinstance(saved_state, dict) and index in saved_state:
            saved_state[index] = meshes.with_first(parameter).place_shards(saved_state[index])


def shards_in(restored: Mapping[str, object]) -> list[tuple[Path, SavedDTensor]]:
    return [shard for key, saved in restored.items() for shard in instances(saved, SavedDTensor, (key,))]


def shards_without_mesh(state: Mapping[str, object], shards: Iterable[tuple[Path, SavedDTensor]]) -> Iterator[str]:
    """Report shards on a mesh that this job does not have, because no DTensor can be made of them."""
    meshes = meshes_of(state)
    for path, shard in shards:
        if not _has_place(state.get(str(path[0])), path[1:]) and (reason := meshes.misfit(shard)):
            yield f"{path_text(path)}: {reason}"


def _has_place(target: object, path: Path) -> bool:
    """Whether the path leads to a live tensor or a module, for which other checks report a mismatch."""
    for part in path:
        if isinstance(target, dict):
            target = target.get(part)
        elif isinstance(target, SEQUENCES) and isinstance(part, int) and part < len(target):
            target = target[part]
    return isinstance(target, torch.Tensor | nn.Module)
