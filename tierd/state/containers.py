"""The containers of a state, and the one walk over them.

Invariant: a run of plain values counts as a container without members, because a look at each of a million numbers
takes seconds. A container is entered once, so a cycle ends the walk as well.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from tierd.state.kinds.packed_tensors import is_plain

Path = tuple[object, ...]
T = TypeVar("T")

SEQUENCES = (list, tuple, deque)
_EXACT = frozenset(SEQUENCES)


def members(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the keys and values in a container; None if `value` is none.

    They are those of now: the container may be changed meanwhile, also by another thread. No pair is kept, because
    thousands of new tuples cause collections of garbage, which take longer than a walk.
    """
    kind = type(value)  # asked first, because `isinstance` of an abstract class is slow
    if kind is dict or (kind not in _EXACT and isinstance(value, Mapping)):
        return () if is_plain(value.values()) else zip(tuple(value), tuple(value.values()), strict=False)
    if kind in _EXACT or isinstance(value, SEQUENCES):
        return () if is_plain(value) else enumerate(tuple(value))
    return None


def walk(value: object, path: Path = ()) -> Iterator[tuple[Path, Any, bool]]:
    """Yield `value` and all values in it: the path, the value, and whether it is a container."""
    entered: dict[int, object] = {}  # by id; kept, because an id is used again once its object is freed
    todo: list[tuple[Path, Iterator[tuple[Any, Any]]]] = []
    at, inner = path, value
    while True:
        inside = members(inner)
        if inside is None:
            yield at, inner, False
        elif id(inner) not in entered:
            entered[id(inner)] = inner
            todo.append((at, iter(inside)))
            yield at, inner, True
        while todo:
            above, remaining = todo[-1]
            if (pair := next(remaining, None)) is not None:
                at, inner = (*above, pair[0]), pair[1]
                break
            todo.pop()
        else:
            return


def leaves(value: object) -> Iterator[Any]:
    """Yield the values inside nested containers, without runs of plain values; `value` itself if it is no container."""
    return (inner for _, inner, is_container in walk(value) if not is_container)


def instances(value: object, kind: type[T], path: Path = ()) -> Iterator[tuple[Path, T]]:
    """Yield each instance of `kind` among the leaves, with its path."""
    return ((at, inner) for at, inner, _ in walk(value, path) if isinstance(inner, kind))


def paired(target: Any, saved: Any) -> Iterator[tuple[object, Any, Any]]:
    """Yield the key of each value in `saved`, what `target` has in its place (None if nothing), and the value.

    Both are dicts, or both are sequences.
    """
    if isinstance(saved, dict):
        yield from ((key, target.get(key), value) for key, value in saved.items())
        return
    olds = list(target)
    for index, value in enumerate(saved):
        yield index, olds[index] if index < len(olds) else None, value


def replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Replace each instance of `kind` in `value` by the result of `by`. Returns the new value.

    Lists, deques and dicts are changed in place; tuples are made anew.
    """
    if isinstance(value, kind):
        return by(value)
    if type(value) is tuple:
        parts = value if is_plain(value) else tuple(replaced(inner, kind, by) for inner in value)
        return value if all(map(operator.is_, parts, value)) else parts
    if isinstance(value, dict | list | deque):
        for key, inner in members(value) or ():
            if (new := replaced(inner, kind, by)) is not inner:
                value[key] = new
    return value
