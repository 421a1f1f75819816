"""The scrub's history, in a small file in the spool, so that the next daemon continues the schedule.

Invariant: the history is a hint, not truth. If it is lost, damaged, too old or forged, copies are read again sooner, or
at most one period later. It has no other effect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tierd.core.ids import PartId
from tierd.core.planning.background_schedule import ScrubbedCopy, base_copies
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL
from tierd.daemon.concurrency import thread_uncancelled
from tierd.spool.file_io import private_opener, replace_private

log = logging.getLogger("tierd.daemon")

_LARGEST = 32 << 20  # bytes of the file that are read
_MAX_COPIES = 100_000  # copies that are recorded


class ScrubHistory(dict[ScrubbedCopy, float]):
    """By copy, when it was last found right, seconds since 1970."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._saved_entries = path, dict[ScrubbedCopy, float]()

    def load(self) -> None:
        """Read the file, if it exists. Entries that are in memory already take precedence."""
        try:
            with open(self._path, "rb", opener=private_opener) as file:
                data = file.read(_LARGEST + 1)
            recorded = msgspec.json.decode(data, type=dict[str, dict[str, float]])
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, or of other types
            log.warning("%s: not used, so some copies are read again early: %s", self._path, error)
            return
        in_memory = dict(self)
        for place, parts in recorded.items():
            for name, when in parts.items():
                pieces = name.split("/")
                part = PartId.parse(*pieces) if len(pieces) == 3 else None
                if part:
                    self[ScrubbedCopy(place, part)] = when
        self._saved_entries = dict(self)
        self.update(in_memory)

    async def save(self, inventory: Inventory) -> None:
        """Write the file if an entry changed, without copies that are gone."""
        bases = self._bases(inventory)
        for copy in list(self._deleted_copies(inventory)):
            if copy not in bases:
                del self[copy]
        for copy, when in bases.items():
            self.setdefault(copy, when)
        newest = dict(sorted(self.items(), key=lambda item: item[1], reverse=True)[:_MAX_COPIES])
        if newest == self._saved_entries:
            return
        by_place: dict[str, dict[str, float]] = {}
        for copy, when in newest.items():
            by_place.setdefault(copy.place, {})[copy.part.path] = when
        try:
            await thread_uncancelled(replace_private, self._path, msgspec.json.encode(by_place))
            self._saved_entries = newest
        except OSError as error:
            log.warning("%s: cannot be written: %s", self._path, error)

    def _bases(self, inventory: Inventory) -> dict[ScrubbedCopy, float]:
        # Copies, deleted ones included, whose chunks other copies name. The time is the other copy's last verification,
        # or now.
        return {
            base: min(self.get(copy, now), now)
            for now in [time.time()]
            for name, place in inventory.tiers.items()
            for checkpoint_copy in (place.checkpoints.values() if place else ())
            for part, facts in checkpoint_copy.facts.items()
            if facts.bases
            for copy in [ScrubbedCopy(name, part)]
            for base in base_copies(inventory, copy)
        }

    def _deleted_copies(self, inventory: Inventory) -> Iterator[ScrubbedCopy]:
        places = {SPOOL: inventory.spool, **inventory.tiers}
        for copy in self:
            place = places.get(copy.place)  # None, or without checkpoints so far: proves nothing
            if copy.place not in places or (place and place.checkpoints and not place.lists(copy.part)):
                yield copy
