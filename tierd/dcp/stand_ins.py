"""Present the objects of a state to DCP such that it loads into them what the checkpoint has.

DCP compares every tensor's size with what the object has now, and loads in place. Two kinds of objects have no right
size before a load: optimizers (`tierd.dcp.optimizers`), and modules whose `get_extra_state` may return anything. An
extra state is loaded as it was saved, and `set_extra_state` decides, as in torch's own `load_state_dict`.

Invariant: nothing in the state changes before DCP has planned the load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from tierd.core.errors import StateMismatch
from tierd.dcp.optimizers import OptimizerStandIn
from tierd.state.containers import leaves
from tierd.state.kinds.modules import is_extra_state
from tierd.state.kinds.optimizer_states import names_in


class _ModuleStandIn:
    """Presents a module to DCP with the extra states that the checkpoint has for it."""

    def __init__(self, name: str, module: nn.Module, metadata: Metadata | None) -> None:
        self._name, self._module, self._metadata = name, module, metadata

    def state_dict(self) -> dict[str, Any]:
        module_state = self._module.state_dict()
        module_state.update(_extra_states(self._name, module_state, self._metadata))
        return module_state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state)


class StandIns:
    """A state as DCP receives it: with stand-ins for optimizers, and for modules and mappings with extra states.

    Args:
        value: returns the checkpoint's value of a name, None if it has none or it cannot be read.

    Attributes:
        state: the state to pass to DCP.
    """

    def __init__(
        self, state: MutableMapping[str, Any], metadata: Metadata | None, value: Callable[[str], object]
    ) -> None:
        self._state = state
        self.state: dict[str, Any] = dict(state)
        for name, entry in state.items():
            if isinstance(entry, Optimizer):
                self.state[name] = OptimizerStandIn(name, entry, metadata, value)
            elif isinstance(entry, nn.Module):
                self.state[name] = _ModuleStandIn(name, entry, metadata)
            elif isinstance(entry, dict) and (extra := _extra_states(name, entry, metadata)):
                self.state[name] = {**entry, **extra}

    def check(self) -> None:
        """Compare optimizers with what the checkpoint has for them.

        Raises:
            StateMismatch: the parameters are others, or have other shapes; the message names them.
        """
        name_of = names_in(leaves(self._state))
        for name, entry in self.state.items():
            if isinstance(entry, OptimizerStandIn):
                for reason in entry.misfits(name_of):
                    raise StateMismatch(f"{name!r}: {reason}")

    def take(self) -> None:
        """Copy the values that DCP loaded back into the state."""
        for name, value in self.state.items():
            entry = self._state[name]
            if isinstance(value, OptimizerStandIn | _ModuleStandIn) or entry is value:
                continue
            if isinstance(entry, dict) and isinstance(value, dict) and value.keys() == entry.keys():
                entry.update(value)
            else:
                self._state[name] = value


def _extra_states(name: str, module_state: Mapping[Any, Any], metadata: Metadata | None) -> dict[Any, Any]:
    """Return by their keys the extra states to load into, of the kinds and sizes that the checkpoint has."""
    keys = [key for key in module_state if type(key) is str and is_extra_state(key)]
    paths = metadata.planner_data if keys and metadata is not None else None
    extra_states: dict[Any, Any] = {}
    for fqn, path in paths.items() if isinstance(paths, dict) else ():
        if isinstance(path, tuple) and len(path) > 1 and path[0] == name and path[1] in keys:
            assert metadata is not None
            stored = metadata.state_dict_metadata.get(fqn)
            room = None
            if isinstance(stored, TensorStorageMetadata):
                room = torch.zeros(stored.size, dtype=stored.properties.dtype)
            set_element(extra_states, path[1:], room)
    return extra_states
