"""NumPy values in a state: arrays become tensors by copy, scalars become tagged bytes; both keep their exact dtype.

Invariant: NumPy is optional. A save finds it only among imported modules, because no value can be NumPy's before the
import. A restore imports it only if a checkpoint contains its values.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    import numpy as np

# bool, signed, unsigned, float, complex, timedelta, datetime, bytes, str: dtypes that their `str` describes fully
_DTYPE = re.compile(r"[<>|=][biufcmMSU][1-9]\d{0,9}(\[[0-9A-Za-z]{1,24}\])?")
_TORCH_HAS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Return whether `value` is exactly a `numpy.ndarray` (not a matrix, memmap or masked array)."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_kind_of_array(value: object) -> bool:
    """Return whether `value` is an instance of a subclass of `numpy.ndarray`."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and type(value) is not numpy.ndarray


def is_scalar(value: object) -> TypeGuard[np.generic]:
    """Return whether `value` is a NumPy scalar; `numpy.float64` is one although it is a `float` too."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def describes(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` can be stored: not object, structured, or foreign (ml_dtypes)."""
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
    """Return the array of a tensor, the inverse of `tensor_of`. The array owns its memory.

    Raises:
        ValueError: dtype, shape and tensor do not match.
    """
    import numpy as np

    array = np.empty(shape, dtype=check_form(tensor.nbytes, dtype, shape))
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[:] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def check_form(nbytes: int, dtype: str, shape: tuple[int, ...]) -> np.dtype[Any]:
    """Return the dtype of that name. Raises `ValueError` if an array of this shape does not have `nbytes` bytes."""
    kind = _dtype(dtype)
    if any(n < 0 for n in shape) or math.prod(shape) * kind.itemsize != nbytes:
        raise ValueError(f"an array of {dtype} and shape {shape} is not {nbytes} bytes long")
    return kind


def scalar_json(value: np.generic) -> list[str]:
    """Return a scalar as ``[dtype, base64 of its bytes]``."""
    return [value.dtype.str, base64.b64encode(value.tobytes()).decode()]


def scalar_of(dtype: str, data: str) -> np.generic:
    """Return the scalar, the inverse of `scalar_json`.

    Raises:
        ValueError: the bytes do not fit the dtype.
    """
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
