"""Find the objects of a training process outside of the saved state, through the garbage collector.

Invariant: objects of two runs correspond if they have the same type, place of creation, and number in order of
creation. If the two runs have different numbers of such objects, none of them is compared.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

from tierd.check.user_code import CreationSites, is_user_code
from tierd.check.user_values import (
    MAX_ELEMENTS,
    is_keras_callback,
    is_keras_optimizer,
    is_user_class,
    objects_with_user_attributes,
    user_attributes,
    user_variables,
)
from tierd.check.value_leaves import ValueLeaf, is_random_generator, key_text, leaf_of, leaves_by_path

_MAX_DEPTH = 30  # containers in each other


def is_data_source(value: object) -> bool:
    """Return whether `value` is a loader, a sampler, a dataset or the like. Requires torch."""
    from tierd.state.kinds.loader_arguments import gives_samples

    return not isinstance(value, dict | list | tuple | set | deque | str | bytes) and gives_samples(value)


def kind_of_object(value: object) -> str:
    """Return `weights`, `optimizer`, `scheduler`, `scaler`, `generator`, `data`, or `state` for anything else."""
    from tierd.state.kinds.random_generators import RngState

    torch: Any = sys.modules["torch"]
    kinds: dict[str, Any] = {
        "weights": torch.nn.Module,
        "optimizer": torch.optim.Optimizer,
        "scheduler": torch.optim.lr_scheduler.LRScheduler,
        "scaler": torch.amp.GradScaler,
        "generator": RngState,
    }
    for name, kind in kinds.items():
        if isinstance(value, kind):
            return name
    if is_random_generator(value):
        return "generator"
    return "data" if is_data_source(value) else "state"


def unsaved_leaves(
    places: CreationSites, objects: LiveObjects, state: Mapping[str, Any] | None
) -> tuple[dict[str, ValueLeaf], dict[str, str]]:
    """Return the leaves of objects in this process outside of `state`, and the objects' kinds by name.

    The leaves are parameters, buffers and numbers of modules, and the state dicts of optimizers, schedulers, scalers
    and others. The generators and tensors that the loop holds are leaves as well.
    """
    torch = sys.modules.get("torch")
    saved = _SavedState(state)
    by_path: dict[str, ValueLeaf] = {}
    kinds: dict[str, str] = {}
    if torch is not None:
        for name, stateful in _name_objects(places, objects.stateful_objects, saved):
            kinds[name] = kind = kind_of_object(stateful)
            if kind == "weights":
                kinds |= {f'{name}["{path}"]': "buffers" for path, _ in stateful.named_buffers()}
            by_path |= (
                _module_leaves(torch, stateful, name, saved)
                if isinstance(stateful, torch.nn.Module)
                else _state_dict_leaves(stateful, name, saved)
            )
    for name, value in _held_values(objects):
        if is_random_generator(value) and torch is not None and _is_data_generator(value):
            continue  # the samples show the generator of a loader or sampler
        is_saved = saved.has(value)
        if not is_saved or is_random_generator(value):
            by_path |= leaves_by_path(value, name, is_saved and None)
    return by_path, kinds


def module_attribute_leaves(places: CreationSites, objects: LiveObjects, is_captured: bool) -> dict[str, ValueLeaf]:
    """Return the attributes of modules outside of parameters and buffers.

    These are gradients, numbers, the training mode, and which parameters are trained and which are frozen; and of an
    optimizer, how many of its parameters no module has.

    Args:
        is_captured: whether the saved state was captured; it does not contain the numbers.
    """
    by_path = gradient_leaves(places, objects) | _orphan_parameters(places, objects)
    for name, module in _modules(places, objects):
        for path, weight in module.named_parameters():
            trained = str(weight.requires_grad)
            by_path[f'{name}["{path}"].requires_grad'] = ValueLeaf(trained, trained)
        for path, inner in module.named_modules():
            where = f"{name}{f'.{path}' if path else ''}"
            by_path[f"{where}.training"] = ValueLeaf(str(inner.training), str(inner.training))
            for key, value in vars(inner).items():
                if type(value) in (int, float) and (leaf := leaf_of(value)) is not None:
                    by_path[f"{where}.{key}"] = ValueLeaf(leaf.digest, leaf.text, saved=False if is_captured else None)
    return by_path


def _orphan_parameters(places: CreationSites, objects: LiveObjects) -> dict[str, ValueLeaf]:
    """Return how many parameters of each optimizer are of no module, as after a load that replaced the module's."""
    optimizer: Any = sys.modules["torch"].optim.Optimizer
    trained = {id(weight) for _, module in _modules(places, objects) for weight in module.parameters()}
    by_path: dict[str, ValueLeaf] = {}
    for name, instance in _name_objects(
        places,
        (stateful for stateful in objects.stateful_objects if isinstance(stateful, optimizer)),
        _SavedState(None),
    ):
        count = sum(id(weight) not in trained for group in instance.param_groups for weight in group["params"])
        by_path[f"{name}: its parameters that no module has"] = ValueLeaf(str(count), str(count))
    return by_path


