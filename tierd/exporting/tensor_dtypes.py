"""The dtypes of safetensors, as torch's, and as the bytes of those that torch lacks.

Source: safetensors 0.8 `bindings/python/py_src/safetensors/torch.py` (`_TYPES`): of F4, two elements are one of torch's
`float4_e2m1fn_x2`, so that the last dimension is half as long.
"""

from __future__ import annotations

import math

import torch

from tierd.state.tensor_file import DTYPES

_NEWER_DTYPES = {  # that safetensors 0.5 does not hold
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_TORCH = DTYPES | {
    name: getattr(torch, torch_name) for name, torch_name in _NEWER_DTYPES.items() if hasattr(torch, torch_name)
}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}
_PAIRS = getattr(torch, "float4_e2m1fn_x2", None)


def as_torch(name: str, shape: tuple[int, ...], nbytes: int) -> tuple[torch.dtype, tuple[int, ...], bool]:
    """Return dtype and shape in torch of a tensor in safetensors, and whether they are its own, not only its bytes."""
    if name in _TORCH and math.prod(shape) * _TORCH[name].itemsize == nbytes:
        return _TORCH[name], shape, True
    if name == "F4" and _PAIRS is not None and shape and shape[-1] % 2 == 0:
        return _PAIRS, (*shape[:-1], shape[-1] // 2), True
    return torch.uint8, (nbytes,), False


def as_safetensors(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return a tensor's dtype and shape in safetensors; None if the format does not hold the dtype."""
    if dtype is _PAIRS and shape:
        return "F4", (*shape[:-1], shape[-1] * 2)
    return (_NAMES[dtype], shape) if dtype in _NAMES else None
