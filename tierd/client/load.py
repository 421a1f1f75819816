"""A restored state -> the objects of the running job.

Law: nothing is loaded until everything that can be checked has been: names, kinds, shapes, dtypes, what shares memory
(`tierd.client.aliased`), and what data loaders were made with (`tierd.client.datastate`). What does not fit is named.

Entries with `load_state_dict` are given their part: an `nn.Module` views into the restored file (it copies),
everything else tensors that own their memory, since it may keep what it is given. An optimizer certainly does, and has
most of the bytes: it is given views as well, if the file's memory may be kept. Plain values are put back where they
were: containers keep their identity and take the saved content, tensors and arrays are copied into, anything else is
replaced.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tierd.client import arrays, datastate
from tierd.client.aliased import Aliased, expanded
from tierd.client.generators import SavedGenerator, generators_in, misfit, unusable
from tierd.client.kept import Kept
from tierd.client.modules import load_module
from tierd.client.owned import tensors_in
from tierd.client.rng import RngState
from tierd.client.tensorfile import Buffer
from tierd.client.values import Path, Stateful, fill, is_stateful, show, show_part, type_name, why_refused
from tierd.core.errors import ConfigError, StateMismatch
from tierd.device import PAGE

_MISSING: Any = object()
_WAY_OUT = "(None in this place takes what was saved)"


def check_fit(state: Mapping[str, object], restored: Mapping[str, object]) -> None:
    """Compare a restored state (as `unflatten` gives it) with the objects that it should be loaded into. Changes
    nothing.

    Raises:
        StateMismatch: names the first few of what is missing, extra, of another shape or dtype, or shares memory with
            what has other values in the checkpoint.
    """
    _check(state, restored)


def chosen(state: Mapping[str, Any], names: Collection[str] | None) -> Mapping[str, Any]:
    """What is to be loaded into: all of `state`, or the entries of these names.

    Raises:
        ConfigError: it lacks one of them, or there are none.
    """
    if names is None:
        return state
    missing = [show_part(name) for name in names if name not in state]
    if missing or not names:
        there = ", ".join(map(show_part, state)) or "no entry"
        if missing:
            raise ConfigError(f"only: {_few(missing)} not in the state passed, which has {there}")
        raise ConfigError(f"only: it names nothing; the state passed has {there}")
    entries = {name: state[name] for name in names}
    return entries if isinstance(state, MutableMapping) else MappingProxyType(entries)


def load(
    state: Mapping[str, object], restored: Mapping[str, object], *, lent: bool = True, file: Buffer | None = None
) -> None:
    """Check as `check_fit` does, then load: first the objects with `load_state_dict`, RngState last of them, then
    plain values.

    Args:
        lent: whether the memory of the restored tensors is used for something else afterwards. If not, optimizers
            keep their large tensors where they lie, and with them the whole file.
        file: that memory, if it is not lent, so that what nobody kept of it can be given back to the system, where it
            is a mapping. `restored`, a dict, is emptied for that.

    Raises:
        StateMismatch: as `check_fit`, and then nothing was loaded; or an object's own `load_state_dict` raised
            (chained), and then the message says what was loaded before it.
    """
    kept = Kept(file, tensors_in(restored)) if file is not None and not lent else None
    _load(state, restored, lent)
    if kept is not None:
        if isinstance(restored, dict):
            restored.clear()
        kept.release()


def _load(state: Mapping[str, object], restored: Mapping[str, object], lent: bool) -> None:
    stateful = _check(state, restored)
    memo: dict[int, object] = {}  # tied tensors are cloned once
    done: list[str] = []
    for path, target, saved in sorted(stateful, key=lambda item: isinstance(item[1], RngState)):
        try:
            if not lent and isinstance(target, torch.optim.Optimizer):
                _spare(saved, memo)
            if isinstance(target, nn.Module):
                load_module(target, saved, memo)
            else:
                target.load_state_dict(copy.deepcopy(datastate.as_given(saved), memo))
        except Exception as error:
            before = f"; already loaded: {_few(done)}" if done else "; nothing was loaded before it"
            raise StateMismatch(
                f"{show(path)}: load_state_dict() raised {type(error).__name__}: {error}{before}"
            ) from error
        done.append(show(path))
    for key, saved in restored.items():
        value = _place(state[key], saved, memo)
        if value is not state[key]:
            state[key] = value  # type: ignore[index]


def _spare(saved: object, memo: dict[int, object]) -> None:
    """Have `deepcopy` take large tensors as they are. A small one must not keep a file in memory, and may lie less
    aligned than one of its own."""
    for tensor in tensors_in(saved):
        if tensor.nbytes >= PAGE:
            memo.setdefault(id(tensor), tensor)


def _check(state: Mapping[str, object], restored: Mapping[str, object]) -> list[tuple[Path, Stateful, Any]]:
    """Every entry with `load_state_dict`, its path and what was saved for it."""
    found: list[str] = []
    stateful: list[tuple[Path, Stateful, Any]] = []
    shared = Aliased()
    missing, extra = [k for k in state if k not in restored], [k for k in restored if k not in state]
    if missing:
        found.append(f"state: {_few(map(show_part, missing))} not in the checkpoint")
    if extra:
        found.append(f"state: {_few(map(show_part, extra))} in the checkpoint, but not in the state passed")
    try:
        for key in state:
            if key in restored:
                found += _misfits(state[key], restored[key], (key,), stateful, shared)
                if not isinstance(state, MutableMapping) and not _stays(state[key], restored[key]):
                    found.append(f"{show((key,))}: cannot be replaced in a {type_name(state)}; pass a dict")
        found += shared.conflicts()
    except RecursionError as error:
        raise StateMismatch("state: nested too deeply, or a cycle") from error
    if found:
        raise StateMismatch("; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else ""))
    return stateful


def _misfits(
    target: object, saved: Any, path: Path, stateful: list[tuple[Path, Stateful, Any]], shared: Aliased
) -> Iterator[str]:
    if is_stateful(target) or isinstance(target, torch.Tensor | torch.Generator) or arrays.is_array(target):
        if saved is _MISSING:
            yield f"{show(path)}: not in the checkpoint"
        elif isinstance(target, torch.Generator):
            if reason := misfit(target, saved):
                yield f"{show(path)}: {reason} {_WAY_OUT}"
        elif isinstance(target, torch.Tensor):
            if reasons := list(_tensor_misfits(target, saved)):
                yield from (f"{show(path)}: {reason} {_WAY_OUT}" for reason in reasons)
            elif _stays(target, saved):
                shared.add((path, None), target, saved)
        elif arrays.is_array(target):
            here, there = _array_form(target), _array_form(saved) if arrays.is_array(saved) else type_name(saved)
            if here != there:
                yield f"{show(path)}: {there} in the checkpoint, {here} here {_WAY_OUT}"
            elif _stays(target, saved):
                shared.add((path, None), target, saved)
        elif is_stateful(target):
            stateful.append((path, target, saved))
            yield from (f"{show(path)}: {reason}" for reason in _stateful_misfits(target, saved, path, shared))
            other = [f"{show(path)}{where}: {reason}" for where, reason in datastate.misfits(target, saved)]
            if other:
                yield from other[:-1]
                yield f"{other[-1]} (None in place of {show(path)} takes what was saved)"
    elif isinstance(target, dict):
        if _stays(target, saved):
            yield from shared.differing(path, target, saved)
        for key, inner in target.items():
            there = saved.get(key, _MISSING) if isinstance(saved, dict) else _MISSING
            yield from _misfits(inner, there, (*path, key), stateful, shared)
        rest = {key: v for key, v in saved.items() if key not in target} if isinstance(saved, dict) else saved
        yield from _homeless(target, rest, path)
    elif isinstance(target, (list, tuple)):
        if isinstance(target, list) and _stays(target, saved):
            yield from shared.differing(path, target, saved)
        others = saved if type(saved) is type(target) else ()
        for index, inner in enumerate(target):
            there = others[index] if index < len(others) else _MISSING
            yield from _misfits(inner, there, (*path, index), stateful, shared)
        rest = dict(enumerate(others[len(target) :], len(target))) if type(saved) is type(target) else saved
        yield from _homeless(target, rest, path)
    else:
        yield from _homeless(target, saved, path)


def _homeless(target: object, saved: Any, path: Path) -> Iterator[str]:
    """Generators that were saved where there is none to set: a new one would be nobody's."""
    for place, found in generators_in(saved, path):
        if target is not None:
            yield f"{show(place)}: a torch.Generator in the checkpoint, none here {_WAY_OUT}"
        elif reason := unusable(found, found.device):
            yield f"{show(place)}: {reason}"


