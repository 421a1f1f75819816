"""The values that a state may hold, with what a save stores of them, and what to do about any other value.

The docs show the table. The remedy for a value is the way that its own type offers.

Invariant: each exact type that the encoder knows is in one row (`tests/state/test_reference.py`). Of a refused value
only attributes of its type, and the dtype of an array, are read; nothing of the value is called.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import io
import pathlib
import random
import types
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tierd.state.kinds import stored_arrays
from tierd.state.kinds.wrapper_tensors import CLASSES


class ValueKindRow(NamedTuple):
    """A row of the table, for people. `types` are those that need no optional library to be named."""

    types: tuple[type, ...]
    value: str
    stored: str
    restored: str


_REPLACED = "is replaced"
_WRAPPERS = ", ".join(f"`{name.partition('.')[2]}`" for name in CLASSES if name.startswith("torchao."))

KINDS: tuple[ValueKindRow, ...] = (
    ValueKindRow(
        (),
        "anything with `state_dict()` and `load_state_dict()`",
        "the state that it returns",
        "receives it in `load_state_dict()`",
    ),
    ValueKindRow(
        (torch.Tensor, torch.nn.Parameter),
        "tensors of any dtype but the quantized ones (`qint8` and the like), on any device, with any strides; "
        "parameters",
        "as tensors. One tensor stays one tensor. A view is stored at full size, and refused if that is 256 MiB more "
        "than it has in memory",
        "is filled in place",
    ),
    ValueKindRow(
        (),
        "DTensors, such as the parameters and optimizer states of `fully_shard` and of tensor parallelism",
        "this rank's local shard and its position: see [sharded models](../howto/sharded.md)",
        "is filled in place, on the same mesh",
    ),
    ValueKindRow(
        (),
        f"wrapper subclasses of tensors that tierd knows, also inside DTensors. Of torchao: {_WRAPPERS}",
        "their inner tensors, and how the class makes them one tensor",
        "is filled in place if it was made in the same way; the library must be installed",
    ),
    ValueKindRow(
        (),
        "NumPy arrays and scalars of every dtype but objects and structures",
        "as tensors and JSON",
        "an array is filled in place",
    ),
    ValueKindRow(
        (torch.Generator, random.Random),
        "`torch.Generator`, `random.Random`, NumPy's `Generator` and `RandomState`",
        "its state, without what `spawn()` counts",
        "is set in place; None takes a new generator",
    ),
    ValueKindRow(
        (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice),
        "None, bool, int, float, complex, str, bytes, bytearray, range, slice of ints",
        "as JSON; NaNs keep sign and payload. At most 256 MiB, 16 million values and 2 million containers in all. Long "
        "lists, tuples and dicts of floats, ints, bools or strings alone, and long bytes, are stored as typed arrays "
        "beside the tensors: 16 million values more, bytes of any number. Larger data belongs in a tensor, or in a "
        "file of `stage()`",
        _REPLACED,
    ),
    ValueKindRow(
        (
            *(dict, list, tuple, set, frozenset, collections.deque),
            *(collections.OrderedDict, collections.Counter, collections.defaultdict),
        ),
        "dict, list, tuple, set, frozenset, deque, `OrderedDict`, `Counter`, `defaultdict` of a built-in type",
        "with keys of str, int, float, bool, bytes, None and tuples of these",
        "dicts, lists and deques keep their identity and receive the saved content",
    ),
    ValueKindRow(
        (torch.Size, torch.dtype, torch.device), "`torch.Size`, `torch.dtype`, `torch.device`", "as JSON", _REPLACED
    ),
    ValueKindRow(
        (
            *(io.BytesIO, uuid.UUID, decimal.Decimal),
            *(type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath),
            *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
        ),
        "`io.BytesIO`, `UUID`, `Decimal`, paths of `pathlib`, `datetime`, `date`, `time`, `timedelta`",
        "as JSON; a buffer with its position; a time zone is None or an offset without a name",
        _REPLACED,
    ),
)

# What is refused -> what to do, as the message says it (`tierd.state.kinds.supported_values`).
REFUSED: tuple[tuple[str, str], ...] = (
    (
        "an object with `get_state()` and `set_state()` or `load_state()`",
        "give its class `state_dict()` and `load_state_dict()`, which call them",
    ),
    ("an object with `to_dict()`, such as PyG's `Data`", "pass `.to_dict()`, and make it again of that dict"),
    ("a dataclass", "pass `dataclasses.asdict(…)`, or give it `state_dict()` and `load_state_dict()`"),
    ("an Enum", "pass its `.name`, and make it again as `Class[name]`"),
    ("a named tuple", "pass `._asdict()`"),
    ("any other subclass of a type above, `SystemRandom`", "pass a plain value; leave `SystemRandom` out"),
    ("a masked array of NumPy", "pass `numpy.ma.getdata(…)` and `numpy.ma.getmaskarray(…)`, and make it again of both"),
    (
        "a `recarray`, an array of a structured dtype; its scalars",
        "pass an array for each field, `{name: numpy.asarray(a[name]) for name in a.dtype.names}`; `.item()`",
    ),
    ("an array of objects", "pass `.tolist()`"),
    ("any other subclass of `numpy.ndarray`, such as `memmap` and `matrix`", "pass `numpy.asarray(…)`"),
    ("a NumPy bit generator", "pass the `numpy.random.Generator` of it, or its `.state`"),
    ("a `datetime` with a zone of `zoneinfo`", "pass `.astimezone(datetime.timezone.utc)`"),
    (
        "any other tensor subclass",
        "pass its inner tensors (`__tensor_flatten__()`), `.dequantize()`, or `.as_subclass(torch.Tensor)`",
    ),
    ("functions, classes and modules", "leave them out, and make them again before the restore"),
    (
        "anything else, such as iterators, files and locks",
        "give it `state_dict()` and `load_state_dict()`, or pass what it holds",
    ),
)


# Checked in this order, because `datetime` is a subclass of `date`, and `bool` has no subclasses.
_BASES = (
    *(dict, list, tuple, set, str, int, float, bytes, torch.Generator, random.Random),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath, io.BytesIO),
)
REMEDY_FOR_WRAPPERS = (
    "a state holds the tensor subclasses that its reference lists; pass this one's inner tensors "
    "(__tensor_flatten__()), or its values as a plain tensor (.dequantize())"
)
_GETTERS = ("get_state", "getstate", "get_state_dict", "save_state")
_SETTERS = ("set_state", "load_state", "setstate", "set_state_dict", "restore_state")
_DICTS = ("to_dict", "as_dict", "model_dump", "_asdict")
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def remedy_for(value: object) -> str:
    """Return the rest of a message that begins with the value's type: what to do, or why there is no way."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return f", an Enum; pass its .name, and make it again as {kind.__name__}[name]"
    if kind is random.SystemRandom:
        return ", which has no state; leave it out"
    if (base := next((base for base in _BASES if isinstance(value, base)), None)) is not None:
        name = _has(value, _DICTS)
        return f", a subclass of {base.__name__}; pass {f'.{name}()' if name else f'a plain {base.__name__}'}"
    if isinstance(value, _CODE):
        return ", which is code; leave it out, and make it again before the restore"
    return f"; {_find_way(value)}"


