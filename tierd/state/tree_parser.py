"""Parse typed JSON: build the values of a state, given the tensors that it names.

Invariant: as in `state/json_tree.py`, whose limits this module enforces.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from tierd.core.errors import StateMismatch
from tierd.core.shard_placement import parse_placement
from tierd.state import tree_budget
from tierd.state.json_tree import MAX_DEPTH, MAX_TREE
from tierd.state.kinds import numpy_arrays, packed_tensors, wrapper_tensors
from tierd.state.kinds.dtensors import SavedDTensor
from tierd.state.kinds.generators import SavedGenerator
from tierd.state.stored_dtypes import logical
from tierd.state.tree_tags import TAGS, all_of, checked, dtype_named, parts_of


def tree_text(tree: bytes | bytearray | memoryview) -> str:
    """Decode a tree's bytes to text, before any of it is parsed.

    Raises:
        ValueError: the tree is larger than tierd writes, or is not UTF-8.
    """
    if len(tree) > MAX_TREE:
        raise ValueError(f"{len(tree)} bytes, more than the {MAX_TREE} that tierd writes")
    text = str(tree, "utf-8")
    if reason := tree_budget.excess(text):
        raise ValueError(reason)
    return text


class Copies:
    """Copies that a reader makes of stored tensors for one tree: arrays, and runs of plain values.

    Invariant: each stored tensor is copied at most once. Otherwise many arrays or runs that name one tensor could take
    any amount of memory.
    """

    def __init__(self) -> None:
        self._claimed: dict[int, object] = {}
        self._values = 0

    def claim(self, stored: object) -> None:
        """Record that this tensor, or the object that represents it, is copied.

        Raises:
            ValueError: it was claimed before.
        """
        if id(stored) in self._claimed:
            raise ValueError("one tensor is named by two arrays or runs of values, which tierd never writes")
        self._claimed[id(stored)] = stored

    def array(self, stored: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Any:
        self.claim(stored)
        return numpy_arrays.array_of(stored, dtype, shape)

    def values(self, stored: torch.Tensor, kind: str, size: int) -> Any:
        self.claim(stored)
        self._values += packed_tensors.count(stored, kind, size)
        if reason := tree_budget.excess_of_runs(self._values):
            raise ValueError(reason)
        return packed_tensors.unpack(stored, kind, size)


def parse_tree(
    tree: bytes | bytearray | memoryview, tensor: Callable[[str], torch.Tensor], *, is_read: bool = True
) -> Any:
    """Parse a tree.

    Args:
        tensor: returns the stored tensor of a name, the same object each time, or raises `KeyError`.
        is_read: whether the tensors' values have been read. Until then arrays are None and packed runs are empty.

    Raises:
        StateMismatch: tierd did not write this tree; the message names the defect.
    """
    copies = Copies()
    json_decoder = decoder(tensor, logical, copies.array, copies.values)
    if not is_read:
        json_decoder = decoder(tensor, logical, lambda *_: None, lambda *_: [])
    try:
        value = json_decoder.decode(tree_text(tree))
        check_depth(value)
    except DEFECTS as error:
        raise StateMismatch(f"the state tree: {str(error)[:300] or type(error).__name__}") from error
    return value


def parse_key(key: object) -> Any:
    """Build a mapping's key from plain JSON. Raises `StateMismatch`."""
    return parse_tree(json.dumps([key]).encode(), dict[str, Any]().__getitem__)[0]


DEFECTS = (ValueError, TypeError, OverflowError, RuntimeError, ImportError)  # raised by `decoder` for a bad tree


def decoder(
    tensor: Callable[[str], Any],
    view: Callable[[Any, torch.dtype], Any],
    array: Callable[[Any, str, Any], Any],
    values: Callable[[Any, str, int], Any],
) -> json.JSONDecoder:
    """Return a JSON decoder for typed JSON.

    Args:
        tensor: returns the stored tensor of a name, or raises `KeyError`.
        view: views a stored tensor as a dtype of `STORED_AS`.
        array: converts a stored tensor to an array of this dtype and shape.
        values: converts a stored tensor to a run of this kind and number of elements.
    """
    views: dict[tuple[str, torch.dtype], Any] = {}

    def stored(name: str) -> Any:
        try:
            return tensor(checked(name, str))
        except KeyError:
            raise ValueError(f"the tensor file has no {name[:100]!r}") from None

    def viewed(payload: Any) -> Any:
        name, dtype = parts_of(payload, str, str)
        key = name, dtype_named(dtype)
        if key not in views:
            views[key] = view(stored(name), key[1])
        return views[key]

    def build_array(payload: Any) -> object:
        name, dtype, shape = parts_of(payload, str, str, list)
        return array(stored(name), dtype, tuple(all_of(shape, int)))

    def generator(payload: Any) -> object:
        name, device = parts_of(payload, str, str)
        return SavedGenerator(stored(name), torch.device(device))

    def run(payload: Any) -> object:
        name, kind, size = parts_of(payload, str, str, int)
        return values(stored(name), kind, size)

    def dtensor(payload: Any) -> object:
        parts = checked(payload, list)
        if len(parts) != 2:
            raise ValueError(f"{len(parts)} parts in the place of 2")
        return SavedDTensor(parts[0], parse_placement(parts[1]))

    tags = {
        **TAGS,
        "$tensor": stored,
        "$view": viewed,
        "$array": build_array,
        "$values": run,
        "$generator": generator,
        "$dtensor": dtensor,
        "$wrapper": wrapper_tensors.parsed,
    }

    def build(pairs: list[tuple[str, Any]]) -> object:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a key occurs twice in one object")
        if not any(key.startswith("$") for key in members):
            return members
        tag, payload = pairs[0]
        if len(pairs) != 1 or tag not in tags:
            raise ValueError(f"unknown tag {tag[:40]!r}: if a newer tierd wrote it, restore it with that one")
        return tags[tag](payload)

    return json.JSONDecoder(object_pairs_hook=build, parse_constant=_refuse)


_CONTAINERS = frozenset((dict, OrderedDict, Counter, defaultdict, list, tuple, deque, set, frozenset))


def check_depth(value: object) -> None:
    """Raise `ValueError` if containers are nested deeper than tierd writes them."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 2):
        inner: list[object] = []
        for node in level:
            if isinstance(node, dict):
                # Skipped for many plain numbers, because checking each of them would be slow.
                if not _CONTAINERS.isdisjoint(map(type, node.values())):
                    inner.extend(node.values())
                if tuple in set(map(type, node)):
                    inner.extend(key for key in node if type(key) is tuple)
                inner.append(getattr(node, "_metadata", None))
            elif not _CONTAINERS.isdisjoint(map(type, node)):
                inner.extend(node)
        level = [node for node in inner if type(node) in _CONTAINERS]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")
