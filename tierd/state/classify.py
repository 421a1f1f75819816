"""Classify the values of a state: which are immutable, which hold others, and which load what was saved themselves."""

from __future__ import annotations

import enum
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from tierd.state.containers import SEQUENCES
from tierd.state.json_tree import SCALARS
from tierd.state.kinds import numpy_arrays, random_states

IMMUTABLE = frozenset(SCALARS) - {bytearray}
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


@runtime_checkable
class Stateful(Protocol):
    """An object that returns its state and loads it: module, optimizer, scheduler, data loader or `tierd.RngState`."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return whether `value` is an instance, not a class, with callable `state_dict` and `load_state_dict`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


class LoadKind(enum.Enum):
    """How a saved value is loaded into a live one."""

    TENSOR = enum.auto()  # filled in place; also a DTensor
    ARRAY = enum.auto()  # of NumPy, filled in place
    GENERATOR = enum.auto()  # set in place
    STATEFUL = enum.auto()  # loads by its own `load_state_dict`
    MAPPING = enum.auto()  # a dict, loaded key by key
    SEQUENCE = enum.auto()  # a list, tuple or deque, loaded value by value
    OTHER = enum.auto()  # replaced


_EXACT: dict[type, LoadKind] = {
    **dict.fromkeys(IMMUTABLE, LoadKind.OTHER),
    **dict.fromkeys(PLAIN, LoadKind.TENSOR),
    **dict.fromkeys(SEQUENCES, LoadKind.SEQUENCE),
    dict: LoadKind.MAPPING,
}


def kind_of(value: object) -> LoadKind:
    """Return the kind of a live value. A subclass has the kind of its base."""
    kind = _EXACT.get(type(value))
    if kind is not None:
        return kind
    if isinstance(value, torch.Tensor):
        return LoadKind.TENSOR
    if isinstance(value, torch.Generator) or random_states.kind_of(value) is not None:
        return LoadKind.GENERATOR
    if numpy_arrays.is_array(value):
        return LoadKind.ARRAY
    if is_stateful(value):
        return LoadKind.STATEFUL
    if isinstance(value, dict):
        return LoadKind.MAPPING
    return LoadKind.SEQUENCE if isinstance(value, SEQUENCES) else LoadKind.OTHER
