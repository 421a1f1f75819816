"""Load a restored state into an `nn.Module`.

Invariant: the module loads by its own `load_state_dict`, and receives no memory of the file that it might keep.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tierd.state.kinds.device_meshes import Meshes
from tierd.state.kinds.dtensors import SavedDTensor
from tierd.state.stored_dtypes import SHELLS
from tierd.state.values import fill

# Suffix in torch.nn.Module of values for a submodule's `set_extra_state`, which may keep them.
_EXTRA_STATE = "_extra_state"


def is_extra_state(key: str) -> bool:
    """Return whether a key of a module's state holds the result of `get_extra_state`."""
    return key.rpartition(".")[2] == _EXTRA_STATE


def _prepare_state(module: nn.Module, saved: dict[str, Any], memo: dict[int, object]) -> dict[str, Any]:
    """Return the state to pass to a module.

    It has views where torch's own modules copy, and owned memory where other code may keep it.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return copy.deepcopy(saved, memo)
    keepers = tuple(
        f"{prefix}." if prefix else ""
        for prefix, part in module.named_modules(remove_duplicate=False)
        if part._load_state_dict_pre_hooks or not type(part)._load_from_state_dict.__module__.startswith("torch.nn.")
    )
    prepared = copy.copy(saved)  # a copy of an OrderedDict keeps its _metadata
    for key, value in saved.items():
        if not isinstance(value, torch.Tensor | SavedDTensor) or key.startswith(keepers) or is_extra_state(key):
            prepared[key] = copy.deepcopy(value, memo)
        else:
            prepared[key] = memo.get(id(value), value)  # may be on the module's device already
    return prepared


def load_module(module: nn.Module, saved: dict[str, Any], memo: dict[int, object], meshes: Meshes) -> None:
    """Load a state that fits. `memo` is that of `deepcopy`. Raises the exceptions of `load_state_dict`."""
    prepared = _prepare_state(module, saved, memo)
    shards = [key for key, value in prepared.items() if isinstance(value, SavedDTensor)]
    module_state: dict[str, Any] = module.state_dict() if shards else {}
    for key in shards:
        prepared[key] = meshes.first(module_state[key]).made(prepared[key])
    prepared = meshes.put(prepared)  # shards nested more deeply, for example in an extra state
    tensors = {
        key: value for key, value in prepared.items() if isinstance(value, torch.Tensor) and not is_extra_state(key)
    }
    shells = [key for key, value in tensors.items() if value.dtype in SHELLS]
    if not shells or type(module).load_state_dict is not nn.Module.load_state_dict:
        module.load_state_dict(prepared)
        return
    module_state = module.state_dict()  # because torch itself cannot copy these dtypes into a module
    for key in shells:
        fill(module_state[key], prepared.pop(key))
    module.load_state_dict(prepared, strict=False)
