"""Present an optimizer to DCP, which loads it for `tierd.dcp.load`.

DCP loads only into existing tensors, and an optimizer that has not taken a step has none, so its moments would silently
stay at zero. Therefore DCP receives tensors of the saved kind. It also receives new ones if the optimizer's parameters
come in another order than the saved ones, because it would load into another parameter's moments.

DCP also writes the keys of mappings as text, while an optimizer numbers its parameters with ints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from tierd.state.kinds.optimizer_states import NameOf, aligned, misfits, owners

_IDENTIFYING = ("params", "param_names", "name")  # members of a group that its parameters are compared by


class OptimizerStandIn:
    """Presents an optimizer to DCP with state tensors for everything that the checkpoint has for it.

    Args:
        name: of the optimizer in the state.
        value: returns the checkpoint's value of a name, None if it has none or it cannot be read.
    """

    def __init__(
        self, name: str, optimizer: Optimizer, metadata: Metadata | None, value: Callable[[str], object]
    ) -> None:
        self.optimizer, self._saved = optimizer, _members(name, metadata)
        self._groups = _groups(name, metadata, value)
        self._nested = {
            (int(path[2]), path[3])
            for _, path in _paths(metadata)
            if len(path) > 4 and path[:2] == (name, "state") and str(path[2]).isdecimal()
        }

    def misfits(self, name_of: NameOf) -> Iterator[str]:
        """Report why the optimizer cannot load what the checkpoint's metadata describes."""
        optimizer_state = self.optimizer.state_dict()["state"]
        unplaced = [(number, key) for number, key in sorted(self._nested) if key not in optimizer_state.get(number, {})]
        if unplaced:
            number, key = unplaced[0]
            yield (
                f"{key!r} of parameter {number} holds several tensors, which DCP does not load into an optimizer "
                "that has none there; Checkpointer.restore does, or take a step first"
            )
            return
        if not self._groups:
            return
        state: dict[int, dict[str, Any]] = {
            number: {
                key: torch.empty(stored.size, device="meta") for key, stored in members.items() if stored is not None
            }
            for number, members in self._saved.items()
        }
        for number, key in self._nested:
            state.setdefault(number, {})[key] = []
        yield from misfits(self.optimizer, {"state": state, "param_groups": self._groups}, name_of)

    def state_dict(self) -> dict[str, Any]:
        optimizer_state = self.optimizer.state_dict()
        if not any("param_names" in group for group in self._groups):
            # Left out, because DCP refuses what the checkpoint lacks; torch keeps those that the optimizer has.
            groups = [
                {key: value for key, value in group.items() if key != "param_names"}
                for group in optimizer_state["param_groups"]
            ]
            optimizer_state = optimizer_state | {"param_groups": groups}
        parameters = owners(self.optimizer, self._groups)
        if optimizer_state["state"] and list(parameters) == list(
            owners(self.optimizer, optimizer_state["param_groups"])
        ):
            return optimizer_state
        state = {
            number: {name: _room(parameters[number], stored) for name, stored in members.items()}
            for number, members in self._saved.items()
            if number in parameters
        }
        return optimizer_state | {"state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        members = state["state"]
        for key in [key for key in members if type(key) is str and key.isdecimal()]:
            members.setdefault(int(key), {}).update(members.pop(key))
        self.optimizer.load_state_dict(aligned(self.optimizer, state))


def _room(parameter: torch.Tensor, stored: TensorStorageMetadata | None) -> torch.Tensor | None:
    """Return a tensor to load into, with the parameter's placement if it has the parameter's shape."""
    if stored is None:
        return None
    if stored.size == parameter.size():
        return torch.zeros_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
    return torch.zeros(
        stored.size, dtype=stored.properties.dtype
    )  # load_state_dict() moves it to the parameter's device


def _members(name: str, metadata: Metadata | None) -> dict[int, dict[str, TensorStorageMetadata | None]]:
    """Return by parameter number and key the metadata of each state tensor; None in the place of a plain value."""
    by_number: dict[int, dict[str, TensorStorageMetadata | None]] = {}
    for fqn, path in _paths(metadata):
        if len(path) == 4 and path[:2] == (name, "state") and str(path[2]).isdecimal():
            assert metadata is not None
            stored = metadata.state_dict_metadata.get(fqn)
            members = by_number.setdefault(int(path[2]), {})
            members[str(path[3])] = stored if isinstance(stored, TensorStorageMetadata) else None
    return by_number


def _groups(name: str, metadata: Metadata | None, value: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return what identifies the parameters in the saved `param_groups`; empty if it cannot be read."""
    by_number: dict[int, dict[str, Any]] = {}
    for fqn, path in _paths(metadata):
        if path[:2] != (name, "param_groups"):
            continue
        if len(path) == 2:  # as torch up to 2.3 wrote it: all groups in one value
            groups = value(fqn)
            return groups if isinstance(groups, list) and all(isinstance(group, dict) for group in groups) else []
        if len(path) == 4 and type(path[2]) is int and path[3] in _IDENTIFYING:
            by_number.setdefault(path[2], {})[path[3]] = value(fqn)
    is_read = list(by_number) == list(range(len(by_number))) and all(
        isinstance(group.get("params"), list) for group in by_number.values()
    )
    return list(by_number.values()) if is_read else []


def _paths(metadata: Metadata | None) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each name in the flat state with its path in the nested one."""
    paths = metadata.planner_data if metadata is not None else None
    for fqn, path in paths.items() if isinstance(paths, dict) else ():
        if isinstance(path, tuple):
            yield fqn, path
