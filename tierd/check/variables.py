"""Read the variables in which a user's code keeps values: of modules, classes, running functions and closures.

Most of them change nothing. A difference is evidence for a cause only, and weaker than any of a known purpose.

Invariant: as `insides`, this module reads attributes and calls nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from types import FunctionType, ModuleType
from typing import Any

from tierd.check.leaves import ValueLeaf, leaves
from tierd.check.places import users_frames, users_modules
from tierd.check.usage import only_logged

_MAX_LEAVES = 4000  # leaves in one capture, at most
_MAX_VARIABLE_LEAVES = 200  # leaves of one variable, at most
_MAX_ELEMENTS = (
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
    excluded, logged = set(known_paths), only_logged()
    by_path: dict[str, ValueLeaf] = {}
    for path, value in _users_variables(functions):
        if id(value) in saved or path in excluded or re.split(r"[ .]", path)[-1] in logged or not _is_small(value):
            continue
        is_saved = False if state is not None else None
        if isinstance(value, count):  # its text has its next number, and reading that draws none
            by_path[path] = ValueLeaf(repr(value), repr(value), saved=is_saved)
        by_path |= leaves(value, path, is_saved, _MAX_VARIABLE_LEAVES)
        if len(by_path) >= _MAX_LEAVES:
            break
    return by_path


def _users_variables(functions: Iterable[FunctionType]) -> Iterator[tuple[str, Any]]:
    frames = list(users_frames())
    for module in users_modules():
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
                yield from ((f"{name}() {variable}", value) for value in _cell_contents(cell))
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


def _cell_contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a variable that is assigned only later
        return []


def _is_small(value: object) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.numel() <= _MAX_ELEMENTS)
    return numpy is None or not isinstance(value, numpy.ndarray) or bool(value.size <= _MAX_ELEMENTS)


def _add_containers(value: object, ids: set[int]) -> None:
    if isinstance(value, Mapping):
        ids.add(id(value))
        for inner in value.values():
            _add_containers(inner, ids)
    elif isinstance(value, list):
        ids.add(id(value))