def gradient_leaves(places: CreationSites, objects: LiveObjects) -> dict[str, ValueLeaf]:
    by_path: dict[str, ValueLeaf] = {}
    for name, module in _modules(places, objects):
        for path, weight in module.named_parameters():
            if weight.grad is not None and (leaf := leaf_of(weight.grad)) is not None:
                by_path[f'gradient of {name}["{path}"]'] = leaf
    return by_path


def _modules(places: CreationSites, objects: LiveObjects) -> Iterator[tuple[str, Any]]:
    torch: Any = sys.modules["torch"]
    return _name_objects(
        places,
        (stateful for stateful in objects.stateful_objects if isinstance(stateful, torch.nn.Module)),
        _SavedState(None),
    )


def objects_by_name(places: CreationSites, objects: LiveObjects) -> dict[str, object]:
    """Return the objects outside of the saved state by their names in the functions that list their leaves."""
    return dict(_name_objects(places, objects.stateful_objects, _SavedState(None)))


class _SavedState:
    """The content of the saved state: the identities of objects, and the addresses of tensors."""

    def __init__(self, state: Mapping[str, Any] | None) -> None:
        self.is_captured = state is not None
        self.object_ids: set[int] = set()
        self.tensor_addresses: set[int] = set()
        self._add(state, 0)

    def _add(self, value: Any, depth: int) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            self.tensor_addresses.add(value.data_ptr())
        elif depth < _MAX_DEPTH and isinstance(value, Mapping):
            for inner in value.values():
                self._add(inner, depth + 1)
        elif depth < _MAX_DEPTH and isinstance(value, list | tuple):
            for inner in value[:1000]:
                self._add(inner, depth + 1)
        elif value is not None:
            self.object_ids.add(id(value))
            if torch is not None and isinstance(value, torch.nn.Module):
                self.object_ids |= {id(module) for module in value.modules()}
                self._add(value.state_dict(), depth + 1)
            elif is_user_class(type(value)) and hasattr(value, "state_dict") and not is_data_source(value):
                with suppress(Exception):  # the loop's next save reports the reason
                    self._add(value.state_dict(), depth + 1)

    def has(self, value: Any) -> bool | None:
        """Return whether the state has a tensor, or an array, in this memory; None if no state was captured."""
        if not self.is_captured:
            return None
        address = getattr(value, "data_ptr", None)
        return id(value) in self.object_ids if address is None else address() in self.tensor_addresses


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """The objects of this process that a capture is about."""

    # objects with `state_dict()` and `load_state_dict()` that are no part of another module, and no data
    stateful_objects: list[Any]
    # the running generator functions of the user's own code, because often only a `for` loop refers to them
    generators: list[GeneratorType[Any, Any, Any]]
    iterators: list[Any] = field(default_factory=list)  # those of torch's data loaders, for the same reason
    # objects of the user's own classes, but no loaders, samplers and datasets; and objects of others' classes of which
    # the user's code sets an attribute
    user_objects: list[Any] = field(default_factory=list)
    loaders_and_samplers: list[Any] = field(default_factory=list)  # torch's loaders and samplers
    # the user's functions that hold values: in a closure, as attributes, or as defaults
    functions: list[FunctionType] = field(default_factory=list)
    # loaders, samplers, datasets and the like of the user's own classes
    user_data: list[Any] = field(default_factory=list)


def find_live_objects() -> LiveObjects:
    """Go through all objects of the process once, because they are many. Requires torch."""
    torch: Any = sys.modules["torch"]
    gc.collect()  # so that the collector's order is by age
    running: list[GeneratorType[Any, Any, Any]] = []
    functions: list[FunctionType] = []
    groups: dict[type, str] = {}
    by_group: dict[str, list[Any]] = {
        group: [] for group in ("module", "stateful", "iterator", "order", "owned", "other")
    }
    for candidate in gc.get_objects():
        kind = type(candidate)
        if kind is GeneratorType and candidate.gi_frame is not None and is_user_code(candidate.gi_code.co_filename):
            running.append(candidate)
        if kind is FunctionType and (candidate.__closure__ or candidate.__dict__ or candidate.__defaults__):
            if is_user_code(candidate.__code__.co_filename):
                functions.append(candidate)
            continue
        group = groups.get(kind)
        if group is None:
            group = groups[kind] = _group_of_class(torch, kind)
        if group:
            by_group[group].append(candidate)
    modules, stateful = by_group["module"], by_group["stateful"]
    inner = {id(child) for module in modules for child in module.children()}
    top = [module for module in modules if id(module) not in inner]
    user_objects = [instance for instance in modules + stateful if is_user_class(type(instance))] + by_group["owned"]
    user_objects += objects_with_user_attributes(by_group["other"])
    return LiveObjects(
        top + [instance for instance in stateful if not is_data_source(instance)],
        running,
        by_group["iterator"],
        [instance for instance in user_objects if not is_data_source(instance)],
        by_group["order"],
        functions,
        [instance for instance in user_objects if is_data_source(instance)],
    )


