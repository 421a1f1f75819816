"""Tell the files that a program deleted of an older checkpoint from those that were lost.

A program removes whole files and directories of its older checkpoints: sharded states, optimizers, the copy beside the
best. Only a checkpoint from which it resumes needs all of them: the newest of its series, and one that a pointer names.

Invariant: a file is left deleted only if a newer checkpoint that is whole has its counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tierd.daemon.intake.judging import JudgedUnit, Verdict
from tierd.watching.files import Tree
from tierd.watching.listing import Listing
from tierd.watching.pointers import may_point, points_to
from tierd.watching.series import has_each, home_of
from tierd.watching.unit import Unit

_TO_REPLACE: tuple[Verdict, ...] = ("damaged", "unfinished")


def to_replace(judged: Sequence[JudgedUnit]) -> Iterator[JudgedUnit]:
    """Yield the units to replace or move, the newest of those that lack files first, and leave those of which a program
    deleted files. What was replaced before is whole.
    """
    replaceable = [judged_unit for judged_unit in judged if judged_unit.verdict in _TO_REPLACE]
    yield from (judged_unit for judged_unit in replaceable if not judged_unit.absent)
    for judged_unit in sorted(
        (judged_unit for judged_unit in replaceable if judged_unit.absent),
        key=lambda judged_unit: judged_unit.made,
        reverse=True,
    ):
        if _is_older(judged_unit, judged):
            judged_unit.verdict, judged_unit.is_shortened = "unknown", True
            judged_unit.why = (
                f"{judged_unit.absent[0]} is not there, and newer checkpoints have such a file: its program "
                "deletes these"
            )
        else:
            yield judged_unit


def names_absent(tree: Tree, judged: JudgedUnit, listing: Listing) -> bool:
    """Whether a pointer in the directory names what a unit lacks."""
    pointers = [*tree.pointers(may_point(judged.unit, listing), listing)]
    return any(points_to(pointer, part) for part in _absent_entries(judged) for pointer in pointers)


def _absent_entries(judged: JudgedUnit) -> Iterator[Unit]:
    """Yield each entry of the unit's directory that lacks files, as a unit of these."""
    depth = judged.unit.path.count("/") + 1
    entries: dict[str, list[str]] = {}
    for path in judged.absent:
        entries.setdefault("/".join(path.split("/")[:depth]), []).append(path)
    return (replace(judged.unit, path=path, files=tuple(files)) for path, files in entries.items())


def _is_older(judged_unit: JudgedUnit, judged: Sequence[JudgedUnit]) -> bool:
    """Whether newer checkpoints are whole that have a counterpart of each file that a unit lacks."""
    if judged_unit.unit.step is None or judged_unit.is_named:
        return False
    newer = [sibling for sibling in judged if sibling.is_good and _is_newer(sibling, judged_unit)]
    return has_each(judged_unit.absent, [path for sibling in newer for path in sibling.unit.files])


def _is_newer(sibling: JudgedUnit, judged: JudgedUnit) -> bool:
    if sibling.run != judged.run or home_of(sibling.unit) != home_of(judged.unit):
        return False
    if sibling.checkpoint is not None and judged.checkpoint is not None:
        return sibling.checkpoint > judged.checkpoint
    return sibling.made > judged.made
