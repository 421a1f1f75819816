"""Decide from successive listings which units are ready to be taken: complete, and unchanged for long enough.

Pure: the caller lists, and passes the time. It takes the units that are due, lists again, and reports the outcome.

This suffices because a writer changes a file's size, its inode or its modification time. Between two equal listings no
writer was active, except within one tick of the file system's clock. A unit is due only after `settle_s` without a
change, which is many ticks, so the last write precedes the read. A unit counts as taken only if a listing that began
after the last byte was read still shows it unchanged.

A program may die while it rewrites or deletes a unit file by file, and the remainder can seem whole. Once a unit was
due, it is therefore due again only after each of its markers changed as well, or if files were only added. A pointer
beside it that names a later checkpoint is no marker of a rewrite in place, because nobody may write that pointer again.
Then all files of the unit have to change. A file may also be newer than the index that names it, by more than the
clocks of nodes may differ. It then belongs to a save whose index is still to come.

No listing shows a rank that has not begun yet, if the layout does not record the number of ranks. Such ranks have to
begin within `settle_s` of each other; a file that arrives later makes the unit due again. A watcher that starts, or
restarts, has no history. It judges a unit that a dead program left half rewritten before then only by its present
files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tierd.watching.series_comparison import UNCERTAIN_LAYOUTS
from tierd.watching.step_in_name import step_in
from tierd.watching.unit import WITHOUT_STEP, ListedEntry, Listing, Unit
from tierd.watching.unit_detection import units

UnitShape: TypeAlias = tuple[tuple[str, ListedEntry], ...]
Outcome: TypeAlias = Literal["taken", "refused", "changed"]
_SKEW_NS = 1_000_000_000  # how much the clocks of nodes that write to one file system may differ
# The file that is written last, and those before it: DCP, Lightning, Megatron (by directory), TensorFlow (by prefix).
_DISTCP = r"__\d+_\d+\.distcp"
_LAST_FILES = tuple(
    (re.compile(last), re.compile(before))
    for last, before in (
        (r"(.*/|)(?:__\d+)?\.metadata", rf"(.*/|){_DISTCP}"),
        (r"(.*/|)meta\.pt", rf"(.*/|)(?:{_DISTCP}|\.metadata)"),
        (r"(.*/|)metadata\.json", rf"(.*/|)(?:{_DISTCP}|\.metadata|common\.pt)"),
        (r"(.+)\.index", r"(.+)\.data-\d+-of-\d+"),
    )
)
MIXED_REASON = "some of its files are those of the save before, and the others are not, or are gone"
_MAX_DOUBLINGS = 6  # of the wait for a unit that changes each time while it is taken


@dataclass(frozen=True, slots=True)
class DueUnit:
    """A unit to be taken now. Read files must match `shape`; it changed `tries` times in a row while it was taken."""

    unit: Unit
    shape: UnitShape
    tries: int


@dataclass(slots=True)
class _UnitState:
    shape: UnitShape
    since_s: float  # when a listing first showed this shape
    changing_s: float  # since when it has not rested
    rested: bool = False  # whether it was unchanged for long enough in this shape
    tries: int = 0
    judged: bool = False  # whether it was taken or refused in this shape
    is_stalled: bool = False  # whether it is incomplete, or mixed from two saves, and at rest: its program may be dead
    former: Mapping[str, ListedEntry] = field(default_factory=dict)  # its files and markers when it was last due


class SettlingTracker:
    """The units of one directory over successive listings.

    Args:
        settle_s: seconds for which a unit has to be complete and unchanged before it is due. It must exceed the delay
            between the first writes of two ranks, and a writer's pause between two writes.
        choose: which units of a listing to observe; all by default.
        is_taken: whether a unit was taken as it is now. It then lacks nothing, whatever later ones beside it have.
    """

    def __init__(
        self,
        settle_s: float,
        choose: Callable[[Sequence[Unit]], Sequence[Unit]] = lambda listed: listed,
        is_taken: Callable[[Unit, UnitShape], bool] = lambda unit, shape: False,
    ) -> None:
        self._settle_s, self._choose, self._is_taken = settle_s, choose, is_taken
        self._seen: dict[str, _UnitState] = {}
        self.units: dict[str, Unit] = {}  # of the last listing, by path

    def observe(self, listing: Listing, now_s: float) -> list[DueUnit]:
        by_path = self.units = {unit.path: unit for unit in self._choose(units(listing))}
        for path in self._seen.keys() - by_path.keys():
            del self._seen[path]
        due_units = []
        for path, unit in by_path.items():
            shape, state = shape_of(unit, listing.entries), self._seen.get(path)
            if state is None or state.shape != shape:
                # An incomplete unit settles from its last change on, not from its marker, because ranks write until
                # then.
                self._seen[path] = new = _UnitState(shape, now_s, now_s)
                if state is not None:
                    new.tries, new.former = state.tries, state.former
                    new.changing_s = now_s if state.rested else state.changing_s
                continue
            if state.judged or now_s - state.since_s < self._wait_s(state):
                continue
            state.rested = True
            state.is_stalled = unit.missing_reason is not None or not _is_one_save(unit, listing, state.former)
            if state.is_stalled and self._is_taken(unit, shape):
                state.is_stalled, state.judged = False, True
            elif not state.is_stalled:
                state.former = {name: listing.entries[name] for name in (*unit.files, *unit.markers)}
                due_units.append(DueUnit(unit, shape, state.tries))
        return sorted(due_units, key=_newest_write, reverse=True)

    @property
    def shapes(self) -> dict[str, UnitShape]:
        return {path: state.shape for path, state in self._seen.items()}

    def is_judged(self, path: str) -> bool:
        """Whether a unit of the last listing was taken or refused as it is now."""
        return path in self._seen and self._seen[path].judged

    def is_waiting(self, but: Collection[str] = ()) -> bool:
        """Whether a unit of the last listing, but these, is still to be taken or refused, or may be being written."""
        return any(not (state.judged or state.is_stalled) for path, state in self._seen.items() if path not in but)

    @property
    def incomplete(self) -> dict[str, str]:
        """The units at rest that no program's file identifies and that seem incomplete, by path, and why."""
        stalled = (unit for path, unit in self.units.items() if self._seen[path].is_stalled and not unit.is_unfinished)
        return {unit.path: unit.missing_reason or MIXED_REASON for unit in stalled if unit.layout in UNCERTAIN_LAYOUTS}

    @property
    def incomplete_reasons(self) -> dict[str, str]:
        """The units at rest that are incomplete or mixed from two saves, by path, and why."""
        mixed = "its files seem to be of two saves"
        return {
            path: self.units[path].missing_reason or mixed for path, state in self._seen.items() if state.is_stalled
        }

    def mixed_units(self, now_s: float, for_s: float) -> list[str]:
        """The units of known programs that have rested for so many seconds, and seem to be of two saves."""
        resting = (path for path, state in self._seen.items() if state.is_stalled and now_s - state.since_s >= for_s)
        return [
            path
            for path in resting
            if self.units[path].missing_reason is None and self.units[path].layout not in UNCERTAIN_LAYOUTS
        ]

    def restless_units(self, now_s: float, for_s: float) -> list[str]:
        """The units of the last listing that have kept changing for so many seconds, without a rest of `settle_s`."""
        return [path for path, state in self._seen.items() if not state.rested and now_s - state.changing_s >= for_s]

    def is_listed(self, path: str) -> bool:
        return path in self._seen

    def _wait_s(self, state: _UnitState) -> float:
        return float(self._settle_s * 2 ** min(state.tries, _MAX_DOUBLINGS))

    def record_outcome(self, due_unit: DueUnit, sound: bool, after: Listing) -> Outcome:
        """Record the outcome for a unit that was due; `after` is a listing that began after the last byte was read.

        After "taken" or "refused", the unit is due again only after a change. After "changed", the read bytes are void,
        and it is due when it has settled.
        """
        state = self._seen.get(due_unit.unit.path)
        if not is_unchanged(due_unit, after):
            if state is not None:
                state.tries += 1
            return "changed"
        if state is not None and state.shape == due_unit.shape:
            state.judged, state.tries = True, 0
        return "taken" if sound else "refused"


