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

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeAlias, TypeVar

import msgspec

from tierd.core.errors import ConfigError
from tierd.core.ids import CheckpointId
from tierd.spool.file_io import open_own, private
from tierd.spool.spool import Spool
from tierd.watching.settle import Shape

_WATCHED = "watched"
_MOST_GONE = 10_000  # files of the units that are gone and are remembered; about 1 MB of the record
_Sizes: TypeAlias = dict[str, tuple[int, int]]  # by file: its size in bytes, its time of modification in ns
_T = TypeVar("_T", _Sizes, "_Waiting")


class _Waiting(msgspec.Struct, frozen=True):
    """A unit that was not taken yet, and the attempt and the step of the newest checkpoint before it appeared."""

    sizes: _Sizes
    after: tuple[str, int] | None


class _Record(msgspec.Struct):
    taken: dict[str, _Sizes]
    waiting: dict[str, _Waiting]
    earlier: dict[str, int] = {}  # by unit: how many versions of the same time were taken before
    newest: tuple[str, int] | None = None  # the newest checkpoint after the last listing; None in an older record
    has_steps: bool = False  # whether a unit ever had a step in its name


class TakenUnits:
    """By path, the size and the time of modification of each file of the units that were taken, or wait.

    Args:
        spool: the spool.
        run: the watched run.
    """

    def __init__(self, spool: Spool, run: str) -> None:
        self._run, self._path = run, spool.control / _WATCHED / f"{run}.json"
        self._record: _Record | None = None  # None before the first listing of a directory
        with (
            suppress(OSError, ConfigError, msgspec.DecodeError, ValueError),
            os.fdopen(open_own(self._path), "rb") as file,  # a FIFO in its place does not block
        ):
            self._record = _decoder.decode(file.read())

    def has(self, path: str, shape: Shape) -> bool:
        """Whether a unit was taken as it is now."""
        return self._record is not None and self._record.taken.get(path) == _sizes(shape)

    def earlier(self, path: str, shape: Shape) -> int:
        """Return how many other versions of a unit were taken that have the time of this one, because a tool kept it.

        Versions differ by sizes: one of the same sizes and times cannot be told from this one.
        """
        record = self._record or _Record({}, {})
        sizes, was = _sizes(shape), record.taken.get(path, {})
        same = _time(was) == _time(sizes)
        return record.earlier.get(path, 0) + (was != sizes) if was and same else 0

    @property
    def has_steps(self) -> bool:
        """Whether a unit that was listed ever had a step in its name."""
        return self._record is not None and self._record.has_steps

    def add(self, path: str, shape: Shape, checkpoint: CheckpointId | None = None) -> None:
        """Record that a unit was taken as a checkpoint, or that a place has it. Raises nothing."""
        record = self._record = self._record or _Record({}, {})
        if checkpoint is not None:
            record.newest = max(_pair(checkpoint), record.newest or ("", 0))
        if self.has(path, shape):
            return
        record.earlier[path] = self.earlier(path, shape)
        record.taken[path] = _sizes(shape)
        record.waiting.pop(path, None)
        self._write(record)

    def see(self, shapes: Mapping[str, Shape], newest: CheckpointId | None, *, has_steps: bool = False) -> None:
        """Record a listing. Raises nothing.

        A listing without units changes nothing and begins no record, because it may be of an empty mount point.

        Args:
            shapes: the units of the listing, by path.
            newest: the newest checkpoint that is known.
            has_steps: whether a unit has a step in its name.
        """
        if not shapes:
            return
        record, known = self._record or _Record({}, {}), _pair(newest) if newest else None
        # What appears now was not there in the listing before, so it is newer than what was taken until then.
        after = min(record.newest or known, known) if known and self._record else None
        taken = _gone(record.taken, shapes) | {path: one for path, one in record.taken.items() if path in shapes}
        waiting = _gone(record.waiting, shapes)
        for path, shape in shapes.items():
            if taken.get(path) != (sizes := _sizes(shape)):
                was = record.waiting.get(path)
                waiting[path] = was if was and was.sizes == sizes else _Waiting(sizes, after)
        earlier = {path: count for path, count in record.earlier.items() if count and path in taken}
        fresh = _Record(taken, waiting, earlier, known, has_steps or self.has_steps)
        if fresh != self._record:
            self._write(fresh)
        self._record = fresh

    def after(self, path: str) -> CheckpointId | None:
        """Return the newest checkpoint before a unit appeared as it is now; None if it was there from the start."""
        waiting = self._record.waiting.get(path) if self._record else None
        return CheckpointId(self._run, *waiting.after) if waiting and waiting.after else None

    def _write(self, record: _Record) -> None:
        # One name, so that a write that was killed leaves one file at most. Only the spool's daemon writes here.
        fresh = self._path.with_name(f".{self._run}.new")
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                with open(fresh, "wb", opener=private) as file:
                    file.write(msgspec.json.encode(record))
                fresh.replace(self._path)
            finally:
                fresh.unlink(missing_ok=True)  # of a failed write, as on a full disk


def _gone(units: Mapping[str, _T], shapes: Mapping[str, Shape]) -> dict[str, _T]:
    """Return the units that a listing lacks, in order, without the first ones if they are of too many files."""
    found: dict[str, _T] = {}
    files = 0
    for path in reversed(list(units)):
        if path not in shapes:
            one = units[path]
            files += len(one.sizes if isinstance(one, _Waiting) else one)
            if files > _MOST_GONE:
                break
            found[path] = one
    return dict(reversed(found.items()))


def _pair(checkpoint: CheckpointId) -> tuple[str, int]:
    return checkpoint.attempt, checkpoint.step


def _sizes(shape: Shape) -> _Sizes:
    return {path: (entry.size, entry.mtime_ns) for path, entry in shape}


def _time(sizes: _Sizes) -> int:
    return max((modified_ns for _, modified_ns in sizes.values()), default=0)


_decoder = msgspec.json.Decoder(_Record)
