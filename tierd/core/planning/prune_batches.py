"""How many prunes of a tier are carried out together, and whether their backlog grows.

Invariant: a batch deletes only what the plan decided, and is so small that a flush waits only seconds for it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierd.core.planning.place import Action, Place, Prune

MAX_BATCH_CHECKPOINTS = 64  # of a batch
MAX_BATCH_PARTS = 1024  # of a batch of more than one checkpoint, because the list of their chunks is held in memory

_WINDOW_S, _WINDOWS = 120.0, 5  # ten minutes


def prune_batch(first: Prune, actions: Iterable[Action], place: Place | None) -> list[Prune]:
    """The batch of prunes that begins with `first`: those of the same tier and run, in the order of `actions`.

    `place` is the tier's contents from which the plan was made.
    """
    batch, parts = [first], _parts(first, place)
    for action in actions:
        if not isinstance(action, Prune) or action.tier != first.tier or action == first:
            continue
        if action.checkpoint.run != first.checkpoint.run:
            continue
        parts += _parts(action, place)
        if len(batch) == MAX_BATCH_CHECKPOINTS or parts > MAX_BATCH_PARTS:
            break
        batch.append(action)
    return batch


def _parts(prune: Prune, place: Place | None) -> int:
    copy = place.checkpoints.get(prune.checkpoint) if place else None
    return sum(map(len, copy.ranks.values())) if copy else 1


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

    def record(self, waiting: int, now: float) -> bool:
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
