"""Compare a restored state with the objects into which it would be loaded.

Invariant: nothing is changed, and every mismatch is named. Checked are names, kinds, shapes and dtypes, memory shared
between targets (`tierd.state.aliasing`), and the arguments with which data loaders were made
(`tierd.state.kinds.loader_fingerprint`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from tierd.core.errors import ConfigError, StateMismatch, as_both
from tierd.core.units import list_few
from tierd.state.aliasing import AliasedTargets, expanded
from tierd.state.kinds import loader_fingerprint, stored_arrays, training_objects, wrapper_tensors
from tierd.state.kinds.dtensors import RESHARD, SavedDTensor, dtensor_misfit, is_dtensor, local_of
from tierd.state.kinds.live_parameters import shards_in, shards_without_mesh, wrapper_difference
from tierd.state.kinds.loader_arguments import mismatch_error
from tierd.state.kinds.random_generators import RngState, SavedRng, generator_misfit
from tierd.state.kinds.stored_arrays import is_plain
from tierd.state.kinds.training_objects import is_extra_state
from tierd.state.kinds.wrapper_tensors import SavedWrapper
from tierd.state.single_values import path_part_text, path_text, type_name, why_refused
from tierd.state.state_tree import SEQUENCES, Path, instances, leaves
from tierd.state.value_kinds import IMMUTABLE, PLAIN, LoadKind, Stateful, load_kind_of


class _Missing:
    """Stands for a value that the checkpoint lacks."""


_MISSING: Any = _Missing()
_WAY_OUT = "(None in this place takes what was saved)"


def select_entries(state: Mapping[str, Any], names: Collection[str] | None) -> Mapping[str, Any]:
    """Return the part of `state` to load into. Raises `ConfigError` if it lacks one of `names`, or these are empty."""
    if names is None:
        return state
    missing = [path_part_text(name) for name in names if name not in state]
    if missing or not names:
        entry_names = ", ".join(map(path_part_text, state)) or "no entry"
        if missing:
            raise ConfigError(f"only: {list_few(missing)} not in the state passed, which has {entry_names}")
        raise ConfigError(f"only: it names nothing; the state passed has {entry_names}")
    entries = {name: state[name] for name in names}
    return entries if isinstance(state, MutableMapping) else MappingProxyType(entries)


class LoadFit(NamedTuple):
    """What a load needs to know of a restored state that fits its targets."""

    # Each entry with `load_state_dict`: its path, the object and its saved state, an optimizer's in the order of its
    # parameters.
    stateful: list[tuple[Path, Stateful, Any]]
    has_shards: bool


def check_fit(state: Mapping[str, object], restored: Mapping[str, object]) -> LoadFit:
    """Compare a restored state with the objects into which it would be loaded. Changes nothing.

    Raises `StateMismatch`, which names the first few values that are missing, extra, or of another shape or dtype, and
    targets that share memory although their saved values differ.
    """
    mismatches: list[str] = []
    stateful: list[tuple[Path, Stateful, Any]] = []
    shared = AliasedTargets()
    missing, extra = [k for k in state if k not in restored], [k for k in restored if k not in state]
    if missing:
        mismatches.append(f"state: {list_few(map(path_part_text, missing))} not in the checkpoint")
    if extra:
        mismatches.append(
            f"state: {list_few(map(path_part_text, extra))} in the checkpoint, but not in the state passed"
        )
    try:
        for key in state:
            if key in restored:
                mismatches += _misfits(state[key], restored[key], (key,), stateful, shared)
                if not isinstance(state, MutableMapping) and not is_loaded_in_place(state[key], restored[key]):
                    mismatches.append(f"{path_text((key,))}: cannot be replaced in a {type_name(state)}; pass a dict")
        mismatches += shared.conflicts()
        name_of = training_objects.names_in(leaves(state))
        for path, target, saved in stateful:
            if isinstance(target, torch.optim.Optimizer):
                mismatches += [
                    f"{path_text(path)}: {reason}" for reason in training_objects.misfits(target, saved, name_of)
                ]
        for key in restored:
            wrappers = instances(restored[key], SavedWrapper, (key,))
            mismatches += [f"{path_text(path)}: {reason}" for path, saved in wrappers if (reason := saved.unusable())]
        shards = shards_in(restored)
        mismatches += shards_without_mesh(state, shards)
    except RecursionError as error:
        raise StateMismatch("state: nested too deeply, or a cycle") from error
    if mismatches:
        suffix = [f"and {len(mismatches) - 5} more"] if len(mismatches) > 5 else []
        way_out = [RESHARD] if any("DTensor" in mismatch for mismatch in mismatches) else []
        raise _error_class(mismatches, stateful)("; ".join([*mismatches[:5], *suffix, *way_out]))
    return LoadFit([(path, target, _align(target, saved)) for path, target, saved in stateful], bool(shards))


def _align(target: Stateful, saved: Any) -> Any:
    return training_objects.align_state(target, saved) if isinstance(target, torch.optim.Optimizer) else saved


def _error_class(mismatches: list[str], stateful: list[tuple[Path, Stateful, Any]]) -> type[StateMismatch]:
    """Return the class to raise: also a library's own, if every mismatch is of one object of that library."""
    for path, target, _ in stateful:
        error_class = mismatch_error(target)
        if error_class is not None and all(mismatch.startswith(path_text(path)) for mismatch in mismatches):
            return as_both(error_class)
    return StateMismatch


