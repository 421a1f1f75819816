"""Names of parameters under wrappers: `torch.compile`, DDP, FSDP1 and activation checkpointing each add a prefix.

Sources of the prefixes: `torch/_dynamo/eval_frame.py` (`OptimizedModule._orig_mod`), `torch/nn/parallel/distributed.py`
and `torch/nn/parallel/data_parallel.py` (`module`), `torch/distributed/fsdp/_common_utils.py`
(`_fsdp_wrapped_module`), `torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py`
(`_checkpoint_wrapped_module`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

WAY_OUT = "pass ignore_prefixes=True to load it all the same"
_ANYWHERE = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_IN_FRONT = "module"  # only in front of every name, because models have submodules of this name


def differing(target: Iterable[object], saved: Iterable[object]) -> str | None:
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


def with_names_of(state: Mapping[str, object], restored: dict[str, Any]) -> dict[str, Any]:
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


def bare_names(names: list[str]) -> list[str]:
    """Return the names without wrappers' prefixes."""
    front = _is_in_front(names)
    return [_bare(name, front) for name in names]


def _by_bare_name(names: list[str]) -> dict[str, str]:
    return dict(zip(bare_names(names), names, strict=True))


def _is_in_front(names: Iterable[str]) -> bool:
    return all(_bare(name, False).startswith(f"{_IN_FRONT}.") for name in names)


def _bare(name: str, front: bool) -> str:
    words = [word for word in name.split(".") if word not in _ANYWHERE]
    if front and words[:1] == [_IN_FRONT]:
        words = words[1:]
    return ".".join(words)
