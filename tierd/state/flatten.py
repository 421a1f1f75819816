"""Convert a training state to typed JSON and tensors, and back.

Invariant: `flatten` returns a snapshot of every value that is not a tensor, so later training steps cannot change it.
Every tensor gets exactly one name. A value without a safe encoding is refused, with its path, before anything is
written. No pickle is used.

`tierd.state.json_tree` describes the encoding; `tierd.state.tensor_file` describes the tensor file. Tied weights, which
are the same memory with the same form, are stored once and restored as one tensor. Tensors that only overlap in memory
are restored as independent tensors. Containers are stored once per reference: a list that a state refers to twice is
restored as two lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tierd.core.errors import StateMismatch
from tierd.state.encode import Encoder
from tierd.state.tensor_file import Buffer, parse_layout, view
from tierd.state.tree_parser import parse_tree
from tierd.state.uncollected import uncollected
from tierd.state.values import encode


@dataclass(frozen=True)
class FlatState:
    """A state in two parts: typed JSON, and the tensors that the JSON names.

    The tensors are live, because `flatten` does not copy them. A caller that needs a snapshot must copy them before
    training changes them.

    Attributes:
        tree: typed JSON in UTF-8.
        tensors: by name; without an autograd graph, of a dtype that the tensor file holds, on any device, perhaps not
            contiguous. Only those made from NumPy arrays are copies.
    """

    tree: bytes
    tensors: dict[str, torch.Tensor]


def flatten(state: Mapping[str, object]) -> FlatState:
    """Take a state apart. Calls every `state_dict()`; has no other effect.

    Raises:
        StateRefused: a value has no encoding (the message names its path), a `state_dict()` raised (chained), or the
            tree is too large.
    """
    with uncollected():
        walk = Encoder()
        walk.begin(state)
        return FlatState(encode(walk.pieces(), walk.holes), walk.tensors)


def unflatten(tree: bytes | bytearray | memoryview, file: Buffer, *, is_read: bool = True) -> dict[str, Any]:
    """Rebuild a state from its tree and its tensor file.

    The returned tensors are views into `file`, so `file` must outlive them. It must be writable, because torch warns
    otherwise. NumPy arrays own their memory. One stored tensor is one tensor object, however often the tree names it.

    Args:
        is_read: as for `parse_tree`: False if only the header of `file` has been read.

    Raises:
        StateMismatch: tierd did not write this tree or file; the message names the defect.
    """
    entries = parse_layout(file).entries
    views: dict[str, torch.Tensor] = {}

    def stored(name: str) -> torch.Tensor:
        if name not in views:
            views[name] = view(file, entries[name])
        return views[name]

    value = parse_tree(tree, stored, is_read=is_read)
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise StateMismatch("the state tree: its root is no mapping of names")
    return value
