"""Find the paths of the holes in a state's JSON, for messages.

They are computed from the pieces, so that no walk must store paths.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tierd.state.containers import Path
from tierd.state.json_tree import NAMING
from tierd.state.tree_parser import parse_key

_SECOND = ("$deque", "$defaultdict")  # tags whose payload is [property, contents]


def places(pieces: Sequence[str]) -> Iterator[Path]:
    """Yield the paths of the holes between the pieces, in order."""
    return _holes(json.loads("null".join(pieces)), ())


def heaviest(paths: Iterable[Path], sizes: Sequence[int]) -> tuple[Path, int]:
    """Return the path with the largest size, and its size.

    The path is as deep as one entry has more than half of its parent.

    Args:
        paths: of values.
        sizes: of the same values.
    """
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


def fullest(tree: str) -> tuple[Path, int]:
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
