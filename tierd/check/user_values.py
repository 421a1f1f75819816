"""Read the values of the user's own code: attributes of objects of its classes, and variables that it keeps.

A framework often holds such an object, so that no variable of the loop refers to it. A difference is evidence for a
cause only, and weaker than any of a known purpose, because many of these values, such as sums for a log, change
nothing.

Invariant: this module reads attributes and calls nothing.
"""

from __future__ import annotations

import dis
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import count, islice
from types import FunctionType, ModuleType
from typing import Any

import msgspec

from tierd.check.source_analysis import attributes_set_on_others, log_only_names, variable_of_path
from tierd.check.user_code import is_user_code, user_frames, user_modules
from tierd.check.value_leaves import ValueLeaf, leaves_by_path

_MAX_OF_CLASS = 16  # objects of one class; of more, none is read, because they are records or samples
_MAX_LEAVES = 2000  # leaves in one capture, at most
_MAX_ATTRIBUTE_LEAVES = 200  # leaves of one attribute, at most


def is_user_class(kind: type) -> bool:
    """Return whether a class is defined in the user's own code."""
    module = sys.modules.get(kind.__module__)
    return is_user_code(getattr(module, "__file__", None) or "<builtin>")


def objects_with_user_attributes(objects: Iterable[Any]) -> list[Any]:
    """Return the objects of libraries' classes of which the user's code sets an attribute."""
    names = attributes_set_on_others()
    # Past methods of the object's class, one of which may warn or import.
    return [instance for instance in objects if not names.isdisjoint(object.__getattribute__(instance, "__dict__"))]


def is_keras_callback(kind: type) -> bool:
    """Return whether a class is a callback of Keras, which saves none of their attributes, and is no log."""
    names = {base.__name__ for base in kind.__mro__}
    return kind.__module__.startswith("keras.") and "Callback" in names and not names & {"History", "ProgbarLogger"}


def is_keras_optimizer(kind: type) -> bool:
    """Return whether a class is an optimizer of Keras, which is none of torch's."""
    return any(base.__name__ == "BaseOptimizer" and base.__module__.startswith("keras.") for base in kind.__mro__)


def user_object_leaves(objects: Iterable[Any], is_captured: bool) -> dict[str, ValueLeaf]:
    """Return numbers, tensors and generators in the attributes of `objects`, and in containers there.

    Args:
        is_captured: whether the saved state was captured; it does not contain them.
    """
    pairs = (
        leaf
        for path, value in user_attributes(objects)
        for leaf in leaves_by_path(value, path, None, _MAX_ATTRIBUTE_LEAVES).items()
    )
    saved = False if is_captured else None
    return {path: msgspec.structs.replace(leaf, saved=saved) for path, leaf in islice(pairs, _MAX_LEAVES)}


@lru_cache(maxsize=4096)
def _is_own_attribute(kind: type, name: str) -> bool:
    """Return whether the user's own code sets an attribute, where a class has a library's class as its base."""
    if is_keras_callback(kind):
        return not name.startswith("_")
    if not is_user_class(kind):
        return name in attributes_set_on_others()
    libraries = [base for base in kind.__mro__[:-1] if not is_user_class(base)]
    return not libraries or not any(name in _attributes_set_by(base) for base in libraries)


def _class_values(kind: type) -> dict[str, Any]:
    """Return the values that a user's class sets for its objects, which have their own only after an assignment."""
    own_bases = [base for base in kind.__mro__[-2::-1] if is_user_class(base)]
    kinds = (bool, int, float, str, list, dict, set, deque)
    return {
        name: value
        for base in own_bases
        for name, value in vars(base).items()
        if type(value) in kinds and not name.startswith("__")
    }


def _slot_values(instance: object) -> dict[str, Any]:
    """Return the values in the slots of an object of a user's class."""
    names = [name for base in type(instance).__mro__ for name in _slot_names(vars(base).get("__slots__", ()))]
    return {name: getattr(instance, name) for name in names if name[:2] != "__" and hasattr(instance, name)}


