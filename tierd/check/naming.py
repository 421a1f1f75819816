"""Find the names that a user gave to objects: variables of the loop's own functions, and attributes of own objects.

Invariant: as `insides`, this module reads attributes and calls nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from tierd.check.insides import reached
from tierd.check.places import users_frames

_MOST = 5000  # objects that one search goes through
_DEEPEST = 4


def users_names(objects: Mapping[str, object], owned: Iterable[object]) -> dict[str, str]:
    """Return the shortest name that the user gave to each of `objects`, by the key there; without one it is left out.

    Args:
        objects: by the names that captures have for them.
        owned: objects of the user's own classes, whose attributes are names as well.
    """
    wanted = {id(value): key for key, value in objects.items()}
    found: dict[str, str] = {}
    todo: deque[tuple[str, Any, int]] = deque()
    for frame in users_frames():
        for name, value in list(frame.f_locals.items()):
            todo.append((f"{frame.f_code.co_name}() {name}", value, 0))
    todo.extend((type(one).__qualname__.split("<locals>.")[-1], one, 1) for one in owned)
    visited: set[int] = set()
    while todo and len(visited) < _MOST:
        name, value, depth = todo.popleft()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if (key := wanted.get(id(value))) is not None:
            found.setdefault(key, name)
        if depth < _DEEPEST:
            todo.extend((path, inner, depth + 1) for path, inner in reached(value, name))
    return found
