"""Which local copies no tier needs, and which copies the spool evicts although retention keeps them, in which order.

Invariant: an evicted copy was observed complete and verified on a tier, or it will be sent to no tier any more. A copy
whose pin no tier has is never evicted. The code that deletes a copy asks the tiers again.
"""

from __future__ import annotations

from collections.abc import Collection

from tierd.core.config import Config
from tierd.core.ids import CheckpointId
from tierd.core.planning.copies import CheckpointCopy, is_complete, union
from tierd.core.planning.demand import Demand, info_of, readable
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Place
from tierd.core.planning.tier_verdicts import infos_on, oldest_completable
from tierd.core.retention.policies import unknown
from tierd.core.retention.ranking import Ranking


def evictable(inventory: Inventory, config: Config) -> tuple[CheckpointId, ...]:
    """The spool's copies that the daemon may evict when the disk is full, in the order of eviction."""
    demands = [
        Demand(inventory, config, run) for run in sorted({checkpoint.run for checkpoint in inventory.spool.checkpoints})
    ]
    unneeded = frozenset[CheckpointId]().union(*(retired(demand) | superseded(demand) for demand in demands))
    return tuple(
        checkpoint for checkpoint in evictions(inventory, unneeded) if checkpoint.run not in inventory.spool.local_only
    )


def evictions(inventory: Inventory, retired: Collection[CheckpointId]) -> tuple[CheckpointId, ...]:
    """The copies that the daemon may delete because the disk is full, in the order of deletion.

    Copies of runs without a trainer and copies that every tier has retired are first. Older copies of the other runs
    follow. Both groups begin with the oldest launch. Pinned copies and the newest verified copy of a run with a trainer
    are last, because a restore would have to fetch them.

    Args:
        retired: the copies that no tier has and that will be sent to none (`retired`, `superseded`).
    """
    in_use = {part.checkpoint for part in inventory.busy} | inventory.held | inventory.local_pins
    verified = [copy.id for copy in inventory.spool.checkpoints.values() if inventory.on_a_tier(copy)]
    newest: dict[str, CheckpointId] = {}
    for checkpoint in verified:
        newest[checkpoint.run] = max(checkpoint, newest.get(checkpoint.run, checkpoint))

    def rank(checkpoint: CheckpointId) -> tuple[int, str, int, str]:
        trained = checkpoint.run not in inventory.trainerless and checkpoint not in retired
        spared = trained and (checkpoint == newest[checkpoint.run] or checkpoint in inventory.pins)
        return 2 if spared else 1 if trained else 0, checkpoint.attempt, checkpoint.step, checkpoint.run

    return tuple(sorted((checkpoint for checkpoint in {*verified, *retired} if checkpoint not in in_use), key=rank))


def may_leave(inventory: Inventory, run: str, retired: Collection[CheckpointId]) -> bool:
    """Whether all copies of a finished run may be deleted from the spool.

    They may if three conditions hold. Every tier answered, except tiers in `silent`. For each copy, one tier has
    verified it or all tiers have retired it. No existing checkpoint has a pin in the spool alone.
    """
    return (
        all(place or name in inventory.silent for name, place in inventory.tiers.items())
        and all(inventory.on_a_tier(copy) or copy.id in retired for copy in inventory.spool.copies(run))
        and not any(pin.run == run and pin in inventory.copies(run) for pin in inventory.local_pins)
    )


def retired(demand: Demand) -> frozenset[CheckpointId]:
    """The spool's copies of a run that no tier needs.

    Every tier that is not silent lacks such a copy and would prune it at once, because newer checkpoints have retired
    it there.
    """
    inventory = demand.inventory
    by_tier = [_retired(demand, name, place) for name, place in inventory.tiers.items() if name not in inventory.silent]
    return frozenset.intersection(*by_tier) if by_tier else frozenset()


