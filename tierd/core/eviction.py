"""Which verified copies the spool gives up before retention lets go of them, and in which order.

Law: only a copy that one tier was seen to hold whole and verified, or that no tier will be sent any more, and never one
whose pin no tier has. Whoever deletes asks the tiers once more.
"""

from __future__ import annotations

from collections.abc import Collection

from tierd.core.ids import CheckpointId
from tierd.core.world import World


def evictions(world: World, retired: Collection[CheckpointId]) -> tuple[CheckpointId, ...]:
    """The copies that a full disk may take, in the order in which they are taken.

    First everything of runs without a trainer and what every tier has retired, then the older copies of the other runs,
    each time the oldest launch first. The newest verified copy of a run with a trainer, and its pinned copies, are the
    last resort: a restore would have to fetch them.

    Args:
        retired: the copies that no tier has and none will be sent (`plan.retired`, `plan.superseded`).
    """
    in_use = {part.checkpoint for part in world.busy} | world.held | world.local_pins
    verified = [seen.id for seen in world.spool.checkpoints.values() if world.on_a_tier(seen)]
    newest: dict[str, CheckpointId] = {}
    for one in verified:
        newest[one.run] = max(one, newest.get(one.run, one))

    def rank(one: CheckpointId) -> tuple[int, str, int, str]:
        trained = one.run not in world.trainerless and one not in retired
        spared = trained and (one == newest[one.run] or one in world.pins)
        return 2 if spared else 1 if trained else 0, one.attempt, one.step, one.run

    return tuple(sorted((one for one in {*verified, *retired} if one not in in_use), key=rank))


def may_leave(world: World, run: str, retired: Collection[CheckpointId]) -> bool:
    """Whether a finished run may leave the spool whole.

    Every tier answered that is not silent for good, one has verified each copy or all have retired it, and no pin of a
    checkpoint that is there is the spool's alone.
    """
    return (
        all(place or name in world.silent for name, place in world.tiers.items())
        and all(world.on_a_tier(seen) or seen.id in retired for seen in world.spool.copies(run))
        and not any(pin.run == run and pin in world.copies(run) for pin in world.local_pins)
    )
