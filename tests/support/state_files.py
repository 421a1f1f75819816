"""A whole state in two parts and as the two files of a part, and a golden fixture of them, which is written once."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tierd.state.encoder import Encoder
from tierd.state.single_values import encode
from tierd.state.state_tree import text_pieces
from tierd.state.tensor_file import Buffer, TensorFileLayout, TensorFilePlanner, target_views


@dataclass(frozen=True)
class FlatState:
    """A state's typed JSON in UTF-8, and the tensors that it names, which are live."""

    tree: bytes
    tensors: dict[str, torch.Tensor]


def flatten(state: Mapping[str, object]) -> FlatState:
    """Take a state apart in one walk, without what an earlier save has found."""
    walk = Encoder()
    walk.begin(state)
    return FlatState(encode(text_pieces(walk.text), walk.holes), walk.tensors)


def plan_layout(tensors: Mapping[str, torch.Tensor], moving: Collection[str] = ()) -> TensorFileLayout:
    return TensorFilePlanner(tensors, moving).layout()


def copy_into(layout: TensorFileLayout, tensors: Mapping[str, torch.Tensor], buffer: Buffer) -> None:
    """Write the whole file, header included, into `buffer`."""
    into = target_views(layout, buffer)
    memoryview(buffer).cast("B")[: len(layout.header)] = layout.header
    for name, target in into.items():
        target.copy_(tensors[name].detach())


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
