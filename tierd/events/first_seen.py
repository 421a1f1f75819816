"""Detect parts that are new in the spool, and checkpoints that are newly complete on a tier, from observations.

Invariant: each is reported once, and a daemon's first observation reports nothing. A checkpoint that becomes complete
on a tier is reported only if its rank 0 is in the spool. So one node of a job reports it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping

from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import CheckpointCopy, differing
from tierd.core.planning.place import Place


class NewCheckpoints:
    """Remembers parts and checkpoints for as long as a place lists them."""

    def __init__(self) -> None:
        self._spool: Place | None = None  # the last observation
        self._suppressed: set[PartId] = set()  # parts that are not reported when the spool lists them
        self._persisting: Counter[PartId] = Counter()  # hand-offs that are being committed, by part
        self._withheld: set[PartId] = set()  # parts that an observation showed while they were being committed
        # Checkpoints whose rank 0 the spool has or had, and when it was first observed.
        self._since: dict[CheckpointId, float] = {}
        self._awaited: dict[str, set[CheckpointId]] = {}  # by tier, checkpoints that were not complete there
        self._settled: dict[str, set[CheckpointId]] = {}  # by tier, checkpoints that were complete there
        # By tier, the copies in all places at the last call of `whole`; a second call with the same finds nothing.
        self._last_listings: dict[str, list[Mapping[CheckpointId, CheckpointCopy]]] = {}

    def persisting(self, part: PartId, under_way: bool) -> None:
        """Record that a hand-off of the part begins or ends. In between, only `take` reports the part.

        A part that was observed in between, and that `take` did not report, is reported by the first observation after
        the end.
        """
        self._persisting[part] += 1 if under_way else -1
        if not self._persisting[part]:
            del self._persisting[part]

    def take(self, part: PartId) -> bool:
        """Return whether the part is new, and do not report it again."""
        listed = self._spool is not None and self._spool.lists(part)
        new = part not in self._suppressed and (part in self._persisting or not listed)
        self._suppressed.add(part)
        self._withheld.discard(part)
        return new

    def came(self, spool: Place) -> list[PartId]:
        """Return the parts that were committed since the last observation of the spool."""
        before, self._spool = spool if self._spool is None else self._spool, spool
        fresh = [
            spool.checkpoints[checkpoint]
            for checkpoint in differing(before.checkpoints, spool.checkpoints)
            if checkpoint in spool.checkpoints
        ]
        arrived = {part for copy in fresh for part in copy.parts() if not before.lists(part)}
        arrived |= {part for part in self._withheld if spool.lists(part)}
        arrived -= self._suppressed
        self._withheld = {part for part in arrived if part in self._persisting}
        self._suppressed = {part for part in self._suppressed if not (spool.lists(part) or before.lists(part))}
        return sorted(arrived - self._withheld)

    def expect(self, tier: str, checkpoint: CheckpointId, now: float) -> None:
        """Record that a flush begins of a checkpoint that is incomplete on the tier and may not be in the spool."""
        if checkpoint not in self._settled.setdefault(tier, set()):
            self._awaited.setdefault(tier, set()).add(checkpoint)
            self._since.setdefault(checkpoint, now)
            self._last_listings.pop(tier, None)

    def whole(
        self, tier: str, spool: Place, place: Place, now: float, other_tiers: Collection[Place] = ()
    ) -> list[tuple[CheckpointId, float]]:
        """Return the checkpoints that became complete on a tier, each with the seconds since the spool first listed it.

        Call this after each observation of the spool or the tier, before any flush that follows from it.

        Args:
            tier: the tier's name.
            spool: the observed spool.
            place: the observed tier.
            now: monotonic seconds.
            other_tiers: the other tiers; a checkpoint that one of them holds may still be flushed to this tier.
        """
        listings = [observation.checkpoints for observation in (spool, place, *other_tiers)]
        last_listings = self._last_listings.get(tier, [])
        if len(last_listings) == len(listings) and all(map(operator.is_, last_listings, listings)):
            return []
        self._last_listings[tier] = listings
        awaited, settled = self._awaited.setdefault(tier, set()), self._settled.setdefault(tier, set())
        for checkpoint in spool.checkpoints.keys() - awaited - settled:
            if any(0 in ranks for ranks in spool.checkpoints[checkpoint].ranks.values()):
                self._since.setdefault(checkpoint, now)
                copy = place.checkpoints.get(checkpoint)
                (settled if copy and copy.usable else awaited).add(checkpoint)
        completed = sorted(
            candidate for candidate in awaited if (copy := place.checkpoints.get(candidate)) and copy.usable
        )
        durations = [(candidate, now - self._since[candidate]) for candidate in completed]
        settled.update(completed)
        awaited.difference_update(completed)
        for group in (awaited, settled):
            group -= group.difference(*listings)
        for pruned in (
            self._since.keys() - spool.checkpoints.keys() - set[CheckpointId]().union(*self._awaited.values())
        ):
            del self._since[pruned]
        return durations
