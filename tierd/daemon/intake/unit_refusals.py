"""The units of a watched directory that are not taken: refused for a time, only begun, or behind a link that leads out.

A program that keeps one checkpoint deletes it before, or while, it writes the next one. Killed in that, it leaves a
part of a save. Only the record of what was taken, or newer siblings, show which files are absent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from tierd.daemon.intake.taken_units import TakenUnits, sizes_of
from tierd.daemon.intake.unit_files import UnitBusy
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.series_comparison import (
    UNCERTAIN_LAYOUTS,
    files_in_own_directories,
    missing_counterpart,
    shares_a_file_form,
)
from tierd.watching.settling_units import MIXED_REASON, DueUnit, SettlingTracker
from tierd.watching.unit import WITHOUT_STEP, Listing, Unit

log = logging.getLogger("tierd.daemon")

_AGAIN_S = 60.0  # seconds until a unit that could not be read or written is tried again
_OPEN_S = 5.0  # seconds until a unit that a process has open for writing is tried again
_RESTLESS_S = 3600.0  # seconds for which a unit may change, or be of two saves, until that is reported
_BAD_NAME = "its name is not UTF-8; rename it"


class Refusals:
    """The refused units of one directory.

    Args:
        settle_s: as for `SettlingTracker`.
        report: called with a unit's path and the reason when it is refused, or for another reason than before.

    Attributes:
        reasons: the units of the last listing that are not taken as they are, by path, and why.
        unread: those that could not be read when they were last tried.
        unnamed: what the last listing refused for its name.
    """

    def __init__(self, settling: SettlingTracker, settle_s: float, report: Callable[[str, str], None]) -> None:
        self._settling, self._settle_s, self._report = settling, settle_s, report
        self.reasons: dict[str, str] = {}
        self.unread: set[str] = set()
        self.unnamed: frozenset[str] = frozenset()
        self._restless: frozenset[str] = frozenset()  # units that were reported because they never rest
        self._incomplete: frozenset[str] = frozenset()  # units that were reported because they lack a file
        self._mixed: frozenset[str] = frozenset()  # units that were reported because they are of two saves
        self._unstored: set[str] = set()  # units that the spool did not take when they were last tried
        self._off: dict[str, float] = {}  # by unit, until when it is not tried
        self._open: dict[str, float] = {}  # by unit, since when a process has it open for writing
        self._now_s = 0.0

    def check_listing(self, unnamed: Collection[str], now_s: float) -> None:
        """Process a listing: forget what is gone, and refuse what its names and its rest tell.

        `unnamed` are the paths whose names are not UTF-8, which no manifest can have.
        """
        self._now_s = now_s
        self._forget()
        self._refuse_all(unnamed, self.unnamed, _BAD_NAME)
        self.unnamed = frozenset(unnamed)
        self._refuse_restless()
        self._refuse_incomplete()
        self._refuse_mixed()

    def is_postponed(self, path: str) -> bool:
        return self._now_s < self._off.get(path, self._now_s)

    def refuse(self, path: str, why: str) -> None:
        """Refuse a unit until it changes, and report that."""
        self.reasons[path] = why
        self._report(path, why)

    def wait_for_room(self, path: str, why: str) -> None:
        """Try a unit again in a minute that the spool did not take. It has not been refused, so it is waited for."""
        self._put_off(path)
        self._unstored.add(path)
        self.reasons[path] = why

    def note_taken(self, path: str) -> None:
        """Record that a unit was taken; it may have been refused until it was tried again."""
        self._unstored.discard(path)
        self.reasons.pop(path, None)

    def _put_off(self, path: str) -> None:
        self._off[path] = self._now_s + _AGAIN_S

    def try_again(self, path: str, why: str) -> None:
        """Refuse a unit until it is tried again; report that if it was not refused for the same reason before."""
        self._put_off(path)
        self.unread.add(path)
        if self.reasons.get(path) != why:
            self.refuse(path, why)

    def wait_for_close(self, path: str, error: UnitBusy) -> None:
        """Wait for a process to close a unit; report that after an hour."""
        since_s = self._open.setdefault(path, self._now_s)
        if self._now_s - since_s >= _RESTLESS_S:
            self.try_again(path, f"{error} for an hour, and it is taken when that ends")
        else:
            self._off[path] = self._now_s + _OPEN_S
            log.info("%s", error)

    def note_closed(self, path: str) -> None:
        self._open.pop(path, None)

    def _forget(self) -> None:
        """Forget the refused units that are gone, or that changed, and all else of those that are gone."""
        self._off = {path: until_s for path, until_s in self._off.items() if self._settling.is_listed(path)}
        self._open = {path: since_s for path, since_s in self._open.items() if self._settling.is_listed(path)}
        self.unread = {path for path in self.unread if self._settling.is_listed(path)}
        self._unstored = {path for path in self._unstored if self._settling.is_listed(path)}
        retried = self.unread | self._unstored
        remaining = {path for path in self.reasons if path in retried or self._settling.is_judged(path)}
        self.reasons = {path: why for path, why in self.reasons.items() if path in remaining}

    def _refuse_restless(self) -> None:
        """Report the units that a program never leaves alone for long enough to be taken."""
        paths = self._settling.restless_units(self._now_s, _RESTLESS_S)
        why = f"it has changed for an hour without a rest of {self._settle_s:g} s, and is taken when it rests"
        self._refuse_all(paths, self._restless, why)
        self._restless = frozenset(paths)

    def _refuse_incomplete(self) -> None:
        """Report the units that seem incomplete although no program's own file says so."""
        incomplete = self._settling.incomplete
        for path, why in incomplete.items():
            self._refuse_all([path], self._incomplete, why)
        self._incomplete = frozenset(incomplete)

    def _refuse_mixed(self) -> None:
        """Report the units of known programs that have been of two saves for so long that their program is dead."""
        paths = self._settling.mixed_units(self._now_s, _RESTLESS_S)
        self._refuse_all(paths, self._mixed, MIXED_REASON)
        self._mixed = frozenset(paths)

    def _refuse_all(self, paths: Collection[str], before: Collection[str], why: str) -> None:
        """Refuse these paths in this listing, and report those that the listing before did not refuse for that."""
        for path in paths:
            if path in before:
                self.reasons[path] = why
            else:
                self.refuse(path, why)


