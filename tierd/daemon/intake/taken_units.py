"""The record of a watched directory: `.tierd/watched/<run>.json`.

It holds the units that were taken. A cache: without it, units that retention deleted everywhere, and that their program
kept, are taken once more when a daemon starts.

It also holds, for each unit that was not taken yet, the newest checkpoint that was known before the unit appeared. The
unit is never older than that one, whatever its files' times are. Without the record, times alone order. What became
known since the listing before does not count: another node may have taken later units while this one was down.

Invariant: a unit that was gone for some time comes back as what it was, because a directory may be an empty mount point
for that time, or partly unreadable. If it came back as new, it would sort after the newest checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TypeVar

import msgspec
import xxhash

from tierd.core.errors import ConfigError, printable
from tierd.core.ids import CheckpointId
from tierd.core.manifest import UNIT_NAME, File
from tierd.daemon.intake.taken_record import (
    MOST_SERIES,
    Sizes,
    TakenRecord,
    UncertainOrder,
    WaitingUnit,
    add_digests,
    add_to_series,
    decayed_files,
    is_saved_again,
    release_series,
    rewritten_files,
    settle_doubts,
    superseded_series,
)
from tierd.spool.file_io import open_own, replace_private
from tierd.spool.spool import Spool
from tierd.watching.checkpoint_names import checkpoint_time, series_of
from tierd.watching.series_comparison import shares_a_file_form
from tierd.watching.settling_units import UnitShape

log = logging.getLogger("tierd.daemon")

_WATCHED = "watched"
_MAX_REFUSED_SAVES = 16  # refused saves that are remembered
_MAX_ABSENT_FILES = 10_000  # files of the units that are gone and are remembered; about 1 MB of the record
_T = TypeVar("_T", Sizes, WaitingUnit)
_Member = TypeVar("_Member")


class TakenUnits:
    """By path, the size and the time of modification of each file of the units that were taken, or wait.

    The newest checkpoints of `most_series` series are pinned; None: of the usual number.
    """

    def __init__(self, spool: Spool, run: str, most_series: int | None = None) -> None:
        self._most_series = most_series or MOST_SERIES
        self._run, self._path = run, spool.control / _WATCHED / f"{run}.json"
        self._record = TakenRecord({}, {})
        self.is_new = True  # no listing has shown a unit yet, also to an earlier daemon of the spool
        with (
            suppress(OSError, ConfigError, msgspec.DecodeError, ValueError),
            os.fdopen(open_own(self._path), "rb") as file,  # a FIFO in its place does not block
        ):
            self._record, self.is_new = _decoder.decode(file.read()), False

    @property
    def has_any(self) -> bool:
        """Whether a unit was taken, also by an earlier daemon of the spool."""
        return bool(self._record.taken)

    def has_path(self, path: str) -> bool:
        """Whether a unit of this path was taken, also if it has changed since."""
        return path in self._record.taken

    def has_taken(self, path: str, shape: UnitShape) -> bool:
        return self._record.taken.get(path) == sizes_of(shape)

    def count_same_time(self, path: str, shape: UnitShape) -> int:
        """Return how many other versions of a unit were taken that have the time of this one, because a tool kept it.

        Versions differ by sizes: one of the same sizes and times cannot be told from this one.
        """
        sizes, was = sizes_of(shape), self._record.taken.get(path, {})
        same = _time(was) == _time(sizes)
        return self._record.earlier.get(path, 0) + (was != sizes) if was and same else 0

    def amended_at(self, path: str, shape: UnitShape) -> datetime | None:
        """Return when a unit was saved, if it was taken, and less than half of it changed, or files were added, since.

        Shortly after the time of what was taken from its place last, so that a later version is the newer one. None: it
        is a new save, or it was not taken.
        """
        record, sizes = self._record, sizes_of(shape)
        was = record.taken.get(path)
        if (
            was is None
            or was == sizes
            or is_saved_again(
                was | {name: (was[name][0], -1) for name in record.amended.get(path, ()) if name in was}, sizes
            )
        ):
            return None
        saved = record.saved.get(path) or checkpoint_time(_time(was))
        version = xxhash.xxh3_64_intdigest(repr(sorted(sizes.items())).encode())  # nodes with one record agree on it
        return saved + timedelta(microseconds=1 + version % 999)

    def is_remainder(self, shape: UnitShape) -> bool:
        """Whether all files were taken with others that are gone: their program deletes the checkpoint."""
        sizes = sizes_of(shape).items()
        return any(sizes < was.items() for was in self._record.taken.values())

    @property
    def refused_saves(self) -> Mapping[str, Sizes]:
        """The last units that were refused because the checkpoint before them had more files, by path."""
        return self._record.begun

    def refuse_begun(self, path: str, sizes: Sizes) -> None:
        """Record that a unit was refused because the checkpoint before it had more files."""
        record = self._record
        if record.begun.get(path) != sizes:
            record.begun.pop(path, None)
            record.begun = dict([*record.begun.items(), (path, sizes)][-_MAX_REFUSED_SAVES:])
            self._write(record)

    def earlier_files(self, sizes: Sizes) -> Sequence[str]:
        """Return the files of the newest unit of a series that was taken; none if some of these files are of it."""
        of_series = [path for path, unit in self._record.taken.items() if shares_a_file_form(sizes, unit)]
        newest = self._record.taken[max(of_series, key=self._saved_at)] if of_series else {}
        return [] if sizes.items() & newest.items() else [*newest]

    def _saved_at(self, path: str) -> datetime:
        """Return when a unit was saved; in an older record, that is not the time of its files alone."""
        return self._record.saved.get(path) or checkpoint_time(_time(self._record.taken.get(path, {})))

    def find_same_bytes(self, path: str, files: Iterable[File]) -> tuple[CheckpointId, datetime] | None:
        """Return the checkpoint as which a unit was last taken, and when that was saved, if it had these bytes."""
        was = self._record.contents.get(path)
        is_same = was is not None and was[0] == _content_digest(files)
        return (CheckpointId(self._run, *was[1:]), self._saved_at(path)) if was and is_same else None

    def checkpoints(self) -> Mapping[str, tuple[CheckpointId, str]]:
        """Return the checkpoint as which each unit was last taken, and its series, by the unit's path."""
        taken = self._record.taken
        return {
            path: (CheckpointId(self._run, attempt, step), series_of(taken[path]))
            for path, (_, attempt, step) in self._record.contents.items()
            if path in taken
        }

    def decayed_files(self, shape: UnitShape, files: Iterable[File]) -> list[str]:
        return decayed_files(self._record, sizes_of(shape), files)

    @property
    def has_steps(self) -> bool:
        """Whether a unit that was listed ever had a step in its name."""
        return self._record.has_steps

    def add(
        self,
        path: str,
        shape: UnitShape,
        checkpoint: CheckpointId | None = None,
        saved: datetime | None = None,
        files: Iterable[File] = (),
    ) -> None:
        """Record that a unit was taken as a checkpoint of these files, or that a place has it."""
        record, self.is_new = self._record, False
        files, sizes = tuple(files), sizes_of(shape)
        add_digests(record, sizes, files)
        if checkpoint is not None:
            pair = _attempt_and_step(checkpoint)
            record.contents[path] = (_content_digest(files), *pair)
            rewritten = rewritten_files(record.taken.get(path, {}), sizes) | {*record.amended.get(path, [])}
            if self.amended_at(path, shape) is None:
                record.amended.pop(path, None)
            elif rewritten:
                record.amended[path] = sorted(rewritten)
            record.newest = max(pair, record.newest or ("", 0))
            series = series_of(sizes)
            add_to_series(record, path, series, pair)
            self._release_series(record)
            settle_doubts(record, path, series, pair)
        if saved is not None:
            record.saved[path] = saved
        if self.has_taken(path, shape):
            return
        record.earlier[path] = self.count_same_time(path, shape)
        record.taken[path] = sizes
        record.waiting.pop(path, None)
        self._write(record)

    def _release_series(self, record: TakenRecord) -> None:
        """Release the pins of the series that were not saved for longest, if there are too many."""
        if names := release_series(record, self._most_series):
            log.warning(
                "run %s: %d series were saved since %s%s: their newest checkpoints are not pinned any more",
                self._run,
                self._most_series,
                printable(names[0]),
                f" and {len(names) - 1} more" if names[1:] else "",
            )

    @property
    def superseded_series(self) -> int:
        """How many series, whose newest are pinned, seem to be of launches that are over."""
        return len(superseded_series(self._record)) if self._record and self._record.has_several else 0

    def newest_of_series(self) -> tuple[Set[CheckpointId], Set[CheckpointId], Set[CheckpointId]]:
        """Return the newest checkpoints of each series, if there are several; those whose pins are to be removed; and
        those that are pinned in the spool.
        """
        record = self._record
        newest_pairs = [pair for newest in record.series.values() for pair in newest] if record.has_several else []
        pairs = (newest_pairs, record.released, record.held)
        first, second, third = ({CheckpointId(self._run, *pair) for pair in group} for group in pairs)
        return first, second, third

    def record_held_pin(self, checkpoint: CheckpointId) -> None:
        """Record that a checkpoint is about to be pinned in the spool."""
        record, self.is_new = self._record, False
        record.held.append(_attempt_and_step(checkpoint))
        record.has_several = True
        self._write(record)

    def record_doubt(self, checkpoint: CheckpointId, paths: Iterable[str]) -> None:
        """Record that a checkpoint with these files is about to be pinned, because its order is in doubt."""
        record, self.is_new = self._record, False
        if any(entry.checkpoint == _attempt_and_step(checkpoint) for entry in record.doubted):
            return  # it could not be committed then
        record.doubted.append(UncertainOrder(_attempt_and_step(checkpoint), series_of(paths), record.doubts))
        record.doubts += 1
        self._write(record)

    @property
    def doubted(self) -> Mapping[CheckpointId, CheckpointId | None]:
        """The checkpoints that are pinned because their order is in doubt, each with a later one of its series, whose
        order is in none.
        """
        return {
            CheckpointId(self._run, *entry.checkpoint): entry.settled and CheckpointId(self._run, *entry.settled)
            for entry in self._record.doubted
        }

    def end_doubts(self, checkpoints: Set[CheckpointId]) -> None:
        """Record that these are no longer pinned because of a doubt."""
        record = self._record
        if checkpoints:
            pairs = set(map(_attempt_and_step, checkpoints))
            record.doubted = [entry for entry in record.doubted if entry.checkpoint not in pairs]
            self._write(record)

    def record_shared_pins(self, released: Set[CheckpointId], held_pins: Set[CheckpointId]) -> None:
        """Record that each tier has the pins as `newest_of_series` returned them."""
        record = self._record
        if released or held_pins:
            record.released = [pair for pair in record.released if CheckpointId(self._run, *pair) not in released]
            record.held = [pair for pair in record.held if CheckpointId(self._run, *pair) not in held_pins]
            self._write(record)

    def record_listing(
        self, shapes: Mapping[str, UnitShape], newest: CheckpointId | None, *, has_steps: bool = False
    ) -> None:
        """Record a listing, and the newest checkpoint that was known then.

        A listing without units changes nothing and begins no record, because it may be of an empty mount point.
        """
        if not shapes:
            return
        self._release_series(self._record)
        record, newest_pair = self._record, _attempt_and_step(newest) if newest else None
        # What appears now was not there in the listing before, so it is newer than what was taken until then.
        after = min(record.newest or newest_pair, newest_pair) if newest_pair and not self.is_new else None
        taken_sizes = _absent_units(record.taken, shapes) | _restricted(record.taken, shapes)
        waiting = _absent_units(record.waiting, shapes)
        for path, shape in shapes.items():
            if taken_sizes.get(path) != (sizes := sizes_of(shape)):
                was = record.waiting.get(path)
                waiting[path] = was if was and was.sizes == sizes else WaitingUnit(sizes, after, record.doubts)
        earlier = {path: count for path, count in record.earlier.items() if count and path in taken_sizes}
        fresh = msgspec.structs.replace(
            record,
            taken=taken_sizes,
            waiting=waiting,
            earlier=earlier,
            newest=newest_pair,
            has_steps=has_steps or record.has_steps,
            contents=_restricted(record.contents, taken_sizes),
            saved=_restricted(record.saved, taken_sizes),
            digests=_restricted(record.digests, {name for sizes in taken_sizes.values() for name in sizes}),
            amended=_restricted(record.amended, taken_sizes),
        )
        if self.is_new or fresh != record:
            self._write(fresh)
        self._record, self.is_new = fresh, False

    def newest_before(self, path: str) -> CheckpointId | None:
        """Return the newest checkpoint before a unit appeared as it is now; None if it was there from the start."""
        waiting = self._record.waiting.get(path)
        return CheckpointId(self._run, *waiting.after) if waiting and waiting.after else None

    def _write(self, record: TakenRecord) -> None:
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_private(self._path, msgspec.json.encode(record))


