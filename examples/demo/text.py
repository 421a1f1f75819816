"""Real text that every Python has: the sources of its own standard library.

Invariant: a sample is a function of its number alone, so the order of the numbers is the order of the data.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

_MOST = 4_000_000  # bytes; the rest of the library adds nothing to a run this short


def standard_library() -> bytes:
    """The top-level modules' sources, one after the other in order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)[:_MOST]


class Windows(Dataset[tuple[int, Tensor, Tensor]]):
    """`count` windows of `size` bytes, spread evenly over `text`; a sample is `(number, inputs, targets)`."""

    def __init__(self, text: bytes, count: int, size: int) -> None:
        self._text, self._count, self._size = text, count, size
        self._stride = (len(text) - size - 1) // count
        if self._stride < 1:
            raise ValueError(f"{len(text)} bytes of text are too few for {count} windows of {size}")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        start = number * self._stride
        window = torch.tensor(list(self._text[start : start + self._size + 1]))
        return number, window[:-1], window[1:]