def _slot_names(slots: object) -> list[str]:
    return [slots] if isinstance(slots, str) else [str(name) for name in slots]  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _attributes_set_by(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the methods of a class set."""
    codes = [method.__code__ for method in vars(kind).values() if isinstance(method, FunctionType)]
    return frozenset(
        str(instruction.argval)
        for code in codes
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_ATTR"
    )


def _is_read_with_modules(value: object) -> bool:
    return type(value) in (int, float) or isinstance(value, sys.modules["torch"].Tensor)


def user_attributes(objects: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of `objects` by `Class.name`, but those that only a log has."""
    by_class: defaultdict[str, list[Any]] = defaultdict(list)
    for instance in objects:
        by_class[type(instance).__qualname__.split("<locals>.")[-1]].append(instance)
    for name, instances in by_class.items():
        if len(instances) <= _MAX_OF_CLASS:
            yield from _class_attributes(name, instances)


def _class_attributes(name: str, objects: list[Any]) -> Iterator[tuple[str, Any]]:
    torch, logged = sys.modules["torch"], log_only_names()
    for number, instance in enumerate(objects, start=1):
        where = name if len(objects) == 1 else f"{name} ({number} of {len(objects)})"
        kind: Any = type(instance)
        if is_keras_optimizer(kind):
            yield where, {str(variable.name): variable.value for variable in instance.variables}
            if not is_user_class(kind):
                continue
        is_module = isinstance(instance, torch.nn.Module)
        for key, value in (
            _class_values(kind) | _slot_values(instance) | dict(getattr(instance, "__dict__", {}))
        ).items():
            # Other functions read the numbers and tensors of modules, their mode, and their inner modules.
            if key in logged or not _is_own_attribute(kind, key):
                continue
            if is_module and (key.startswith("_") or key == "training" or _is_read_with_modules(value)):
                continue
            yield f"{where}.{key}", value


_MAX_VARIABLES_LEAVES = 4000  # leaves in one capture, at most
_MAX_VARIABLE_LEAVES = 200  # leaves of one variable, at most
MAX_ELEMENTS = (
    10_000_000  # elements of a tensor or an array; of a larger one, nothing is read, because it is a data set
)


def variable_leaves(
    functions: Iterable[FunctionType], state: Mapping[str, Any] | None, known_paths: Iterable[str]
) -> dict[str, ValueLeaf]:
    """Return the values of the user's variables by `module.name`, `Class.name` or `function() name`.

    Args:
        functions: the user's functions with closures or attributes of their own.
        state: the loop's saved state, whose containers are left out.
        known_paths: paths of values that are known by these names already.
    """
    saved: set[int] = set()
    _add_containers(state, saved)
    excluded = set(known_paths)
    by_path: dict[str, ValueLeaf] = {}
    for path, value in user_variables(functions):
        if id(value) in saved or path in excluded or not _is_small(value):
            continue
        is_saved = False if state is not None else None
        if isinstance(value, count):  # its text has its next number, and reading that draws none
            by_path[path] = ValueLeaf(repr(value), repr(value), saved=is_saved)
        by_path |= leaves_by_path(value, path, is_saved, _MAX_VARIABLE_LEAVES)
        if len(by_path) >= _MAX_VARIABLES_LEAVES:
            break
    return by_path


def user_variables(functions: Iterable[FunctionType]) -> Iterator[tuple[str, Any]]:
    """Yield the user's variables by the names of `variable_leaves`, but those that only a log has."""
    logged = log_only_names()
    return (pair for pair in _all_variables(functions) if variable_of_path(pair[0]) not in logged)


def _all_variables(functions: Iterable[FunctionType]) -> Iterator[tuple[str, Any]]:
    frames = list(user_frames())
    for module in user_modules():
        yield from _module_variables(module)
    of_frames: set[str] = set()
    for frame in frames:
        if frame.f_code.co_name == "<module>":
            continue  # its variables are the module's
        of_frames |= {*frame.f_code.co_cellvars}
        for name, value in list(frame.f_locals.items()):
            yield f"{frame.f_code.co_name}() {name}", value
    for function in functions:
        name = function.__qualname__.split("<locals>.")[-1]
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if variable not in of_frames and variable != "__class__":
                yield from ((f"{name}() {variable}", value) for value in cell_contents(cell))
        yield from ((f"{name}.{key}", value) for key, value in list(function.__dict__.items()) if key != "__wrapped__")
        for index, value in enumerate(function.__defaults__ or ()):
            if isinstance(value, dict | list | set):
                yield f"{name}() {_argument_name(function, index)}", value


def _argument_name(function: FunctionType, index: int) -> str:
    """Return the name of the argument with the default of number `index`."""
    code = function.__code__
    return code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) + index]


def _module_variables(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            if value.__module__ == module.__name__:
                attributes = list(vars(value).items())
                yield from ((f"{value.__qualname__}.{key}", inner) for key, inner in attributes if key[:2] != "__")
        else:
            yield f"{module.__name__}.{name}", value


def cell_contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a variable that is assigned only later
        return []


def _is_small(value: object) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.numel() <= MAX_ELEMENTS)
    return numpy is None or not isinstance(value, numpy.ndarray) or bool(value.size <= MAX_ELEMENTS)


def _add_containers(value: object, ids: set[int]) -> None:
    if isinstance(value, Mapping):
        ids.add(id(value))
        for inner in value.values():
            _add_containers(inner, ids)
    elif isinstance(value, list):
        ids.add(id(value))