def _misfits(
    target: Any, saved: Any, path: Path, stateful: list[tuple[Path, Stateful, Any]], shared: AliasedTargets
) -> Iterator[str]:
    kind = load_kind_of(target)
    if kind is LoadKind.MAPPING:
        if is_loaded_in_place(target, saved):
            yield from shared.add_container(path, target, saved)
        if is_simple(target) and is_simple(saved):
            return
        if isinstance(saved, dict) and (reason := wrapper_difference(target, saved)):
            yield f"{path_text(path)}: {reason}"
            return
        if isinstance(saved, dict) and (reason := training_objects.misfit_of_groups(_groups(target), _groups(saved))):
            yield f"{path_text(path)}: {reason}"
            return
        for key, inner in target.items():
            saved_inner = saved.get(key, _MISSING) if isinstance(saved, dict) else _MISSING
            yield from _misfits(inner, saved_inner, (*path, key), stateful, shared)
        extra = {key: v for key, v in saved.items() if key not in target} if isinstance(saved, dict) else saved
        yield from _homeless(target, extra, path)
    elif kind is LoadKind.SEQUENCE:
        if not isinstance(target, tuple) and is_loaded_in_place(target, saved):
            yield from shared.add_container(path, target, saved)
        if is_simple(target) and is_simple(saved):
            return
        saved_items = list(saved) if is_sequence_of(target, saved) else []
        for index, inner in enumerate(target):
            saved_inner = saved_items[index] if index < len(saved_items) else _MISSING
            yield from _misfits(inner, saved_inner, (*path, index), stateful, shared)
        extra = dict(enumerate(saved_items[len(target) :], len(target))) if is_sequence_of(target, saved) else saved
        yield from _homeless(target, extra, path)
    elif kind is LoadKind.OTHER:
        yield from _homeless(target, saved, path)
    elif saved is _MISSING:
        yield f"{path_text(path)}: not in the checkpoint"
    elif kind is LoadKind.STATEFUL:
        stateful.append((path, target, saved))
        yield from (f"{path_text(path)}: {reason}" for reason in _stateful_misfits(target, saved, path, shared))
        loader_misfits = [
            f"{path_text(path)}{where}: {reason}" for where, reason in loader_fingerprint.misfits(target, saved)
        ]
        if loader_misfits:
            yield from loader_misfits[:-1]
            yield f"{loader_misfits[-1]} (None in place of {path_text(path)} takes what was saved)"
    elif reason := _MISFIT_BY_KIND[kind](target, saved):
        yield f"{path_text(path)}: {reason} {_WAY_OUT}"
    elif kind is not LoadKind.GENERATOR and is_loaded_in_place(target, saved):
        _share(shared, (path, None), target, saved)


def _groups(state_dict: dict[Any, Any]) -> object:
    return state_dict.get("param_groups") if "state" in state_dict else None


def _homeless(target: object, saved: Any, path: Path) -> Iterator[str]:
    """Report saved generators whose target is none: a new generator would belong to no object of the job."""
    if type(saved) in IMMUTABLE:
        return
    for place, generator in instances(saved, SavedRng, path):
        if target is not None:
            yield f"{path_text(place)}: {generator.label} in the checkpoint, none here {_WAY_OUT}"
        elif reason := generator.unusable():
            yield f"{path_text(place)}: {reason}"


def _tensor_misfit(target: torch.Tensor, saved: Any) -> str | None:
    if is_dtensor(target):
        return dtensor_misfit(target, saved)
    if isinstance(saved, SavedWrapper):
        return saved.misfit(target)
    if type(target) not in PLAIN and (wrapper := wrapper_tensors.wrapper_name_of(target)):
        saved_form = _form(saved) if isinstance(saved, torch.Tensor) else type_name(saved)
        return f"{saved_form} in the checkpoint, a {wrapper} here"
    if (reason := why_refused(target)) is not None:
        return reason
    if isinstance(saved, SavedDTensor):
        return f"{saved} in the checkpoint, {_form(target)}, no DTensor, here"
    if not isinstance(saved, torch.Tensor):
        return f"{saved.label if isinstance(saved, SavedRng) else type_name(saved)} in the checkpoint, a tensor here"
    if saved.shape != target.shape or saved.dtype != target.dtype:
        return f"{_form(saved)} in the checkpoint, {_form(target)} here"
    return None


