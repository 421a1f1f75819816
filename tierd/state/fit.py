"""Compare a restored state with the objects into which it would be loaded.

Invariant: nothing is changed, and every mismatch is named. Checked are names, kinds, shapes and dtypes, memory shared
between targets (`tierd.state.aliasing`), and the arguments with which data loaders were made
(`tierd.state.kinds.loader_fingerprint`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from tierd.core.errors import ConfigError, StateMismatch, as_both
from tierd.state.aliasing import Aliased, expanded
from tierd.state.classify import IMMUTABLE, PLAIN, Kind, Stateful, kind_of
from tierd.state.containers import SEQUENCES, Path, instances, leaves
from tierd.state.kinds import loader_fingerprint, numpy_arrays, optimizer_states, wrapper_tensors
from tierd.state.kinds.device_meshes import meshless, shards_in
from tierd.state.kinds.dtensors import RESHARD, SavedDTensor, is_dtensor, local_of
from tierd.state.kinds.dtensors import misfit as shard_misfit
from tierd.state.kinds.generators import SavedRng, misfit
from tierd.state.kinds.modules import is_extra_state
from tierd.state.kinds.packed_tensors import is_plain
from tierd.state.kinds.rng import RngState
from tierd.state.kinds.shard_datasets import mismatch_error
from tierd.state.kinds.wrapped_names import differing
from tierd.state.kinds.wrapper_tensors import SavedWrapper
from tierd.state.values import show, show_part, type_name, why_refused


class _Missing:
    """Stands for a value that the checkpoint lacks."""


_MISSING: Any = _Missing()
_WAY_OUT = "(None in this place takes what was saved)"


def chosen(state: Mapping[str, Any], names: Collection[str] | None) -> Mapping[str, Any]:
    """Return the part of `state` to load into: all of it, or the entries of these names.

    Raises:
        ConfigError: `state` lacks one of the names, or `names` is empty.
    """
    if names is None:
        return state
    missing = [show_part(name) for name in names if name not in state]
    if missing or not names:
        there = ", ".join(map(show_part, state)) or "no entry"
        if missing:
            raise ConfigError(f"only: {few(missing)} not in the state passed, which has {there}")
        raise ConfigError(f"only: it names nothing; the state passed has {there}")
    entries = {name: state[name] for name in names}
    return entries if isinstance(state, MutableMapping) else MappingProxyType(entries)


class Fitting(NamedTuple):
    """What a load needs to know of a restored state that fits its targets.

    Attributes:
        stateful: each entry with `load_state_dict`: its path, the object and its saved state, which for an optimizer is
            in the order of its parameters.
        has_shards: whether the restored state has shards of DTensors.
    """

    stateful: list[tuple[Path, Stateful, Any]]
    has_shards: bool


def check_fit(state: Mapping[str, object], restored: Mapping[str, object]) -> Fitting:
    """Compare a restored state with the objects into which it would be loaded. Changes nothing.

    Args:
        restored: as `unflatten` returns it.

    Raises:
        StateMismatch: names the first few values that are missing, extra, or of another shape or dtype, and targets
            that share memory although their saved values differ.
    """
    found: list[str] = []
    stateful: list[tuple[Path, Stateful, Any]] = []
    shared = Aliased()
    missing, extra = [k for k in state if k not in restored], [k for k in restored if k not in state]
    if missing:
        found.append(f"state: {few(map(show_part, missing))} not in the checkpoint")
    if extra:
        found.append(f"state: {few(map(show_part, extra))} in the checkpoint, but not in the state passed")
    try:
        for key in state:
            if key in restored:
                found += _misfits(state[key], restored[key], (key,), stateful, shared)
                if not isinstance(state, MutableMapping) and not stays(state[key], restored[key]):
                    found.append(f"{show((key,))}: cannot be replaced in a {type_name(state)}; pass a dict")
        found += shared.conflicts()
        name_of = optimizer_states.names_in(leaves(state))
        for path, target, saved in stateful:
            if isinstance(target, torch.optim.Optimizer):
                found += [f"{show(path)}: {reason}" for reason in optimizer_states.misfits(target, saved, name_of)]
        for key in restored:
            wrappers = instances(restored[key], SavedWrapper, (key,))
            found += [f"{show(path)}: {reason}" for path, saved in wrappers if (reason := saved.unusable())]
        shards = shards_in(restored)
        found += meshless(state, shards)
    except RecursionError as error:
        raise StateMismatch("state: nested too deeply, or a cycle") from error
    if found:
        more = [f"and {len(found) - 5} more"] if len(found) > 5 else []
        way_out = [RESHARD] if any("DTensor" in one for one in found) else []
        raise _error_class(found, stateful)("; ".join([*found[:5], *more, *way_out]))
    return Fitting([(path, target, _aligned(target, saved)) for path, target, saved in stateful], bool(shards))


def _aligned(target: Stateful, saved: Any) -> Any:
    return optimizer_states.aligned(target, saved) if isinstance(target, torch.optim.Optimizer) else saved


def _error_class(found: list[str], stateful: list[tuple[Path, Stateful, Any]]) -> type[StateMismatch]:
    """Return the class to raise: also a library's own, if every mismatch is of one object of that library."""
    for path, target, _ in stateful:
        own = mismatch_error(target)
        if own is not None and all(one.startswith(show(path)) for one in found):
            return as_both(own)
    return StateMismatch


