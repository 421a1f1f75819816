"""Retention's final verdicts over a run's checkpoints in a place, when all places count."""

from __future__ import annotations

from dataclasses import replace

from tierd.core.ids import CheckpointId
from tierd.core.planning.demand import Demand, info_of
from tierd.core.planning.eviction import retired, superseded
from tierd.core.planning.place import SPOOL, Place
from tierd.core.planning.tier_verdicts import by_order, judge_tier, oldest_completable
from tierd.core.retention.policies import unnamed
from tierd.core.retention.policy import seconds
from tierd.core.retention.ranking import HOPED_FOR, Ranking, Verdict


def judge(demand: Demand, name: str) -> tuple[Verdict, ...]:
    """Retention's verdicts over the checkpoints of a run in a place, newest first.

    The place is the spool or a tier that answers. A tier also keeps checkpoints that it wants when all places count
    (`Demand`), and checkpoints that other tiers want and lack.
    """
    tier = None if name == SPOOL else demand.inventory.tiers[name]
    return judge_spool(demand) if tier is None else _judge_tier_over_all_places(demand, name, tier, drops=False)


def not_kept(demand: Demand, name: str) -> tuple[Verdict, ...]:
    """The verdicts of `judge` that do not keep. Most kept checkpoints are not judged one by one, which saves time."""
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

    An incomplete checkpoint may still become complete, as in `tier_verdicts`.
    """
    checkpoint, hoped = verdict.id, verdict.id.attempt >= over
    if reasons := demand.reasons(name, checkpoint, hoped=hoped):
        return Verdict(checkpoint, True, reasons)
    copy = tier.checkpoints.get(checkpoint)
    names = demand.waiting(name, checkpoint, copy, hoped=hoped) if copy else ()
    if demand.policy(name).every and (checkpoint in demand.whole or hoped):
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
    if checkpoint not in demand.whole or merged is None or merged.spoken is None:
        return ()
    names = unnamed(demand.inventory, tier, demand.run)
    if not names or checkpoint.attempt == demand.newest_attempt:
        return ()
    age_s = demand.ages.age_s((checkpoint.run, checkpoint.attempt, checkpoint.step), merged.spoken.created)
    return names if age_s < seconds(demand.config.hold_for) else ()


def judge_spool(demand: Demand, *, drops: bool = False) -> tuple[Verdict, ...]:
    """Retention's verdicts over the spool's copies of a run.

    A copy counts as verified if a tier has verified it. It also counts as verified if every tier that is not silent
    would prune it at once, because newer checkpoints have retired it there. The spool also keeps copies that it would
    keep if all its copies were verified, or if it held every known checkpoint.

    Args:
        demand: the run's demand.
        drops: whether to leave out most verdicts that keep.
    """
    inventory, run, policy = demand.inventory, demand.run, demand.policy(SPOOL)
    outdated = superseded(demand)
    if drops and not outdated and len(inventory.spool.run(run).seen) <= policy.keep_last:
        return ()  # `keep_last` keeps all of them
    retired_ids = retired(demand)
    pins = inventory.pins | inventory.held
    infos = {
        copy.id: info_of(
            copy,
            pins,
            complete=copy.complete or any(_complete_on(copy.id, place) for place in inventory.tiers.values()),
            verified=inventory.on_a_tier(copy) or copy.id in retired_ids,
        )
        for copy in inventory.spool.copies(run)
    }
    live = demand.live(SPOOL)
    ranking = Ranking(list(infos.values()), policy, demand.origins, live)
    judged = list(infos.values())
    if drops:
        judged = [info for info in judged if not info.complete or info.id not in ranking.kept or info.id in outdated]
    verdicts = tuple(map(ranking.verdict, sorted(judged, key=by_order, reverse=True)))
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
    waiting = [verdict.id for verdict in verdicts if verdict.keep and verdict.reasons == (HOPED_FOR,)]
    reason = (f"incomplete, and {count} newer ones wait here, too",)
    excess = set(waiting[count:])
    return tuple(Verdict(verdict.id, False, reason) if verdict.id in excess else verdict for verdict in verdicts)
