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


def lacks(due: Due, units: Sequence[Unit], taken: TakenUnits) -> str | None:
    """Return why a unit may be a save, or a deletion, that was only begun; None if it lacks nothing.

    A second save in a row with the same names is whole: its program writes fewer files now.

    Args:
        due: the unit.
        units: all units of the listing.
        taken: the record of what was taken, in which a save that lacks a file is noted.
    """
    unit, own = due.unit, sizes_of(due.shape)
    is_joint = unit.path.rpartition("/")[2] == WITHOUT_STEP  # its files are not of one save
    if is_joint or unit.layout not in UNCERTAIN:
        return None
    if (reason := _lost(unit, units)) is not None:
        return reason
    # Of those that were there from the start, an older one may lack files that its program has removed.
    is_old = taken.after(unit.path) is None or taken.amended(unit.path, due.shape) is not None
    if is_old and any(_shows(other, unit) for other in units):
        return None
    absent = _lacking(unit, taken.before(own), units)
    if absent is None:
        return None
    saves: list[Iterable[str]] = [sizes for sizes in taken.begun.values() if _is_other(sizes, own)]
    saves += [other.files for other in units if _shows(other, unit) and not taken.knows(other.path)]
    if any(_lacking(unit, files, units) is None for files in saves):
        return None
    taken.refuse_begun(unit.path, own)
    return f"the checkpoint that was taken before it has {absent}, and nothing like that is there; it may be begun"


def _lost(unit: Unit, units: Sequence[Unit]) -> str | None:
    """Return why the oldest unit of a series may be in its deletion; None if it is not the oldest, or lacks nothing."""
    if any(_shows(other, unit) and not _is_older(unit, other) for other in units):  # ends at the first for most units
        return None
    absent = [_lacking(unit, other.files, units) for other in units if _shows(other, unit)]
    if not absent or None in absent:
        return None
    return f"all newer checkpoints of its series have a file like {absent[0]}; its deletion may be begun"


def _lacking(unit: Unit, earlier: Iterable[str], units: Sequence[Unit]) -> str | None:
    """Return a file that a unit lacks. Of an older one its program may have removed a whole directory."""
    has_newer = any(_shows(other, unit) and _is_older(unit, other) for other in units)
    return lacking(unit.files, beside(unit, earlier) if has_newer else earlier, unit.layout)


def _is_older(unit: Unit, other: Unit) -> bool:
    return unit.step is not None and other.step is not None and unit.step < other.step


def _shows(other: Unit, unit: Unit) -> bool:
    return other.path != unit.path and not other.missing and is_of_series(other.files, unit.files)


def _is_other(sizes: Sizes, own: Sizes) -> bool:
    """Whether these are the files of another save of the same series."""
    return is_of_series(sizes, own) and sizes.items().isdisjoint(own.items())
