"""Prunes of a tier together: which go in one pass, and when their backlog grows although they are carried out.

Law: a pass deletes what the plan decided and nothing else, and is so small that a flush waits for seconds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierd.core.plan import Action, Prune
from tierd.core.world import Place

MOST_CHECKPOINTS = 64  # of a pass
MOST_PARTS = 1024  # of a pass of more than one checkpoint: their chunks are listed and held in memory

_WINDOW_S, _WINDOWS = 120.0, 5  # ten minutes


def together(first: Prune, actions: Iterable[Action], place: Place | None) -> list[Prune]:
    """The prunes that go in one pass with `first`, and it: of the same tier and run, in the order of `actions`.

    Args:
        place: the tier, as the plan saw it.
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
    """How many copies wait to be deleted from one tier, and whether they become ever more.

    They do when, in five windows of two minutes in a row, the fewest that waited are more in each than in the one
    before. Then they are too many until no more wait than at the beginning. So a large backlog that shrinks, as after a
    change of configuration, is none that grows, and a pass that has just ended hides nothing.
    """

    grows: bool = False
    _fewest: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_WINDOWS + 1))  # window, count
    _before: int = 0

    def count(self, waiting: int, now: float) -> bool:
        """Note how many wait at `now`, in monotonic seconds; whether they become ever more."""
        window = int(now // _WINDOW_S)
        if self._fewest and self._fewest[-1][0] == window:
            self._fewest[-1] = window, min(self._fewest[-1][1], waiting)
        else:
            self._fewest.append((window, waiting))
        counts = [fewest for _, fewest in self._fewest][:_WINDOWS]  # without the window that goes on
        if self.grows:
            self.grows = waiting > self._before
        elif len(self._fewest) > _WINDOWS and all(a < b for a, b in itertools.pairwise(counts)):
            self.grows, self._before = True, counts[0]
        return self.grows
