"""Retention's verdicts over a tier's checkpoints by its contents alone; by these, the local copies that no tier needs.

Invariant: an evicted copy was observed complete and verified on a tier, or it will be sent to no tier any more. A copy
whose pin no tier has is never evicted. The code that deletes a copy asks the tiers again. `judge_place` in
`pruning` gives the final verdicts: it also keeps checkpoints that are wanted when all places count.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace

from tierd.core.config import Config
from tierd.core.errors import FormatTooNew
from tierd.core.ids import CheckpointId
from tierd.core.planning.copies import CheckpointCopy, is_complete, union_ranks
from tierd.core.planning.demand import Demand, retention_info, without_defects
from tierd.core.planning.inventory import Inventory, unknown_policy_reason
from tierd.core.planning.place import SPOOL, Place
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.retention.retention_verdicts import CheckpointInfo, Origins, Ranking, Verdict

info_order = operator.attrgetter("order")


def judge_tier(
    inventory: Inventory,
    tier: Place,
    policy: RetentionPolicy,
    run: str,
    live: Collection[str] = (),
    *,
    drops: bool = False,
) -> tuple[Verdict, ...]:
    """Retention's verdicts over a tier's checkpoints of `run`, judged by this tier's contents alone.

    `inventory` gives pins and origins; `live` is as for `Ranking`; `drops` leaves out most verdicts that keep.
    """
    listed = tier.run(run).copies.keys() | tier.owners | tier.interrupted_prunes
    if drops and len(listed) + len(tier.quarantined) <= policy.keep_last:
        return ()  # `keep_last` keeps all of them
    over = oldest_completable(tier, policy, run, live)
    infos = tier_infos(tier, run, inventory.pins | inventory.being_restored)
    verdicts = _patient(infos, policy, inventory.origins(run), over, live, drops=drops)
    if any(isinstance(defect, FormatTooNew) and part.checkpoint.run == run for part, defect in tier.defects()):
        # Nothing is deleted, because an unreadable manifest may name any chunk, and a newer tierd may keep more.
        return tuple(
            verdict if verdict.keep else Verdict(verdict.id, True, ("a newer tierd writes here, or another key",))
            for verdict in verdicts
        )
    return _hold(verdicts, inventory, tier, run)


def _hold(verdicts: tuple[Verdict, ...], inventory: Inventory, tier: Place, run: str) -> tuple[Verdict, ...]:
    """The verdicts, all changed to keep while the run's policy on the tier cannot be read."""
    why = unknown_policy_reason(tier, run) or unknown_policy_reason(inventory.spool, run)
    if why is None:
        return verdicts
    reason = (f"what the run keeps is not known: {why}",)
    return tuple(verdict if verdict.keep else Verdict(verdict.id, True, reason) for verdict in verdicts)


def oldest_completable(tier: Place, policy: RetentionPolicy, run: str, live: Collection[str] = ()) -> str:
    """The oldest attempt whose checkpoints may still become complete.

    Once `keep_last` checkpoints of later launches are complete, no trainer writes missing parts of an earlier launch
    any more. A launch among the `live` is an exception.
    """
    complete = tier.run(run).usable
    return min([complete[-policy.keep_last].attempt, *live]) if len(complete) >= policy.keep_last else ""


def tier_infos(tier: Place, run: str, pins: frozenset[CheckpointId]) -> list[CheckpointInfo]:
    """The input to retention for a tier's checkpoints of a run."""
    run_copies = tier.run(run)
    quarantined = {part.checkpoint for part in tier.quarantined}
    extra = quarantined | (tier.owners - run_copies.bases - tier.bases) | tier.interrupted_prunes
    infos = [retention_info(copy, pins, complete=copy.complete) for copy in tier.copies(run)]
    infos += [
        CheckpointInfo(
            checkpoint, complete=False, verified=True, pinned=checkpoint in pins, quarantined=checkpoint in quarantined
        )
        for checkpoint in extra - run_copies.copies.keys()
        if checkpoint.run == run
    ]
    return infos


