"""Parse typed JSON: build the values of a state, given the tensors that it names, and find paths for messages.

Invariant: as in `state/state_tree.py`, whose limits this module enforces. Paths are computed from the pieces of text,
so that no walk must store them.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tierd.core.errors import StateMismatch
from tierd.core.shard_placement import parse_placement
from tierd.state import state_tree
from tierd.state.kinds import stored_arrays, wrapper_tensors
from tierd.state.kinds.dtensors import SavedDTensor
from tierd.state.kinds.random_generators import SavedGenerator
from tierd.state.kinds.stored_arrays import logical
from tierd.state.state_tree import MAX_DEPTH, MAX_TREE, NAMING, Path
from tierd.state.value_kinds import VALUE_TAGS, dtype_named, parts_of, require_type, require_types


def tree_text(tree: bytes | bytearray | memoryview) -> str:
    """Decode a tree's bytes to text. Raises `ValueError` if it is larger than tierd writes, or no UTF-8."""
    if len(tree) > MAX_TREE:
        raise ValueError(f"{len(tree)} bytes, more than the {MAX_TREE} that tierd writes")
    text = str(tree, "utf-8")
    if reason := state_tree.exceeded_limit(text):
        raise ValueError(reason)
    return text


class StoredCopies:
    """Copies that a reader makes of stored tensors for one tree: arrays, and runs of plain values.

    Invariant: each stored tensor is copied at most once. Otherwise many arrays or runs that name one tensor could take
    any amount of memory.
    """

    def __init__(self) -> None:
        self._claimed: dict[int, object] = {}
        self._values = 0

    def claim(self, stored: object) -> None:
        """Record that this tensor, or the object that represents it, is copied; raises `ValueError` the second time."""
        if id(stored) in self._claimed:
            raise ValueError("one tensor is named by two arrays or runs of values, which tierd never writes")
        self._claimed[id(stored)] = stored

    def array(self, stored: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Any:
        self.claim(stored)
        return stored_arrays.array_of(stored, dtype, shape)

    def values(self, stored: torch.Tensor, kind: str, size: int) -> Any:
        self.claim(stored)
        self._values += stored_arrays.count_values(stored, kind, size)
        if reason := state_tree.exceeded_run_limit(self._values):
            raise ValueError(reason)
        return stored_arrays.unpack(stored, kind, size)


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
    copies = StoredCopies()
    json_decoder = decoder(tensor, logical, copies.array, copies.values)
    if not is_read:
        json_decoder = decoder(tensor, logical, lambda *_: None, lambda *_: [])
    try:
        value = json_decoder.decode(tree_text(tree))
        check_depth(value)
    except DECODE_ERRORS as error:
        raise StateMismatch(f"the state tree: {str(error)[:300] or type(error).__name__}") from error
    return value


def parse_key(key: object) -> Any:
    return parse_tree(json.dumps([key]).encode(), dict[str, Any]().__getitem__)[0]


DECODE_ERRORS = (ValueError, TypeError, OverflowError, RuntimeError, ImportError)  # raised by `decoder` for a bad tree


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
        array, values: convert a stored tensor to an array, or to a run of plain values.
    """
    views: dict[tuple[str, torch.dtype], Any] = {}

    def stored(name: str) -> Any:
        try:
            return tensor(require_type(name, str))
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
        return array(stored(name), dtype, tuple(require_types(shape, int)))

    def generator(payload: Any) -> object:
        name, device = parts_of(payload, str, str)
        return SavedGenerator(stored(name), torch.device(device))

    def run(payload: Any) -> object:
        name, kind, size = parts_of(payload, str, str, int)
        return values(stored(name), kind, size)

    def dtensor(payload: Any) -> object:
        parts = require_type(payload, list)
        if len(parts) != 2:
            raise ValueError(f"{len(parts)} parts in the place of 2")
        return SavedDTensor(parts[0], parse_placement(parts[1]))

    tags = {
        **VALUE_TAGS,
        "$tensor": stored,
        "$view": viewed,
        "$array": build_array,
        "$values": run,
        "$generator": generator,
        "$dtensor": dtensor,
        "$wrapper": wrapper_tensors.parse_wrapper,
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


_SECOND = ("$deque", "$defaultdict")  # tags whose payload is [property, contents]


def hole_paths(pieces: Sequence[str]) -> Iterator[Path]:
    return _holes(json.loads("null".join(pieces)), ())


def heaviest_path(paths: Iterable[Path], sizes: Sequence[int]) -> tuple[Path, int]:
    """Return the path with the largest size, and its size, as deep as one entry has more than half of its parent."""
    inside = list(zip(paths, sizes, strict=True))
    path: Path = ()
    total = sum(sizes)
    while True:
        shares: defaultdict[object, int] = defaultdict(int)
        for place, size in inside:
            if len(place) > len(path):
                shares[place[len(path)]] += size
        part = max(shares, key=shares.__getitem__, default=None)
        if not shares or (path and 2 * shares[part] <= total):
            return path, total
        path, total = (*path, part), shares[part]
        inside = [(place, size) for place, size in inside if place[: len(path)] == path]


def fullest_path(tree: str) -> tuple[Path, int]:
    """Return the path in typed JSON with the most values and containers, and their number.

    The path is as deep as one entry has more than half of its parent.
    """
    path: Path = ()
    node, largest = json.loads(tree), 0
    while True:
        inside = [(place, inner, _count(inner)) for place, inner in _inside(node, path)]
        place, inner, count = max(inside, key=lambda counted: counted[2], default=((), None, 0))
        if not count or (path and 2 * count <= largest):
            return path, largest
        path, node, largest = place, inner, count


def _count(node: Any) -> int:
    total, pending = 0, [node]
    while pending:
        current = pending.pop()
        total += 1
        if type(current) is list:
            pending += current
        elif type(current) is dict:
            pending += current.values()
    return total


def _holes(node: Any, path: Path) -> Iterator[Path]:
    if type(node) is not list and type(node) is not dict:
        yield path
    for place, inner in _inside(node, path):
        yield from _holes(inner, place)


def _inside(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the values inside a value of typed JSON, each with its path."""
    if type(node) is list:
        for index, inner in enumerate(node):
            yield (*path, index), inner
    elif type(node) is dict:
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            for key, inner in node.items():
                yield (*path, key), inner
        elif tag == "$dict":
            for key, inner in node[tag]:
                yield (*path, parse_key(key) if type(key) is dict else key), inner
        elif tag == "$odict":
            yield from zip((path, (*path, "_metadata")), node[tag], strict=False)
        elif tag == "$map":
            yield from ((path, inner) for inner in node[tag])
        elif tag not in NAMING:
            yield path, node[tag][1] if tag in _SECOND else node[tag]
