"""What looks show for the first time: parts that came into the spool, and checkpoints that a tier now holds whole.

Law: each is news once, and what a daemon finds at its first look is none. A checkpoint's being whole on a tier is news
where its rank 0 lies in the spool, so that one node of a job tells of it.
"""

from __future__ import annotations

from collections.abc import Collection

from tierd.core.ids import CheckpointId, PartId
from tierd.core.world import Place


class News:
    """Remembers what was seen, as long as a place shows it."""

    def __init__(self) -> None:
        self._parts: set[PartId] | None = None  # that the spool showed last
        self._known: set[PartId] = set()  # that are no news when it shows them
        self._since: dict[CheckpointId, float] = {}  # whose rank 0 the spool has or had, and when that was seen
        self._awaited: dict[str, set[CheckpointId]] = {}  # by tier, what it did not hold whole yet
        self._settled: dict[str, set[CheckpointId]] = {}  # and what it did

    def take(self, part: PartId) -> bool:
        """Whether the part's coming is news; from now on it is none."""
        new = part not in self._known and part not in (self._parts or ())
        self._known.add(part)
        return new

    def came(self, spool: Place) -> list[PartId]:
        """The parts that came into the spool since it was last seen."""
        now = set(spool.parts())
        before, self._parts = now if self._parts is None else self._parts, now
        came = sorted(now - before - self._known)
        self._known -= now | (before - now)
        return came

    def expect(self, tier: str, checkpoint: CheckpointId, now: float) -> None:
        """A tier is about to be sent a checkpoint that it does not hold whole, and that the spool may have no more."""
        if checkpoint not in self._settled.setdefault(tier, set()):
            self._awaited.setdefault(tier, set()).add(checkpoint)
            self._since.setdefault(checkpoint, now)

    def whole(
        self, tier: str, spool: Place, place: Place, now: float, others: Collection[Place] = ()
    ) -> list[tuple[CheckpointId, float]]:
        """The checkpoints that a tier has come to hold whole, each with the seconds since it was seen in the spool.

        To be asked after each look at either, before anything is flushed by what it showed. `others`: the other tiers;
        what one of those has may still come.
        """
        awaited, settled = self._awaited.setdefault(tier, set()), self._settled.setdefault(tier, set())
        for one, seen in spool.checkpoints.items():
            if one not in awaited and one not in settled and any(0 in ranks for ranks in seen.ranks.values()):
                self._since.setdefault(one, now)
                copy = place.checkpoints.get(one)
                (settled if copy and copy.usable else awaited).add(one)
        whole = sorted(one for one in awaited if (copy := place.checkpoints.get(one)) and copy.usable)
        took = [(one, now - self._since[one]) for one in whole]
        settled.update(whole)
        awaited.difference_update(whole)
        for left in (awaited, settled):
            left -= {one for one in left if all(one not in some.checkpoints for some in (spool, place, *others))}
        self._since = {one: at for one, at in self._since.items() if one in spool.checkpoints or self._is_awaited(one)}
        return took

    def _is_awaited(self, checkpoint: CheckpointId) -> bool:
        return any(checkpoint in awaited for awaited in self._awaited.values())