def _tensor_misfits(target: torch.Tensor, saved: Any) -> Iterator[str]:
    reason = why_refused(target)
    if reason is not None:
        yield reason
    elif not isinstance(saved, torch.Tensor):
        there = "a torch.Generator" if isinstance(saved, SavedGenerator) else type_name(saved)
        yield f"{there} in the checkpoint, a tensor here"
    elif saved.shape != target.shape or saved.dtype != target.dtype:
        yield f"{_form(saved)} in the checkpoint, {_form(target)} here"


def _stateful_misfits(target: Stateful, saved: Any, path: Path, shared: Aliased) -> Iterator[str]:
    if isinstance(target, RngState):
        misfit = target.misfit(saved)
        if misfit is not None:
            yield misfit
    elif isinstance(target, nn.Module):
        yield from _module_misfits(target, saved, path, shared)
    elif isinstance(target, torch.optim.Optimizer):
        try:
            there = [len(group["params"]) for group in saved["param_groups"]]
        except (TypeError, KeyError):
            yield "not the state of an optimizer"
            return
        here = [len(group["params"]) for group in target.param_groups]
        if here != there:
            yield f"parameter groups of {there} parameters in the checkpoint, of {here} here"


def _module_misfits(module: nn.Module, saved: Any, path: Path, shared: Aliased) -> Iterator[str]:
    if not isinstance(saved, dict):
        yield f"{type_name(saved)} in the checkpoint, a module here"
        return
    try:
        own = module.state_dict()
    except Exception as error:
        yield f"its own state_dict() raised {type(error).__name__}: {error}"
        return
    missing, extra = [k for k in own if k not in saved], [k for k in saved if k not in own]
    if missing:
        yield f"{_few(map(show_part, missing))} not in the checkpoint"
    if extra:
        yield f"{_few(map(show_part, extra))} in the checkpoint, but not in the module"
    both = [(k, v, saved[k]) for k, v in own.items() if k in saved and type(v) in (torch.Tensor, nn.Parameter)]
    wrong: list[str] = []
    for k, v, other in both:
        reasons = [f"{show_part(k)} ({reason})" for reason in _tensor_misfits(v, other)]
        wrong += reasons
        if not reasons and _stays(v, other):
            shared.add((path, k), v, other)
    if wrong:
        yield f"of another shape or dtype: {_few(wrong)}"