def _patient(
    infos: list[CheckpointInfo],
    policy: RetentionPolicy,
    origins: Origins,
    over: str,
    live: Collection[str],
    *,
    drops: bool,
) -> tuple[Verdict, ...]:
    """Retention's verdicts, except that an incomplete checkpoint is kept if it would be kept as a complete one.

    Another node may still hold its other parts, and deleting it here would make nodes send it again and again. The
    exception does not hold for attempts before `over`.
    """
    if drops and len(infos) <= policy.keep_last:
        return ()  # `keep_last` keeps all of them
    alone = Ranking(infos, policy, origins, live)
    judged = [info for info in infos if info.id not in alone.kept_ids] if drops else infos
    judged = sorted(judged, key=info_order, reverse=True)
    halves = {
        info.id: replace(info, complete=True)
        for info in infos
        if not info.complete and info.created and info.id.attempt >= over
    }
    reasons: dict[CheckpointId, tuple[str, ...]] = {}
    if any(info.id in halves for info in judged):
        completed = Ranking([halves.get(info.id, info) for info in infos], policy, origins, live)
        for ranking in (alone, completed):  # as if each alone were complete, then as if all of them were
            verdicts = [ranking.verdict(half) for half in halves.values()]
            reasons |= {verdict.id: verdict.reasons for verdict in verdicts if verdict.keep}
    return tuple(
        verdict
        if verdict.keep or verdict.id not in reasons
        else Verdict(verdict.id, True, ("incomplete; if the rest comes:", *reasons[verdict.id]))
        for verdict in map(alone.verdict, judged)
    )


def is_disk_low(inventory: Inventory, config: Config) -> bool:
    """Whether less of the spool's disk is free than the configuration demands."""
    return inventory.free * 100 < config.min_free_percent


def evictable_copies(inventory: Inventory, config: Config) -> tuple[CheckpointId, ...]:
    """The spool's copies that the daemon may evict when the disk is full, in the order of eviction."""
    demands = [
        Demand(inventory, config, run) for run in sorted({checkpoint.run for checkpoint in inventory.spool.checkpoints})
    ]
    unneeded = frozenset[CheckpointId]().union(
        *(retired_copies(demand) | superseded_copies(demand) for demand in demands)
    )
    return tuple(
        checkpoint
        for checkpoint in eviction_order(inventory, unneeded)
        if checkpoint.run not in inventory.spool.local_only
    )


def eviction_order(inventory: Inventory, retired: Collection[CheckpointId]) -> tuple[CheckpointId, ...]:
    """The copies that the daemon may delete because the disk is full, in the order of deletion.

    Copies of runs without a trainer and `retired` copies, which no tier has and none will get, are first. Older copies
    of the other runs follow. Both groups begin with the oldest launch. Pinned copies and the newest verified copy of a
    run with a trainer are last, because a restore would have to fetch them.
    """
    in_use = {part.checkpoint for part in inventory.busy} | inventory.being_restored | inventory.local_pins
    verified = [copy.id for copy in inventory.spool.checkpoints.values() if inventory.is_on_a_tier(copy)]
    newest: dict[str, CheckpointId] = {}
    for checkpoint in verified:
        newest[checkpoint.run] = max(checkpoint, newest.get(checkpoint.run, checkpoint))

    def rank(checkpoint: CheckpointId) -> tuple[int, str, int, str]:
        trained = checkpoint.run not in inventory.trainerless and checkpoint not in retired
        spared = trained and (checkpoint == newest[checkpoint.run] or checkpoint in inventory.pins)
        return 2 if spared else 1 if trained else 0, checkpoint.attempt, checkpoint.step, checkpoint.run

    return tuple(sorted((checkpoint for checkpoint in {*verified, *retired} if checkpoint not in in_use), key=rank))


def may_leave_spool(inventory: Inventory, run: str, retired: Collection[CheckpointId]) -> bool:
    """Whether all copies of a finished run may be deleted from the spool.

    They may if three conditions hold. Every tier answered, except tiers in `silent`. For each copy, one tier has
    verified it or all tiers have retired it. No existing checkpoint has a pin in the spool alone.
    """
    return (
        all(place or name in inventory.silent for name, place in inventory.tiers.items())
        and all(inventory.is_on_a_tier(copy) or copy.id in retired for copy in inventory.spool.copies(run))
        and not any(pin.run == run and pin in inventory.copies(run) for pin in inventory.local_pins)
    )


