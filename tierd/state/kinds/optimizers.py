"""Find the tensors that an optimizer changes, its parameters and its own state, by address and size.

Invariant: only attributes of objects are read; no `state_dict()` is called and no tensor's values are read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer

from tierd.state.classify import IMMUTABLE
from tierd.state.containers import SEQUENCES, leaves
from tierd.state.kinds import wrapper_tensors
from tierd.state.kinds.dtensors import held_by, local_of, tensors_in
from tierd.state.values import is_storable

_MAX_MEMBERS = 64  # items; larger containers are not searched, because nobody keeps optimizers in them
_DEPTH = 3  # levels of nested containers and objects that are searched for optimizers

_NO_PLACE = (torch.Tensor, nn.Module)
_requires_grad = operator.attrgetter("requires_grad")


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's elements, and their size in bytes."""
    return tensor.data_ptr(), tensor.nbytes


def owned(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that `step()` may change; for a DTensor its local shard.

    Wrappers are left out, because a write to one does not raise the version counters of its inner tensors.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for tensor in chain(parameters, leaves(optimizer.state)):
        if isinstance(tensor, torch.Tensor) and wrapper_tensors.name_of(local_of(tensor)) is None:
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


def trained(optimizers: list[Optimizer]) -> list[bool]:
    """Return for each parameter whether these optimizers change it, because their groups may also list frozen ones."""
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return list(map(_requires_grad, chain.from_iterable(groups)))


def moving(optimizers: list[Optimizer], tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of the tensors that every step of these optimizers changes."""
    changed_places = {
        place(tensor) for optimizer in optimizers for tensor in _changed_tensors(optimizer) if is_storable(tensor)
    }
    return frozenset(
        name for name, tensor in tensors.items() if changed_places and tensor.nbytes and place(tensor) in changed_places
    )


def _changed_tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield from held_by(parameter)
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor) or key.requires_grad:
            yield from tensors_in(value)


def _attributes(value: object) -> dict[str, object]:
    try:
        attributes: dict[str, object] = getattr(value, "__dict__", {})
        return attributes
    except Exception:  # some objects raise when their attributes are read; no optimizer is found in them
        return {}
