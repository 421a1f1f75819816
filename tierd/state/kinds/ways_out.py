"""What to do about a value that a state cannot hold: the way that the value's own type offers.

Invariant: only attributes of the value's type, and the dtype of an array, are read; nothing of the value is called.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import pathlib
import random
import types
from collections.abc import Mapping
from typing import Any

import torch

from tierd.state.kinds import numpy_arrays

# Checked in this order, because `datetime` is a subclass of `date`, and `bool` has no subclasses.
_BASES = (
    *(dict, list, tuple, set, str, int, float, bytes, torch.Generator, random.Random),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath, io.BytesIO),
)
OF_WRAPPERS = (
    "a state holds the tensor subclasses that its reference lists; pass this one's inner tensors "
    "(__tensor_flatten__()), or its values as a plain tensor (.dequantize())"
)
_GETTERS = ("get_state", "getstate", "get_state_dict", "save_state")
_SETTERS = ("set_state", "load_state", "setstate", "set_state_dict", "restore_state")
_DICTS = ("to_dict", "as_dict", "model_dump", "_asdict")
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def of(value: object) -> str:
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
    if numpy_arrays.is_kind_of_array(value):
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
    return "pass numpy.asarray(…)" if array.dtype.names is None else of_dtype(array.dtype)


def of_dtype(dtype: Any) -> str:
    """Return what to do with an array of a NumPy dtype that has no encoding."""
    if dtype.names is not None:
        return (
            "pass an array for each field, {name: numpy.asarray(a[name]) for name in a.dtype.names}, and assign them "
            "to the fields of a new array"
        )
    return "pass .tolist()" if dtype.kind in "OT" else "pass .view() with an integer dtype of the same size"


def _has(value: object, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if callable(getattr(type(value), name, None))), None)
