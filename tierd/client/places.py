"""Where in a state the holes of its JSON are: worked out of the pieces, for messages; nobody keeps paths for that."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tierd.client.tree import NAMING, parse_key

Path = tuple[object, ...]

_SECOND = ("$deque", "$defaultdict")  # [what it is, what it holds]


def places(pieces: Sequence[str]) -> Iterator[Path]:
    """The paths of the holes between the pieces, in their order."""
    return _holes(json.loads("null".join(pieces)), ())


def heaviest(paths: Iterable[Path], sizes: Sequence[int]) -> tuple[Path, int]:
    """The entry that takes most, as deep as most of that is in one place, and how much it takes.

    Args:
        paths: of values.
        sizes: of the same values.
    """
    inside = list(zip(paths, sizes, strict=True))
    path: Path = ()
    whole = sum(sizes)
    while True:
        shares: defaultdict[object, int] = defaultdict(int)
        for place, size in inside:
            if len(place) > len(path):
                shares[place[len(path)]] += size
        part = max(shares, key=shares.__getitem__, default=None)
        if not shares or (path and 2 * shares[part] <= whole):
            return path, whole
        path, whole = (*path, part), shares[part]
        inside = [(place, size) for place, size in inside if place[: len(path)] == path]


def _holes(node: Any, path: Path) -> Iterator[Path]:
    if type(node) is list:
        for index, inner in enumerate(node):
            yield from _holes(inner, (*path, index))
    elif type(node) is not dict:
        yield path
    else:
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            for key, inner in node.items():
                yield from _holes(inner, (*path, key))
        elif tag == "$dict":
            for key, inner in node[tag]:
                yield from _holes(inner, (*path, parse_key(key) if type(key) is dict else key))
        elif tag == "$odict":
            for at, inner in zip((path, (*path, "_metadata")), node[tag], strict=False):
                yield from _holes(inner, at)
        elif tag not in NAMING:
            yield from _holes(node[tag][1] if tag in _SECOND else node[tag], path)