def divides_itself(value: object) -> bool:
    """Whether a value is an optimizer of which each rank has another part of the state."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(value).__mro__)


def remedy_for_failure(value: object) -> str:
    """Return the rest of a message that says how a value's `state_dict()` failed."""
    if divides_itself(value):
        return " To save each rank's part: docs/howto/sharded.md#zeroredundancyoptimizer"
    return ""


def _find_way(value: Any) -> str:
    loads = "restore then calls its load_state_dict()"
    if _has(value, ("state_dict",)):
        return f"it has state_dict() and no load_state_dict(): give it that, too, and {loads}"
    if (getter := _has(value, _GETTERS)) and (setter := _has(value, _SETTERS)):
        return f"give its class state_dict() and load_state_dict(), which call {getter}() and {setter}(), and {loads}"
    if name := _has(value, _DICTS):
        remedy = "by .from_dict()" if _has(value, ("from_dict",)) else "of that dict"
        return f"pass .{name}(), and make it again {remedy}"
    if dataclasses.is_dataclass(value):
        return (
            "pass dataclasses.asdict(…), and make it again of that dict; or give it state_dict() and load_state_dict()"
        )
    if stored_arrays.is_kind_of_array(value):
        return _of_array(value)
    if isinstance(value, Mapping):
        return "pass dict(…)"
    if isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace":
        return "pass vars(…)"
    if type(value).__module__.startswith("numpy.random"):
        return "pass the numpy.random.Generator of it, or its .state, a dict"
    return "give it state_dict() and load_state_dict(), or pass what it holds as tensors, numbers, lists and dicts"


def _of_array(array: Any) -> str:
    if hasattr(type(array), "mask"):  # a masked array; numpy.asarray would leave its mask out
        return (
            "pass numpy.ma.getdata(…) and numpy.ma.getmaskarray(…), and make it again by numpy.ma.array(data, mask=…)"
        )
    return "pass numpy.asarray(…)" if array.dtype.names is None else remedy_for_dtype(array.dtype)


def remedy_for_dtype(dtype: Any) -> str:
    if dtype.names is not None:
        return (
            "pass an array for each field, {name: numpy.asarray(a[name]) for name in a.dtype.names}, and assign them "
            "to the fields of a new array"
        )
    return "pass .tolist()" if dtype.kind in "OT" else "pass .view() with an integer dtype of the same size"


def _has(value: object, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if callable(getattr(type(value), name, None))), None)
