"""Prunes on a tier: which the plan contains, their batches, and whether their backlog grows; and the tiers that lose a
checkpoint that they wanted.

Invariant: a batch deletes only what the plan decided, and is so small that a flush waits only seconds for it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tierd.core.config import Config
from tierd.core.ids import CheckpointId
from tierd.core.planning.actions import Action, Prune
from tierd.core.planning.copies import CheckpointCopy
from tierd.core.planning.demand import Demand
from tierd.core.planning.flush_candidates import wanted_on
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.janitor import is_janitor
from tierd.core.planning.place import SPOOL, Place
from tierd.core.planning.verdicts import judge, not_kept

MOST_CHECKPOINTS = 64  # of a batch
MOST_PARTS = 1024  # of a batch of more than one checkpoint, because the list of their chunks is held in memory

_WINDOW_S, _WINDOWS = 120.0, 5  # ten minutes


def tier_prunes(demand: Demand, name: str) -> Iterator[Prune]:
    """The checkpoints of a run to delete from a tier, oldest first; none if another node is the janitor."""
    inventory, run, tier = demand.inventory, demand.run, demand.inventory.tiers[name]
    if tier is None or name in inventory.append_only or not is_janitor(inventory, tier, run):
        return
    going = not_kept(demand, name)
    if not going:
        return
    # A checkpoint that the spool would send again at once is kept, even if the other ranks' parts never arrived.
    in_spool, demanded = inventory.spool.run(run).seen, wanted_on(demand, name, tier).ids
    coming = {
        verdict.id
        for verdict in going
        if verdict.id in in_spool and in_spool[verdict.id].facts and verdict.id in demanded
    }
    coming |= {part.checkpoint for part in inventory.busy}
    if None in inventory.tiers.values():
        # A checkpoint that is about to be deleted from the spool is deleted there first. If the tiers deleted theirs
        # first, the spool would keep its copy for the tier that does not answer.
        coming |= {verdict.id for verdict in not_kept(demand, SPOOL)}
    for verdict in reversed(going):
        if verdict.id not in coming:
            yield Prune(verdict.id, name, verdict.reasons)


def prunes_when_full(demands: Iterable[Demand], name: str) -> list[Prune]:
    """The prunes of the checkpoints that a full tier only holds for other tiers, oldest first.

    The caller carries out one, and the next one only after another put has failed. All are listed, because the oldest
    may be one that cannot be deleted for now.
    """
    verdicts = [
        verdict
        for demand in demands
        for tier in [demand.inventory.tiers[name]]
        if tier is not None
        and name not in demand.inventory.append_only
        and is_janitor(demand.inventory, tier, demand.run)
        for verdict in judge(demand, name)
        if verdict.held_for and not any(part.checkpoint == verdict.id for part in demand.inventory.busy)
    ]
    verdicts.sort(key=lambda verdict: (verdict.id.attempt, verdict.id.step, verdict.id.run))
    return [Prune(verdict.id, name, (f"{name} is full; it was {verdict.reasons[0]}",)) for verdict in verdicts]


def relied_on(demand: Demand, name: str, checkpoint: CheckpointId) -> list[tuple[str, CheckpointCopy]]:
    """The copies for whose sake a tier may delete a checkpoint: those of the other tiers that want it.

    A copy that is known to be unusable, or is incomplete, is none of them: a full tier gives up what it holds for such
    a tier all the same.
    """
    copies = demand.copies.get(checkpoint, {})
    return [
        (tier, copy)
        for tier, copy in copies.items()
        if tier not in (SPOOL, name)
        and not demand.lacking(tier, checkpoint, copies.get(name))
        and demand.reasons(tier, checkpoint, hoped=True)
    ]


def together(first: Prune, actions: Iterable[Action], place: Place | None) -> list[Prune]:
    """The batch of prunes that begins with `first`: those of the same tier and run, in the order of `actions`.

    Args:
        place: the tier's contents from which the plan was made.
    """
    batch, parts = [first], _parts(first, place)
    for action in actions:
        if not isinstance(action, Prune) or action.tier != first.tier or action == first:
            continue
        if action.checkpoint.run != first.checkpoint.run:
            continue
        parts += _parts(action, place)
        if len(batch) == MOST_CHECKPOINTS or parts > MOST_PARTS:
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


def lost_to(
    inventory: Inventory, before: Inventory, config: Config, place: str, deleted: CheckpointCopy
) -> tuple[str, ...]:
    """The tiers that lose a checkpoint that they wanted, because a place deleted the last copy of it.

    Two places may have deleted their copies at the same time, each while the other still had its own. A tier wanted the
    checkpoint if it did when the deletion was decided (`before`). It also did if it wants the checkpoint now, without
    those deleted since. Checkpoints that arrived since then retire nothing, because a deletion takes long on a slow
    tier and the trainer saves meanwhile.

    Args:
        inventory: the places as observed after the deletion.
        before: the places from which the deletion was decided.
        config: the tiers and their policies.
        place: the place that deleted its copy.
        deleted: the deleted copy.

    Returns:
        The names of the tiers; empty if another place still completes the checkpoint.
    """
    undeleted = _without_what_came(inventory, before)
    if place == SPOOL:
        undeleted = replace(undeleted, spool=_with(undeleted.spool, deleted))
    else:
        undeleted = replace(
            undeleted, tiers={**undeleted.tiers, place: _with(undeleted.tiers[place] or Place(), deleted)}
        )
    demand, run = Demand(undeleted, config, deleted.id.run), deleted.id.run
    if not demand.is_last(place, deleted.id):
        return ()
    before = replace(before, tiers={name: tier for name, tier in before.tiers.items() if name in inventory.tiers})
    wanting = [view.waiting(place, deleted.id, deleted, hoped=False) for view in (Demand(before, config, run), demand)]
    return tuple(name for name in inventory.tiers if any(name in names for names in wanting))


def _without_what_came(inventory: Inventory, before: Inventory) -> Inventory:
    """`inventory` without the checkpoints that arrived since `before` in a place that answered then."""
    checkpoints_before = {checkpoint for place in before.places.values() for checkpoint in place.checkpoints}
    answered = [place for name, place in inventory.places.items() if name in before.places]
    arrived = {checkpoint for place in answered for checkpoint in place.checkpoints} - checkpoints_before

    def rid(place: Place) -> Place:
        return replace(
            place,
            checkpoints={
                checkpoint: copy for checkpoint, copy in place.checkpoints.items() if checkpoint not in arrived
            },
        )

    tiers = {name: place and rid(place) for name, place in inventory.tiers.items()}
    return replace(inventory, spool=rid(inventory.spool), tiers=tiers) if arrived else inventory


def _with(place: Place, copy: CheckpointCopy) -> Place:
    return replace(place, checkpoints={**place.checkpoints, copy.id: copy})
