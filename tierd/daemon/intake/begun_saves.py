"""Tell a save that was only begun, or a deletion that was, by the checkpoints before and after it.

A program that keeps one checkpoint deletes it before, or while, it writes the next one. Killed in that, it leaves a
part beside which nothing lies that has the other files. Only the record of what was taken shows that they are absent.

A program that was killed while it deleted its oldest checkpoint, before anything took that, leaves a part that lacks
what all newer ones have. If two lack it, their program deletes it on purpose, as older optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierd.daemon.intake.taken import TakenUnits, sizes_of
from tierd.daemon.intake.taken_record import Sizes
from tierd.watching.series import UNCERTAIN, beside, is_of_series, lacking
from tierd.watching.settle import Due
from tierd.watching.unit import WITHOUT_STEP, Unit


def lacks(due_unit: Due, units: Sequence[Unit], taken_units: TakenUnits) -> str | None:
    """Return why a unit may be a save, or a deletion, that was only begun; None if it lacks nothing.

    A second save in a row with the same names is whole: its program writes fewer files now.

    Args:
        due_unit: the unit.
        units: all units of the listing.
        taken_units: the record of what was taken, in which a save that lacks a file is noted.
    """
    unit, own_sizes = due_unit.unit, sizes_of(due_unit.shape)
    is_joint = unit.path.rpartition("/")[2] == WITHOUT_STEP  # its files are not of one save
    if is_joint or unit.layout not in UNCERTAIN:
        return None
    if (reason := _why_being_deleted(unit, units)) is not None:
        return reason
    # Of those that were there from the start, an older one may lack files that its program has removed.
    is_old = taken_units.after(unit.path) is None or taken_units.amended(unit.path, due_unit.shape) is not None
    if is_old and any(_is_complete_sibling(sibling, unit) for sibling in units):
        return None
    absent = _missing_file(unit, taken_units.before(own_sizes), units)
    if absent is None:
        return None
    saves: list[Iterable[str]] = [sizes for sizes in taken_units.begun.values() if _is_another_save(sizes, own_sizes)]
    saves += [
        sibling.files
        for sibling in units
        if _is_complete_sibling(sibling, unit) and not taken_units.knows(sibling.path)
    ]
    if any(_missing_file(unit, files, units) is None for files in saves):
        return None
    taken_units.refuse_begun(unit.path, own_sizes)
    return f"the checkpoint that was taken before it has {absent}, and nothing like that is there; it may be begun"


def _why_being_deleted(unit: Unit, units: Sequence[Unit]) -> str | None:
    """Return why the oldest unit of a series may be in its deletion; None if it is not the oldest, or lacks nothing."""
    if any(
        _is_complete_sibling(sibling, unit) and not _is_older(unit, sibling) for sibling in units
    ):  # ends at the first for most units
        return None
    absent = [_missing_file(unit, sibling.files, units) for sibling in units if _is_complete_sibling(sibling, unit)]
    if not absent or None in absent:
        return None
    return f"all newer checkpoints of its series have a file like {absent[0]}; its deletion may be begun"


def _missing_file(unit: Unit, earlier: Iterable[str], units: Sequence[Unit]) -> str | None:
    """Return a file that a unit lacks. Of an older one its program may have removed a whole directory."""
    has_newer = any(_is_complete_sibling(sibling, unit) and _is_older(unit, sibling) for sibling in units)
    return lacking(unit.files, beside(unit, earlier) if has_newer else earlier, unit.layout)


def _is_older(unit: Unit, sibling: Unit) -> bool:
    return unit.step is not None and sibling.step is not None and unit.step < sibling.step


def _is_complete_sibling(sibling: Unit, unit: Unit) -> bool:
    return sibling.path != unit.path and not sibling.missing and is_of_series(sibling.files, unit.files)


def _is_another_save(sizes: Sizes, own_sizes: Sizes) -> bool:
    """Whether these are the files of another save of the same series."""
    return is_of_series(sizes, own_sizes) and sizes.items().isdisjoint(own_sizes.items())
