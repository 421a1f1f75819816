"""Find units by a person's own rules, for layouts that no rule here knows. Pure.

Invariant: the other rules apply neither within a unit nor beside it. A path that no glob matches is no unit.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tierd.core.ids import MAX_STEP
from tierd.watching.listing import ListedEntry, Listing, below, joined
from tierd.watching.programs import OWN
from tierd.watching.step_in_name import directory_step, step_in
from tierd.watching.unit import Unit

_NAME = "{name}"  # in `complete_when`, the unit's own name


@dataclass(frozen=True, slots=True)
class OwnLayout:
    """Rules that say which paths are checkpoints.

    Attributes:
        unit: globs of paths from the directory. `*` stands for a part of one name, `**` for any directories; neither
            stands for a name that begins with a dot.
        step: a regular expression with one group, whose last match in a unit's path is its step; None: the number in
            its name, as of other checkpoints.
        complete_when: a file within a unit, or beside it if the name has `{name}`, without which it is not complete;
            None: nothing says that.
    """

    unit: tuple[str, ...]
    step: str | None = None
    complete_when: str | None = None


def own_units(listing: Listing, own: OwnLayout) -> list[Unit]:
    """Return the paths that a glob matches, each as one unit with all below it, sorted by path."""
    tree = listing.tree()
    globs = [tuple(glob.split("/")) for glob in own.unit]
    found: list[str] = []
    todo = [""]
    while todo:
        here = todo.pop()
        for name, entry in tree[here].items():
            path = joined(here, name)
            if entry.kind in ("file", "directory") and any(_matches(tuple(path.split("/")), glob) for glob in globs):
                found.append(path)
            elif entry.kind == "directory":
                todo.append(path)
    markers = {marker for path in found if _NAME in (own.complete_when or "") and (marker := _marker(path, own))}
    return sorted((_unit(path, listing, tree, own) for path in found if path not in markers), key=lambda one: one.path)


def _unit(path: str, listing: Listing, tree: Mapping[str, Mapping[str, ListedEntry]], own: OwnLayout) -> Unit:
    entries = listing.entries
    is_directory = entries[path].kind == "directory"
    inside = list(below(tree, path)) if is_directory else [(path, entries[path])]
    files = sorted(inner for inner, entry in inside if entry.kind == "file")
    missing = None if files else "it has no file yet"
    markers = tuple(files)
    if (marker := _marker(path, own)) is not None:
        if marker in entries and entries[marker].kind == "file":
            markers = (marker,)
            files = sorted({*files, marker})
        elif not is_directory and _NAME not in (own.complete_when or ""):
            missing = f"it is a file, and {own.complete_when} would lie within a directory; use {_NAME} for its name"
        else:
            missing = missing or f"{marker} is not there"
    strange = tuple(sorted(inner for inner, entry in inside if entry.kind != "file"))
    step = _step(path, own, is_directory)
    begun = step is not None and not inside  # as of other checkpoints: a killed program left an empty directory
    return Unit(OWN, path, step, tuple(files), strange, missing, markers, begun)


def _marker(path: str, own: OwnLayout) -> str | None:
    """Return the path of the file without which a unit is not complete."""
    if own.complete_when is None:
        return None
    home, _, name = path.rpartition("/")
    if _NAME not in own.complete_when:
        return f"{path}/{own.complete_when}"
    return joined(home, own.complete_when.replace(_NAME, name))


def _step(path: str, own: OwnLayout, is_directory: bool) -> int | None:
    if own.step is None:
        name = path.rpartition("/")[2]
        return directory_step(name) if is_directory else step_in(name)
    number = None
    for match in re.finditer(own.step, path):
        if match[1] is not None and re.fullmatch(r"[0-9]{1,18}", match[1]):
            number = int(match[1])
    return number if number is not None and number <= MAX_STEP else None


def _matches(names: tuple[str, ...], glob: tuple[str, ...]) -> bool:
    if not glob:
        return not names
    if glob[0] == "**":
        inner = bool(names) and not names[0].startswith(".") and _matches(names[1:], glob)
        return inner or _matches(names, glob[1:])
    return bool(names) and _is_named(names[0], glob[0]) and _matches(names[1:], glob[1:])


def _is_named(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