def retired_copies(demand: Demand) -> frozenset[CheckpointId]:
    """The spool's copies of a run that every tier that is not silent lacks and would prune at once, because newer
    checkpoints have retired them there.
    """
    inventory = demand.inventory
    by_tier = [_retired(demand, name, place) for name, place in inventory.tiers.items() if name not in inventory.silent]
    return frozenset.intersection(*by_tier) if by_tier else frozenset()


def _retired(demand: Demand, name: str, tier: Place | None) -> frozenset[CheckpointId]:
    """The checkpoints in the spool that a tier lacks and would prune at once."""
    if (
        tier is None
        or unknown_policy_reason(tier, demand.run)
        or unknown_policy_reason(demand.inventory.spool, demand.run)
    ):
        return frozenset()
    inventory, run, policy = demand.inventory, demand.run, demand.policy(name)
    waiting = {checkpoint for checkpoint in demand.pending(name) if not demand.keeps(name, checkpoint)}
    waiting |= {copy.id for copy in inventory.spool.run(run).unusable if copy.is_mismatched}  # which are never sent
    if not waiting:
        return frozenset()
    # Each checkpoint is judged as if it alone were added, because others that are merely pending must not retire it.
    live = demand.live(SPOOL)
    pins, over = inventory.pins | inventory.being_restored, oldest_completable(tier, policy, run, live)
    ranking = Ranking(tier_infos(tier, run, pins), policy, demand.origins, live)
    pruned = set()
    for checkpoint in waiting:
        added, hoped = (
            _added(tier.checkpoints.get(checkpoint), without_defects(inventory.spool.checkpoints[checkpoint])),
            checkpoint.attempt >= over,
        )
        info = retention_info(added, pins, complete=is_complete(added.ranks) or hoped)
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
        tier_copy.id, union_ranks(tier_copy.ranks, local.ranks), {**local.facts, **tier_copy.facts}, defective
    )


def complete_in_spool(inventory: Inventory, run: str) -> list[CheckpointCopy]:
    """The checkpoints of which the spool holds every rank's part, by their manifests."""
    return [copy for copy in inventory.spool.copies(run) if copy.is_whole_by_manifest]


def superseded_copies(demand: Demand) -> frozenset[CheckpointId]:
    """The spool's copies of a run that are on no tier and will be sent to none.

    So many newer checkpoints are complete in this spool alone that every tier that is not silent wants those instead.
    So a tier that is slower than the saves does not fill the spool. If other nodes have ranks, only a tier shows which
    checkpoints are complete, and `retired_copies` decides.
    """
    inventory = demand.inventory
    tiers = [(name, place) for name, place in inventory.tiers.items() if name not in inventory.silent]
    complete = complete_in_spool(inventory, demand.run)
    if not tiers or len(complete) < 2:
        return frozenset()
    by_tier = [_superseded(demand, name, place, complete) for name, place in tiers]
    return frozenset.intersection(*by_tier) - inventory.awaited


def _superseded(
    demand: Demand, name: str, tier: Place | None, complete: list[CheckpointCopy]
) -> frozenset[CheckpointId]:
    """The checkpoints complete in the spool that a tier has no part of, and would prune if it had all in `complete`."""
    inventory, run = demand.inventory, demand.run
    if tier is None or unknown_policy_reason(tier, run) or unknown_policy_reason(inventory.spool, run):
        return frozenset()
    in_spool, on_tier = inventory.spool.run(run).copies, tier.run(run).copies
    waiting = [
        checkpoint
        for checkpoint in demand.pending(name)
        if checkpoint not in on_tier and in_spool[checkpoint].is_whole_by_manifest
    ]
    if not (lacking := [checkpoint for checkpoint in waiting if not demand.keeps(name, checkpoint)]):
        return frozenset()
    pins = inventory.pins | inventory.being_restored
    local = {copy.id: retention_info(copy, pins, complete=True) for copy in complete}
    infos = [info for info in tier_infos(tier, run, pins) if info.id not in local] + list(local.values())
    ranking = Ranking(infos, demand.policy(name), demand.origins, demand.live(SPOOL))
    return frozenset(
        checkpoint
        for checkpoint in lacking
        if not ranking.verdict(local[checkpoint]).keep and not demand.reasons(name, checkpoint)
    )