def _retired(demand: Demand, name: str, tier: Place | None) -> frozenset[CheckpointId]:
    """The checkpoints in the spool that a tier lacks and would prune at once."""
    if tier is None or unknown(tier, demand.run) or unknown(demand.inventory.spool, demand.run):
        return frozenset()
    inventory, run, policy = demand.inventory, demand.run, demand.policy(name)
    waiting = {checkpoint for checkpoint in demand.pending(name) if not demand.keeps(name, checkpoint)}
    if not waiting:
        return frozenset()
    # Each checkpoint is judged as if it alone were added, because others that are merely pending must not retire it.
    live = demand.live(SPOOL)
    pins, over = inventory.pins | inventory.held, oldest_completable(tier, policy, run, live)
    ranking = Ranking(infos_on(tier, run, pins), policy, demand.origins, live)
    pruned = set()
    for checkpoint in waiting:
        added, hoped = (
            _added(tier.checkpoints.get(checkpoint), readable(inventory.spool.checkpoints[checkpoint])),
            checkpoint.attempt >= over,
        )
        info = info_of(added, pins, complete=is_complete(added.ranks) or hoped)
        if not ranking.verdict(info).keep and not demand.reasons(name, checkpoint, hoped=hoped):
            pruned.add(checkpoint)
    return frozenset(pruned)


def _added(tier_copy: CheckpointCopy | None, local: CheckpointCopy | None) -> CheckpointCopy:
    """A tier's copy after a flush of the spool's parts, which adds missing parts and replaces unusable ones."""
    if tier_copy is None or local is None:
        copy = tier_copy or local
        assert copy is not None
        return copy
    defective = {part: why for part, why in tier_copy.defects.items() if part not in local.facts}
    return CheckpointCopy(
        tier_copy.id, union(tier_copy.ranks, local.ranks), {**local.facts, **tier_copy.facts}, defective
    )


def complete_here(inventory: Inventory, run: str) -> list[CheckpointCopy]:
    """The checkpoints of which the spool holds every rank's part, by their manifests."""
    return [copy for copy in inventory.spool.copies(run) if copy.whole]


def superseded(demand: Demand) -> frozenset[CheckpointId]:
    """The spool's copies of a run that are on no tier and will be sent to none.

    So many newer checkpoints are complete in this spool alone that every tier that is not silent wants those instead.
    So a tier that is slower than the saves does not fill the spool. If other nodes have ranks, only a tier shows which
    checkpoints are complete, and `retired` decides.
    """
    inventory = demand.inventory
    tiers = [(name, place) for name, place in inventory.tiers.items() if name not in inventory.silent]
    complete = complete_here(inventory, demand.run)
    if not tiers or len(complete) < 2:
        return frozenset()
    by_tier = [_superseded(demand, name, place, complete) for name, place in tiers]
    return frozenset.intersection(*by_tier) - inventory.needed


def _superseded(
    demand: Demand, name: str, tier: Place | None, complete: list[CheckpointCopy]
) -> frozenset[CheckpointId]:
    """The checkpoints complete in the spool that a tier has no part of, and would prune if it had all in `complete`."""
    inventory, run = demand.inventory, demand.run
    if tier is None or unknown(tier, run) or unknown(inventory.spool, run):
        return frozenset()
    in_spool, on_tier = inventory.spool.run(run).seen, tier.run(run).seen
    waiting = [
        checkpoint for checkpoint in demand.pending(name) if checkpoint not in on_tier and in_spool[checkpoint].whole
    ]
    if not (lacking := [checkpoint for checkpoint in waiting if not demand.keeps(name, checkpoint)]):
        return frozenset()
    pins = inventory.pins | inventory.held
    local = {copy.id: info_of(copy, pins, complete=True) for copy in complete}
    infos = [info for info in infos_on(tier, run, pins) if info.id not in local] + list(local.values())
    ranking = Ranking(infos, demand.policy(name), demand.origins, demand.live(SPOOL))
    return frozenset(
        checkpoint
        for checkpoint in lacking
        if not ranking.verdict(local[checkpoint]).keep and not demand.reasons(name, checkpoint)
    )
