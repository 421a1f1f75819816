"""Dtypes that safetensors lacks: the dtype in which their bytes are stored, and the view that restores them."""

from __future__ import annotations

import torch

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
SHELLS = frozenset(
    getattr(torch, name)
    for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
    if hasattr(torch, name)
)
STORED_AS |= dict.fromkeys(SHELLS, torch.uint8)


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
