"""Load a restored state into the objects of the running job.

Invariant: nothing is loaded until everything that can be checked has been checked, and every mismatch is named. Checked
are names, kinds, shapes and dtypes, memory shared between targets (`tierd.state.aliasing`), and the arguments with
which data loaders were made (`tierd.state.kinds.loader_fingerprint`).

Entries with `load_state_dict` receive their saved state. An `nn.Module` receives views into the restored file, because
it copies them. Other objects receive tensors that own their memory, because an object may keep the tensors that it
receives. An optimizer does keep them and has most of the bytes, so it receives views as well if the file's memory may
be kept.

Plain values are restored in place: containers keep their identity and receive the saved content, and tensors and arrays
are overwritten. Any other value is replaced.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tierd.core.errors import ConfigError, StateMismatch
from tierd.spool.direct_io import PAGE
from tierd.state.aliasing import Aliased, expanded
from tierd.state.kinds import loader_fingerprint, numpy_arrays
from tierd.state.kinds.device_meshes import meshes_of, meshless, put_beside
from tierd.state.kinds.dtensors import RESHARD, SavedDTensor, is_dtensor, local_of
from tierd.state.kinds.dtensors import misfit as shard_misfit
from tierd.state.kinds.generators import SavedGenerator, generators_in, misfit, unusable
from tierd.state.kinds.modules import load_module
from tierd.state.kinds.optimizers import tensors_in
from tierd.state.kinds.packed_tensors import is_plain
from tierd.state.kinds.rng import RngState
from tierd.state.kinds.shard_datasets import mismatch_error
from tierd.state.kinds.wrapped_names import differing
from tierd.state.reclaim import ReclaimedMemory
from tierd.state.tensor_file import Buffer
from tierd.state.values import (
    IMMUTABLE,
    PLAIN,
    Path,
    Stateful,
    fill,
    is_stateful,
    show,
    show_part,
    type_name,
    why_refused,
)

_MISSING: Any = object()
_LONG = 1 << 10  # values
_WAY_OUT = "(None in this place takes what was saved)"


def check_fit(state: Mapping[str, object], restored: Mapping[str, object]) -> None:
    """Compare a restored state with the objects into which it would be loaded. Changes nothing.

    Args:
        restored: as `unflatten` returns it.

    Raises:
        StateMismatch: names the first few values that are missing, extra, or of another shape or dtype, and targets
            that share memory although their saved values differ.
    """
    _check(state, restored)


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
            raise ConfigError(f"only: {_few(missing)} not in the state passed, which has {there}")
        raise ConfigError(f"only: it names nothing; the state passed has {there}")
    entries = {name: state[name] for name in names}
    return entries if isinstance(state, MutableMapping) else MappingProxyType(entries)


def load(
    state: Mapping[str, object],
    restored: Mapping[str, object],
    *,
    lent: bool = True,
    file: Buffer | None = None,
    staged: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Check as `check_fit` does, then load.

    The objects with `load_state_dict` are loaded first, and then the plain values. Of the objects, those that yield
    samples come first, because their own `load_state_dict` refuses a state most often, and `RngState` comes last.

    Args:
        lent: whether the memory of the restored tensors is reused after the load. If not, optimizers keep views of
            large tensors, which keep the file's memory.
        file: the memory of the restored tensors, if it is not reused. If it is a mapping, the parts that no object kept
            are returned to the system; `restored`, if it is a dict, is emptied for that.
        staged: by the id of a restored tensor, a tensor with the same values on the target's device. Nothing else
            refers to it.

    Raises:
        StateMismatch: as `check_fit`, and then nothing was loaded; or an object's own `load_state_dict` raised
            (chained), and then the message says which entries were loaded before it.
    """
    kept = ReclaimedMemory(file, tensors_in(restored)) if file is not None and not lent else None
    _load(state, restored, lent, staged)
    if kept is not None:
        if isinstance(restored, dict):
            restored.clear()
        kept.release()


def _load(
    state: Mapping[str, object], restored: Mapping[str, object], lent: bool, staged: Mapping[int, torch.Tensor]
) -> None:
    stateful = _check(state, restored)
    memo: dict[int, object] = dict(staged)  # so that tied tensors are cloned only once
    meshes = meshes_of(state)
    done: list[str] = []
    for path, target, saved in sorted(stateful, key=lambda item: _turn(item[1])):
        try:
            if not lent and isinstance(target, torch.optim.Optimizer):
                _spare(saved, memo)
            if isinstance(target, nn.Module):
                load_module(target, saved, memo, meshes)
            else:
                given = _copied(loader_fingerprint.as_given(saved), memo)
                if isinstance(target, torch.optim.Optimizer):
                    put_beside(target, given, meshes)
                target.load_state_dict(meshes.put(given))
        except Exception as error:
            before = f"; already loaded: {_few(done)}" if done else "; nothing was loaded before it"
            raise _as_both(type(error))(
                f"{show(path)}: load_state_dict() raised {type(error).__name__}: {error}{before}"
            ) from error
        done.append(show(path))
    for key, saved in restored.items():
        value = meshes.put(_place(state[key], saved, memo))
        if value is not state[key]:
            state[key] = value  # type: ignore[index]


