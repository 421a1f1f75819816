"""What an optimizer changes: its parameters and its own state, by address and extent.

Law: nothing is asked of an object but its attributes; no `state_dict()` is called and no tensor's values are read.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer

from tierd.client.values import IMMUTABLE, is_storable

_FEW = 64  # parts; what has more of them is no place where one keeps optimizers
_DEPTH = 3  # of containers and objects, one inside the other, that are searched for optimizers

_NO_PLACE = (torch.Tensor, nn.Module)
_requires_grad = operator.attrgetter("requires_grad")


def leaves(value: object) -> Iterator[object]:
    """What lies in nested containers, however deep; the value itself if it is none."""
    todo = [value]
    while todo:
        inner = todo.pop()
        if isinstance(inner, Mapping):
            todo += inner.values()
        elif isinstance(inner, list | tuple | deque):
            todo += inner
        else:
            yield inner


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors among the leaves."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's elements begin and how many bytes they are."""
    return tensor.data_ptr(), tensor.nbytes


def owned(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """All that `step()` may change."""
    for group in optimizer.param_groups:
        yield from group["params"]
    yield from tensors_in(optimizer.state)


def optimizers_in(state: Mapping[str, object]) -> list[Optimizer]:
    """The optimizers among a state's values, in small containers there, and in the attributes of objects there."""
    found: dict[int, Optimizer] = {}
    level: list[object] = list(state.values())
    for _ in range(_DEPTH):
        inner: list[object] = []
        for value in level:
            if type(value) in IMMUTABLE or isinstance(value, _NO_PLACE):
                continue
            if isinstance(value, Optimizer):
                found[id(value)] = value
            parts = value if isinstance(value, dict | list | tuple) else getattr(value, "__dict__", {})
            if len(parts) <= _FEW:
                inner += parts.values() if isinstance(parts, dict) else parts
        level = inner
    return list(found.values())


def trained(optimizers: list[Optimizer]) -> list[bool]:
    """Which of their parameters these optimizers change; others may be listed, frozen, in their groups."""
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return list(map(_requires_grad, chain.from_iterable(groups)))


def moving(optimizers: list[Optimizer], tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Names of the tensors that every step of these optimizers changes."""
    own = {place(tensor) for optimizer in optimizers for tensor in _moved(optimizer) if is_storable(tensor)}
    return frozenset(name for name, tensor in tensors.items() if own and tensor.nbytes and place(tensor) in own)


def _moved(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.requires_grad)
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor) or key.requires_grad:
            yield from tensors_in(value)
