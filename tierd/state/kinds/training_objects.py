"""Load a restored state into an `nn.Module`, and assign an optimizer's saved state to its parameters by their names.

`torch.optim.Optimizer.load_state_dict` assigns saved state by position alone, and compares neither names nor shapes. So
an optimizer whose parameters come in another order would train on with the moments of other parameters. Where there are
no names, shapes are compared.

Invariants:

- A module loads by its own `load_state_dict`, and receives no memory of the file that it might keep.
- An optimizer's state is only rearranged, and no tensor's values are read. State is moved to another position only if
  each of its tensors has the form of its parameter's moments. A state that one parameter holds for all of them, as
  LBFGS has it, depends on the order, so it is refused.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tierd.core.units import list_few
from tierd.state.kinds.dtensors import SavedDTensor, local_of
from tierd.state.kinds.live_parameters import Meshes, strip_wrapper_prefixes
from tierd.state.kinds.stored_arrays import OPAQUE_DTYPES
from tierd.state.kinds.wrapper_tensors import SavedWrapper
from tierd.state.single_values import fill_tensor, path_part_text

# Suffix in torch.nn.Module of values for a submodule's `set_extra_state`, which may keep them.
_EXTRA_STATE = "_extra_state"


def is_extra_state(key: str) -> bool:
    """Whether a key of a module's state holds the result of `get_extra_state`."""
    return key.rpartition(".")[2] == _EXTRA_STATE


def keeper_prefixes(module: nn.Module) -> tuple[str, ...] | None:
    """Return how the keys of submodules begin that may keep or change what they load, because their code is not torch's
    own; None if that holds for the module as a whole.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return None
    return tuple(
        f"{prefix}." if prefix else ""
        for prefix, part in module.named_modules(remove_duplicate=False)
        if part._load_state_dict_pre_hooks or not type(part)._load_from_state_dict.__module__.startswith("torch.nn.")
    )


def _prepare_state(module: nn.Module, saved: dict[str, Any], memo: dict[int, object]) -> dict[str, Any]:
    """Return the state to pass to a module: views where torch's own modules copy, owned memory where others may keep
    it.
    """
    keepers = keeper_prefixes(module)
    if keepers is None:
        return copy.deepcopy(saved, memo)
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
        prepared[key] = meshes.with_first(module_state[key]).dtensor_of(prepared[key])
    prepared = meshes.place_shards(prepared)  # shards nested more deeply, for example in an extra state
    tensors = {
        key: value for key, value in prepared.items() if isinstance(value, torch.Tensor) and not is_extra_state(key)
    }
    shells = [key for key, value in tensors.items() if value.dtype in OPAQUE_DTYPES]
    if not shells or type(module).load_state_dict is not nn.Module.load_state_dict:
        module.load_state_dict(prepared)
        return
    module_state = module.state_dict()  # because torch itself cannot copy these dtypes into a module
    for key in shells:
        fill_tensor(module_state[key], prepared.pop(key))
    module.load_state_dict(prepared, strict=False)


Groups = Sequence[dict[str, Any]]  # the `param_groups` of an optimizer, or of its saved state
NameOf = Callable[[torch.Tensor], str | None]

SAME_ORDER = "make the optimizer with its parameters in the order of the checkpoint"
_SCALARS = frozenset(("step", "eta", "mu", "mu_product"))  # of torch's own optimizers; every other tensor is a moment
_PLAIN = (torch.Tensor, SavedDTensor, SavedWrapper, bool, int, float, str, type(None))


class _Moment(NamedTuple):
    """A tensor in the saved state of one parameter."""

    place: int  # the parameter's position among all of the optimizer
    key: Any
    shape: tuple[int, ...]  # of a DTensor the whole one's


def align_state(optimizer: Optimizer, saved: Any) -> Any:
    """Return a state that fits (`misfits`), in the order of the optimizer's own parameters.

    It is `saved` itself if the order is the same, or if either side has no names. Otherwise it numbers the parameters
    as the optimizer's own `state_dict()` does. Tensors are neither copied nor changed.
    """
    order = _order(optimizer, saved)
    if order is None or order == list(range(len(order))):
        return saved
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    places = {numbers[saved_index]: index for index, saved_index in enumerate(order)}
    state = {places.get(number, number): members for number, members in saved["state"].items()}
    groups, first = [], 0
    for group, target_group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        behind = first + len(target_group["params"])
        groups.append({**group, "params": list(range(first, behind)), "param_names": list(target_group["param_names"])})
        first = behind
    reordered = copy.copy(saved)
    reordered["state"], reordered["param_groups"] = state, groups
    return reordered


def parameters_by_number(optimizer: Optimizer, groups: object) -> dict[Any, torch.Tensor]:
    """Return the optimizer's parameters by the numbers that they have in saved `param_groups`.

    Without groups, or if they do not fit, parameters have the numbers of `state_dict()`.
    """
    target_groups = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        order = _order(optimizer, {"param_groups": groups})
        numbers = [number for group in groups for number in group["params"]]  # type: ignore[attr-defined]
    except (TypeError, KeyError, AttributeError):
        order, numbers = None, []
    if order is not None:
        numbers = [numbers[place] for place in order]
    if len(numbers) != len(parameters):
        numbers = [number for group in target_groups for number in group["params"]]
    return dict(zip(numbers, parameters, strict=True))


def misfits(optimizer: Optimizer, saved: Any, name_of: NameOf) -> Iterator[str]:
    """Report why a saved state cannot be assigned to the optimizer's parameters."""
    target_groups: Groups = optimizer.param_groups
    try:
        saved_groups: Groups = saved["param_groups"]
        sizes = [len(group["params"]) for group in saved_groups]
        state = {number: members for number, members in saved["state"].items() if isinstance(members, dict)}
    except (TypeError, KeyError, AttributeError):
        yield "not the state of an optimizer"
        return
    is_free = not _has_hook(optimizer)  # such a hook adapts the state, as torch documents it
    reason = _name_misfit(target_groups, saved_groups) if is_free else None
    if reason is None and sizes != (target_sizes := [len(group["params"]) for group in target_groups]):
        reason = f"parameter groups of {sizes} parameters in the checkpoint, of {target_sizes} here"
    if reason is None and is_free:
        reason = _shape_misfit(optimizer, saved, state, name_of)
    if reason is not None:
        yield reason