def _misfits(
    target: Any, saved: Any, path: Path, stateful: list[tuple[Path, Stateful, Any]], shared: Aliased
) -> Iterator[str]:
    kind = kind_of(target)
    if kind is Kind.MAPPING:
        if stays(target, saved):
            yield from shared.differing(path, target, saved)
        if is_simple(target) and is_simple(saved):
            return
        if isinstance(saved, dict) and (reason := differing(target, saved)):
            yield f"{show(path)}: {reason}"
            return
        if isinstance(saved, dict) and (reason := optimizer_states.misfit_of_groups(_groups(target), _groups(saved))):
            yield f"{show(path)}: {reason}"
            return
        for key, inner in target.items():
            there = saved.get(key, _MISSING) if isinstance(saved, dict) else _MISSING
            yield from _misfits(inner, there, (*path, key), stateful, shared)
        rest = {key: v for key, v in saved.items() if key not in target} if isinstance(saved, dict) else saved
        yield from _homeless(target, rest, path)
    elif kind is Kind.SEQUENCE:
        if not isinstance(target, tuple) and stays(target, saved):
            yield from shared.differing(path, target, saved)
        if is_simple(target) and is_simple(saved):
            return
        others = list(saved) if is_sequence_of(target, saved) else []
        for index, inner in enumerate(target):
            there = others[index] if index < len(others) else _MISSING
            yield from _misfits(inner, there, (*path, index), stateful, shared)
        rest = dict(enumerate(others[len(target) :], len(target))) if is_sequence_of(target, saved) else saved
        yield from _homeless(target, rest, path)
    elif kind is Kind.OTHER:
        yield from _homeless(target, saved, path)
    elif saved is _MISSING:
        yield f"{show(path)}: not in the checkpoint"
    elif kind is Kind.STATEFUL:
        stateful.append((path, target, saved))
        yield from (f"{show(path)}: {reason}" for reason in _stateful_misfits(target, saved, path, shared))
        other = [f"{show(path)}{where}: {reason}" for where, reason in loader_fingerprint.misfits(target, saved)]
        if other:
            yield from other[:-1]
            yield f"{other[-1]} (None in place of {show(path)} takes what was saved)"
    elif reasons := list(_FILLED[kind](target, saved)):
        yield from (f"{show(path)}: {reason} {_WAY_OUT}" for reason in reasons)
    elif kind is not Kind.GENERATOR and stays(target, saved):
        _share(shared, (path, None), target, saved)


def _groups(state_dict: dict[Any, Any]) -> object:
    """Return the `param_groups` if this is the state dict of an optimizer."""
    return state_dict.get("param_groups") if "state" in state_dict else None


def _homeless(target: object, saved: Any, path: Path) -> Iterator[str]:
    """Report saved generators whose target is not a generator: a new generator would belong to no object of the job."""
    if type(saved) in IMMUTABLE:
        return
    for place, found in instances(saved, SavedRng, path):
        if target is not None:
            yield f"{show(place)}: {found.label} in the checkpoint, none here {_WAY_OUT}"
        elif reason := found.unusable():
            yield f"{show(place)}: {reason}"


def _tensor_misfits(target: torch.Tensor, saved: Any) -> Iterator[str]:
    if is_dtensor(target):
        if reason := shard_misfit(target, saved):
            yield reason
        return
    if isinstance(saved, SavedWrapper):
        if reason := saved.misfit(target):
            yield reason
    elif type(target) not in PLAIN and wrapper_tensors.name_of(target):
        there = _form(saved) if isinstance(saved, torch.Tensor) else type_name(saved)
        yield f"{there} in the checkpoint, a {wrapper_tensors.name_of(target)} here"
    elif (reason := why_refused(target)) is not None:
        yield reason
    elif isinstance(saved, SavedDTensor):
        yield f"{saved} in the checkpoint, {_form(target)}, no DTensor, here"
    elif not isinstance(saved, torch.Tensor):
        there = saved.label if isinstance(saved, SavedRng) else type_name(saved)
        yield f"{there} in the checkpoint, a tensor here"
    elif saved.shape != target.shape or saved.dtype != target.dtype:
        yield f"{_form(saved)} in the checkpoint, {_form(target)} here"


