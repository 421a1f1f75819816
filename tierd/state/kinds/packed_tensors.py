"""Store runs of plain values as typed arrays: one tensor in the tensor file instead of JSON for each value.

A run has one exact type: float, int of at most 64 bits, bool or str. It is packed if it has at least `FEWEST` values.
`bytes` and `bytearray` are packed from `FEWEST_BYTES` bytes on. A mapping with such keys and values becomes two runs.
Everything else is stored as JSON.

Invariant: `unpack` returns the packed values with their exact types and bits: NaNs with their payload, -0.0, and True
instead of 1.

A tensor has more elements than its run needs, filled with zeros, because a list of losses grows by a value per save.
The spare elements keep the layout of the tensor file unchanged for many saves. Planning it takes longer than packing a
million values.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

FEWEST = 1 << 8  # values; JSON of fewer takes a third of a millisecond, and can be read by hand
FEWEST_BYTES = 1 << 16
DTYPES: dict[str, torch.dtype] = {
    "float": torch.float64,
    "int": torch.int64,
    "bool": torch.bool,
    "str": torch.uint8,
    "bytes": torch.uint8,
    "bytearray": torch.uint8,
}

BYTES = ("bytes", "bytearray")  # kinds that hold one value
_STRUCTS = {float: "d", int: "q"}
_RUNS = (float, int, bool, str)
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
_BETWEEN = "\0"  # separator of strings; a run with a string that contains it is stored as JSON
_WINDOW = 1 << 12  # values that are packed at once
_LINE = 64  # elements; so that a tensor is whole cache lines, and is aligned


PLAIN = frozenset((type(None), bool, int, float, str, bytes))


def is_plain(values: Iterable[object]) -> bool:
    """Return whether no value contains another.

    One call checks all values, because a call for each of a million numbers takes seconds.
    """
    return PLAIN.issuperset(map(type, values))


class PackedReference(str):
    """The JSON that refers to a packed run.

    Attributes:
        values: number of values that a reader will make of the run.
    """

    __slots__ = ("values",)
    values: int


class PackedRun(NamedTuple):
    """A packed run.

    Attributes:
        kind: a key of `DTYPES`.
        size: number of the tensor's elements in use; they are values, or bytes of text.
        values: number of values; 0 for `bytes` and `bytearray`, which are one value.
        tensor: one-dimensional, of `room(size)` elements, with zeros from `size` on; nothing else holds it.
    """

    kind: str
    size: int
    values: int
    tensor: torch.Tensor

    def named(self, name: str) -> PackedReference:
        """Return the JSON that refers to the run if its tensor has this name."""
        text = json.dumps({"$values": [name, self.kind, self.size]}, ensure_ascii=False, separators=(",", ":"))
        reference = PackedReference(text)
        reference.values = self.values
        return reference


def run_form(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the properties on which the layout of the tensor file depends.

    Two runs of one form fit into the same position.
    """
    return str(tensor.dtype), tensor.shape


def room(size: int) -> int:
    """Return the number of elements for a run of `size`: at most a thirty-second part more, or 63 more."""
    step = max(_LINE, 1 << max(0, size.bit_length() - 6))
    return -(-size // step) * step


def pack(value: Any) -> list[PackedRun] | None:
    """Pack a container, `bytes` or `bytearray` as it is now.

    Returns one run, two for a mapping, or None if it must be stored as JSON.
    """
    kind = type(value)
    if kind is bytes or kind is bytearray:
        return [_pack_bytes(kind.__name__, value, 0)] if len(value) >= FEWEST_BYTES else None
    if len(value) < FEWEST:
        return None
    if kind in _MAPPINGS:
        return _pack_mapping(value)
    run = pack_run(tuple(value))
    return None if run is None else [run]


def pack_run(parts: tuple[Any, ...]) -> PackedRun | None:
    """Pack a run of values; returns None if it must be stored as JSON."""
    if len(parts) < FEWEST or not _is_likely(parts[0], parts[-1]):
        return None
    kind = type(parts[0])
    if kind in _STRUCTS:
        return _pack_numbers(parts, kind)
    if set(map(type, parts)) != {kind}:
        return None
    if kind is bool:
        return _pack_bytes("bool", bytes(parts), len(parts))
    text = _BETWEEN.join(parts)
    if text.count(_BETWEEN) >= len(parts):
        return None
    try:
        return _pack_bytes("str", text.encode(), len(parts))
    except UnicodeEncodeError:
        return None


def _pack_numbers(parts: tuple[Any, ...], kind: type) -> PackedRun | None:
    data = bytearray(room(len(parts)) * 8)
    # In windows, so that types and values are read while they are in the CPU cache.
    for begin in range(0, len(parts), _WINDOW):
        window = parts[begin : begin + _WINDOW]
        if set(map(type, window)) != {kind}:
            return None
        try:
            struct.pack_into(f"{len(window)}{_STRUCTS[kind]}", data, 8 * begin, *window)
        except struct.error:  # an int of more than 64 bits
            return None
    return PackedRun(kind.__name__, len(parts), len(parts), torch.frombuffer(data, dtype=DTYPES[kind.__name__]))


def _pack_mapping(value: Any) -> list[PackedRun] | None:
    if type(value) is dict:
        pairs = value.copy()  # in one call, because another thread may add members meanwhile
        keys, values = tuple(pairs), tuple(pairs.values())
    else:
        keys, values = zip(*value.items(), strict=True)
    # Checked first, so that the keys are not packed in vain.
    if len(keys) < FEWEST or not _is_likely(values[0], values[-1]):
        return None
    runs = [pack_run(keys), pack_run(values)]
    return [run for run in runs if run is not None] if None not in runs else None


def _is_likely(first: object, last: object) -> bool:
    return type(first) is type(last) and type(first) in _RUNS


def _pack_bytes(kind: str, data: bytes | bytearray, values: int) -> PackedRun:
    padded = bytearray(room(len(data)))
    padded[: len(data)] = data
    return PackedRun(kind, len(data), values, torch.frombuffer(padded, dtype=DTYPES[kind]))


def check_form(dtype: torch.dtype, shape: Sequence[int], kind: str, size: int) -> None:
    """Raise `ValueError` if a tensor of this dtype and shape cannot hold `size` elements of a run of `kind`."""
    if kind not in DTYPES:
        raise ValueError(f"{kind[:40]!r} is no kind of values: a newer tierd may have written it")
    if dtype != DTYPES[kind] or len(shape) != 1 or not 0 <= size <= shape[0]:
        raise ValueError(f"a tensor of {dtype} and shape {tuple(shape)} holds no {size} elements of {kind}")


def count(tensor: torch.Tensor, kind: str, size: int) -> int:
    """Return how many values `unpack` would make; 0 for `bytes` and `bytearray`.

    Raises `ValueError` as `check_form`.
    """
    check_form(tensor.dtype, tensor.shape, kind, size)
    if kind == "str":
        return 1 + int((tensor[:size] == 0).sum())
    return 0 if kind in BYTES else size


def unpack(tensor: torch.Tensor, kind: str, size: int) -> Any:
    """Return the packed values: a list of the run's values, `bytes` or a `bytearray`.

    Args:
        tensor: contiguous, in the host's memory.

    Raises:
        ValueError: as `check_form`, or the text is not UTF-8.
    """
    check_form(tensor.dtype, tensor.shape, kind, size)
    if DTYPES[kind] is not torch.uint8:
        return tensor[:size].tolist()
    data = ctypes.string_at(tensor.data_ptr(), size) if size else b""
    if kind == "str":
        return str(data, "utf-8").split(_BETWEEN)
    return bytearray(data) if kind == "bytearray" else data
