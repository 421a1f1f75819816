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
    demands = [Demand(inventory, config, run) for run in sorted({one.run for one in inventory.spool.checkpoints})]
    gone = frozenset[CheckpointId]().union(*(retired(one) | superseded(one) for one in demands))
    return tuple(one for one in evictions(inventory, gone) if one.run not in inventory.spool.local_only)


def evictions(inventory: Inventory, retired: Collection[CheckpointId]) -> tuple[CheckpointId, ...]:
    """The copies that the daemon may delete because the disk is full, in the order of deletion.

    Copies of runs without a trainer and copies that every tier has retired are first. Older copies of the other runs
    follow. Both groups begin with the oldest launch. Pinned copies and the newest verified copy of a run with a trainer
    are last, because a restore would have to fetch them.

    Args:
        retired: the copies that no tier has and that will be sent to none (`retired`, `superseded`).
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


def retired(demand: Demand) -> frozenset[CheckpointId]:
    """The spool's copies of a run that no tier needs.

    Every tier that is not silent lacks such a copy and would prune it at once, because newer checkpoints have retired
    it there.
    """
    inventory = demand.inventory
    found = [_retired(demand, name, place) for name, place in inventory.tiers.items() if name not in inventory.silent]
    return frozenset.intersection(*found) if found else frozenset()


def _retired(demand: Demand, name: str, tier: Place | None) -> frozenset[CheckpointId]:
    """The checkpoints in the spool that a tier lacks and would prune at once."""
    if tier is None or unknown(tier, demand.run) or unknown(demand.inventory.spool, demand.run):
        return frozenset()
    inventory, run, policy = demand.inventory, demand.run, demand.policy(name)
    waiting = {one for one in demand.pending(name) if not demand.keeps(name, one)}
    if not waiting:
        return frozenset()
    # Each checkpoint is judged as if it alone were added, because others that are merely pending must not retire it.
    live = demand.live(SPOOL)
    pins, over = inventory.pins | inventory.held, oldest_completable(tier, policy, run, live)
    ranking = Ranking(infos_on(tier, run, pins), policy, demand.origins, live)
    gone = set()
    for checkpoint in waiting:
        added, hoped = (
            _added(tier.checkpoints.get(checkpoint), readable(inventory.spool.checkpoints[checkpoint])),
            checkpoint.attempt >= over,
        )
        info = info_of(added, pins, complete=is_complete(added.ranks) or hoped)
        if not ranking.verdict(info).keep and not demand.reasons(name, checkpoint, hoped=hoped):
            gone.add(checkpoint)
    return frozenset(gone)


def _added(own: CheckpointCopy | None, local: CheckpointCopy | None) -> CheckpointCopy:
    """A tier's copy after a flush of the spool's parts, which adds missing parts and replaces unusable ones."""
    if own is None or local is None:
        found = own or local
        assert found is not None
        return found
    bad = {part: why for part, why in own.defects.items() if part not in local.facts}
    return CheckpointCopy(own.id, union(own.ranks, local.ranks), {**local.facts, **own.facts}, bad)


def complete_here(inventory: Inventory, run: str) -> list[CheckpointCopy]:
    """The checkpoints of which the spool holds every rank's part, by their manifests."""
    return [seen for seen in inventory.spool.copies(run) if seen.whole]


def superseded(demand: Demand) -> frozenset[CheckpointId]:
    """The spool's copies of a run that are on no tier and will be sent to none.

    So many newer checkpoints are complete in this spool alone that every tier that is not silent wants those instead.
    So a tier that is slower than the saves does not fill the spool. If other nodes have ranks, only a tier shows which
    checkpoints are complete, and `retired` decides.
    """
    inventory = demand.inventory
    there = [(name, place) for name, place in inventory.tiers.items() if name not in inventory.silent]
    whole = complete_here(inventory, demand.run)
    if not there or len(whole) < 2:
        return frozenset()
    found = [_superseded(demand, name, place, whole) for name, place in there]
    return frozenset.intersection(*found) - inventory.needed


def _superseded(demand: Demand, name: str, tier: Place | None, whole: list[CheckpointCopy]) -> frozenset[CheckpointId]:
    """The checkpoints complete in the spool that a tier has no part of, and would prune if it had all in `whole`."""
    inventory, run = demand.inventory, demand.run
    if tier is None or unknown(tier, run) or unknown(inventory.spool, run):
        return frozenset()
    here, there = inventory.spool.run(run).seen, tier.run(run).seen
    waiting = [one for one in demand.pending(name) if one not in there and here[one].whole]
    if not (lacking := [one for one in waiting if not demand.keeps(name, one)]):
        return frozenset()
    pins = inventory.pins | inventory.held
    local = {seen.id: info_of(seen, pins, complete=True) for seen in whole}
    infos = [info for info in infos_on(tier, run, pins) if info.id not in local] + list(local.values())
    ranking = Ranking(infos, demand.policy(name), demand.origins, demand.live(SPOOL))
    return frozenset(one for one in lacking if not ranking.verdict(local[one]).keep and not demand.reasons(name, one))