def _array_misfits(target: Any, saved: Any) -> Iterator[str]:
    here, there = _array_form(target), _array_form(saved) if numpy_arrays.is_array(saved) else type_name(saved)
    if here != there:
        yield f"{there} in the checkpoint, {here} here"


def _generator_misfits(target: Any, saved: Any) -> Iterator[str]:
    if reason := misfit(target, saved):
        yield reason


_FILLED: dict[Kind, Callable[[Any, Any], Iterator[str]]] = {
    Kind.TENSOR: _tensor_misfits,
    Kind.ARRAY: _array_misfits,
    Kind.GENERATOR: _generator_misfits,
}


def _stateful_misfits(target: Stateful, saved: Any, path: Path, shared: Aliased) -> Iterator[str]:
    if isinstance(target, RngState):
        if (reason := target.misfit(saved)) is not None:
            yield reason
    elif isinstance(target, nn.Module):
        yield from _module_misfits(target, saved, path, shared)


def _module_misfits(module: nn.Module, saved: Any, path: Path, shared: Aliased) -> Iterator[str]:
    if not isinstance(saved, dict):
        yield f"{type_name(saved)} in the checkpoint, a module here"
        return
    try:
        own = module.state_dict()
    except Exception as error:
        yield f"its own state_dict() raised {type(error).__name__}: {error}"
        return
    if reason := differing(own, saved):
        yield reason
        return
    missing, extra = [k for k in own if k not in saved], [k for k in saved if k not in own]
    if missing:
        yield f"{few(map(show_part, missing))} not in the checkpoint"
    if extra:
        yield f"{few(map(show_part, extra))} in the checkpoint, but not in the module"
    # `set_extra_state` decides about a plain tensor, as in torch's own `load_state_dict`.
    checked = [k for k, v in own.items() if is_dtensor(v) or (_is_checked(v) and not is_extra_state(k))]
    both = [(k, own[k], saved[k]) for k in checked if k in saved]
    wrong: list[str] = []
    for k, v, other in both:
        reasons = [f"{show_part(k)} ({reason})" for reason in _tensor_misfits(v, other)]
        wrong += reasons
        if not reasons and stays(v, other):
            _share(shared, (path, k), v, other)
    if wrong:
        yield f"of another shape or dtype: {few(wrong)}"


def _is_checked(value: object) -> bool:
    return type(value) in PLAIN or (isinstance(value, torch.Tensor) and wrapper_tensors.name_of(value) is not None)


def _share(shared: Aliased, place: tuple[Path, str | None], target: torch.Tensor, saved: Any) -> None:
    for inner, stored in filled_pairs(target, saved):
        shared.add(place, inner, stored)


def filled_pairs(target: torch.Tensor, saved: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each plain tensor that a load fills for `target`, with the stored one."""
    local = saved.local if isinstance(saved, SavedDTensor) else saved
    if isinstance(local, SavedWrapper):
        yield from local.pairs(local_of(target))
    else:
        yield local_of(target), local


def stays(target: Any, saved: Any) -> bool:
    """Return whether a load keeps the object.

    Expanded and inference tensors and read-only arrays are replaced, because they cannot be written.
    """
    kind = kind_of(target)
    if kind is Kind.TENSOR:
        target = local_of(target)
        if wrapper_tensors.name_of(target):
            return True
        return not expanded(target.shape, target.stride()) and not target.is_inference()
    if kind is Kind.ARRAY:
        return target.flags.writeable and not expanded(target.shape, target.strides)
    if kind is Kind.MAPPING:
        return isinstance(saved, dict)
    if kind is not Kind.SEQUENCE:
        return kind is not Kind.OTHER
    if not is_sequence_of(target, saved):
        return False
    if isinstance(target, tuple):
        return len(target) == len(saved) and all(map(stays, target, saved))
    return not isinstance(target, deque) or bool(target.maxlen == saved.maxlen)


def is_sequence_of(target: Any, saved: Any) -> bool:
    """Return whether a saved sequence is loaded into a live one value by value. A tuple of a subclass is replaced."""
    return type(target) is type(saved) or (isinstance(target, list | deque) and isinstance(target, type(saved)))


def is_simple(value: object) -> bool:
    """Return whether this is a plain container of plain values alone."""
    if type(value) is dict:
        return is_plain(value.values())
    return type(value) in SEQUENCES and is_plain(value)  # type: ignore[arg-type]


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _array_form(array: Any) -> str:
    return f"array {array.dtype.str} {array.shape}"


def few(items: Iterable[str], count: int = 3) -> str:
    listed = list(items)
    return ", ".join(listed[:count]) + (f" and {len(listed) - count} more" if len(listed) > count else "")