def _restricted(members: Mapping[str, _Member], paths: Container[str]) -> dict[str, _Member]:
    return {path: member for path, member in members.items() if path in paths}


def _absent_units(units: Mapping[str, _T], shapes: Mapping[str, UnitShape]) -> dict[str, _T]:
    """Return the units that a listing lacks, in order, without the first ones if they are of too many files."""
    absent: dict[str, _T] = {}
    files = 0
    for path in reversed(list(units)):
        if path not in shapes:
            unit = units[path]
            files += len(unit.sizes if isinstance(unit, WaitingUnit) else unit)
            if files > _MAX_ABSENT_FILES:
                break
            absent[path] = unit
    return dict(reversed(absent.items()))


def _content_digest(files: Iterable[File]) -> str:
    digests = sorted((file.path, [chunk.xxh3_128 for chunk in file.chunks]) for file in files if file.path != UNIT_NAME)
    return xxhash.xxh3_128_hexdigest(repr(digests).encode())


def _attempt_and_step(checkpoint: CheckpointId) -> tuple[str, int]:
    return checkpoint.attempt, checkpoint.step


def sizes_of(shape: UnitShape) -> Sizes:
    return {path: (entry.size, entry.mtime_ns) for path, entry in shape}


def _time(sizes: Sizes) -> int:
    return max((modified_ns for _, modified_ns in sizes.values()), default=0)


_decoder = msgspec.json.Decoder(TakenRecord)
