"""Writes the golden fixture of wrapper subclasses: `python tests/format/make_v1_wrappers.py DIRECTORY`.

Invariant: run once, for `tests/format/v1-wrappers/`; what lies there is never edited and never written again. It is the
two files of a part whose state has a wrapper, and one inside another. `tests/test_format.py` reads it, and writes it
anew.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal import two_tensor

from tierd.state.flatten import flatten
from tierd.state.tensor_file import copy_into, plan_layout

TwoTensor: Any = two_tensor.TwoTensor


def state() -> dict[str, object]:
    numbers = torch.arange(12.0).view(3, 4)
    return {
        "weight": TwoTensor(numbers, -numbers),
        "nested": [TwoTensor(TwoTensor(numbers.half(), numbers.half()), TwoTensor(numbers.half(), numbers.half() + 1))],
    }


def files() -> dict[str, bytes]:
    flat = flatten(state())
    layout = plan_layout(flat.tensors)
    image = bytearray(layout.size)
    copy_into(layout, flat.tensors, image)
    return {"state.json": flat.tree, "tensors.safetensors": bytes(image)}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if any(target.glob("*")):
        sys.exit(f"{target} is not empty: fixtures are written once")
    target.mkdir(parents=True, exist_ok=True)
    for name, data in files().items():
        (target / name).write_bytes(data)