def _group_of_class(torch: Any, kind: type) -> str:
    """Return the group of the objects of a class in a capture; empty if they are in none."""
    from tierd.state.kinds.random_generators import RngState

    if issubclass(kind, type | ModuleType | RngState):
        return ""
    if issubclass(kind, sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter):
        return "iterator"
    if issubclass(kind, torch.utils.data.DataLoader | torch.utils.data.Sampler):
        return "order"
    if issubclass(kind, torch.nn.Module):
        return "module"
    if callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None)):
        return "stateful"
    if is_user_class(kind) or is_keras_callback(kind) or is_keras_optimizer(kind):
        return "owned"
    return "other" if kind.__dictoffset__ else ""


def _name_objects(places: CreationSites, objects: Iterable[Any], saved: _SavedState) -> Iterator[tuple[str, Any]]:
    """Name each object by its type, its place of creation, and its number among equal ones."""
    kinds: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
    for instance in objects:
        order, place = places.creation_of(instance)
        kinds[f"{type(instance).__qualname__}{f' of {place}' if place else ''}"].append((order, instance))
    for name, instances in kinds.items():
        instances.sort(key=lambda item: item[0])
        for number, (_, instance) in enumerate(instances, start=1):
            if id(instance) not in saved.object_ids or not saved.is_captured or hasattr(instance, "named_buffers"):
                yield name if len(instances) == 1 else f"{name} ({number} of {len(instances)})", instance


def _module_leaves(torch: Any, module: Any, name: str, saved: _SavedState) -> dict[str, ValueLeaf]:
    by_path: dict[str, ValueLeaf] = {}

    def add(path: str, value: Any, is_saved: bool | None) -> None:
        if not is_saved and (leaf := leaf_of(value)) is not None:
            by_path[path] = ValueLeaf(leaf.digest, leaf.text, leaf.count, leaf.sample, is_saved)

    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        add(f'{name}["{path}"]', tensor, saved.has(tensor))
    for path, inner in module.named_modules():
        for key, value in vars(inner).items():
            where = f"{name}{f'.{path}' if path else ''}.{key}"
            is_unset = value is None and key[0] != "_" and is_user_class(type(inner))  # a tensor, perhaps, later
            if is_unset or isinstance(value, torch.Tensor):
                add(where, value, False if is_unset else saved.has(value))
    return by_path


def _state_dict_leaves(stateful: Any, name: str, saved: _SavedState) -> dict[str, ValueLeaf]:
    try:
        return leaves_by_path(stateful.state_dict(), name, False if saved.is_captured else None)
    except Exception:  # half constructed, or already released
        return {}


def _is_data_generator(generator: object) -> bool:
    """Return whether a loader, a sampler or a dataset draws from this generator."""
    owners = gc.get_referrers(generator)
    owners += [owner for referrer in owners if type(referrer) is dict for owner in gc.get_referrers(referrer)]
    return any(is_data_source(owner) and not isinstance(owner, GeneratorType) for owner in owners)


def _held_values(objects: LiveObjects) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, arrays and generators in the user's variables and in attributes of the user's objects."""
    for path, value in chain(user_variables(objects.functions), user_attributes(objects.user_objects)):
        yield from _find_values(value, path, 0)


def _find_values(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if depth < 4 and isinstance(value, Mapping) and len(value) < 10_000:
        for key, inner in list(value.items()):
            yield from _find_values(inner, f"{path}[{key_text(key)}]", depth + 1)
    elif depth < 4 and isinstance(value, list | tuple | deque) and len(value) < 1000:
        for index, inner in enumerate(list(value)):
            yield from _find_values(inner, f"{path}[{index}]", depth + 1)
    elif numpy is not None and isinstance(value, numpy.ndarray):
        if value.size <= MAX_ELEMENTS:
            yield path, value
    elif (torch is not None and isinstance(value, torch.Tensor)) or (is_random_generator(value) and "() " in path):
        yield path, value
