"""Retention's verdicts over a tier's checkpoints, judged by this tier's contents alone.

`verdicts.judge` gives the final verdicts: it also keeps checkpoints that are wanted when all places count.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace

from tierd.core.errors import FormatTooNew
from tierd.core.ids import CheckpointId
from tierd.core.planning.demand import info_of
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.retention.policies import unknown
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.retention.ranking import CheckpointInfo, Origins, Ranking, Verdict

by_order = operator.attrgetter("order")


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

    Args:
        inventory: the observed places, which give pins and origins.
        tier: the tier.
        policy: the run's policy on the tier.
        run: the run.
        live: the launches that live, as for `Ranking`.
        drops: whether to leave out most verdicts that keep.
    """
    listed = tier.run(run).seen.keys() | tier.owners | tier.cut
    if drops and len(listed) + len(tier.quarantined) <= policy.keep_last:
        return ()  # `keep_last` keeps all of them
    over = oldest_completable(tier, policy, run, live)
    infos = infos_on(tier, run, inventory.pins | inventory.held)
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
    why = unknown(tier, run) or unknown(inventory.spool, run)
    if why is None:
        return verdicts
    reason = (f"what the run keeps is not known: {why}",)
    return tuple(verdict if verdict.keep else Verdict(verdict.id, True, reason) for verdict in verdicts)


def oldest_completable(tier: Place, policy: RetentionPolicy, run: str, live: Collection[str] = ()) -> str:
    """The oldest attempt whose checkpoints may still become complete.

    Once `keep_last` checkpoints of later launches are complete, no trainer writes missing parts of an earlier launch
    any more. A launch among the `live` is an exception.
    """
    complete = tier.run(run).whole
    return min([complete[-policy.keep_last].attempt, *live]) if len(complete) >= policy.keep_last else ""


def infos_on(tier: Place, run: str, pins: frozenset[CheckpointId]) -> list[CheckpointInfo]:
    """The input to retention for a tier's checkpoints of a run."""
    run_copies = tier.run(run)
    quarantined = {part.checkpoint for part in tier.quarantined}
    extra = quarantined | (tier.owners - run_copies.bases - tier.bases) | tier.cut
    infos = [info_of(copy, pins, complete=copy.complete) for copy in tier.copies(run)]
    infos += [
        CheckpointInfo(
            checkpoint, complete=False, verified=True, pinned=checkpoint in pins, quarantined=checkpoint in quarantined
        )
        for checkpoint in extra - run_copies.seen.keys()
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
    judged = [info for info in infos if info.id not in alone.kept] if drops else infos
    judged = sorted(judged, key=by_order, reverse=True)
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
