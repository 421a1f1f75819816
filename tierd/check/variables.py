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

_MOST = 4000  # leaves in one capture, at most
_OF_ONE = 200  # leaves of one variable, at most
_LARGEST = 10_000_000  # elements of a tensor or an array; of a larger one, nothing is read, because it is a data set


def variable_leaves(
    functions: Iterable[FunctionType], state: Mapping[str, Any] | None, named: Iterable[str]
) -> dict[str, ValueLeaf]:
    """Return the values of the user's variables by `module.name`, `Class.name` or `function() name`.

    Args:
        functions: the user's functions with closures or attributes of their own.
        state: the loop's saved state, whose containers are left out.
        named: paths of values that are known by these names already.
    """
    saved: set[int] = set()
    _add_containers(state, saved)
    known, logged = set(named), only_logged()
    found: dict[str, ValueLeaf] = {}
    for path, value in _variables(functions):
        if id(value) in saved or path in known or re.split(r"[ .]", path)[-1] in logged or not _is_small(value):
            continue
        there = False if state is not None else None
        if isinstance(value, count):  # its text has its next number, and reading that draws none
            found[path] = ValueLeaf(repr(value), repr(value), saved=there)
        found |= leaves(value, path, there, _OF_ONE)
        if len(found) >= _MOST:
            break
    return found


def _variables(functions: Iterable[FunctionType]) -> Iterator[tuple[str, Any]]:
    frames = list(users_frames())
    for module in users_modules():
        yield from _of_module(module)
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
                yield from ((f"{name}() {variable}", value) for value in _content(cell))
        yield from ((f"{name}.{key}", value) for key, value in list(function.__dict__.items()) if key != "__wrapped__")
        for index, value in enumerate(function.__defaults__ or ()):
            if isinstance(value, dict | list | set):
                yield f"{name}() {_argument(function, index)}", value


def _argument(function: FunctionType, index: int) -> str:
    """Return the name of the argument with the default of number `index`."""
    code = function.__code__
    return code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) + index]


def _of_module(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            if value.__module__ == module.__name__:
                attributes = list(vars(value).items())
                yield from ((f"{value.__qualname__}.{key}", inner) for key, inner in attributes if key[:2] != "__")
        else:
            yield f"{module.__name__}.{name}", value


def _content(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a variable that is assigned only later
        return []


def _is_small(value: object) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.numel() <= _LARGEST)
    return numpy is None or not isinstance(value, numpy.ndarray) or bool(value.size <= _LARGEST)


def _add_containers(value: object, found: set[int]) -> None:
    if isinstance(value, Mapping):
        found.add(id(value))
        for inner in value.values():
            _add_containers(inner, found)
    elif isinstance(value, list):
        found.add(id(value))
