"""Group the files of a listing that belong to no unit, so that a person sees what a watch leaves. Pure.

Invariant: the answer has at most `_GROUPS` groups of `_NAMES` names, however many files there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tierd.watching.listing import Kind, Listing
from tierd.watching.unit import Unit
from tierd.watching.unknown_names import POINTERS, USUAL

_GROUPS = 20
_NAMES = 3
_EVENTS = "events.out.tfevents."  # of TensorBoard; a host's name follows
_ENDING = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,15}")
_REASONS: dict[Kind, str] = {
    "link": "links are not followed, and one that leads to a checkpoint is recorded with it",
    "other": "it is neither a file nor a directory that can be read",
}
_HIDDEN = "a name that begins with a dot is not a checkpoint's"
_POINTS = "it is recorded with the checkpoint that it names"
_USUAL = "such names are of logs, settings, texts and pictures"
_UNMATCHED = "no glob of --unit, or of `unit` in a [[watch]], matches it"
_UNKNOWN = "no layout that tierd knows has such names"


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Files of one directory that belong to no checkpoint.

    Attributes:
        directory: the directory, from the watched one; empty for the watched one itself.
        ending: the ending of their names, with its dot; empty if they have none.
        count: how many there are.
        names: the first names.
        why: why no checkpoint has them.
    """

    directory: str
    ending: str
    count: int
    names: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        suffix = f" and {self.count - len(self.names)} more" if self.count > len(self.names) else ""
        where = f" in {self.directory}" if self.directory else ""
        return f"{', '.join(self.names)}{suffix}{where}: {self.why}"


def passed_over(listing: Listing, units: Iterable[Unit]) -> tuple[int, tuple[PassedOver, ...]]:
    """Return how many files, links and special files belong to no unit, and groups of them.

    Names of no known kind come first, then the largest groups.
    """
    unit_paths = {path for unit in units for path in (*unit.files, *unit.strange, *unit.markers)}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for path, entry in listing.entries.items():
        if entry.kind != "directory" and path not in unit_paths:
            directory, _, name = path.rpartition("/")
            ending = _ending(name)
            why = _UNMATCHED if listing.own and entry.kind == "file" else _reason(name, ending, entry.kind)
            groups.setdefault((directory, ending, why), []).append(name)
    groups_shown = [
        PassedOver(directory, ending, len(names), tuple(sorted(names)[:_NAMES]), why)
        for (directory, ending, why), names in groups.items()
    ]
    groups_shown.sort(
        key=lambda group: (group.why not in (_UNKNOWN, _UNMATCHED), -group.count, group.directory, group.ending)
    )
    return sum(group.count for group in groups_shown), tuple(groups_shown[:_GROUPS])


def _ending(name: str) -> str:
    if name.startswith(_EVENTS):
        return ".tfevents"
    _, dot, ending = name.rpartition(".")
    return f".{ending}" if dot and _ENDING.fullmatch(ending) else ""


def _reason(name: str, ending: str, kind: Kind) -> str:
    if kind != "file":
        return _REASONS[kind]
    if name.startswith("."):
        return _HIDDEN
    if name in POINTERS:
        return _POINTS
    return _USUAL if ending.lower() in USUAL else _UNKNOWN
