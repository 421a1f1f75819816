"""A tensor file's header, parsed strictly because its bytes may be untrusted, and tensors in other ranks' files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch

from tierd.core.errors import StateMismatch
from tierd.core.manifest import TENSORS
from tierd.state.tensor_file import (
    DTYPES,
    ELSEWHERE,
    MAX_DIMS,
    MAX_HEADER,
    METADATA,
    REPLICATED,
    Buffer,
    TensorEntry,
    TensorFileLayout,
    tensor_view,
)


def sibling_path(rank: int) -> str:
    """Return the name that another rank's tensor file has among the files of a part that were read."""
    return f"{rank:05}/{TENSORS}"


def tensors_elsewhere(layout: TensorFileLayout, files: Mapping[str, Buffer]) -> dict[str, torch.Tensor]:
    """Return the tensors that lie in other ranks' files, as views of these: `files` has them by `sibling_path`.

    Raises `StateMismatch` if such a file is there, and no tensor file of tierd's. A tensor that is not there is left
    out.
    """
    layouts: dict[int, TensorFileLayout] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, rank in layout.elsewhere.items():
        if (file := files.get(sibling_path(rank))) is None:
            continue
        if rank not in layouts:
            layouts[rank] = parse_layout(file, sibling_path(rank))
        if entry := layouts[rank].entries.get(name):
            tensors[name] = tensor_view(file, entry)
    return tensors


def parse_layout(file: Buffer, name: str = "tensors.safetensors") -> TensorFileLayout:
    """Parse a header strictly; the inverse of the planner's `layout`. The bytes may be untrusted.

    Raises `StateMismatch`, which names the file and the defect, if tierd cannot have written it.
    """
    with memoryview(file).cast("B") as raw:
        size = raw.nbytes
        header = bytes(raw[: header_length(raw[:8], size, name)])
    return parse_header(header, size, name)


def header_length(prefix: bytes | memoryview, size: int, name: str = "tensors.safetensors") -> int:
    """Return the length in bytes of a header, with its own prefix of 8 bytes. `size` is that of the whole file.

    Raises `StateMismatch` if the file has no room for it, or it is longer than any that tierd writes.
    """
    length = int.from_bytes(prefix, "little") if len(prefix) >= 8 else -1
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise StateMismatch(f"{name}: a header of {length} bytes in a file of {size}")
    return 8 + length


def parse_header(header: bytes, size: int, name: str = "tensors.safetensors") -> TensorFileLayout:
    """Parse as `parse_layout` does, but from the header alone; `size` is that of the whole file, in bytes."""
    try:
        description = json.loads(str(header[8:], "utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
        if type(description) is not dict:
            raise ValueError(f"the header is no object but {type(description).__name__}")
        metadata = _checked_metadata(description.pop(METADATA, {}))
        elsewhere, replicated = _elsewhere(metadata.get(ELSEWHERE)), _replicated(metadata.get(REPLICATED))
        entries = {key: _entry(key, value, len(header), size) for key, value in description.items()}
        ordered = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
        end = len(header)
        for key, entry in ordered.items():
            if entry.offset != end:
                raise ValueError(f"tensor {key[:100]!r} begins at {entry.offset}, the one before it ends at {end}")
            end += entry.nbytes
        if end != size:
            raise ValueError(f"the tensors end at {end}, the file at {size}")
        if both := elsewhere.keys() & entries.keys():
            raise ValueError(f"tensor {min(both)[:100]!r} is here, and in another rank's file")
    except (ValueError, RecursionError) as error:
        raise StateMismatch(f"{name}: {str(error)[:300]}") from error
    return TensorFileLayout(header, size, ordered, elsewhere, replicated)


def _entry(name: str, value: object, start: int, size: int) -> TensorEntry:
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name[:100]!r} is not described by dtype, shape and data_offsets")
    code, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(code) if type(code) is str else None
    if dtype is None:
        raise ValueError(f"tensor {name[:100]!r} has the unknown dtype {str(code)[:20]!r}")
    if (
        not is_list_of_sizes(shape)
        or len(shape) > MAX_DIMS
        or math.prod(n or 1 for n in shape) * dtype.itemsize >= 2**63
    ):
        raise ValueError(f"tensor {name[:100]!r} has an impossible shape")
    if not is_list_of_sizes(span) or len(span) != 2 or not span[0] <= span[1] <= size - start:
        raise ValueError(f"tensor {name[:100]!r} lies outside the file")
    nbytes = span[1] - span[0]
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"tensor {name[:100]!r} needs {math.prod(shape) * dtype.itemsize} bytes and has {nbytes}")
    if nbytes and (start + span[0]) % dtype.itemsize:
        raise ValueError(f"tensor {name[:100]!r} is not aligned to its element size")
    return TensorEntry(start + span[0], nbytes, dtype, tuple(shape))


def is_list_of_sizes(value: object) -> bool:
    return type(value) is list and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _checked_metadata(value: object) -> dict[str, str]:
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise ValueError(f"{METADATA} maps names to anything but strings")
    return value


def _elsewhere(text: str | None) -> dict[str, int]:
    if text is None:
        return {}
    by_rank = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    elsewhere: dict[str, int] = {}
    for rank, names in by_rank.items() if type(by_rank) is dict else [("", None)]:
        if not (rank.isascii() and rank.isdigit() and len(rank) <= 5) or type(names) is not list:
            raise ValueError(f"{ELSEWHERE} is no object of ranks and lists of names")
        for name in names:
            if type(name) is not str or name in elsewhere:
                raise ValueError(f"{ELSEWHERE} names {str(name)[:100]!r} twice, or it is no name")
            elsewhere[name] = int(rank)
    return elsewhere


def _replicated(text: str | None) -> tuple[str, ...]:
    names = [] if text is None else json.loads(text, parse_constant=_refuse)
    if type(names) is not list or not all(type(name) is str for name in names):
        raise ValueError(f"{REPLICATED} is no array of names")
    return tuple(names)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice")
    return members


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")
