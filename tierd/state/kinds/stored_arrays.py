"""Values that are stored as tensors: runs of plain values, NumPy arrays, and dtypes that safetensors lacks.

A run has one exact type: float, int of at most 64 bits, bool or str. It is packed if it has at least `FEWEST` values.
`bytes` and `bytearray` are packed from `FEWEST_BYTES` bytes on. A mapping with such keys and values becomes two runs.
Everything else is stored as JSON. A tensor has more elements than its run needs, filled with zeros, because a list of
losses grows by a value per save. The spare elements keep the layout of the tensor file unchanged for many saves.
Planning it takes longer than packing a million values.

Invariants:

- `unpack` returns the packed values with their exact types and bits: NaNs with their payload, -0.0, and True instead of
  1. Arrays and scalars of NumPy keep their exact dtype.
- NumPy is optional. A save finds it only among imported modules, because no value can be NumPy's before the import. A
  restore imports it only if a checkpoint contains its values.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

if TYPE_CHECKING:
    import numpy as np

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
    """Whether no value contains another, in one call, because a call for each of a million numbers takes seconds."""
    return PLAIN.issuperset(map(type, values))


class PackedReference(str):
    """The JSON that refers to a packed run, of which a reader will make `values` values."""

    __slots__ = ("values",)
    values: int


class PackedRun(NamedTuple):
    kind: str
    size: int  # number of the tensor's elements in use; they are values, or bytes of text
    values: int  # 0 for `bytes` and `bytearray`, which are one value
    tensor: torch.Tensor

    def json_reference(self, name: str) -> PackedReference:
        text = json.dumps({"$values": [name, self.kind, self.size]}, ensure_ascii=False, separators=(",", ":"))
        reference = PackedReference(text)
        reference.values = self.values
        return reference


def layout_form(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return what the layout of the tensor file depends on: two runs of one form fit into the same position."""
    return str(tensor.dtype), tensor.shape


