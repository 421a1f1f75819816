"""Batches of prunes on a tier, and whether their backlog grows although the daemon carries them out.

Invariant: a batch deletes only what the plan decided, and is so small that a flush waits only seconds for it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierd.core.planning.place import Place
from tierd.core.planning.plan import Action, Prune

MOST_CHECKPOINTS = 64  # of a batch
MOST_PARTS = 1024  # of a batch of more than one checkpoint, because the list of their chunks is held in memory

_WINDOW_S, _WINDOWS = 120.0, 5  # ten minutes


def together(first: Prune, actions: Iterable[Action], place: Place | None) -> list[Prune]:
    """The batch of prunes that begins with `first`: those of the same tier and run, in the order of `actions`.

    Args:
        place: the tier's contents from which the plan was made.
    """
    found, parts = [first], _parts(first, place)
    for one in actions:
        if not isinstance(one, Prune) or one.tier != first.tier or one == first:
            continue
        if one.checkpoint.run != first.checkpoint.run:
            continue
        parts += _parts(one, place)
        if len(found) == MOST_CHECKPOINTS or parts > MOST_PARTS:
            break
        found.append(one)
    return found


def _parts(one: Prune, place: Place | None) -> int:
    seen = place.checkpoints.get(one.checkpoint) if place else None
    return sum(map(len, seen.ranks.values())) if seen else 1


@dataclass(slots=True)
class PruneBacklog:
    """The number of copies that wait to be deleted from one tier, and whether that number keeps growing.

    The backlog grows if the minimum of each of five consecutive two-minute windows exceeds the minimum of the window
    before. It then counts as growing until no more copies wait than at the beginning. So a large backlog that shrinks,
    as after a change of configuration, does not count. A batch that has just ended does not hide growth.
    """

    grows: bool = False
    _fewest: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_WINDOWS + 1))  # window, count
    _before: int = 0

    def count(self, waiting: int, now: float) -> bool:
        """Record that `waiting` copies wait at `now` (monotonic seconds); return whether the backlog grows."""
        window = int(now // _WINDOW_S)
        if self._fewest and self._fewest[-1][0] == window:
            self._fewest[-1] = window, min(self._fewest[-1][1], waiting)
        else:
            self._fewest.append((window, waiting))
        counts = [fewest for _, fewest in self._fewest][:_WINDOWS]  # without the current window
        if self.grows:
            self.grows = waiting > self._before
        elif len(self._fewest) > _WINDOWS and all(a < b for a, b in itertools.pairwise(counts)):
            self.grows, self._before = True, counts[0]
        return self.grows
