"""The names that DCP's metadata may contain, and the dtypes, layouts and memory formats that they stand for.

Invariant: names are resolved only through these tables, which are built before any pickle is read.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tierd.core.dcp_names import PLACES
from tierd.core.errors import ManifestError
from tierd.core.pickled import PickledGlobal, PickledInstance

_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}
_LAYOUTS = {str(member): member for member in vars(torch).values() if isinstance(member, torch.layout)}
_DTYPES = {name: member for name, member in vars(torch).items() if isinstance(member, torch.dtype)}
NAMES = {(module, name): PickledGlobal(kind, f"{module}.{name}") for module, name, kind in PLACES}
NAMES |= {("torch", name): PickledGlobal("dtype", name) for name in _DTYPES}


def wrong(pickled: Any, place: str) -> NoReturn:
    """Raise, because the pickle describes something other than a `place`."""
    actual = (
        pickled.of.name
        if type(pickled) is PickledInstance
        else pickled.name
        if type(pickled) is PickledGlobal
        else type(pickled).__name__
    )
    raise ManifestError(f"{actual} where {place} belongs")


def dtype(pickled: Any) -> torch.dtype:
    if type(pickled) is not PickledGlobal or pickled.kind != "dtype":
        wrong(pickled, "a dtype")
    return _DTYPES[pickled.name]


def layout(pickled: Any) -> torch.layout:
    if type(pickled) is PickledInstance and pickled.of.kind == "layout" and len(pickled.arguments) == 1:
        [name] = pickled.arguments
        if type(name) is str and name in _LAYOUTS:
            return _LAYOUTS[name]
    wrong(pickled, "a layout")


def memory_format(pickled: Any) -> torch.memory_format:
    """Return the memory format that an enumeration member names, by value or by name."""
    arguments = pickled.arguments if type(pickled) is PickledInstance else ()
    if type(pickled) is PickledInstance and pickled.of.kind == "memory format" and len(arguments) == 1:
        [value] = arguments
        if type(value) is int and 0 <= value < len(_FORMATS):
            return list(_FORMATS.values())[value]
    elif type(pickled) is PickledInstance and pickled.of.kind == "getattr" and len(arguments) == 2:
        of, name = arguments
        if type(of) is PickledGlobal and of.kind == "memory format" and type(name) is str and name in _FORMATS:
            return _FORMATS[name]
    wrong(pickled, "a memory format")
