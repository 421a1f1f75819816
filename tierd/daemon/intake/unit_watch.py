"""One watched directory: each unit that is complete, sound and at rest becomes a checkpoint of the run.

Invariant: nothing is written to the directory. What is committed is byte for byte a unit that the program had finished:
it was sound, and it did not change from before its first byte was read until after the last one.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from tierd import __version__
from tierd.core.errors import ConfigError, CorruptChunk, ManifestError, StepRefused, StoreRefused
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import File, Manifest
from tierd.daemon.component_status import WatchStatus, first_reasons
from tierd.daemon.intake.active_watch import WatchStopped
from tierd.daemon.intake.taken_units import TakenUnits
from tierd.daemon.intake.unit_files import UnitBusy, check_closed, stage_unit
from tierd.daemon.intake.unit_order import SeriesPins, UnitOrder
from tierd.daemon.intake.unit_refusals import OutwardLinks, Refusals, why_begun
from tierd.formats.byte_source import ByteSource
from tierd.spool.commit import CommittedPart, SpaceMaker
from tierd.spool.spool import Spool
from tierd.spool.spool_access import is_disk_full, spool_error
from tierd.stores.base import Store
from tierd.threads import cpu_wait_s
from tierd.watching.checkpoint_names import (
    KnownCheckpoints,
    UnitName,
    is_in_range,
    modified_at,
    name_unit,
    second_of,
    series_of,
    step_of,
)
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.loose_units import UserLayout
from tierd.watching.series_comparison import LoneSaveHistory
from tierd.watching.settling_units import DueUnit, SettlingTracker, UnitShape, is_unchanged
from tierd.watching.unit import Listing, Unit
from tierd.watching.unit_description import UnitDescription, UnmatchedFiles, describe_unit, group_unmatched_files
from tierd.watching.unit_file import pointer_candidates, points_to
from tierd.watching.unit_inspection import ChangedFile, InspectedUnit, Opener, describe_problems, inspect_unit

log = logging.getLogger("tierd.daemon")

_CHANGES_UNTIL_REPORT = 3  # tries in which a unit changed, until that is reported


class WatchReports(Protocol):
    """What a watch reports. The methods are called in the thread of `UnitWatch.observe`."""

    def report_taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        """A unit was committed as this part, or the spool did not take it."""
        ...

    def report_refused(self, path: str, why: str) -> None:
        """A unit is not taken unless it changes."""
        ...

    def report_doubt(self, path: str, checkpoint: CheckpointId) -> None:
        """A unit is taken as this checkpoint, which is pinned, because steps and times contradict each other."""
        ...


class _UnitUnchanged(Exception):
    """A unit has the bytes that were taken last from its place, as this checkpoint, which was saved at this time."""

    def __init__(self, checkpoint: CheckpointId, saved: datetime, files: Sequence[File]) -> None:
        super().__init__(checkpoint, saved)
        self.checkpoint, self.saved, self.files = checkpoint, saved, files


class _UnitDecayed(Exception):
    """Files of a unit have the size and the time with which they were taken, and other bytes."""


class UnitWatch:
    """A watched directory.

    Args:
        settle_s: as for `SettlingTracker`.
        own: a person's own rules about which paths are checkpoints; None: the usual ones.
        stepless: take the units without a step in their names, and leave the others; otherwise the reverse. Without any
            step, all are taken.
        most_series: of how many series the newest checkpoints are pinned; None: of the usual number.
        room: frees disk space when a commit finds the disk full.
        going: called before each name of a listing, each read and each chunk; if it raises `WatchStopped`, `observe`
            ends.
        writes: called before files are written to the spool, with the bytes of the largest.
        reads: called after a listing, before units are read and copied.

    Attributes:
        listing_s: how long the last listing kept the file system and a CPU busy, in seconds. The time in which this
            thread waited for a CPU is left out: beside training it is most of the time.
        wanted_checkpoint: the checkpoint of the first unit that the last `observe` left because it might not take any.
        leaves_stepless: whether the last listing has units without a step that are left to another watch.
    """

    def __init__(
        self,
        spool: Spool,
        directory: Path,
        run: str,
        reports: WatchReports,
        *,
        settle_s: float,
        own: UserLayout | None = None,
        stepless: bool = False,
        most_series: int | None = None,
        room: SpaceMaker | None = None,
        going: Callable[[], None] = lambda: None,
        writes: Callable[[int], None] = lambda size: None,
        reads: Callable[[], None] = lambda: None,
        stores: Callable[[], Mapping[str, Store]] = dict,
    ) -> None:
        self._spool, self._directory, self._run, self._reports = spool, directory, run, reports
        self._room, self._going, self._writes, self._reads = room, going, writes, reads
        self._taken_units = TakenUnits(spool, run, most_series)
        self._settling = SettlingTracker(settle_s, self._choose, self._was_taken)
        self._layout, self._stepless, self.leaves_stepless = own, stepless, False
        self._ordering = UnitOrder(self._settling, self._taken_units)
        self.pins = SeriesPins(spool, run, self._taken_units, stores)
        self._refusals = Refusals(self._settling, settle_s, reports.report_refused)
        self._history, self._listing = KnownCheckpoints(), Listing({})
        self.wanted_checkpoint: CheckpointId | None = None
        self.listing_s = 0.0
        self.unreadable: tuple[str, ...] = ()
        self._links = OutwardLinks(directory)
        self._series = LoneSaveHistory()
        self._listed_units: Sequence[Unit] = ()  # of the last listing, also those that this watch does not take
        self._passed_over: tuple[int, tuple[UnmatchedFiles, ...]] = (0, ())  # by the last listing
        self._doubted = False  # whether a doubt about the order was reported

    @property
    def is_waiting(self) -> bool:
        """Whether a unit of the last listing is still to be taken or refused, or may still be being written.

        A unit that cannot be read counts as refused, although it is tried again.
        """
        return self._settling.is_waiting(self._refusals.unread)

    @property
    def refused(self) -> Mapping[str, str]:
        """The units of the last listing that are not taken as they are, by path, and why."""
        return self._refusals.reasons

    @property
    def is_new(self) -> bool:
        return self._taken_units.is_new

    @property
    def has_taken_any(self) -> bool:
        return self._taken_units.has_any or bool(self._history.created)

    @property
    def superseded_series(self) -> int:
        """How many series, whose newest are pinned, seem to be of launches that are over."""
        return self._taken_units.superseded_series

    @property
    def status(self) -> WatchStatus:
        reasons_by_path = {**self._settling.incomplete_reasons, **self.refused}
        return WatchStatus(
            directory=str(self._directory),
            run=self._run,
            checkpoints=len(self._settling.units),
            not_taken=len(reasons_by_path),
            reasons=first_reasons(reasons_by_path),
            files=self._passed_over[0],
            passed_over=self._passed_over[1],
        )

    def observe(self, history: KnownCheckpoints, now_s: float, *, may_take: bool = True) -> None:
        """List the directory, and take every unit that is due.

        Args:
            now_s: any monotonic clock, in seconds.
            may_take: without it, the first unit that is due and that no place has is named in `wanted_checkpoint`, and
                not read.

        Raises:
            OSError: the directory cannot be opened.
            StoreRefused, ConfigError: it cannot be listed.
        """
        self._history, self.wanted_checkpoint = self._history.merge(history), None
        with DirectoryTree(self._directory, skip=True, user_layout=self._layout, going=self._going) as tree:
            began_s = time.monotonic() - cpu_wait_s()
            listing = self._listing = tree.list_names()
            due_units = self._settling.observe(listing, now_s)
            self._passed_over = (0, ()) if self._stepless else group_unmatched_files(listing, self._listed_units)
            self.listing_s = time.monotonic() - cpu_wait_s() - began_s
            self.unreadable = tuple(tree.unreadable)
            self._refusals.check_listing(tree.unnamed, now_s)
            self._links.log_new_links(tree, listing)
            self._ordering.note_listing(self._history)
            self._reads()
            for due_unit in self._ordering.sort(due_units):
                if not self._refusals.is_postponed(due_unit.unit.path):
                    self._consider_apart(tree, due_unit, listing, may_take)
                if self.wanted_checkpoint is not None:
                    break

    def _choose(self, listed: Sequence[Unit]) -> Sequence[Unit]:
        listed = self._listed_units = [self._series.judge(unit) for unit in listed]
        if self._stepless:
            return [unit for unit in listed if unit.step is None]
        stepped = [unit for unit in listed if unit.step is not None]
        has_steps = bool(stepped) or self._taken_units.has_steps
        self.leaves_stepless = has_steps and len(stepped) < len(listed)
        return stepped if has_steps else listed

    def _was_taken(self, unit: Unit, shape: UnitShape) -> bool:
        """Whether a unit was taken as it is now, or with files that its program has deleted since."""
        return self._taken_units.has_taken(unit.path, shape) or (
            unit.step is not None and self._taken_units.is_remainder(shape)
        )

    def _consider_apart(self, tree: DirectoryTree, due_unit: DueUnit, listing: Listing, may_take: bool) -> None:
        """Consider a unit. An error that nobody foresaw refuses this unit for now, so that it stops no other."""
        try:
            self._consider(tree, due_unit, listing, may_take)
        except (WatchStopped, OSError, StoreRefused, ConfigError):  # of the directory, the spool or the daemon
            raise
        except Exception as error:
            path, why = due_unit.unit.path, f"{type(error).__name__}: {error}"
            log.warning("%s: not taken", path, exc_info=error)
            self._refusals.try_again(path, f"it cannot be taken, and is tried again: {why}")

    def _consider(self, tree: DirectoryTree, due_unit: DueUnit, listing: Listing, may_take: bool) -> None:
        path, entries = due_unit.unit.path, dict(due_unit.shape)
        if self._was_taken(due_unit.unit, due_unit.shape):
            self._settling.record_outcome(due_unit, True, listing)
            return
        if any(name.startswith(f"{path}/") for name in self._refusals.unnamed):
            self._refuse_as_it_is(tree, due_unit, "the name of a file in it is not UTF-8")
            return
        self._refusals.unread.discard(path)
        if (why := why_begun(due_unit, self._listed_units, self._taken_units)) is not None:
            self._refuse_as_it_is(tree, due_unit, why)
            return

        def opener(name: str) -> AbstractContextManager[ByteSource]:
            return tree.opened(name, entries[name])

        created, after = modified_at(due_unit.shape), self._taken_units.newest_before(path)
        # What has no step is rewritten file by file, and the newest of it is the newest.
        saved = self._taken_units.amended_at(path, due_unit.shape) if due_unit.unit.step is not None else None
        if saved is not None and self._has_newer(saved):
            created, after = saved, None  # most of it was saved then, before newer checkpoints
        described = describe_unit(due_unit.unit, opener)
        step = second_of(created) if self._stepless else step_of(described, created)
        if self._ordering.has_checkpoint(path, step, created, self._history):
            self._finish(tree, due_unit)
            return
        series = self._ordering.series_checkpoints(path, self._history)
        assigned = name_unit(self._run, path, step, created, self._history, after, series)
        if not may_take:
            self.wanted_checkpoint = assigned.checkpoint
            return
        if self._is_open(tree, due_unit):
            return
        inspected = self._inspect(due_unit, opener)
        if inspected.status != "sound" and not (inspected.status == "unknown" and not inspected.findings):
            self._refuse(tree, due_unit, inspected)
            return
        self._take(tree, due_unit, described, assigned, created)

    def _has_newer(self, created: datetime) -> bool:
        """Whether a checkpoint was made later, but not in the same millisecond."""
        return any(at > created + timedelta(milliseconds=1) for at in self._history.created.values())

    def _is_open(self, tree: DirectoryTree, due_unit: DueUnit) -> bool:
        """Whether a process has a file of a unit open for writing. Other errors are left to the check of the unit."""
        try:
            check_closed(tree, due_unit.unit, dict(due_unit.shape))
        except UnitBusy as error:
            self._refusals.wait_for_close(due_unit.unit.path, error)
            return True
        except (ChangedFile, OSError):
            return False
        self._refusals.note_closed(due_unit.unit.path)
        return False

    def _inspect(self, due_unit: DueUnit, opener: Opener) -> InspectedUnit:
        def open_next(path: str) -> AbstractContextManager[ByteSource]:
            self._going()
            return opener(path)

        return inspect_unit(due_unit.unit, {path: entry.size for path, entry in due_unit.shape}, open_next)

    def _refuse(self, tree: DirectoryTree, due_unit: DueUnit, inspected: InspectedUnit) -> None:
        path = due_unit.unit.path
        if inspected.status == "changing":
            self._wait_after_change(due_unit, inspected.findings[0].reason)
        elif inspected.status == "unreadable":
            self._refusals.try_again(path, f"it cannot be read, and is tried again: {inspected.findings[0].reason}")
        else:
            why = describe_problems(inspected.findings[:3]) or "no format that can be checked"
            self._refuse_as_it_is(tree, due_unit, f"it is {inspected.status}: {why}")

    def _refuse_as_it_is(self, tree: DirectoryTree, due_unit: DueUnit, why: str) -> None:
        """Refuse a unit until it changes, unless it has changed since it was due."""
        if self._settling.record_outcome(due_unit, False, tree.relist(due_unit.unit)) == "refused":
            self._refusals.refuse(due_unit.unit.path, why)

    def _wait_after_change(self, due_unit: DueUnit, why: str) -> None:
        """Wait longer each time, because a unit changed while it was read; report it after some tries."""
        self._settling.record_outcome(due_unit, False, Listing({}))
        if due_unit.tries + 1 == _CHANGES_UNTIL_REPORT:
            message = f"it changed {_CHANGES_UNTIL_REPORT} times while it was taken, and is tried again: {why}"
            self._reports.report_refused(due_unit.unit.path, message)

    def _finish(self, tree: DirectoryTree, due_unit: DueUnit, files: Iterable[File] = ()) -> None:
        if self._settling.record_outcome(due_unit, True, tree.relist(due_unit.unit)) == "taken":
            self._record(due_unit, files=files)

    def _record(
        self,
        due_unit: DueUnit,
        checkpoint: CheckpointId | None = None,
        saved: datetime | None = None,
        files: Iterable[File] = (),
    ) -> None:
        self._taken_units.add(due_unit.unit.path, due_unit.shape, checkpoint, saved, files)
        self._refusals.note_taken(due_unit.unit.path)

    def _take(
        self, tree: DirectoryTree, due_unit: DueUnit, described: UnitDescription, assigned: UnitName, created: datetime
    ) -> None:
        path, part = due_unit.unit.path, PartId(assigned.checkpoint, 0, 1)
        try:
            try:
                self._commit(tree, due_unit, described, assigned, created)
            except OSError as error:
                if not self._has_room(part, due_unit, error):
                    raise
                self._commit(tree, due_unit, described, assigned, created)
        except UnitBusy as error:
            self._refusals.wait_for_close(path, error)
        except (ChangedFile, CorruptChunk) as error:
            self._wait_after_change(due_unit, str(error))
        except _UnitUnchanged as error:
            # Whatever its files' times are now, its place in the order is that of its bytes.
            if error.checkpoint in self._history.created or error.checkpoint in self._history.unread:
                self._finish(tree, due_unit, error.files)
            else:  # no place has it any more, because retention deleted it
                reassigned = UnitName(error.checkpoint, self._history.origins.get(error.checkpoint.attempt))
                self._take(tree, due_unit, described, reassigned, error.saved)
        except StepRefused:  # it was committed since the spool was observed
            self._finish(tree, due_unit)
        except ManifestError as error:
            self._settling.record_outcome(due_unit, False, tree.relist(due_unit.unit))
            self._refusals.refuse(path, str(error))
        except _UnitDecayed as error:
            self._refuse_as_it_is(tree, due_unit, str(error))
        except OSError as error:
            failure = spool_error(error, f"spool {self._spool.root}", self._spool.root)
            self._refusals.wait_for_room(path, f"{failure}; it is tried again")
            self._reports.report_taken(part, failure)

    def _has_room(self, part: PartId, due_unit: DueUnit, error: OSError) -> bool:
        """Free disk space if an error says that there is none; return whether a second try can succeed."""
        if not is_disk_full(error) or self._room is None:
            return False
        return self._room(part, sum(entry.size for _, entry in due_unit.shape), error.errno == errno.EDQUOT)

    def _keep(self, path: str, checkpoint: CheckpointId, files: Iterable[str]) -> None:
        """Pin a checkpoint whose place in the order is in doubt, before retention can see it; report the first."""
        self.pins.pin_doubtful(checkpoint, files)
        if self._doubted:
            log.warning("%s: in doubt: pinned as %s", path, checkpoint)
        else:
            self._doubted = True
            self._reports.report_doubt(path, checkpoint)

    def _has_decayed(self, checkpoint: CheckpointId) -> bool:
        """Whether the spool's copy of a checkpoint lost its bytes, as when a program writes to files that it links."""
        part = PartId(checkpoint, 0, 1)
        is_present = self._spool.holds(part) or part in self._spool.quarantined()
        return is_present and not self._spool.is_whole(part)

    def _has_several_series(self) -> bool:
        """Whether the complete units of the last listing are of several series. Others may lack a file that tells."""
        complete = (unit for unit in self._settling.units.values() if unit.files and not unit.missing_reason)
        return len({series_of(unit.files) for unit in complete}) > 1

    def _commit(
        self, tree: DirectoryTree, due_unit: DueUnit, described: UnitDescription, assigned: UnitName, created: datetime
    ) -> None:
        part, entries = PartId(assigned.checkpoint, 0, 1), dict(due_unit.shape)
        self._writes(max(entry.size for entry in entries.values()))
        with self._spool.stage(part) as stage:
            listed_pointers = tree.pointers(pointer_candidates(due_unit.unit, self._listing), self._listing)
            pointers = [pointer for pointer in listed_pointers if points_to(pointer, due_unit.unit)]
            staged = stage_unit(tree, due_unit.unit, entries, described.ranks, pointers, stage, self._going)
            after = tree.relist(due_unit.unit)
            if not is_unchanged(due_unit, after):
                raise ChangedFile("it was written to, renamed or deleted")
            same = self._taken_units.find_same_bytes(due_unit.unit.path, staged.files)
            if same is not None and same != (assigned.checkpoint, created) and not self._has_decayed(same[0]):
                raise _UnitUnchanged(*same, staged.files)
            if decayed := self._taken_units.decayed_files(due_unit.shape, staged.files):
                raise _UnitDecayed(
                    f"{decayed[0]} was damaged since it was taken: it has the size and the time of then, and other "
                    "bytes; end the program, and run `tierd prepare`, which puts a verified copy back"
                )
            if same is None and self._ordering.is_in_doubt(due_unit.unit.path, assigned, created, self._history):
                self._keep(due_unit.unit.path, assigned.checkpoint, entries)
            elif self._has_several_series():
                self.pins.pin_until_shared(assigned.checkpoint)
            stage.commit(Manifest.of(part, assigned.origin, described.metrics, created, __version__, staged.files))
        self._settling.record_outcome(due_unit, True, after)
        self._history = self._history.with_checkpoint(assigned.checkpoint, created, assigned.origin)
        self._record(due_unit, assigned.checkpoint, created, staged.files)
        how = ", ".join(f"{count} by {name}" for name, count in sorted(staged.counts_by_method.items()))
        log.debug("%s: taken as %s: %s", due_unit.unit.path, assigned.checkpoint, how)
        if not all(is_in_range(entry.mtime_ns) for entry in entries.values()):
            log.warning("%s: a file's time is not one of 1970 to 2069, and counts as 1970", due_unit.unit.path)
        size = sum(file.size for file in staged.files)
        origin = f"taken from {due_unit.unit.path}, {how}"
        metrics = dict(described.metrics)
        committed = CommittedPart(size, direct=False, recycled=False, metrics=metrics, origin=origin)
        self._reports.report_taken(part, committed)
