"""What a daemon remembers of its scrubbing, in a small file in the spool, so that the next one goes on there.

Law: it is a memory, not truth. Lost, damaged, too old or made up, it makes copies be read again sooner, or at most one
period later, and nothing else.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tierd.core.ids import PartId
from tierd.core.scrub import Copy, lenders
from tierd.core.world import SPOOL, World
from tierd.daemon.together import to_the_end
from tierd.persist import private

log = logging.getLogger("tierd.daemon")

_LARGEST = 32 << 20  # bytes that are read of the file
_MOST = 100_000  # copies that are remembered


class Scrubbed(dict[Copy, float]):
    """Copy -> when it was last found right, seconds since 1970."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._written = path, dict[Copy, float]()

    def load(self) -> None:
        """Take up what the file holds, if anything, below what is known already."""
        try:
            # O_NONBLOCK: a FIFO in its place would be waited for.
            plain = os.O_NOFOLLOW | os.O_NONBLOCK
            with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | plain)) as file:
                data = file.read(_LARGEST + 1)
            found = msgspec.json.decode(data, type=dict[str, dict[str, float]])
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, or of other types
            log.warning("%s: not used, so some copies are read again early: %s", self._path, error)
            return
        known = dict(self)
        for place, parts in found.items():
            for name, when in parts.items():
                pieces = name.split("/")
                part = PartId.parse(*pieces) if len(pieces) == 3 else None
                if part:
                    self[Copy(place, part)] = when
        self._written = dict(self)
        self.update(known)

    async def save(self, world: World) -> None:
        """Write the file anew, if there is anything new, without copies that are gone."""
        lent = self._lent(world)
        for copy in list(self._gone(world)):
            if copy not in lent:
                del self[copy]
        for copy, when in lent.items():
            self.setdefault(copy, when)
        newest = dict(sorted(self.items(), key=lambda item: item[1], reverse=True)[:_MOST])
        if newest == self._written:
            return
        told: dict[str, dict[str, float]] = {}
        for copy, when in newest.items():
            told.setdefault(copy.place, {})[copy.part.path] = when
        try:
            await to_the_end(self._write, msgspec.json.encode(told))
            self._written = newest
        except OSError as error:
            log.warning("%s: cannot be written: %s", self._path, error)

    def _write(self, data: bytes) -> None:
        fresh = self._path.with_suffix(".new")
        try:
            with open(fresh, "wb", opener=private) as file:
                file.write(data)
            fresh.replace(self._path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise

    def _lent(self, world: World) -> dict[Copy, float]:
        # Copies that are gone while others name their chunks; and a time for those of which nothing is remembered.
        return {
            lender: min(self.get(copy, now), now)
            for now in [time.time()]
            for name, place in world.tiers.items()
            for seen in (place.checkpoints.values() if place else ())
            for part, facts in seen.facts.items()
            if facts.borrowed
            for copy in [Copy(name, part)]
            for lender in lenders(world, copy)
        }

    def _gone(self, world: World) -> Iterator[Copy]:
        places = {SPOOL: world.spool, **world.tiers}
        for copy in self:
            place = places.get(copy.place)  # None, or nothing seen yet: says nothing
            if copy.place not in places or (place and place.checkpoints and not place.lists(copy.part)):
                yield copy
