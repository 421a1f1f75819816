"""Prepare the optimizers in a state for `tierd.dcp.load`.

DCP loads only into existing tensors, and an optimizer that has not taken a step has none, so its moments would silently
stay at zero. Therefore it receives tensors of the saved kind before the load.

DCP also writes the keys of mappings as text, while an optimizer numbers its parameters with ints.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer


class _StandIn:
    """Presents an optimizer to DCP with state tensors for everything that the checkpoint has for it.

    Args:
        saved: by parameter number and name, the checkpoint's metadata of a tensor, or None for a plain value.
    """

    def __init__(self, optimizer: Optimizer, saved: Mapping[int, Mapping[str, TensorStorageMetadata | None]]) -> None:
        self.optimizer, self._saved = optimizer, saved

    def state_dict(self) -> dict[str, Any]:
        own = self.optimizer.state_dict()
        if own["state"]:
            return own
        parameters = list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))
        state = {
            number: {name: _room(parameters[number], stored) for name, stored in members.items()}
            for number, members in self._saved.items()
            if number < len(parameters)
        }
        return own | {"state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        members = state["state"]
        for key in [key for key in members if type(key) is str and key.isdecimal()]:
            members.setdefault(int(key), {}).update(members.pop(key))
        self.optimizer.load_state_dict(state)


def _room(parameter: torch.Tensor, stored: TensorStorageMetadata | None) -> torch.Tensor | None:
    """Return a tensor to load into, with the parameter's placement if it has the parameter's shape."""
    if stored is None:
        return None
    if stored.size == parameter.size():
        return torch.zeros_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
    return torch.zeros(
        stored.size, dtype=stored.properties.dtype
    )  # load_state_dict() moves it to the parameter's device


def stand_ins(state: Mapping[str, Any], metadata: Metadata | None) -> dict[str, Any]:
    """Return the state with a stand-in for each optimizer."""
    found = dict(state)
    for name, value in state.items():
        if isinstance(value, Optimizer):
            found[name] = _StandIn(value, _members(name, metadata))
    return found


def filled(state: MutableMapping[str, Any], given: Mapping[str, Any]) -> None:
    """Copy the values that DCP loaded into `given` back into `state`, from which `given` was made."""
    for name, value in given.items():
        if not isinstance(value, _StandIn) and state[name] is not value:
            state[name] = value


def _members(name: str, metadata: Metadata | None) -> dict[int, dict[str, TensorStorageMetadata | None]]:
    found: dict[int, dict[str, TensorStorageMetadata | None]] = {}
    paths = metadata.planner_data if metadata is not None else None
    for fqn, path in paths.items() if isinstance(paths, dict) else ():
        if not isinstance(path, tuple) or len(path) != 4 or path[:2] != (name, "state") or not str(path[2]).isdecimal():
            continue
        stored = metadata.state_dict_metadata.get(fqn) if metadata is not None else None
        found.setdefault(int(path[2]), {})[str(path[3])] = stored if isinstance(stored, TensorStorageMetadata) else None
    return found
