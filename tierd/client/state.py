"""Training state <-> typed JSON and tensors.

Law: what `flatten` returns is a snapshot of every value that is not a tensor (nothing that training does afterwards
changes it) and names every tensor once; a value without a safe encoding is refused by its path before anything is
written. No pickle.

The encoding is described in `tierd.client.tree`, the tensor file in `tierd.client.tensorfile`. Tensors that are the
same memory seen the same way (tied weights) are stored once and come back as one tensor; tensors that merely overlap
come back independent. Containers are stored where they stand: a list referred to twice comes back as two lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tierd.client.tensorfile import Buffer, parse_layout, view
from tierd.client.tree import parse_tree
from tierd.client.values import encode
from tierd.client.walk import Walk, uncollected
from tierd.core.errors import StateMismatch


@dataclass(frozen=True)
class Flattened:
    """A state in two parts: `tree`, typed JSON in UTF-8, and the tensors that it names.

    The tensors are the live ones: without a graph, of a dtype that the tensor file holds, on any device, perhaps not
    contiguous, not copied (NumPy arrays are). Whoever wants a snapshot copies them before training changes them.
    """

    tree: bytes
    tensors: dict[str, torch.Tensor]


def flatten(state: Mapping[str, object]) -> Flattened:
    """Take a state apart. Calls every `state_dict()`; has no other effect.

    Raises:
        StateRefused: a value has no encoding (its path is named), a `state_dict()` raised (chained), or the tree is
            too large.
    """
    with uncollected():
        walk = Walk()
        walk.begin(state)
        return Flattened(encode(walk.pieces(), walk.holes), walk.tensors)


def unflatten(tree: bytes | bytearray | memoryview, file: Buffer) -> dict[str, Any]:
    """Put a state together again; its tensors are views into `file` (writable, or torch warns), which has to outlive
    them.

    NumPy arrays own their memory. One stored tensor is one tensor object, wherever the tree names it.

    Raises:
        StateMismatch: tree or file is not what tierd writes; names the defect.
    """
    entries = parse_layout(file).entries
    views: dict[str, torch.Tensor] = {}

    def stored(name: str) -> torch.Tensor:
        if name not in views:
            views[name] = view(file, entries[name])
        return views[name]

    value = parse_tree(tree, stored)
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise StateMismatch("the state tree: its root is no mapping of names")
    return value