def padded_size(size: int) -> int:
    """Return the number of elements for a run of `size`: at most a thirty-second part more, or 63 more."""
    step = max(_LINE, 1 << max(0, size.bit_length() - 6))
    return -(-size // step) * step


def pack(value: Any) -> list[PackedRun] | None:
    """Pack a container, `bytes` or `bytearray` as it is now, into one run, or two for a mapping; None for JSON."""
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
    """Pack a run of values; None if it must be stored as JSON."""
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
    data = bytearray(padded_size(len(parts)) * 8)
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
    padded = bytearray(padded_size(len(data)))
    padded[: len(data)] = data
    return PackedRun(kind, len(data), values, torch.frombuffer(padded, dtype=DTYPES[kind]))


def check_run_form(dtype: torch.dtype, shape: Sequence[int], kind: str, size: int) -> None:
    """Raise `ValueError` if a tensor of this dtype and shape cannot hold `size` elements of a run of `kind`."""
    if kind not in DTYPES:
        raise ValueError(f"{kind[:40]!r} is no kind of values: a newer tierd may have written it")
    if dtype != DTYPES[kind] or len(shape) != 1 or not 0 <= size <= shape[0]:
        raise ValueError(f"a tensor of {dtype} and shape {tuple(shape)} holds no {size} elements of {kind}")


def count_values(tensor: torch.Tensor, kind: str, size: int) -> int:
    """Return how many values `unpack` would make; 0 for `bytes` and `bytearray`. Raises as `check_run_form`."""
    check_run_form(tensor.dtype, tensor.shape, kind, size)
    if kind == "str":
        return 1 + int((tensor[:size] == 0).sum())
    return 0 if kind in BYTES else size


def unpack(tensor: torch.Tensor, kind: str, size: int) -> Any:
    """Return the packed values of a contiguous tensor on the host: a list, `bytes` or a `bytearray`.

    Raises `ValueError` as `check_run_form`, or if the text is not UTF-8.
    """
    check_run_form(tensor.dtype, tensor.shape, kind, size)
    if DTYPES[kind] is not torch.uint8:
        return tensor[:size].tolist()
    data = ctypes.string_at(tensor.data_ptr(), size) if size else b""
    if kind == "str":
        return str(data, "utf-8").split(_BETWEEN)
    return bytearray(data) if kind == "bytearray" else data


# bool, signed, unsigned, float, complex, timedelta, datetime, bytes, str: dtypes that their `str` describes fully
_DTYPE = re.compile(r"[<>|=][biufcmMSU][1-9]\d{0,9}(\[[0-9A-Za-z]{1,24}\])?")
_TORCH_HAS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether `value` is exactly a `numpy.ndarray` (not a matrix, memmap or masked array)."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_kind_of_array(value: object) -> bool:
    """Whether `value` is an instance of a subclass of `numpy.ndarray`."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and type(value) is not numpy.ndarray


def is_scalar(value: object) -> TypeGuard[np.generic]:
    """Whether `value` is a NumPy scalar; `numpy.float64` is one although it is a `float` too."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def describes(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` can be stored: not object, structured, or foreign (ml_dtypes)."""
    import numpy as np

    return _DTYPE.fullmatch(dtype.str) is not None and np.dtype(dtype.str) == dtype


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a copy of the array as a tensor.

    It holds numbers if torch has the dtype (complex: with a last dimension of re, im), else flat uint8 bytes.
    """
    import numpy as np

    if array.dtype.isnative and array.dtype.str[1:] in _TORCH_HAS:
        tensor = torch.from_numpy(np.array(array, order="C", copy=True))
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor
    raw = bytearray(array.tobytes())
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def array_of(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the array of a tensor, in its own memory: the inverse of `tensor_of`. Raises `ValueError` if they do not
    match.
    """
    import numpy as np

    array = np.empty(shape, dtype=check_array_form(tensor.nbytes, dtype, shape))
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[:] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def check_array_form(nbytes: int, dtype: str, shape: tuple[int, ...]) -> np.dtype[Any]:
    """Return the dtype of that name. Raises `ValueError` if an array of this shape does not have `nbytes` bytes."""
    kind = _dtype(dtype)
    if any(n < 0 for n in shape) or math.prod(shape) * kind.itemsize != nbytes:
        raise ValueError(f"an array of {dtype} and shape {shape} is not {nbytes} bytes long")
    return kind


def scalar_json(value: np.generic) -> list[str]:
    """Return a scalar as ``[dtype, base64 of its bytes]``."""
    return [value.dtype.str, base64.b64encode(value.tobytes()).decode()]


def scalar_of(dtype: str, data: str) -> np.generic:
    """Return the scalar, the inverse of `scalar_json`. Raises `ValueError` if the bytes do not fit the dtype."""
    import numpy as np

    kind, raw = _dtype(dtype), base64.b64decode(data, validate=True)
    if len(raw) != kind.itemsize or not raw or kind.kind in "SU":
        raise ValueError(f"{len(raw)} bytes are no scalar of {dtype[:40]}")
    scalar: np.generic = np.frombuffer(raw, dtype=kind)[0]
    return scalar


def _dtype(text: str) -> np.dtype[Any]:
    import numpy as np

    if not _DTYPE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no array dtype")
    return np.dtype(text)


# Dtypes that safetensors 0.5 lacks -> the dtype in which their bytes are stored.
STORED_AS: dict[torch.dtype, torch.dtype] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
for _name in (
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "bits8",
    "bits1x8",
    "bits2x4",
    "bits4x2",
):
    if hasattr(torch, _name):  # because torch 2.6 lacks the newest of them
        STORED_AS[getattr(torch, _name)] = torch.uint8
STORED_AS[torch.bits16] = torch.uint16
# int1 to int7 and uint1 to uint7: torch can view these dtypes as bytes, but cannot copy or clone them.
OPAQUE_DTYPES = frozenset(
    getattr(torch, name)
    for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
    if hasattr(torch, name)
)
STORED_AS |= dict.fromkeys(OPAQUE_DTYPES, torch.uint8)


def check_view(stored: torch.dtype, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise `ValueError` if a stored tensor cannot be viewed as `dtype`."""
    if STORED_AS.get(dtype) != stored:
        raise ValueError(f"{stored} does not hold {dtype}")
    if dtype.is_complex and shape[-1:] != (2,):
        raise ValueError("a complex tensor's last dimension is 2")


def logical(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View a stored tensor as a dtype of `STORED_AS`. Raises as `check_view`."""
    check_view(tensor.dtype, tuple(tensor.shape), dtype)
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)