def misfit_of_groups(target_groups: object, saved_groups: object) -> str | None:
    """Return why saved `param_groups` cannot replace others: their parameters have another order.

    Anything else is no misfit.
    """
    try:
        target_names, saved = _names(target_groups), _names(saved_groups)  # type: ignore[arg-type]
    except (TypeError, KeyError, AttributeError):
        return None
    if (
        target_names is None
        or saved is None
        or target_names.keys() != saved.keys()
        or list(target_names.items()) == list(saved.items())
    ):
        return None
    return _order_misfit(target_names, saved)


def names_in(state: Iterable[object]) -> NameOf:
    """Return a function that names a parameter as the modules among these values name it."""
    names_by_id: dict[int, str] = {}
    for value in state:
        if isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters():
                names_by_id.setdefault(id(parameter), name)
    return lambda parameter: names_by_id.get(id(parameter))


def _has_hook(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))


def _names(groups: Groups) -> dict[str, int] | None:
    """Return each parameter's name, without wrappers' prefixes, with the number of its group; None without names."""
    listed: list[str] = []
    at: list[int] = []
    for number, group in enumerate(groups):
        names = group.get("param_names")
        if not isinstance(names, list | tuple) or len(names) != len(group["params"]):
            return None
        listed += names
        at += [number] * len(names)
    if not _are_texts(listed):
        return None
    groups_by_name = dict(zip(strip_wrapper_prefixes(listed), at, strict=True))
    return groups_by_name if len(groups_by_name) == len(listed) else None


def _are_texts(names: Iterable[object]) -> bool:
    return all(type(name) is str for name in names)


def _order(optimizer: Optimizer, saved: Any) -> list[int] | None:
    """Return for each of the optimizer's parameters its position in `saved`; None if the names do not say it."""
    target_names, saved_names = _names(optimizer.param_groups), _names(saved["param_groups"])
    if target_names is None or saved_names is None or target_names != saved_names or _has_hook(optimizer):
        return None
    places = {name: place for place, name in enumerate(saved_names)}
    return [places[name] for name in target_names]


def _name_misfit(target_groups: Groups, saved_groups: Groups) -> str | None:
    """Return how the names of parameters, or of groups, differ in more than the order within a group."""
    titles = [[group.get("name") for group in groups] for groups in (target_groups, saved_groups)]
    if titles[0] != titles[1] and _are_texts(titles[0] + titles[1]) and Counter(titles[0]) == Counter(titles[1]):
        return f"parameter groups in the order {titles[1]} in the checkpoint, {titles[0]} here; {SAME_ORDER}"
    target_names, saved = _names(target_groups), _names(saved_groups)
    if target_names is None or saved is None or target_names == saved:
        return None
    reasons = []
    if missing := [name for name in target_names if name not in saved]:
        reasons.append(f"the parameters {_quoted(missing)} not in the checkpoint")
    if extra := [name for name in saved if name not in target_names]:
        reasons.append(f"{_quoted(extra)} in the checkpoint, not among the parameters here")
    if reasons:
        return f"{'; '.join(reasons)} (an optimizer that is made without names is compared by shapes)"
    moved = [name for name, group in target_names.items() if saved[name] != group]
    old_group, new_group = saved[moved[0]], target_names[moved[0]]
    groups = f"{path_part_text(moved[0])} in group {old_group} in the checkpoint, in group {new_group} here"
    return f"the parameters {_quoted(moved)} in other groups: {groups}"


