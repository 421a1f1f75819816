"""The order in which a watch takes units, and whether the order of a unit is in doubt.

Invariant: no unit that a watch takes is pruned as old only because its file's time lies before another one's. It is
newer than what was taken before it was first seen. Where time alone orders it, and its step contradicts the time, it is
in doubt, and its checkpoint is pinned.
"""

from __future__ import annotations

from datetime import datetime

from tierd.core.ids import CheckpointId
from tierd.daemon.intake.taken import TakenUnits
from tierd.watching.beside import ListedUnits, made_of
from tierd.watching.naming import KnownCheckpoints, UnitName, order_of, series_of
from tierd.watching.settle import Due, Settling
from tierd.watching.unit import Unit


class Ordering:
    """The units of a watched directory, as last listed.

    Args:
        settling: the units.
        taken: the record of those that were taken.

    Attributes:
        beside: the units of the last listing.
    """

    def __init__(self, settling: Settling, taken_units: TakenUnits) -> None:
        self._settling, self._taken_units = settling, taken_units
        self._newest_foreign: CheckpointId | None = None  # the newest that was known before the first listing
        self._listed = False
        self.beside = ListedUnits({}, {})

    def see(self, history: KnownCheckpoints) -> None:
        """Record the last listing."""
        newest = max(history.made, default=None)
        if not self._listed:
            self._listed, self._newest_foreign = True, newest
        shapes = self._settling.shapes
        self.beside = ListedUnits(self._settling.units, shapes)
        has_steps = any(unit.step is not None for unit in self._settling.units.values())
        self._taken_units.see(shapes, newest, has_steps=has_steps)

    def sort(self, due_units: list[Due]) -> list[Due]:
        """Order due units: those that were there from the start, the newest first; then the others, the oldest first.

        The newest of many is safe soon. Later ones follow as they were written, because each is named after the last.
        """
        first = [due_unit for due_unit in due_units if self._taken_units.after(due_unit.unit.path) is None]
        return first + [
            due_unit for due_unit in reversed(due_units) if self._taken_units.after(due_unit.unit.path) is not None
        ]

    def has(self, path: str, step: int, created: datetime, history: KnownCheckpoints) -> bool:
        """Whether a place has a unit; if several have its step and its time, whether a place has that many.

        Several are other units of the directory, and versions of this one that were taken before.
        """
        earlier = self._taken_units.earlier(path, self._settling.shapes[path])
        return len(history.find(step, created)) >= self.beside.count(path, step, created) + earlier

    def series(self, path: str, history: KnownCheckpoints) -> dict[CheckpointId, datetime]:
        """Return the known checkpoints of a unit's series, and when each was made.

        The record says as which checkpoint a unit was taken. Of one that another node took, its step and its time do,
        and units of other series may share both.
        """
        unit_series, shapes = series_of(self._settling.units[path].files or [path]), self._settling.shapes
        recorded = self._taken_units.checkpoints()
        other_checkpoints = {checkpoint for checkpoint, series in recorded.values() if series != unit_series}
        by_time: dict[tuple[int, datetime], set[CheckpointId]] = {}
        for checkpoint, at in history.made.items():
            by_time.setdefault((checkpoint.step, at), set()).add(checkpoint)
        checkpoints = {checkpoint for checkpoint, series in recorded.values() if series == unit_series}
        for unit in self._settling.units.values():
            if unit.path in recorded and self._taken_units.has(unit.path, shapes[unit.path]):
                continue
            if unit.path != path and series_of(unit.files or [unit.path]) == unit_series:
                created = made_of(shapes[unit.path])
                step = order_of(created) if unit.step is None else unit.step
                checkpoints |= by_time.get((step, created), set()) - other_checkpoints
        return {checkpoint: history.made[checkpoint] for checkpoint in checkpoints if checkpoint in history.made}

    def is_in_doubt(self, path: str, assigned: UnitName, created: datetime, history: KnownCheckpoints) -> bool:
        """Whether a unit may be newer than checkpoints that sort after it."""
        checkpoint = assigned.checkpoint
        contradicting = self.beside.contradicting(path, checkpoint.step, created)
        if assigned.below or any(self._sorts_after(checkpoint, unit, at, history) for unit, at in contradicting):
            return True
        # On a new node the directory may lack the files of which the tiers tell.
        newest = self._newest_foreign
        return newest is not None and checkpoint < newest and checkpoint.step > newest.step

    def _sorts_after(self, checkpoint: CheckpointId, unit: Unit, created: datetime, history: KnownCheckpoints) -> bool:
        """Whether a unit sorts after a checkpoint, or will when it is taken. One that was pruned does not."""
        matches = history.find(unit.step or 0, created)
        if not matches:
            return not self._taken_units.has(unit.path, self._settling.shapes[unit.path])
        return max(matches) > checkpoint