def _array_misfit(target: Any, saved: Any) -> str | None:
    saved_form = _array_form(saved) if stored_arrays.is_array(saved) else type_name(saved)
    target_form = _array_form(target)
    return None if target_form == saved_form else f"{saved_form} in the checkpoint, {target_form} here"


_MISFIT_BY_KIND: dict[LoadKind, Callable[[Any, Any], str | None]] = {
    LoadKind.TENSOR: _tensor_misfit,
    LoadKind.ARRAY: _array_misfit,
    LoadKind.GENERATOR: generator_misfit,
}


def _stateful_misfits(target: Stateful, saved: Any, path: Path, shared: AliasedTargets) -> Iterator[str]:
    if isinstance(target, RngState):
        if (reason := target.misfit(saved)) is not None:
            yield reason
    elif isinstance(target, nn.Module):
        yield from _module_misfits(target, saved, path, shared)


def _module_misfits(module: nn.Module, saved: Any, path: Path, shared: AliasedTargets) -> Iterator[str]:
    if not isinstance(saved, dict):
        yield f"{type_name(saved)} in the checkpoint, a module here"
        return
    try:
        module_state = module.state_dict()
    except Exception as error:
        yield f"its own state_dict() raised {type(error).__name__}: {error}"
        return
    if reason := wrapper_difference(module_state, saved):
        yield reason
        return
    missing, extra = [k for k in module_state if k not in saved], [k for k in saved if k not in module_state]
    if missing:
        yield f"{list_few(map(path_part_text, missing))} not in the checkpoint"
    if extra:
        yield f"{list_few(map(path_part_text, extra))} in the checkpoint, but not in the module"
    # `set_extra_state` decides about a plain tensor, as in torch's own `load_state_dict`.
    checked = [k for k, v in module_state.items() if is_dtensor(v) or (_is_checked(v) and not is_extra_state(k))]
    pairs = [(k, module_state[k], saved[k]) for k in checked if k in saved]
    wrong: list[str] = []
    for k, v, saved_value in pairs:
        if reason := _tensor_misfit(v, saved_value):
            wrong.append(f"{path_part_text(k)} ({reason})")
        elif is_loaded_in_place(v, saved_value):
            _share(shared, (path, k), v, saved_value)
    if wrong:
        yield f"of another shape or dtype: {list_few(wrong)}"


def _is_checked(value: object) -> bool:
    return type(value) in PLAIN or (
        isinstance(value, torch.Tensor) and wrapper_tensors.wrapper_name_of(value) is not None
    )


def _share(shared: AliasedTargets, place: tuple[Path, str | None], target: torch.Tensor, saved: Any) -> None:
    for inner, stored in filled_pairs(target, saved):
        shared.add(place, inner, stored)


def filled_pairs(target: torch.Tensor, saved: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each plain tensor that a load fills for `target`, with the stored one."""
    local = saved.local if isinstance(saved, SavedDTensor) else saved
    if isinstance(local, SavedWrapper):
        yield from local.pairs(local_of(target))
    else:
        yield local_of(target), local


def is_loaded_in_place(target: Any, saved: Any) -> bool:
    """Whether a load keeps the object.

    Expanded and inference tensors and read-only arrays are replaced, because they cannot be written.
    """
    kind = load_kind_of(target)
    if kind is LoadKind.TENSOR:
        target = local_of(target)
        if wrapper_tensors.wrapper_name_of(target):
            return True
        return not expanded(target.shape, target.stride()) and not target.is_inference()
    if kind is LoadKind.ARRAY:
        return target.flags.writeable and not expanded(target.shape, target.strides)
    if kind is LoadKind.MAPPING:
        return isinstance(saved, dict)
    if kind is not LoadKind.SEQUENCE:
        return kind is not LoadKind.OTHER
    if not is_sequence_of(target, saved):
        return False
    if isinstance(target, tuple):
        return len(target) == len(saved) and all(map(is_loaded_in_place, target, saved))
    return not isinstance(target, deque) or bool(target.maxlen == saved.maxlen)


def is_sequence_of(target: Any, saved: Any) -> bool:
    """Whether a saved sequence is loaded into a live one value by value. A tuple of a subclass is replaced."""
    return type(target) is type(saved) or (isinstance(target, list | deque) and isinstance(target, type(saved)))


def is_simple(value: object) -> bool:
    """Whether this is a plain container of plain values alone."""
    if type(value) is dict:
        return is_plain(value.values())
    return type(value) in SEQUENCES and is_plain(value)  # type: ignore[arg-type]


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _array_form(array: Any) -> str:
    return f"array {array.dtype.str} {array.shape}"
