"""Assign an optimizer's saved state to its parameters by their names, or compare shapes where there are no names.

`torch.optim.Optimizer.load_state_dict` assigns saved state by position alone, and compares neither names nor shapes. So
an optimizer whose parameters come in another order would train on with the moments of other parameters.

Invariant: nothing is changed, and no tensor's values are read. State is moved to another position only if each of its
tensors has the form of its parameter's moments. A state that one parameter holds for all of them, as LBFGS has it,
depends on the order, so it is refused.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tierd.state.kinds.dtensors import SavedDTensor, local_of
from tierd.state.kinds.wrapped_names import bare_names
from tierd.state.kinds.wrapper_tensors import SavedWrapper
from tierd.state.values import show_part

Groups = Sequence[dict[str, Any]]  # the `param_groups` of an optimizer, or of its saved state
NameOf = Callable[[torch.Tensor], str | None]

SAME_ORDER = "make the optimizer with its parameters in the order of the checkpoint"
_SCALARS = frozenset(("step", "eta", "mu", "mu_product"))  # of torch's own optimizers; every other tensor is a moment
_PLAIN = (torch.Tensor, SavedDTensor, SavedWrapper, bool, int, float, str, type(None))
_MAX_NAMED = 3  # parameters that a message names


class _Moment(NamedTuple):
    """A tensor in the saved state of one parameter.

    Attributes:
        place: the parameter's position among all of the optimizer.
        key: of the tensor in the parameter's state.
        shape: of the tensor; of a DTensor the whole one's.
    """

    place: int
    key: Any
    shape: tuple[int, ...]


def aligned(optimizer: Optimizer, saved: Any) -> Any:
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


def owners(optimizer: Optimizer, groups: object) -> dict[Any, torch.Tensor]:
    """Return the optimizer's parameters by the numbers that they have in a saved state.

    Args:
        groups: the saved `param_groups`. Without them, or if they do not fit, parameters have the numbers of
            `state_dict()`.
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
    """Report why a saved state cannot be assigned to the optimizer's parameters.

    Args:
        name_of: returns the name by which a message mentions a parameter, or None.
    """
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
    """Return why the state dict of an optimizer cannot be replaced by a saved one: its parameters have another order.

    Args:
        target_groups, saved_groups: the `param_groups` of both. Anything else is no misfit.
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


# ---- names


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
    groups_by_name = dict(zip(bare_names(listed), at, strict=True))
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
        reasons.append(f"the parameters {_list_few(missing)} not in the checkpoint")
    if extra := [name for name in saved if name not in target_names]:
        reasons.append(f"{_list_few(extra)} in the checkpoint, not among the parameters here")
    if reasons:
        return f"{'; '.join(reasons)} (an optimizer that is made without names is compared by shapes)"
    moved = [name for name, group in target_names.items() if saved[name] != group]
    groups = (
        f"{show_part(moved[0])} in group {saved[moved[0]]} in the checkpoint, in group {target_names[moved[0]]} here"
    )
    return f"the parameters {_list_few(moved)} in other groups: {groups}"


def _order_misfit(target_names: Iterable[str], saved: Iterable[str]) -> str:
    differing = [pair for pair in zip(saved, target_names, strict=True) if pair[0] != pair[1]]
    order = [_list_few(names) for names in zip(*differing, strict=True)] or [_list_few(saved), _list_few(target_names)]
    return f"its parameters come in another order: {order[0]} in the checkpoint where here are {order[1]}; {SAME_ORDER}"


# ---- shapes


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
        f"{show_part(wrong[0].key)} of {_list_few(names, quote=False)} has another shape than its parameter: "
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
    """Return whether the moment has its parameter's shape, or that of a factor of it."""
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
            return show_part(name) if name else f"parameter {at} of group {number}"
        at -= len(group["params"])
    raise IndexError(place)


def _list_few(names: Iterable[str], *, quote: bool = True) -> str:
    listed = [show_part(name) if quote else name for name in names]
    return ", ".join(listed[:_MAX_NAMED]) + (
        f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    )
