"""The order in which a watch takes units, and the pins by which the newest of each series, and doubtful ones, are kept.

Invariants: no unit is pruned as old only because its file's time lies before another one's. Where its step contradicts
the time, it is in doubt, and its checkpoint is pinned until a later one of its series is verified on every tier. A pin
that a person put stays: the pins of this module have a text, and only such a pin is removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Set
from datetime import datetime

from tierd.core.errors import StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId, pin_key
from tierd.daemon.intake.taken_units import TakenUnits
from tierd.daemon.tiers.intents import read_pin
from tierd.spool.spool import Spool
from tierd.stores.base import Store, delete_if_permitted
from tierd.watching.checkpoint_names import KnownCheckpoints, ListedUnits, UnitName, modified_at, second_of, series_of
from tierd.watching.settling_units import DueUnit, SettlingTracker
from tierd.watching.unit import Unit


class UnitOrder:
    """The units of a watched directory, as last listed."""

    def __init__(self, settling: SettlingTracker, taken_units: TakenUnits) -> None:
        self._settling, self._taken_units = settling, taken_units
        self._newest_foreign: CheckpointId | None = None  # the newest that was known before the first listing
        self._listed = False
        self.listed_units = ListedUnits({}, {})

    def note_listing(self, history: KnownCheckpoints) -> None:
        newest = max(history.created, default=None)
        if not self._listed:
            self._listed, self._newest_foreign = True, newest
        shapes = self._settling.shapes
        self.listed_units = ListedUnits(self._settling.units, shapes)
        has_steps = any(unit.step is not None for unit in self._settling.units.values())
        self._taken_units.record_listing(shapes, newest, has_steps=has_steps)

    def sort(self, due_units: list[DueUnit]) -> list[DueUnit]:
        """Order due units: those that were there from the start, the newest first; then the others, the oldest first.

        The newest of many is safe soon. Later ones follow as they were written, because each is named after the last.
        """
        first = [due_unit for due_unit in due_units if self._taken_units.newest_before(due_unit.unit.path) is None]
        return first + [
            due_unit
            for due_unit in reversed(due_units)
            if self._taken_units.newest_before(due_unit.unit.path) is not None
        ]

    def has_checkpoint(self, path: str, step: int, created: datetime, history: KnownCheckpoints) -> bool:
        """Whether a place has a unit; if several have its step and its time, whether a place has that many.

        Several are other units of the directory, and versions of this one that were taken before.
        """
        earlier = self._taken_units.count_same_time(path, self._settling.shapes[path])
        return (
            len(history.find(step, created))
            >= self.listed_units.count_same_step_and_time(path, step, created) + earlier
        )

    def series_checkpoints(self, path: str, history: KnownCheckpoints) -> dict[CheckpointId, datetime]:
        """Return the known checkpoints of a unit's series, and when each was made.

        The record says as which checkpoint a unit was taken. Of one that another node took, its step and its time do,
        and units of other series may share both.
        """
        unit_series, shapes = series_of(self._settling.units[path].files or [path]), self._settling.shapes
        recorded = self._taken_units.checkpoints()
        other_checkpoints = {checkpoint for checkpoint, series in recorded.values() if series != unit_series}
        by_time: dict[tuple[int, datetime], set[CheckpointId]] = {}
        for checkpoint, at in history.created.items():
            by_time.setdefault((checkpoint.step, at), set()).add(checkpoint)
        checkpoints = {checkpoint for checkpoint, series in recorded.values() if series == unit_series}
        for unit in self._settling.units.values():
            if unit.path in recorded and self._taken_units.has_taken(unit.path, shapes[unit.path]):
                continue
            if unit.path != path and series_of(unit.files or [unit.path]) == unit_series:
                created = modified_at(shapes[unit.path])
                step = second_of(created) if unit.step is None else unit.step
                checkpoints |= by_time.get((step, created), set()) - other_checkpoints
        return {checkpoint: history.created[checkpoint] for checkpoint in checkpoints if checkpoint in history.created}

    def is_in_doubt(self, path: str, assigned: UnitName, created: datetime, history: KnownCheckpoints) -> bool:
        """Whether a unit may be newer than checkpoints that sort after it."""
        checkpoint = assigned.checkpoint
        contradicting = self.listed_units.newer_units_of_smaller_step(path, checkpoint.step, created)
        if assigned.sorts_below_taken or any(
            self._sorts_after(checkpoint, unit, at, history) for unit, at in contradicting
        ):
            return True
        # On a new node the directory may lack the files of which the tiers tell.
        newest = self._newest_foreign
        return newest is not None and checkpoint < newest and checkpoint.step > newest.step

    def _sorts_after(self, checkpoint: CheckpointId, unit: Unit, created: datetime, history: KnownCheckpoints) -> bool:
        """Whether a unit sorts after a checkpoint, or will when it is taken. One that was pruned does not."""
        matches = history.find(unit.step or 0, created)
        if not matches:
            return not self._taken_units.has_taken(unit.path, self._settling.shapes[unit.path])
        return max(matches) > checkpoint


log = logging.getLogger("tierd.daemon")

NEWEST_PIN_TEXT = b"the newest of its series"
DOUBT_PIN_TEXT = b"its place in the order is in doubt"


class SeriesPins:
    """The pins of one watched run."""

    def __init__(
        self, spool: Spool, run: str, taken_units: TakenUnits, stores: Callable[[], Mapping[str, Store]]
    ) -> None:
        self._spool, self._run, self._taken_units, self._stores = spool, run, taken_units, stores
        self._shared: dict[str, Set[CheckpointId]] = {}  # by tier, what was found pinned there

    def pin_until_shared(self, checkpoint: CheckpointId) -> None:
        """Pin a checkpoint in the spool before it is committed, until it is pinned on the tiers."""
        self._taken_units.record_held_pin(checkpoint)
        self._spool.pin(checkpoint, pinned=True)

    def pin_doubtful(self, checkpoint: CheckpointId, paths: Iterable[str]) -> None:
        """Pin a checkpoint with these files, whose order is in doubt, in the spool before it is committed."""
        self._taken_units.record_doubt(checkpoint, paths)
        self._spool.pin(checkpoint, pinned=True)

    async def share(self, observed: Set[CheckpointId], stored: Set[CheckpointId]) -> Set[CheckpointId]:
        """Pin the newest checkpoints of each series, and those in doubt, on each tier; remove the pins of older ones.

        What a tier does not answer is done at the next call. Returns the checkpoints whose pins are not a person's.

        Args:
            observed: the checkpoints that this node's retention knows to be pinned on every tier.
            stored: those that every tier has, verified.
        """
        to_pin, released, held_pins = self._taken_units.newest_of_series()
        doubted = self._taken_units.doubted
        newest = max((checkpoint for checkpoint in stored if checkpoint.run == self._run), default=None)
        settled = {checkpoint for checkpoint, later in doubted.items() if newest and later and newest >= later}
        doubts = (
            (doubted.keys() - settled) & self._spool.pins() if doubted else set()
        )  # a person may have unpinned some
        texts = dict.fromkeys(doubts, DOUBT_PIN_TEXT) | dict.fromkeys(to_pin, NEWEST_PIN_TEXT)
        stores, everywhere = self._stores(), True
        for name, store in stores.items():
            try:
                for checkpoint in texts.keys() - self._shared.get(name, frozenset()):
                    if await read_pin(store, checkpoint) is None:
                        await store.put(pin_key(checkpoint), texts[checkpoint])
                for checkpoint in (released | settled) - texts.keys():
                    if await read_pin(store, checkpoint) in (NEWEST_PIN_TEXT, DOUBT_PIN_TEXT):
                        await delete_if_permitted(store, [pin_key(checkpoint)])
                self._shared[name] = texts.keys()
            except (StoreUnavailable, StoreRefused) as error:
                log.info("%s: the newest of each series cannot be pinned there yet: %s", name, error)
                everywhere = False
        if stores and everywhere:
            to_unpin = {checkpoint for checkpoint in held_pins if checkpoint in observed or checkpoint not in to_pin}
            for checkpoint in (to_unpin | (settled - (held_pins - to_unpin))) - doubts:
                self._spool.pin(checkpoint, pinned=False)
            self._taken_units.record_shared_pins(released, to_unpin)
            self._taken_units.end_doubts(settled)
        return to_pin | released | held_pins | doubted.keys()
