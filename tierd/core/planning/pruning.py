"""Retention's final verdicts over a run's checkpoints when all places count, and the deletions that follow from them on
a tier and in the spool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tierd.core.config import Config
from tierd.core.ids import CheckpointId
from tierd.core.planning.copies import CheckpointCopy
from tierd.core.planning.demand import Demand, retention_info
from tierd.core.planning.eviction import (
    info_order,
    is_disk_low,
    judge_tier,
    oldest_completable,
    retired_copies,
    superseded_copies,
)
from tierd.core.planning.flush_order import demanded_on
from tierd.core.planning.inventory import Inventory, is_janitor, unnamed_tiers
from tierd.core.planning.place import SPOOL, Discard, Place, Prune
from tierd.core.retention.policy import parse_duration
from tierd.core.retention.retention_verdicts import AWAITS_PARTS, Ranking, Verdict


def judge_place(demand: Demand, name: str) -> tuple[Verdict, ...]:
    """Retention's verdicts over the checkpoints of a run in a place, newest first.

    The place is the spool or a tier that answers. A tier also keeps checkpoints that it wants when all places count
    (`Demand`), and checkpoints that other tiers want and lack.
    """
    tier = None if name == SPOOL else demand.inventory.tiers[name]
    return judge_spool(demand) if tier is None else _judge_tier_over_all_places(demand, name, tier, drops=False)


def deletion_verdicts(demand: Demand, name: str) -> tuple[Verdict, ...]:
    """The verdicts of `judge_place` that do not keep. Most kept checkpoints are not judged one by one, to save time."""
    tier = None if name == SPOOL else demand.inventory.tiers[name]
    verdicts = (
        judge_spool(demand, drops=True) if tier is None else _judge_tier_over_all_places(demand, name, tier, drops=True)
    )
    return tuple(verdict for verdict in verdicts if not verdict.keep)


def _judge_tier_over_all_places(demand: Demand, name: str, tier: Place, *, drops: bool) -> tuple[Verdict, ...]:
    over = oldest_completable(tier, demand.policy(name), demand.run, demand.live(name))
    verdicts = judge_tier(demand.inventory, tier, demand.policy(name), demand.run, demand.live(name), drops=drops)
    return tuple(
        verdict if verdict.keep else _over_all_places(demand, name, tier, verdict, over) for verdict in verdicts
    )


def _over_all_places(demand: Demand, name: str, tier: Place, verdict: Verdict, over: str) -> Verdict:
    """The final verdict over a checkpoint that the tier's own contents alone would delete.

    An incomplete checkpoint may still become complete, as in `judge_tier`.
    """
    checkpoint, hoped = verdict.id, verdict.id.attempt >= over
    if reasons := demand.reasons(name, checkpoint, hoped=hoped):
        return Verdict(checkpoint, True, reasons)
    copy = tier.checkpoints.get(checkpoint)
    names = demand.waiting_tiers(name, checkpoint, copy, hoped=hoped) if copy else ()
    if demand.policy(name).every and (checkpoint in demand.complete_ids or hoped):
        # An older checkpoint that only such a tier has moves the whole chain of `keep_every`.
        names += tuple(
            tier_name for tier_name, place in demand.inventory.tiers.items() if place is None and tier_name not in names
        )
    names = tuple(tier_name for tier_name in names if tier_name not in demand.inventory.silent)
    if names:
        return Verdict(checkpoint, True, (f"held for {', '.join(names)}",), names)
    if names := _unnamed(demand, tier, checkpoint):
        return Verdict(
            checkpoint, True, (f"held for {', '.join(names)}, which another node names, and this one does not",), names
        )
    return verdict


def _unnamed(demand: Demand, tier: Place, checkpoint: CheckpointId) -> tuple[str, ...]:
    """The tiers that may want a checkpoint of an earlier launch, and that only another node's configuration names.

    Nobody here knows whether they answer. So a checkpoint is held until it is `hold_for` older than the newest one, and
    not for ever for the sake of a node that is gone. The age is that of `Ages`, because a launch whose clock is ahead
    must not end the hold. The newest launch keeps what its own node's configuration says.
    """
    merged = demand.merged.get(checkpoint)
    if checkpoint not in demand.complete_ids or merged is None or merged.metadata_facts is None:
        return ()
    names = unnamed_tiers(demand.inventory, tier, demand.run)
    if not names or checkpoint.attempt == demand.newest_attempt:
        return ()
    age_s = demand.ages.age_s((checkpoint.run, checkpoint.attempt, checkpoint.step), merged.metadata_facts.created)
    return names if age_s < parse_duration(demand.config.hold_for) else ()


def judge_spool(demand: Demand, *, drops: bool = False) -> tuple[Verdict, ...]:
    """Retention's verdicts over the spool's copies of a run.

    A copy counts as verified if a tier has verified it. It also counts as verified if every tier that is not silent
    would prune it at once, because newer checkpoints have retired it there. The spool also keeps copies that it would
    keep if all its copies were verified, or if it held every known checkpoint.
    """
    inventory, run, policy = demand.inventory, demand.run, demand.policy(SPOOL)
    outdated = superseded_copies(demand)
    if drops and not outdated and len(inventory.spool.run(run).copies) <= policy.keep_last:
        return ()  # `keep_last` keeps all of them
    retired_ids = retired_copies(demand)
    pins = inventory.pins | inventory.being_restored
    infos = {
        copy.id: retention_info(
            copy,
            pins,
            complete=copy.complete or any(_complete_on(copy.id, place) for place in inventory.tiers.values()),
            verified=inventory.is_on_a_tier(copy) or copy.id in retired_ids,
        )
        for copy in inventory.spool.copies(run)
    }
    live = demand.live(SPOOL)
    ranking = Ranking(list(infos.values()), policy, demand.origins, live)
    judged = list(infos.values())
    if drops:
        judged = [
            info for info in judged if not info.complete or info.id not in ranking.kept_ids or info.id in outdated
        ]
    verdicts = tuple(map(ranking.verdict, sorted(judged, key=info_order, reverse=True)))
    if not outdated and all(verdict.keep for verdict in verdicts):
        return _bounded(verdicts, policy.keep_last)
    verified = Ranking([replace(info, verified=True) for info in infos.values()], policy, demand.origins, live)

    def over_all_places(verdict: Verdict) -> Verdict:
        if verdict.keep and verdict.id in outdated:
            verdict = Verdict(verdict.id, False, ("newer ones are complete here, and no tier wants it any more",))
        if verdict.keep or not infos[verdict.id].complete:
            return verdict
        if_verified = verified.verdict(replace(infos[verdict.id], verified=True))
        reasons = if_verified.reasons if if_verified.keep else demand.reasons(SPOOL, verdict.id)
        return Verdict(verdict.id, True, reasons) if reasons else verdict

    return _bounded(tuple(map(over_all_places, verdicts)), policy.keep_last)


def _complete_on(checkpoint: CheckpointId, tier: Place | None) -> bool:
    copy = tier.checkpoints.get(checkpoint) if tier else None
    return copy is not None and copy.usable


def _bounded(verdicts: tuple[Verdict, ...], count: int) -> tuple[Verdict, ...]:
    """The verdicts, changed to keep only `count` verified copies that merely wait for other ranks' parts.

    If one rank never saves again, such copies must not fill the other nodes' spools. Deleting them loses nothing,
    because a tier has each of them or no tier would keep it.
    """
    waiting = [verdict.id for verdict in verdicts if verdict.keep and verdict.reasons == (AWAITS_PARTS,)]
    reason = (f"incomplete, and {count} newer ones wait here, too",)
    excess = set(waiting[count:])
    return tuple(Verdict(verdict.id, False, reason) if verdict.id in excess else verdict for verdict in verdicts)


def tier_prunes(demand: Demand, name: str) -> Iterator[Prune]:
    """The checkpoints of a run to delete from a tier, oldest first; none if another node is the janitor."""
    inventory, run, tier = demand.inventory, demand.run, demand.inventory.tiers[name]
    if tier is None or name in inventory.append_only or not is_janitor(inventory, tier, run):
        return
    going = deletion_verdicts(demand, name)
    if not going:
        return
    # A checkpoint that the spool would send again at once is kept, even if the other ranks' parts never arrived.
    in_spool, demanded = inventory.spool.run(run).copies, demanded_on(demand, name, tier).ids
    coming = {
        verdict.id
        for verdict in going
        if verdict.id in in_spool and in_spool[verdict.id].facts and verdict.id in demanded
    }
    coming |= {part.checkpoint for part in inventory.busy}
    if None in inventory.tiers.values():
        # A checkpoint that is about to be deleted from the spool is deleted there first. If the tiers deleted theirs
        # first, the spool would keep its copy for the tier that does not answer.
        coming |= {verdict.id for verdict in deletion_verdicts(demand, SPOOL)}
    for verdict in reversed(going):
        if verdict.id not in coming:
            yield Prune(verdict.id, name, verdict.reasons)


def spool_prunes(demand: Demand, config: Config) -> Iterator[Prune]:
    """The copies of a run that retention gives up in the spool, and on a nearly full disk more that a tier has."""
    inventory = demand.inventory
    busy = {part.checkpoint for part in inventory.busy} | inventory.being_restored
    low = is_disk_low(inventory, config)
    verdicts = judge_spool(demand, drops=not low)
    retired_ids = retired_copies(demand) if low else frozenset()
    counted = {
        v.id
        for v in verdicts
        if low and (v.id in retired_ids or inventory.is_on_a_tier(inventory.spool.checkpoints[v.id]))
    }
    trained = demand.run not in inventory.trainerless  # without a trainer no restore is imminent, and a tier has a copy
    spared = inventory.pins | {max(counted, default=None)} if trained else inventory.local_pins
    for verdict in reversed(verdicts):
        if verdict.id in busy:
            continue
        if not verdict.keep:
            yield Prune(verdict.id, SPOOL, verdict.reasons)
        elif verdict.id in counted and verdict.id not in spared:
            yield Prune(verdict.id, SPOOL, (f"under {config.min_free_percent:g} % of the spool's disk is free",))


def finished_run_deletions(inventory: Inventory, run: str) -> Iterator[Prune | Discard]:
    """The deletion of a finished run from the spool: its pins, which a tier has too, then its copies, the newest last,
    then the record that the run was saved here."""
    for pin in sorted(inventory.spool.pins):
        if pin.run == run:
            yield Discard(f"pins/{run}/{pin.name}")
    busy = {part.checkpoint for part in inventory.busy} | inventory.being_restored
    for checkpoint in sorted(copy.id for copy in inventory.spool.copies(run)):
        if checkpoint not in busy:
            yield Prune(checkpoint, SPOOL, ("the run is finished, and tiers have what they want of it",))
    if run in inventory.spool.launches and not any(inventory.spool.copies(run)):
        yield Discard(f"saved/{run}/{inventory.spool.launches[run].attempt}")


def aged_quarantine(demand: Demand, config: Config) -> Iterator[Discard]:
    """The quarantined parts of a run that nobody needs any more."""
    inventory, run = demand.inventory, demand.run
    # Kept for a person to examine until `keep_last` newer verified checkpoints exist.
    quarantined = [part for part in inventory.spool.quarantined if part.checkpoint.run == run]
    if not quarantined:
        return
    verified = sorted(copy.id for copy in inventory.spool.copies(run) if inventory.is_on_a_tier(copy))
    low = is_disk_low(inventory, config)
    for part in sorted(quarantined):
        newer = len(verified) - bisect_right(verified, part.checkpoint)
        if newer >= demand.policy(SPOOL).keep_last or low:
            yield Discard(f"quarantine/{part.path}")


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
        for verdict in judge_place(demand, name)
        if verdict.waiting_tiers and not any(part.checkpoint == verdict.id for part in demand.inventory.busy)
    ]
    verdicts.sort(key=lambda verdict: (verdict.id.attempt, verdict.id.step, verdict.id.run))
    return [Prune(verdict.id, name, (f"{name} is full; it was {verdict.reasons[0]}",)) for verdict in verdicts]


def relied_copies(demand: Demand, name: str, checkpoint: CheckpointId) -> list[tuple[str, CheckpointCopy]]:
    """The copies for whose sake a tier may delete a checkpoint: those of the other tiers that want it.

    A copy that is known to be unusable, or is incomplete, is none of them: a full tier gives up what it holds for such
    a tier all the same.
    """
    copies = demand.copies.get(checkpoint, {})
    return [
        (tier, copy)
        for tier, copy in copies.items()
        if tier not in (SPOOL, name)
        and not demand.lacks_complete(tier, checkpoint, copies.get(name))
        and demand.reasons(tier, checkpoint, hoped=True)
    ]


def tiers_losing(
    inventory: Inventory, before: Inventory, config: Config, place: str, deleted: CheckpointCopy
) -> tuple[str, ...]:
    """The tiers that lose a checkpoint that they wanted, because `place` deleted the last copy of it; none if another
    place still completes it.

    Two places may have deleted their copies at the same time, each while the other still had its own. A tier wanted the
    checkpoint if it did when the deletion was decided (`before`). It also did if it wants the checkpoint now, without
    those deleted since. Checkpoints that arrived since then retire nothing, because a deletion takes long on a slow
    tier and the trainer saves meanwhile.
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
    wanting = [
        view.waiting_tiers(place, deleted.id, deleted, hoped=False) for view in (Demand(before, config, run), demand)
    ]
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
