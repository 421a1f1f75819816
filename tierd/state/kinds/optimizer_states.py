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
_FEW = 3  # parameters that a message names


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
    places = {numbers[there]: here for here, there in enumerate(order)}
    state = {places.get(number, number): members for number, members in saved["state"].items()}
    groups, first = [], 0
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        behind = first + len(own["params"])
        groups.append({**group, "params": list(range(first, behind)), "param_names": list(own["param_names"])})
        first = behind
    found = copy.copy(saved)
    found["state"], found["param_groups"] = state, groups
    return found


def owners(optimizer: Optimizer, groups: object) -> dict[Any, torch.Tensor]:
    """Return the optimizer's parameters by the numbers that they have in a saved state.

    Args:
        groups: the saved `param_groups`. Without them, or if they do not fit, parameters have the numbers of
            `state_dict()`.
    """
    own = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        order = _order(optimizer, {"param_groups": groups})
        numbers = [number for group in groups for number in group["params"]]  # type: ignore[attr-defined]
    except (TypeError, KeyError, AttributeError):
        order, numbers = None, []
    if order is not None:
        numbers = [numbers[there] for there in order]
    if len(numbers) != len(parameters):
        numbers = [number for group in own for number in group["params"]]
    return dict(zip(numbers, parameters, strict=True))


def misfits(optimizer: Optimizer, saved: Any, name_of: NameOf) -> Iterator[str]:
    """Report why a saved state cannot be assigned to the optimizer's parameters.

    Args:
        name_of: returns the name by which a message mentions a parameter, or None.
    """
    here: Groups = optimizer.param_groups
    try:
        there: Groups = saved["param_groups"]
        sizes = [len(group["params"]) for group in there]
        state = {number: members for number, members in saved["state"].items() if isinstance(members, dict)}
    except (TypeError, KeyError, AttributeError):
        yield "not the state of an optimizer"
        return
    is_free = not _has_hook(optimizer)  # such a hook adapts the state, as torch documents it
    reason = _other_names(here, there) if is_free else None
    if reason is None and sizes != (own := [len(group["params"]) for group in here]):
        reason = f"parameter groups of {sizes} parameters in the checkpoint, of {own} here"
    if reason is None and is_free:
        reason = _shape_misfit(optimizer, saved, state, name_of)
    if reason is not None:
        yield reason


def misfit_of_groups(here: object, there: object) -> str | None:
    """Return why the state dict of an optimizer cannot be replaced by a saved one: its parameters have another order.

    Args:
        here, there: the `param_groups` of both. Anything else is no misfit.
    """
    try:
        own, saved = _names(here), _names(there)  # type: ignore[arg-type]
    except (TypeError, KeyError, AttributeError):
        return None
    if own is None or saved is None or own.keys() != saved.keys() or list(own.items()) == list(saved.items()):
        return None
    return _in_other_order(own, saved)


def names_in(state: Iterable[object]) -> NameOf:
    """Return a function that names a parameter as the modules among these values name it."""
    known: dict[int, str] = {}
    for value in state:
        if isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters():
                known.setdefault(id(parameter), name)
    return lambda parameter: known.get(id(parameter))


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
    found = dict(zip(bare_names(listed), at, strict=True))
    return found if len(found) == len(listed) else None


def _are_texts(names: Iterable[object]) -> bool:
    return all(type(name) is str for name in names)


def _order(optimizer: Optimizer, saved: Any) -> list[int] | None:
    """Return for each of the optimizer's parameters its position in `saved`; None if the names do not say it."""
    own, there = _names(optimizer.param_groups), _names(saved["param_groups"])
    if own is None or there is None or own != there or _has_hook(optimizer):
        return None
    places = {name: place for place, name in enumerate(there)}
    return [places[name] for name in own]