def _place(target: Any, saved: Any, memo: dict[int, object]) -> Any:
    """Put `saved` where `target` stands: `target` itself with new content, or what takes its place."""
    if is_stateful(target):
        return target
    if isinstance(target, torch.Generator):
        saved.set(target)
        return target
    if isinstance(target, dict) and isinstance(saved, dict):
        new = {key: _place(target.get(key), value, memo) for key, value in saved.items()}
        target.clear()
        for key, value in new.items():
            target[key] = value
        if isinstance(target, OrderedDict):
            vars(target).update(copy.deepcopy(getattr(saved, "__dict__", {})))  # the _metadata of a module's state
        return target
    if type(target) is list and type(saved) is list:
        target[:] = [_place(old, value, memo) for old, value in _aligned(target, saved)]
        return target
    if type(target) is tuple and type(saved) is tuple:
        placed = tuple(_place(old, value, memo) for old, value in _aligned(target, saved))
        same = len(placed) == len(target) and all(a is b for a, b in zip(placed, target, strict=True))
        return target if same else placed
    if not _stays(target, saved):
        return copy.deepcopy(saved, memo)
    if isinstance(target, torch.Tensor):
        fill(target, saved)
    else:
        target[...] = saved
    return target


def _stays(target: Any, saved: Any) -> bool:
    """Whether `_place` keeps the object: expanded and inference tensors and read-only arrays cannot be written."""
    if isinstance(target, torch.Generator):
        return True
    if isinstance(target, torch.Tensor):
        return not expanded(target.shape, target.stride()) and not target.is_inference()
    if arrays.is_array(target):
        return target.flags.writeable and not expanded(target.shape, target.strides)
    if type(target) is tuple and type(saved) is tuple and len(target) == len(saved):
        return all(_stays(old, value) for old, value in zip(target, saved, strict=True))
    both = (target, saved)
    return is_stateful(target) or any(all(isinstance(v, kind) for v in both) for kind in (dict, list))


def _aligned(targets: Iterable[Any], saved: Iterable[Any]) -> list[tuple[Any, Any]]:
    olds = list(targets)
    return [(olds[index] if index < len(olds) else None, value) for index, value in enumerate(saved)]


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _array_form(array: Any) -> str:
    return f"array {array.dtype.str} {array.shape}"


def _few(items: Iterable[str], count: int = 3) -> str:
    listed = list(items)
    return ", ".join(listed[:count]) + (f" and {len(listed) - count} more" if len(listed) > count else "")
