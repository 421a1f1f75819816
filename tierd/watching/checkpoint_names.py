"""Name the checkpoint that a unit becomes: its step, its attempt, and what the attempt resumed from; and compare the
steps and times of the units of one listing.

Pure. A program that is watched names no launches, so its history is read from steps and times. Within an attempt, later
steps were written later. A unit that breaks this was written after its program had gone back to an earlier step, or by
a launch from before that: it belongs to another attempt.

A file's time is weak evidence, because a clock may be set back, and a copy may lose the time. So it orders only units
that were first seen together. A unit that was first seen after a checkpoint was taken is newer than that checkpoint.

Within a series, a name never sorts above that of a newer checkpoint, by time and then by step. Series that are saved at
the same steps, or within a millisecond, take each other's place in an attempt, so the attempts alone do not ensure it.

The names depend only on the files and on the checkpoints that are known, not on the node or the moment. So nodes that
watch one directory, and a watcher that starts again, give a unit the same name, and a tier keeps it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from posixpath import basename, commonpath, dirname
from types import MappingProxyType

import xxhash

from tierd.core.ids import MAX_RUN, CheckpointId, is_attempt, launch_ms, next_attempt
from tierd.core.planning.inventory import Inventory
from tierd.watching.settling_units import UnitShape
from tierd.watching.step_in_name import (
    are_ends_of_run,
    counted_step,
    directory_step,
    is_name_of_run,
    without_launch,
    without_numbers,
)
from tierd.watching.unit import Unit
from tierd.watching.unit_description import UnitDescription

BEFORE_ALL = datetime(1, 1, 1, tzinfo=UTC)  # before any checkpoint was made
_STEPLESS = ".stepless"
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_NS = 3_155_760_000 * 10**9  # 2070


@dataclass(frozen=True, slots=True)
class KnownCheckpoints:
    """The checkpoints of a run that any place has."""

    created: Mapping[CheckpointId, datetime] = field(default_factory=dict)
    origins: Mapping[str, CheckpointId | None] = field(default_factory=dict)  # from which each attempt resumed
    unread: frozenset[CheckpointId] = frozenset()  # checkpoints of which only the names are known

    def with_checkpoint(
        self, checkpoint: CheckpointId, created: datetime, origin: CheckpointId | None
    ) -> KnownCheckpoints:
        return KnownCheckpoints(
            {**self.created, checkpoint: created}, {**self.origins, checkpoint.attempt: origin}, self.unread
        )

    def merge(self, newer: KnownCheckpoints) -> KnownCheckpoints:
        """Return both histories; `newer` was observed later."""
        return KnownCheckpoints(
            {**self.created, **newer.created}, {**self.origins, **newer.origins}, newer.unread - self.created.keys()
        )

    def created_at(self, checkpoint: CheckpointId) -> datetime:
        """Return when a checkpoint was made; before all if no place tells."""
        return self.created.get(checkpoint, BEFORE_ALL)

    def find(self, step: int, created: datetime) -> list[CheckpointId]:
        return [checkpoint for checkpoint, at in self.created.items() if checkpoint.step == step and at == created]


@dataclass(frozen=True, slots=True)
class UnitName:
    """The name of a unit's checkpoint, and the origin of its attempt."""

    checkpoint: CheckpointId
    origin: CheckpointId | None
    # whether it sorts before a checkpoint that had been taken when the unit was first seen, or before an older one of
    # its series
    sorts_below_taken: bool = False


def known_checkpoints(inventory: Inventory, run: str) -> KnownCheckpoints:
    created: dict[CheckpointId, datetime] = {}
    names: set[CheckpointId] = set()
    for place in inventory.places.values():
        for copy in place.copies(run):
            names.add(copy.id)
            if facts := copy.metadata_facts:
                created[copy.id] = facts.created
    return KnownCheckpoints(created, inventory.origins(run), frozenset(names - created.keys()))