def why_begun(due_unit: DueUnit, units: Sequence[Unit], taken_units: TakenUnits) -> str | None:
    """Return why a unit may be a save, or a deletion, that was only begun; None if it lacks nothing.

    A second save in a row with the same names is whole: its program writes fewer files now. A save that lacks a file is
    noted in the record.
    """
    unit, own_sizes = due_unit.unit, sizes_of(due_unit.shape)
    is_joint = unit.path.rpartition("/")[2] == WITHOUT_STEP  # its files are not of one save
    if is_joint or unit.layout not in UNCERTAIN_LAYOUTS:
        return None
    if (reason := _why_being_deleted(unit, units)) is not None:
        return reason
    # Of those that were there from the start, an older one may lack files that its program has removed.
    is_old = (
        taken_units.newest_before(unit.path) is None or taken_units.amended_at(unit.path, due_unit.shape) is not None
    )
    if is_old and any(_is_complete_sibling(sibling, unit) for sibling in units):
        return None
    absent = _missing_file(unit, taken_units.earlier_files(own_sizes), units)
    if absent is None:
        return None
    saves: list[Iterable[str]] = [
        sizes
        for sizes in taken_units.refused_saves.values()
        if (shares_a_file_form(sizes, own_sizes) and sizes.items().isdisjoint(own_sizes.items()))
    ]
    saves += [
        sibling.files
        for sibling in units
        if _is_complete_sibling(sibling, unit) and not taken_units.has_path(sibling.path)
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
    return missing_counterpart(
        unit.files, files_in_own_directories(unit, earlier) if has_newer else earlier, unit.layout
    )


def _is_older(unit: Unit, sibling: Unit) -> bool:
    return unit.step is not None and sibling.step is not None and unit.step < sibling.step


def _is_complete_sibling(sibling: Unit, unit: Unit) -> bool:
    return sibling.path != unit.path and not sibling.missing_reason and shares_a_file_form(sibling.files, unit.files)


class OutwardLinks:
    """The links of one directory over successive listings."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._logged_links: set[str] = set()

    def log_new_links(self, tree: DirectoryTree, listing: Listing) -> None:
        fresh = {path for path, entry in listing.entries.items() if entry.kind == "link"} - self._logged_links
        self._logged_links |= fresh
        if targets := tree.links_leading_out(sorted(fresh)):
            path, target = next(iter(targets.items()))
            log.warning(
                "%s/%s leads to %s, and is not followed: if a program saves there, watch that directory as a run of "
                "its own%s",
                self._directory,
                path,
                target,
                f"; and {len(targets) - 1} more links" if targets.keys() - {path} else "",
            )