def _is_simple(value: object) -> bool:
    """Return whether this is a plain container of plain values alone."""
    if type(value) is dict:
        return is_plain(value.values())
    return type(value) in (list, tuple) and is_plain(value)  # type: ignore[arg-type]


def _copied(saved: Any, memo: dict[int, object]) -> Any:
    """Return a deep copy.

    A long run of plain values is copied in one call, because `deepcopy` copies them one by one.
    """
    if type(saved) in IMMUTABLE:
        return saved
    for inner in _containers(saved):
        if len(inner) >= _LONG and _is_simple(inner) and id(inner) not in memo:
            memo[id(inner)] = inner if type(inner) is tuple else inner.copy()
            memo.setdefault(id(memo), []).append(inner)  # type: ignore[attr-defined]
    return copy.deepcopy(saved, memo)


def _containers(value: object) -> Iterator[Any]:
    todo = [value]
    while todo:
        inner = todo.pop()
        if isinstance(inner, dict | list | tuple):
            yield inner
            if not _is_simple(inner):
                todo += inner.values() if isinstance(inner, dict) else inner


def _turn(target: Stateful) -> int:
    return 2 if isinstance(target, RngState) else 0 if loader_fingerprint.gives_samples(target) else 1


def _as_both(kind: type[Exception]) -> type[StateMismatch]:
    """Return a class of `StateMismatch` that is also a subclass of the library's own exception.

    The reason is that the library's documentation names its own class for this error.
    """
    if kind.__module__ == "builtins" or issubclass(StateMismatch, kind):
        return StateMismatch
    if issubclass(kind, StateMismatch):
        return kind
    plain = {"__init__": Exception.__init__, "__str__": Exception.__str__, "__module__": StateMismatch.__module__}
    try:
        return type(StateMismatch.__name__, (StateMismatch, kind), plain)
    except TypeError:  # their memory layouts cannot be combined in one class
        return StateMismatch


def _spare(saved: object, memo: dict[int, object]) -> None:
    """Exempt large tensors from `deepcopy`, so that their target keeps views.

    Small tensors are copied, because each view keeps the whole file in memory and may be less aligned than a copy.
    """
    for tensor in tensors_in(saved):
        if tensor.nbytes >= PAGE:
            memo.setdefault(id(tensor), tensor)


def _check(state: Mapping[str, object], restored: Mapping[str, object]) -> list[tuple[Path, Stateful, Any]]:
    """Compare the states. Returns each entry with `load_state_dict`: its path, the object and its saved state."""
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
        found += meshless(state, restored)
    except RecursionError as error:
        raise StateMismatch("state: nested too deeply, or a cycle") from error
    if found:
        more = [f"and {len(found) - 5} more"] if len(found) > 5 else []
        way_out = [RESHARD] if any("DTensor" in one for one in found) else []
        raise _kind_of(found, stateful)("; ".join([*found[:5], *more, *way_out]))
    return stateful


def _kind_of(found: list[str], stateful: list[tuple[Path, Stateful, Any]]) -> type[StateMismatch]:
    """Return the class to raise: also a library's own, if every mismatch is of one object of that library."""
    for path, target, _ in stateful:
        own = mismatch_error(target)
        if own is not None and all(one.startswith(show(path)) for one in found):
            return _as_both(own)
    return StateMismatch


def _misfits(
    target: object, saved: Any, path: Path, stateful: list[tuple[Path, Stateful, Any]], shared: Aliased
) -> Iterator[str]:
    if is_stateful(target) or isinstance(target, torch.Tensor | torch.Generator) or numpy_arrays.is_array(target):
        if saved is _MISSING:
            yield f"{show(path)}: not in the checkpoint"
        elif isinstance(target, torch.Generator):
            if reason := misfit(target, saved):
                yield f"{show(path)}: {reason} {_WAY_OUT}"
        elif isinstance(target, torch.Tensor):
            if reasons := list(_tensor_misfits(target, saved)):
                yield from (f"{show(path)}: {reason} {_WAY_OUT}" for reason in reasons)
            elif _stays(target, saved):
                shared.add((path, None), local_of(target), _local(saved))
        elif numpy_arrays.is_array(target):
            here, there = _array_form(target), _array_form(saved) if numpy_arrays.is_array(saved) else type_name(saved)
            if here != there:
                yield f"{show(path)}: {there} in the checkpoint, {here} here {_WAY_OUT}"
            elif _stays(target, saved):
                shared.add((path, None), target, saved)
        elif is_stateful(target):
            stateful.append((path, target, saved))
            yield from (f"{show(path)}: {reason}" for reason in _stateful_misfits(target, saved, path, shared))
            other = [f"{show(path)}{where}: {reason}" for where, reason in loader_fingerprint.misfits(target, saved)]
            if other:
                yield from other[:-1]
                yield f"{other[-1]} (None in place of {show(path)} takes what was saved)"
    elif isinstance(target, dict):
        if _stays(target, saved):
            yield from shared.differing(path, target, saved)
        if _is_simple(target) and _is_simple(saved):
            return
        if isinstance(saved, dict) and (reason := differing(target, saved)):
            yield f"{show(path)}: {reason}"
            return
        for key, inner in target.items():
            there = saved.get(key, _MISSING) if isinstance(saved, dict) else _MISSING
            yield from _misfits(inner, there, (*path, key), stateful, shared)
        rest = {key: v for key, v in saved.items() if key not in target} if isinstance(saved, dict) else saved
        yield from _homeless(target, rest, path)
    elif isinstance(target, (list, tuple)):
        if isinstance(target, list) and _stays(target, saved):
            yield from shared.differing(path, target, saved)
        if _is_simple(target) and _is_simple(saved):
            return
        others = saved if type(saved) is type(target) else ()
        for index, inner in enumerate(target):
            there = others[index] if index < len(others) else _MISSING
            yield from _misfits(inner, there, (*path, index), stateful, shared)
        rest = dict(enumerate(others[len(target) :], len(target))) if type(saved) is type(target) else saved
        yield from _homeless(target, rest, path)
    else:
        yield from _homeless(target, saved, path)


