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


def differing(own: Iterable[object], saved: Iterable[object]) -> str | None:
    """Say how two sets of names differ, if they differ by wrappers' prefixes alone; else None."""
    mine, theirs = list(own), list(saved)
    pairs = _pairs(mine, theirs)
    if pairs is None:
        return None
    there, here = next((there, here) for there, here in pairs.items() if there != here)
    return f"the names differ by prefixes of wrappers alone: {there!r} in the checkpoint is {here!r} here; {WAY_OUT}"


def with_names_of(state: Mapping[str, object], restored: dict[str, Any]) -> dict[str, Any]:
    """Return a restored state in which modules' parameters, and mappings, have the names that they have in `state`.

    Only names that differ by wrappers' prefixes alone are changed. Tensors are neither copied nor changed.
    """
    return {key: _renamed(state[key], saved) if key in state else saved for key, saved in restored.items()}


def _renamed(target: object, saved: Any) -> Any:
    if not isinstance(saved, dict):
        return saved
    if isinstance(target, nn.Module):
        own = target.state_dict()
        pairs = _pairs(own, saved)
        return saved if pairs is None else _with_names(saved, pairs, own)
    if not isinstance(target, dict):
        return saved
    pairs = _pairs(target, saved)
    found = saved if pairs is None else _with_names(saved, pairs, target)
    for name in found.keys() & target.keys():
        inner = _renamed(target[name], found[name])
        if inner is not found[name]:
            found = copy.copy(found) if found is saved else found
            found[name] = inner
    return found


def _with_names(saved: dict[str, Any], pairs: Mapping[str, str], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `saved` under other names; an `OrderedDict` keeps torch's `_metadata`, under its modules' other names."""
    found: dict[str, Any] = OrderedDict() if isinstance(saved, OrderedDict) else {}
    found.update((pairs[name], value) for name, value in saved.items())
    metadata, wanted = getattr(saved, "_metadata", None), getattr(own, "_metadata", None)
    if isinstance(metadata, dict) and isinstance(wanted, dict):
        # A wrapper has an entry of its own, which comes first; that of what it wraps counts.
        front = _is_in_front(saved)
        known = {_bare(name, front): entry for name, entry in metadata.items()}
        front = _is_in_front(own)
        there = ((name, known.get(_bare(name, front))) for name in wanted)
        found._metadata = OrderedDict((name, entry) for name, entry in there if entry is not None)  # type: ignore[attr-defined]
    return found


def _pairs(own: Iterable[object], saved: Iterable[object]) -> dict[str, str] | None:
    """Return each saved name with the name that it has here; None if they are equal, or differ by more."""
    mine, theirs = list(own), list(saved)
    if len(mine) != len(theirs) or set(mine) == set(theirs):
        return None
    names = [one for one in (*mine, *theirs) if isinstance(one, str)]
    if len(names) != len(mine) + len(theirs):
        return None
    here, there = _by_bare_name(names[: len(mine)]), _by_bare_name(names[len(mine) :])
    if len(here) != len(mine) or here.keys() != there.keys():
        return None
    return {there[bare]: name for bare, name in here.items()}


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
