"""Keep the two newest checkpoints of each series of a watched run on the tiers, whatever retention wants of the run.

Retention counts the checkpoints of a run, and knows no series. So `_actor/step_30` and `_critic/step_30` would count as
two, and a series that is saved seldom, as `best-30.pt`, would be deleted by those of another one.

A checkpoint whose place in the order is in doubt is pinned as well, until a later one of its series, which is in no
doubt, is verified on every tier. A program that renames its checkpoints before each save would fill the tiers
otherwise.

Invariant: a pin that a person put stays. The pins that this module puts have a text, and only such a pin is removed.
Between its commit and its pin on the tiers a checkpoint is pinned in the spool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Set

from tierd.core.errors import ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId, pin_key
from tierd.daemon.intake.taken import TakenUnits
from tierd.spool.spool import Spool
from tierd.stores.base import Store, clear

log = logging.getLogger("tierd.daemon")

TEXT = b"the newest of its series"
DOUBT = b"its place in the order is in doubt"


class SeriesPins:
    """The pins of one watched run.

    Args:
        spool: the spool.
        run: the run.
        taken: the record of the units that were taken.
        stores: returns the tiers.
    """

    def __init__(
        self, spool: Spool, run: str, taken_units: TakenUnits, stores: Callable[[], Mapping[str, Store]]
    ) -> None:
        self._spool, self._run, self._taken_units, self._stores = spool, run, taken_units, stores
        self._shared: dict[str, Set[CheckpointId]] = {}  # by tier, what was found pinned there

    def hold(self, checkpoint: CheckpointId) -> None:
        """Pin a checkpoint in the spool before it is committed, until it is pinned on the tiers."""
        self._taken_units.hold(checkpoint)
        self._spool.pin(checkpoint, pinned=True)

    def keep(self, checkpoint: CheckpointId, paths: Iterable[str]) -> None:
        """Pin a checkpoint with these files, whose order is in doubt, in the spool before it is committed."""
        self._taken_units.doubt(checkpoint, paths)
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
        texts = dict.fromkeys(doubts, DOUBT) | dict.fromkeys(to_pin, TEXT)
        stores, everywhere = self._stores(), True
        for name, store in stores.items():
            try:
                for checkpoint in texts.keys() - self._shared.get(name, frozenset()):
                    if await _read_pin_text(store, checkpoint) is None:
                        await store.put(pin_key(checkpoint), texts[checkpoint])
                for checkpoint in (released | settled) - texts.keys():
                    if await _read_pin_text(store, checkpoint) in (TEXT, DOUBT):
                        await clear(store, [pin_key(checkpoint)])
                self._shared[name] = texts.keys()
            except (StoreUnavailable, StoreRefused) as error:
                log.info("%s: the newest of each series cannot be pinned there yet: %s", name, error)
                everywhere = False
        if stores and everywhere:
            to_unpin = {checkpoint for checkpoint in held_pins if checkpoint in observed or checkpoint not in to_pin}
            for checkpoint in (to_unpin | (settled - (held_pins - to_unpin))) - doubts:
                self._spool.pin(checkpoint, pinned=False)
            self._taken_units.shared(released, to_unpin)
            self._taken_units.end_doubts(settled)
        return to_pin | released | held_pins | doubted.keys()


async def _read_pin_text(store: Store, checkpoint: CheckpointId) -> bytes | None:
    """Return the text of a pin; None if there is none."""
    try:
        return bytes(await store.get(pin_key(checkpoint)))
    except ObjectNotFound:
        return None
