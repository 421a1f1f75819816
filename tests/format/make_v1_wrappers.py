"""Writes the golden fixture of wrappers: `PYTHONPATH=tests python tests/format/make_v1_wrappers.py DIRECTORY`.

Invariant: run once, for `tests/format/v1-wrappers/`; what lies there is never edited and never written again. It is the
two files of a part whose state has a wrapper, and one inside another. `tests/test_format.py` reads it, and writes it
anew.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from support.state_files import files_of, write_fixture
from torch.testing._internal import two_tensor

TwoTensor: Any = two_tensor.TwoTensor


def state() -> dict[str, object]:
    numbers = torch.arange(12.0).view(3, 4)
    return {
        "weight": TwoTensor(numbers, -numbers),
        "nested": [TwoTensor(TwoTensor(numbers.half(), numbers.half()), TwoTensor(numbers.half(), numbers.half() + 1))],
    }


def files() -> dict[str, bytes]:
    return files_of(state())


if __name__ == "__main__":
    write_fixture(Path(sys.argv[1]), files())
