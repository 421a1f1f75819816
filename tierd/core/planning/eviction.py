"""Which local copies the spool evicts although retention keeps them, and in which order.

Invariant: an evicted copy was observed complete and verified on a tier, or it will be sent to no tier any more. A copy
whose pin no tier has is never evicted. The code that deletes a copy asks the tiers again.
"""

from __future__ import annotations

from collections.abc import Collection

from tierd.core.ids import CheckpointId
from tierd.core.planning.inventory import Inventory


def evictions(inventory: Inventory, retired: Collection[CheckpointId]) -> tuple[CheckpointId, ...]:
    """The copies that the daemon may delete because the disk is full, in the order of deletion.

    Copies of runs without a trainer and copies that every tier has retired are first. Older copies of the other runs
    follow. Both groups begin with the oldest launch. Pinned copies and the newest verified copy of a run with a trainer
    are last, because a restore would have to fetch them.

    Args:
        retired: the copies that no tier has and that will be sent to none (`plan.retired`, `plan.superseded`).
    """
    in_use = {part.checkpoint for part in inventory.busy} | inventory.held | inventory.local_pins
    verified = [seen.id for seen in inventory.spool.checkpoints.values() if inventory.on_a_tier(seen)]
    newest: dict[str, CheckpointId] = {}
    for one in verified:
        newest[one.run] = max(one, newest.get(one.run, one))

    def rank(one: CheckpointId) -> tuple[int, str, int, str]:
        trained = one.run not in inventory.trainerless and one not in retired
        spared = trained and (one == newest[one.run] or one in inventory.pins)
        return 2 if spared else 1 if trained else 0, one.attempt, one.step, one.run

    return tuple(sorted((one for one in {*verified, *retired} if one not in in_use), key=rank))


def may_leave(inventory: Inventory, run: str, retired: Collection[CheckpointId]) -> bool:
    """Whether all copies of a finished run may be deleted from the spool.

    They may if three conditions hold. Every tier answered, except tiers in `silent`. For each copy, one tier has
    verified it or all tiers have retired it. No existing checkpoint has a pin in the spool alone.
    """
    return (
        all(place or name in inventory.silent for name, place in inventory.tiers.items())
        and all(inventory.on_a_tier(seen) or seen.id in retired for seen in inventory.spool.copies(run))
        and not any(pin.run == run and pin in inventory.copies(run) for pin in inventory.local_pins)
    )
