"""A restored state -> an `nn.Module`.

Law: the module loads by its own `load_state_dict`, and is given no memory of the file's that it may keep.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tierd.client.tree import SHELLS
from tierd.client.values import fill

_EXTRA_STATE = "_extra_state"  # what a part's `set_extra_state` is given, and may keep; torch.nn.Module's own suffix


def _given(module: nn.Module, saved: dict[str, Any], memo: dict[int, object]) -> dict[str, Any]:
    """What a module is given: views for what torch's own modules copy, memory of its own for what others may keep."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return copy.deepcopy(saved, memo)
    keepers = tuple(
        f"{prefix}." if prefix else ""
        for prefix, part in module.named_modules(remove_duplicate=False)
        if part._load_state_dict_pre_hooks or not type(part)._load_from_state_dict.__module__.startswith("torch.nn.")
    )
    given = copy.copy(saved)  # keeps an OrderedDict's _metadata
    for key, value in saved.items():
        if not isinstance(value, torch.Tensor) or key.startswith(keepers) or key.endswith(_EXTRA_STATE):
            given[key] = copy.deepcopy(value, memo)
    return given


def load_module(module: nn.Module, saved: dict[str, Any], memo: dict[int, object]) -> None:
    """Load a state that fits. `memo` is `deepcopy`'s. Raises what `load_state_dict` raises."""
    given = _given(module, saved, memo)
    shells = [key for key, value in given.items() if isinstance(value, torch.Tensor) and value.dtype in SHELLS]
    if not shells or type(module).load_state_dict is not nn.Module.load_state_dict:
        module.load_state_dict(given)
        return
    own = module.state_dict()  # torch itself cannot copy these into a module
    for key in shells:
        fill(own[key], given.pop(key))
    module.load_state_dict(given, strict=False)
