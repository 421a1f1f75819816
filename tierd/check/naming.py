"""Find the names that a user gave to objects: variables of the loop's own functions, and attributes of own objects.

Invariant: as `insides`, this module reads attributes and calls nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from tierd.check.insides import reached
from tierd.check.places import users_frames

_MAX_OBJECTS = 5000  # objects that one search goes through
_MAX_DEPTH = 4


def users_names(objects: Mapping[str, object], owned: Iterable[object]) -> dict[str, str]:
    """Return the shortest name that the user gave to each of `objects`, by the key there; without one it is left out.

    Args:
        objects: by the names that captures have for them.
        owned: objects of the user's own classes, whose attributes are names as well.
    """
    keys_by_id = {id(value): key for key, value in objects.items()}
    names: dict[str, str] = {}
    todo: deque[tuple[str, Any, int]] = deque()
    for frame in users_frames():
        for name, value in list(frame.f_locals.items()):
            todo.append((f"{frame.f_code.co_name}() {name}", value, 0))
    todo.extend((type(instance).__qualname__.split("<locals>.")[-1], instance, 1) for instance in owned)
    visited: set[int] = set()
    while todo and len(visited) < _MAX_OBJECTS:
        name, value, depth = todo.popleft()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if (key := keys_by_id.get(id(value))) is not None:
            names.setdefault(key, name)
        if depth < _MAX_DEPTH:
            todo.extend((path, inner, depth + 1) for path, inner in reached(value, name))
    return names
