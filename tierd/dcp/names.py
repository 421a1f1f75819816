"""The names that DCP's metadata may contain, and the dtypes, layouts and memory formats that they stand for.

Invariant: names are resolved only through these tables, which are built before any pickle is read.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tierd.core.dcp_names import PLACES
from tierd.core.errors import ManifestError
from tierd.core.pickled import Named, PickledInstance

_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}
_LAYOUTS = {str(one): one for one in vars(torch).values() if isinstance(one, torch.layout)}
_DTYPES = {name: one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
NAMES = {(module, name): Named(kind, f"{module}.{name}") for module, name, kind in PLACES}
NAMES |= {("torch", name): Named("dtype", name) for name in _DTYPES}


def wrong(found: Any, place: str) -> NoReturn:
    """Raise, because the pickle describes something other than a `place`."""
    what = (
        found.of.name
        if type(found) is PickledInstance
        else found.name
        if type(found) is Named
        else type(found).__name__
    )
    raise ManifestError(f"{what} where {place} belongs")


def dtype(found: Any) -> torch.dtype:
    if type(found) is not Named or found.kind != "dtype":
        wrong(found, "a dtype")
    return _DTYPES[found.name]


def layout(found: Any) -> torch.layout:
    if type(found) is PickledInstance and found.of.kind == "layout" and len(found.arguments) == 1:
        [name] = found.arguments
        if type(name) is str and name in _LAYOUTS:
            return _LAYOUTS[name]
    wrong(found, "a layout")


def memory_format(found: Any) -> torch.memory_format:
    """Return the memory format that an enumeration member names, by value or by name."""
    arguments = found.arguments if type(found) is PickledInstance else ()
    if type(found) is PickledInstance and found.of.kind == "memory format" and len(arguments) == 1:
        [value] = arguments
        if type(value) is int and 0 <= value < len(_FORMATS):
            return list(_FORMATS.values())[value]
    elif type(found) is PickledInstance and found.of.kind == "getattr" and len(arguments) == 2:
        of, name = arguments
        if type(of) is Named and of.kind == "memory format" and type(name) is str and name in _FORMATS:
            return _FORMATS[name]
    wrong(found, "a memory format")
