"""Compare a unit with the other units of its listing: their steps and times. Pure.

Nothing is read, so the step of a unit whose name has none is the second of its last write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from posixpath import dirname

from tierd.watching.naming import made_at, order_of
from tierd.watching.settle import Shape
from tierd.watching.unit import Unit


class ListedUnits:
    """The units of a listing.

    Args:
        units: the units, by path.
        shapes: their shapes, by path.
    """

    def __init__(self, units: Mapping[str, Unit], shapes: Mapping[str, Shape]) -> None:
        self._dated_units = [(unit, made_of(shapes[path])) for path, unit in units.items()]

    def _sibling_units(self, path: str) -> Iterator[tuple[Unit, datetime]]:
        return ((unit, created) for unit, created in self._dated_units if unit.path != path)

    def count(self, path: str, step: int, created: datetime) -> int:
        """Return how many units have this step and this time, the one at `path` included."""
        return 1 + sum((_step_or_order(unit, at), at) == (step, created) for unit, at in self._sibling_units(path))

    def contradicting(self, path: str, step: int, created: datetime) -> Iterator[tuple[Unit, datetime]]:
        """Yield the units of the same directory that have a smaller step and a later time.

        Their program went back to an earlier step, or the times are wrong: nothing in the directory says which.
        """
        for unit, at in self._sibling_units(path):
            if dirname(unit.path) == dirname(path) and at > created and unit.step is not None and unit.step < step:
                yield unit, at


def _step_or_order(unit: Unit, created: datetime) -> int:
    return order_of(created) if unit.step is None else unit.step


def made_of(shape: Shape) -> datetime:
    """Return when the newest file of a unit was last written."""
    return made_at(max((entry.mtime_ns for _, entry in shape), default=0))