def _homeless(target: object, saved: Any, path: Path) -> Iterator[str]:
    """Report saved generators whose target is not a generator: a new generator would belong to no object of the job."""
    for place, found in generators_in(saved, path):
        if target is not None:
            yield f"{show(place)}: a torch.Generator in the checkpoint, none here {_WAY_OUT}"
        elif reason := unusable(found, found.device):
            yield f"{show(place)}: {reason}"


def _local(saved: Any) -> Any:
    return saved.local if isinstance(saved, SavedDTensor) else saved


def _tensor_misfits(target: torch.Tensor, saved: Any) -> Iterator[str]:
    if is_dtensor(target):
        if reason := shard_misfit(target, saved):
            yield reason
        return
    reason = why_refused(target)
    if reason is not None:
        yield reason
    elif isinstance(saved, SavedDTensor):
        yield f"{saved} in the checkpoint, {_form(target)}, no DTensor, here"
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
    if reason := differing(own, saved):
        yield reason
        return
    missing, extra = [k for k in own if k not in saved], [k for k in saved if k not in own]
    if missing:
        yield f"{_few(map(show_part, missing))} not in the checkpoint"
    if extra:
        yield f"{_few(map(show_part, extra))} in the checkpoint, but not in the module"
    both = [(k, v, saved[k]) for k, v in own.items() if k in saved and (type(v) in PLAIN or is_dtensor(v))]
    wrong: list[str] = []
    for k, v, other in both:
        reasons = [f"{show_part(k)} ({reason})" for reason in _tensor_misfits(v, other)]
        wrong += reasons
        if not reasons and _stays(v, other):
            shared.add((path, k), local_of(v), _local(other))
    if wrong:
        yield f"of another shape or dtype: {_few(wrong)}"


def _place(target: Any, saved: Any, memo: dict[int, object]) -> Any:
    """Restore `saved` into `target`. Returns `target` with new content, or the value that replaces it."""
    if is_stateful(target):
        return target
    if isinstance(target, torch.Generator):
        saved.set(target)
        return target
    if isinstance(target, dict) and isinstance(saved, dict):
        if type(target) is dict and _is_simple(target) and _is_simple(saved):
            target.clear()
            target.update(saved)
            return target
        new = {key: _place(target.get(key), value, memo) for key, value in saved.items()}
        target.clear()
        for key, value in new.items():
            target[key] = value
        if isinstance(target, OrderedDict):
            # Restores the _metadata of a module's state.
            vars(target).update(copy.deepcopy(getattr(saved, "__dict__", {})))
        return target
    if type(target) is list and type(saved) is list:
        if _is_simple(target) and _is_simple(saved):
            target[:] = saved
            return target
        target[:] = [_place(old, value, memo) for old, value in _aligned(target, saved)]
        return target
    if type(target) is tuple and type(saved) is tuple:
        if _is_simple(target) and _is_simple(saved):
            return saved
        placed = tuple(_place(old, value, memo) for old, value in _aligned(target, saved))
        same = len(placed) == len(target) and all(a is b for a, b in zip(placed, target, strict=True))
        return target if same else placed
    if not _stays(target, saved):
        return _copied(saved, memo)
    if isinstance(target, torch.Tensor):
        local = _local(saved)
        there = memo.get(id(local), local)
        fill(local_of(target), there if isinstance(there, torch.Tensor) else local)
    else:
        target[...] = saved
    return target


def _stays(target: Any, saved: Any) -> bool:
    """Return whether `_place` keeps the object.

    Expanded and inference tensors and read-only arrays are replaced, because they cannot be written.
    """
    if isinstance(target, torch.Generator):
        return True
    if isinstance(target, torch.Tensor):
        target = local_of(target)
        return not expanded(target.shape, target.stride()) and not target.is_inference()
    if numpy_arrays.is_array(target):
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
