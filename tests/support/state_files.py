"""The two files of a part whose state is given, and a golden fixture of them, which is written once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tierd.state.state_loading import flatten
from tierd.state.tensor_file import copy_into, plan_layout


def files_of(state: Mapping[str, object]) -> dict[str, bytes]:
    """The contents of `state.json` and `tensors.safetensors`, by name."""
    flat = flatten(state)
    layout = plan_layout(flat.tensors)
    image = bytearray(layout.size)
    copy_into(layout, flat.tensors, image)
    return {"state.json": flat.tree, "tensors.safetensors": bytes(image)}


def write_fixture(target: Path, files: Mapping[str, bytes]) -> None:
    """Write the files to an empty directory, which is made; exit if it is not empty."""
    if any(target.glob("*")):
        sys.exit(f"{target} is not empty: fixtures are written once")
    target.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (target / name).write_bytes(data)