def _newest_write(due_unit: DueUnit) -> tuple[int, int]:
    """Order units by time; those of one second, as after a tar or on some file systems, by their steps."""
    return max((entry.mtime_ns for _, entry in due_unit.shape), default=0), due_unit.unit.step or 0


def is_unchanged(due_unit: DueUnit, after: Listing) -> bool:
    """Whether a later listing shows the files of a unit as they were when it was due, and no more in its directory."""
    shape = dict(due_unit.shape)
    below = (path for path, entry in after.entries.items() if entry.kind != "directory")
    return all(path in shape for path in below if path.startswith(f"{due_unit.unit.path}/")) and all(
        after.entries.get(path) == entry for path, entry in due_unit.shape
    )


def _is_one_save(unit: Unit, listing: Listing, former: Mapping[str, ListedEntry]) -> bool:
    """Whether all files can come from one save, and not partly from an unfinished save or deletion.

    `former` are the unit's files and markers when it was last due.
    """
    if unit.path.rpartition("/")[2] == WITHOUT_STEP:  # each file is rewritten, added and deleted by itself
        return True
    entries = listing.entries
    if any(_is_older(unit, entries, last, before) for last, before in _LAST_FILES):
        return False
    if all(entries.get(path) == entry for path, entry in former.items() if path not in unit.markers):
        return all(path in entries for path in former)  # only its markers changed, or files were added
    markers = [path for path in unit.markers if not _names_later(path, unit, listing)]
    if not markers:
        files = {*former, *unit.files} - {*unit.markers}
        return all(path in entries and entries[path] != former.get(path) for path in files)
    return all(entries[path] != former.get(path) for path in markers)


def _names_later(pointer: str, unit: Unit, listing: Listing) -> bool:
    """Whether a marker is a pointer beside the unit that names a later checkpoint."""
    step = step_in(listing.texts.get(pointer, "").strip())
    return pointer not in unit.files and step is not None and unit.step is not None and step > unit.step


def _is_older(unit: Unit, entries: Mapping[str, ListedEntry], last: re.Pattern[str], before: re.Pattern[str]) -> bool:
    """Return whether a file that is written last is older than one that is written before it."""
    newest: dict[str, int] = {}
    for path in unit.files:
        if match := before.fullmatch(path):
            newest[match[1]] = max(newest.get(match[1], 0), entries[path].mtime_ns)
    last_matches = ((match, entries[path].mtime_ns) for path in unit.files if (match := last.fullmatch(path)))
    return any(newest.get(match[1], 0) > mtime_ns + _SKEW_NS for match, mtime_ns in last_matches)


def shape_of(unit: Unit, entries: Mapping[str, ListedEntry]) -> UnitShape:
    return tuple((path, entries[path]) for path in (*unit.files, *unit.special_files))