def _order_misfit(target_names: Iterable[str], saved: Iterable[str]) -> str:
    differing = [pair for pair in zip(saved, target_names, strict=True) if pair[0] != pair[1]]
    order = [_quoted(names) for names in zip(*differing, strict=True)] or [_quoted(saved), _quoted(target_names)]
    return f"its parameters come in another order: {order[0]} in the checkpoint where here are {order[1]}; {SAME_ORDER}"


def _shape_misfit(optimizer: Optimizer, saved: Any, state: dict[Any, dict[Any, Any]], name_of: NameOf) -> str | None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(map(is_lazy, parameters)):
        return None
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    straight = list(range(len(numbers)))
    order = _order(optimizer, saved) or straight
    moments = [
        _Moment(place, key, shape)
        for place, saved_place in enumerate(order)
        for key, value in state.get(numbers[saved_place], {}).items()
        if (shape := _shape(value)) is not None
    ]
    if order != straight and not (
        saved.keys() == {"state", "param_groups"}
        and all(isinstance(value, _PLAIN) for members in state.values() for value in members.values())
        and all(not moment.shape or _has_parameter_shape(moment, parameters) for moment in moments)
    ):
        return misfit_of_groups(optimizer.param_groups, saved["param_groups"])
    is_torch_s = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    if is_torch_s and not isinstance(optimizer, torch.optim.LBFGS):
        wrong = [
            moment for moment in moments if moment.key not in _SCALARS and not _has_parameter_shape(moment, parameters)
        ]
    else:
        wrong = _permuted_moments(moments, parameters)
    if not wrong:
        return None
    names = dict.fromkeys(_parameter_label(optimizer, moment.place, name_of) for moment in wrong)
    return (
        f"{path_part_text(wrong[0].key)} of {list_few(names)} has another shape than its parameter: "
        f"{wrong[0].shape} in the checkpoint, {tuple(parameters[wrong[0].place].shape)} here. If the parameters come "
        f"in another order: {SAME_ORDER}, or with named_parameters() when you save and when you restore"
    )


def _shape(value: object) -> tuple[int, ...] | None:
    if isinstance(value, SavedDTensor):
        return value.placement.shape
    if isinstance(value, SavedWrapper):
        return value.shape
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _has_parameter_shape(moment: _Moment, parameters: list[torch.Tensor]) -> bool:
    """Whether the moment has its parameter's shape, or that of a factor of it."""
    parameter = parameters[moment.place]
    full_shape = tuple(parameter.shape)
    if moment.shape in (full_shape, tuple(local_of(parameter).shape)):
        return True
    # Adafactor's means: torch keeps the dimension that they are taken over, with the length 1; others leave it out.
    rows, columns = full_shape[:-1], (*full_shape[:-2], *full_shape[-1:])
    kept_shapes = (*rows, 1), (*full_shape[:-2], 1, *full_shape[-1:])
    return len(full_shape) > 1 and moment.shape in (*kept_shapes, rows, columns)


def _permuted_moments(moments: list[_Moment], parameters: list[torch.Tensor]) -> list[_Moment]:
    """Return the moments of another shape than their parameters, where the shapes of a key are those of the parameters.

    This is for optimizers of which nothing is known. A key whose tensors have the parameters' shapes, but at other
    parameters, shows another order. Any other shapes show nothing.
    """
    wrong = []
    for key in dict.fromkeys(moment.key for moment in moments):
        pairs = [(moment, tuple(parameters[moment.place].shape)) for moment in moments if moment.key == key]
        if Counter(moment.shape for moment, _ in pairs) == Counter(full_shape for _, full_shape in pairs):
            wrong += [moment for moment, full_shape in pairs if moment.shape != full_shape]
    return wrong


def _parameter_label(optimizer: Optimizer, place: int, name_of: NameOf) -> str:
    at = place
    for number, group in enumerate(optimizer.param_groups):
        if at < len(group["params"]):
            name = name_of(group["params"][at]) or (group["param_names"][at] if group.get("param_names") else None)
            return path_part_text(name) if name else f"parameter {at} of group {number}"
        at -= len(group["params"])
    raise IndexError(place)


def _quoted(names: Iterable[str]) -> str:
    return list_few(map(path_part_text, names))
