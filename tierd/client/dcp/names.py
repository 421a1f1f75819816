"""What DCP's metadata may name, and what the names of dtypes, layouts and memory formats stand for.

Invariant: a name is looked up in these tables, which are made before any pickle is read, and nowhere else.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tierd.core.errors import ManifestError
from tierd.core.pickled import DICT, Made, Named

_DCP = "torch.distributed.checkpoint"
_FORMER = "torch.distributed._shard.sharded_tensor.metadata"  # where DCP had some classes first
_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}
_LAYOUTS = {str(one): one for one in vars(torch).values() if isinstance(one, torch.layout)}
_DTYPES = {name: one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
_PLACES = (
    *(
        (f"{_DCP}.metadata", name, name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta"),
        )
    ),
    (f"{_DCP}.filesystem", "_StorageInfo", "_StorageInfo"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING", "memory format"),
    (_FORMER, "TensorProperties", "TensorProperties"),
    (_FORMER, "MEM_FORMAT_ENCODING", "memory format"),
    ("torch", "Size", "Size"),
    ("torch.serialization", "_get_layout", "layout"),
    ("collections", "OrderedDict", DICT),
    # The directory that torch's own writer wrote to.
    *((module, name, "path") for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
    # How the first releases of Python 3.11 pickle a member of an enumeration.
    *((module, "getattr", "getattr") for module in ("builtins", "__builtin__")),
)
NAMES = {(module, name): Named(kind, f"{module}.{name}") for module, name, kind in _PLACES}
NAMES |= {("torch", name): Named("dtype", name) for name in _DTYPES}


def wrong(found: Any, place: str) -> NoReturn:
    """Refuse what the pickle describes, because it is no `place`."""
    what = found.of.name if type(found) is Made else found.name if type(found) is Named else type(found).__name__
    raise ManifestError(f"{what} where {place} belongs")


def dtype(found: Any) -> torch.dtype:
    if type(found) is not Named or found.kind != "dtype":
        wrong(found, "a dtype")
    return _DTYPES[found.name]


def layout(found: Any) -> torch.layout:
    if type(found) is Made and found.of.kind == "layout" and len(found.arguments) == 1:
        [name] = found.arguments
        if type(name) is str and name in _LAYOUTS:
            return _LAYOUTS[name]
    wrong(found, "a layout")


def memory_format(found: Any) -> torch.memory_format:
    """A member of the enumeration that stands for memory formats: by its value, or by its name."""
    arguments = found.arguments if type(found) is Made else ()
    if type(found) is Made and found.of.kind == "memory format" and len(arguments) == 1:
        [value] = arguments
        if type(value) is int and 0 <= value < len(_FORMATS):
            return list(_FORMATS.values())[value]
    elif type(found) is Made and found.of.kind == "getattr" and len(arguments) == 2:
        of, name = arguments
        if type(of) is Named and of.kind == "memory format" and type(name) is str and name in _FORMATS:
            return _FORMATS[name]
    wrong(found, "a memory format")
