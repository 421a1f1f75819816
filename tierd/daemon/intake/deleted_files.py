"""Tell the files that a program deleted of an older checkpoint from those that were lost.

A program removes whole files and directories of its older checkpoints: sharded states, optimizers, the copy beside the
best. Only a checkpoint from which it resumes needs all of them: the newest of its series, and one that a pointer names.

Invariant: a file is left deleted only if a newer checkpoint that is whole has its counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tierd.daemon.intake.judging import Judged, Verdict
from tierd.watching.files import Tree
from tierd.watching.listing import Listing
from tierd.watching.pointers import may_point, points_to
from tierd.watching.series import has_each, home_of
from tierd.watching.unit import Unit

_TO_REPLACE: tuple[Verdict, ...] = ("damaged", "unfinished")


def to_replace(judged: Sequence[Judged]) -> Iterator[Judged]:
    """Yield the units to replace or move, the newest of those that lack files first, and leave those of which a program
    deleted files. What was replaced before is whole.
    """
    bad = [one for one in judged if one.verdict in _TO_REPLACE]
    yield from (one for one in bad if not one.absent)
    for one in sorted((one for one in bad if one.absent), key=lambda one: one.made, reverse=True):
        if _is_older(one, judged):
            one.verdict, one.is_shortened = "unknown", True
            one.why = f"{one.absent[0]} is not there, and newer checkpoints have such a file: its program deletes these"
        else:
            yield one


def names_absent(tree: Tree, one: Judged, listing: Listing) -> bool:
    """Whether a pointer in the directory names what a unit lacks."""
    pointers = [*tree.pointers(may_point(one.unit, listing), listing)]
    return any(points_to(pointer, part) for part in _absent_entries(one) for pointer in pointers)


def _absent_entries(one: Judged) -> Iterator[Unit]:
    """Yield each entry of the unit's directory that lacks files, as a unit of these."""
    depth = one.unit.path.count("/") + 1
    entries: dict[str, list[str]] = {}
    for path in one.absent:
        entries.setdefault("/".join(path.split("/")[:depth]), []).append(path)
    return (replace(one.unit, path=path, files=tuple(files)) for path, files in entries.items())


def _is_older(one: Judged, judged: Sequence[Judged]) -> bool:
    """Whether newer checkpoints are whole that have a counterpart of each file that a unit lacks."""
    if one.unit.step is None or one.is_named:
        return False
    newer = [other for other in judged if other.is_good and _is_newer(other, one)]
    return has_each(one.absent, [path for other in newer for path in other.unit.files])


def _is_newer(other: Judged, one: Judged) -> bool:
    if other.run != one.run or home_of(other.unit) != home_of(one.unit):
        return False
    if other.checkpoint is not None and one.checkpoint is not None:
        return other.checkpoint > one.checkpoint
    return other.made > one.made
