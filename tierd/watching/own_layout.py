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


def own_units(listing: Listing, rules: OwnLayout) -> list[Unit]:
    """Return the paths that a glob matches, each as one unit with all below it, sorted by path."""
    tree = listing.tree()
    globs = [tuple(glob.split("/")) for glob in rules.unit]
    paths: list[str] = []
    todo = [""]
    while todo:
        directory = todo.pop()
        for name, entry in tree[directory].items():
            path = joined(directory, name)
            if entry.kind in ("file", "directory") and any(_matches(tuple(path.split("/")), glob) for glob in globs):
                paths.append(path)
            elif entry.kind == "directory":
                todo.append(path)
    markers = {marker for path in paths if _NAME in (rules.complete_when or "") and (marker := _marker(path, rules))}
    return sorted(
        (_unit(path, listing, tree, rules) for path in paths if path not in markers), key=lambda unit: unit.path
    )


def _unit(path: str, listing: Listing, tree: Mapping[str, Mapping[str, ListedEntry]], rules: OwnLayout) -> Unit:
    entries = listing.entries
    is_directory = entries[path].kind == "directory"
    inside = list(below(tree, path)) if is_directory else [(path, entries[path])]
    files = sorted(inner for inner, entry in inside if entry.kind == "file")
    missing = None if files else "it has no file yet"
    markers = tuple(files)
    if (marker := _marker(path, rules)) is not None:
        if marker in entries and entries[marker].kind == "file":
            markers = (marker,)
            files = sorted({*files, marker})
        elif not is_directory and _NAME not in (rules.complete_when or ""):
            missing = f"it is a file, and {rules.complete_when} would lie within a directory; use {_NAME} for its name"
        else:
            missing = missing or f"{marker} is not there"
    strange = tuple(sorted(inner for inner, entry in inside if entry.kind != "file"))
    step = _step(path, rules, is_directory)
    is_unfinished = step is not None and not inside  # as of other checkpoints: a killed program left an empty directory
    return Unit(OWN, path, step, tuple(files), strange, missing, markers, is_unfinished)


def _marker(path: str, rules: OwnLayout) -> str | None:
    """Return the path of the file without which a unit is not complete."""
    if rules.complete_when is None:
        return None
    home, _, name = path.rpartition("/")
    if _NAME not in rules.complete_when:
        return f"{path}/{rules.complete_when}"
    return joined(home, rules.complete_when.replace(_NAME, name))


def _step(path: str, rules: OwnLayout, is_directory: bool) -> int | None:
    if rules.step is None:
        name = path.rpartition("/")[2]
        return directory_step(name) if is_directory else step_in(name)
    number = None
    for match in re.finditer(rules.step, path):
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