def checkpoint_time(modified_ns: int) -> datetime:
    """Convert a file's time to the time of a checkpoint, in microseconds; a time out of range to 1970.

    A time after 2069 is out of range. An attempt of that name would sort after all later ones, because `next_attempt`
    ignores names far ahead of the clock.
    """
    return _UNIX_EPOCH + timedelta(microseconds=modified_ns // 1000 if is_in_range(modified_ns) else 0)


def is_in_range(modified_ns: int) -> bool:
    return 0 <= modified_ns < _LATEST_NS


def step_of(described: UnitDescription, created: datetime) -> int:
    return second_of(created) if described.step is None else described.step


def second_of(created: datetime) -> int:
    """Return the number that stands in the place of a step: the second, since 1970, in which a unit was finished."""
    return int(created.timestamp())


def is_order_of_time(step: int, created: datetime) -> bool:
    """Whether the step of a checkpoint is only the order of its unit."""
    return step == second_of(created)


def stepless_run(run: str) -> str:
    """Return the run of the units without a step in a directory where others have one, which are those of `run`.

    It is a run of its own because the others' steps cannot be compared with the order of these, and because a program
    that rewrites one file after each epoch would have retention delete all others.
    """
    return f"{run[: MAX_RUN - len(_STEPLESS)]}{_STEPLESS}"


def series_of(paths: Iterable[str]) -> str:
    """Return the series of a checkpoint with these files: its path without numbers, but with those of ranks.

    The path is that of the directory with a step. Files beside each other have no directory of their own, so the first
    of them names the series. The directories above keep the numbers of seeds and jobs, but not those of launches.
    """
    return _series_of(tuple(paths))


@lru_cache(1 << 14)  # because each unit that is named is compared with all others of the listing
def _series_of(paths: tuple[str, ...]) -> str:
    first = min(paths)
    home = commonpath([dirname(path) for path in paths])
    above = home.split("/") if home else []
    names = first.split("/")
    steps = (
        at
        for at, name in enumerate(above)
        if (directory_step(name) is not None or counted_step(name) is not None) and not _is_of_run(names[at:], paths)
    )
    length = next(steps, len(above))
    return "/".join([*map(without_launch, names[:length]), without_numbers(names[length])])


def _is_of_run(names: Sequence[str], paths: Sequence[str]) -> bool:
    if not names[0].isdecimal():
        return False
    are_ends = are_ends_of_run(map(basename, paths), names[0])
    return are_ends or any(is_name_of_run(name, names[0]) for name in names[1:])


def name_unit(
    run: str,
    path: str,
    step: int,
    created: datetime,
    history: KnownCheckpoints,
    after: CheckpointId | None = None,
    series: Mapping[CheckpointId, datetime] = MappingProxyType({}),
) -> UnitName:
    """Name the checkpoint of a unit that `history` does not have.

    Args:
        after: the newest checkpoint when the unit was first seen. Times are compared with later ones only. None if the
            unit was there when the watch began.
        series: the known checkpoints of its series, and when each was made.
    """
    attempts = sorted({checkpoint.attempt for checkpoint in history.created} | set(history.origins), reverse=True)
    peers = {checkpoint: at for checkpoint, at in history.created.items() if after is None or checkpoint > after}
    series = {checkpoint: at for checkpoint, at in series.items() if checkpoint in peers}
    older, newer = _neighbours(step, created, series)
    lower_bound = max((checkpoint for checkpoint in (after, older) if checkpoint is not None), default=None)
    for attempt in attempts:
        checkpoint = CheckpointId(run, attempt, step)
        is_between = (lower_bound is None or checkpoint > lower_bound) and (newer is None or checkpoint < newer)
        if is_between and _keeps_order(checkpoint, created, history, peers):
            return UnitName(checkpoint, history.origins.get(attempt))
    token = xxhash.xxh3_64_hexdigest(f"{run}\0{path}\0{step}\0{created.isoformat()}".encode())[:8]
    at_ms = (created - _UNIX_EPOCH) // timedelta(milliseconds=1)
    if newer is not None or any(at > created for at in peers.values()):  # by a launch from before the newest one
        limit_ms = launch_ms(newer.attempt if newer else attempts[0])
        from_ms = 0 if older is None else launch_ms(older.attempt) + 1
        if newer is not None or from_ms < limit_ms:
            attempt = f"{max(0, min(max(at_ms, from_ms), limit_ms - 1)):012x}-{token}"
            assert is_attempt(attempt)
            checkpoint = CheckpointId(run, attempt, step)
            return UnitName(checkpoint, None, sorts_below_taken=lower_bound is not None and checkpoint < lower_bound)
    origin = _find_origin(step, attempts, history)
    return UnitName(CheckpointId(run, next_attempt(at_ms, attempts, token), step), origin)


def _neighbours(
    step: int, created: datetime, series: Mapping[CheckpointId, datetime]
) -> tuple[CheckpointId | None, CheckpointId | None]:
    """Return the checkpoints of a series between which a unit sorts: the last of the older, the first of the newer.

    A checkpoint below which its program went back later counts only as the older one, because the later launch may
    have resumed from a checkpoint that is older still.
    """
    older, newer = list[CheckpointId](), list[CheckpointId]()
    least_step = None
    for checkpoint, at in sorted(series.items(), key=lambda item: (item[1], item[0].step), reverse=True):
        if (at, checkpoint.step) < (created, step):
            older.append(checkpoint)
        elif (at, checkpoint.step) > (created, step) and (least_step is None or checkpoint.step < least_step):
            newer.append(checkpoint)
        least_step = checkpoint.step if least_step is None else min(least_step, checkpoint.step)
    return max(older, default=None), min(newer, default=None)


def _keeps_order(
    checkpoint: CheckpointId, created: datetime, history: KnownCheckpoints, peers: Mapping[CheckpointId, datetime]
) -> bool:
    """Whether an attempt stays in order with a checkpoint: later steps were made later, and each step once."""
    same_attempt = [recorded for recorded in history.created if recorded.attempt == checkpoint.attempt]
    origin = history.origins.get(checkpoint.attempt)
    is_known = checkpoint in history.unread or checkpoint in history.created
    if not same_attempt or is_known or (origin is not None and checkpoint.step <= origin.step):
        return False
    times = [(peer.step - checkpoint.step, at) for peer, at in peers.items() if peer.attempt == checkpoint.attempt]
    return all((ahead < 0 and at <= created) or (ahead > 0 and at >= created) for ahead, at in times)


def _find_origin(step: int, attempts: list[str], history: KnownCheckpoints) -> CheckpointId | None:
    """Return the newest checkpoint of the timeline below a step: that is where a program that went back began."""
    attempt, below = next(iter(attempts), None), step
    while attempt is not None:
        earlier = (saved for saved in history.created if saved.attempt == attempt and saved.step < below)
        if (newest := max(earlier, default=None)) is not None:
            return newest
        origin = history.origins.get(attempt)
        if origin is None or origin.attempt >= attempt:
            return None
        if origin.step < step and origin in history.created:
            return origin
        attempt, below = origin.attempt, min(below, origin.step + 1)
    return None


class ListedUnits:
    """The units of a listing, and their shapes, by path."""

    def __init__(self, units: Mapping[str, Unit], shapes: Mapping[str, UnitShape]) -> None:
        self._dated_units = [(unit, modified_at(shapes[path])) for path, unit in units.items()]

    def _sibling_units(self, path: str) -> Iterator[tuple[Unit, datetime]]:
        return ((unit, created) for unit, created in self._dated_units if unit.path != path)

    def count_same_step_and_time(self, path: str, step: int, created: datetime) -> int:
        """Count the units of this step and time, the one at `path` included."""
        return 1 + sum(
            (second_of(at) if unit.step is None else unit.step, at) == (step, created)
            for unit, at in self._sibling_units(path)
        )

    def newer_units_of_smaller_step(self, path: str, step: int, created: datetime) -> Iterator[tuple[Unit, datetime]]:
        """Yield the units of the same directory that have a smaller step and a later time.

        Their program went back to an earlier step, or the times are wrong: nothing in the directory says which.
        """
        for unit, at in self._sibling_units(path):
            if dirname(unit.path) == dirname(path) and at > created and unit.step is not None and unit.step < step:
                yield unit, at


def modified_at(shape: UnitShape) -> datetime:
    return checkpoint_time(max((entry.mtime_ns for _, entry in shape), default=0))