def _other_names(here: Groups, there: Groups) -> str | None:
    """Return how the names of parameters, or of groups, differ in more than the order within a group."""
    titles = [[group.get("name") for group in groups] for groups in (here, there)]
    if titles[0] != titles[1] and _are_texts(titles[0] + titles[1]) and Counter(titles[0]) == Counter(titles[1]):
        return f"parameter groups in the order {titles[1]} in the checkpoint, {titles[0]} here; {SAME_ORDER}"
    own, saved = _names(here), _names(there)
    if own is None or saved is None or own == saved:
        return None
    reasons = []
    if missing := [name for name in own if name not in saved]:
        reasons.append(f"the parameters {_few(missing)} not in the checkpoint")
    if extra := [name for name in saved if name not in own]:
        reasons.append(f"{_few(extra)} in the checkpoint, not among the parameters here")
    if reasons:
        return f"{'; '.join(reasons)} (an optimizer that is made without names is compared by shapes)"
    moved = [name for name, group in own.items() if saved[name] != group]
    groups = f"{show_part(moved[0])} in group {saved[moved[0]]} in the checkpoint, in group {own[moved[0]]} here"
    return f"the parameters {_few(moved)} in other groups: {groups}"


def _in_other_order(own: Iterable[str], saved: Iterable[str]) -> str:
    differing = [pair for pair in zip(saved, own, strict=True) if pair[0] != pair[1]]
    order = [_few(names) for names in zip(*differing, strict=True)] or [_few(saved), _few(own)]
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
        for place, there in enumerate(order)
        for key, value in state.get(numbers[there], {}).items()
        if (shape := _shape(value)) is not None
    ]
    if order != straight and not (
        saved.keys() == {"state", "param_groups"}
        and all(isinstance(value, _PLAIN) for members in state.values() for value in members.values())
        and all(not one.shape or _fits(one, parameters) for one in moments)
    ):
        return misfit_of_groups(optimizer.param_groups, saved["param_groups"])
    is_torch_s = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    if is_torch_s and not isinstance(optimizer, torch.optim.LBFGS):
        wrong = [one for one in moments if one.key not in _SCALARS and not _fits(one, parameters)]
    else:
        wrong = _permuted(moments, parameters)
    if not wrong:
        return None
    names = dict.fromkeys(_named(optimizer, one.place, name_of) for one in wrong)
    return (
        f"{show_part(wrong[0].key)} of {_few(names, quote=False)} has another shape than its parameter: "
        f"{wrong[0].shape} in the checkpoint, {tuple(parameters[wrong[0].place].shape)} here. If the parameters come "
        f"in another order: {SAME_ORDER}, or with named_parameters() when you save and when you restore"
    )


def _shape(value: object) -> tuple[int, ...] | None:
    if isinstance(value, SavedDTensor):
        return value.placement.shape
    if isinstance(value, SavedWrapper):
        return value.shape
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _fits(moment: _Moment, parameters: list[torch.Tensor]) -> bool:
    """Return whether the moment has its parameter's shape, or that of a factor of it."""
    parameter = parameters[moment.place]
    whole = tuple(parameter.shape)
    if moment.shape in (whole, tuple(local_of(parameter).shape)):
        return True
    # Adafactor's means: torch keeps the dimension that they are taken over, with the length 1; others leave it out.
    rows, columns = whole[:-1], (*whole[:-2], *whole[-1:])
    kept = (*rows, 1), (*whole[:-2], 1, *whole[-1:])
    return len(whole) > 1 and moment.shape in (*kept, rows, columns)


def _permuted(moments: list[_Moment], parameters: list[torch.Tensor]) -> list[_Moment]:
    """Return the moments of another shape than their parameters, where the shapes of a key are those of the parameters.

    This is for optimizers of which nothing is known. A key whose tensors have the parameters' shapes, but at other
    parameters, shows another order. Any other shapes show nothing.
    """
    wrong = []
    for key in dict.fromkeys(one.key for one in moments):
        pairs = [(one, tuple(parameters[one.place].shape)) for one in moments if one.key == key]
        if Counter(one.shape for one, _ in pairs) == Counter(whole for _, whole in pairs):
            wrong += [one for one, whole in pairs if one.shape != whole]
    return wrong


def _named(optimizer: Optimizer, place: int, name_of: NameOf) -> str:
    at = place
    for number, group in enumerate(optimizer.param_groups):
        if at < len(group["params"]):
            name = name_of(group["params"][at]) or (group["param_names"][at] if group.get("param_names") else None)
            return show_part(name) if name else f"parameter {at} of group {number}"
        at -= len(group["params"])
    raise IndexError(place)


def _few(names: Iterable[str], *, quote: bool = True) -> str:
    listed = [show_part(name) if quote else name for name in names]
    return ", ".join(listed[:_FEW]) + (f" and {len(listed) - _FEW} more" if len(listed) > _FEW else "")
