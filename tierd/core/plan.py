"""The plan: from what was observed to what should be done next. The daemon's only source of decisions.

Law: only `plan` may decide to delete, and only from complete, verified facts: a tier that did not answer is `None` in
the `World` and proves nothing. A manifest that nobody has read counts by its name: it was put after every byte was
verified. Whoever carries a deletion out reads first what it rests on (`daemon/prune.py`, `daemon/tiers.py`) and, where
that cannot be used, deletes nothing and makes it known. Called again on an unchanged world, it gives the same answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from tierd.core.config import Config
from tierd.core.errors import FormatTooNew, ManifestError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.retention import HOPED_FOR, CheckpointInfo, Origins, Ranking, RetentionPolicy, Verdict, decide
from tierd.core.world import SPOOL, Place, Seen, World, is_complete, runs, union

Backoff = Mapping[str, float]  # tier -> monotonic time before which it is left alone, seconds


@dataclass(frozen=True, slots=True)
class Flush:
    """Copy a part from the spool to a tier."""

    part: PartId
    tier: str


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete a checkpoint from a tier, or its copy from the spool (`tier` is then `SPOOL`)."""

    checkpoint: CheckpointId
    tier: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove a stage that its writer left behind in the spool, or a quarantined part that retention has retired."""

    name: str
    tier: str = SPOOL


@dataclass(frozen=True, slots=True)
class Mend:
    """A part's manifest is corrupt in one place: heal it from another, or quarantine it."""

    part: PartId
    tier: str = SPOOL


Action = Flush | Prune | Discard | Mend


def plan(world: World, config: Config, backoff: Backoff, now: float) -> tuple[Action, ...]:
    """What to do next, most urgent first: flushes newest first, then deletions oldest first.

    Args:
        world: what was observed.
        config: the tiers and their policies.
        backoff: tiers to leave alone for now.
        now: monotonic time, seconds; compared with `backoff` only.
    """
    awake = _awake(world, backoff, now)
    sent = flushes(world, config, backoff, now)
    mends = [Mend(part) for part in _corrupt(world.spool)]
    anew = {(flush.part, flush.tier) for flush in sent}
    for name, place in awake.items():  # what is flushed anew needs no mending
        mends += [Mend(part, name) for part in _corrupt(place) if (part, name) not in anew and part not in world.busy]
    actions: list[Action] = [*sent, *mends]
    for run in runs(world):
        for name, place in awake.items():
            actions += _tier_prunes(world, place, config.named(name).retention, run, name)
        actions += _spool_prunes(world, config, run)
        actions += _aged_quarantine(world, config, run)
    actions += [Discard(name) for name in world.leftovers]
    return tuple(actions)


def flushes(world: World, config: Config, backoff: Backoff, now: float) -> tuple[Flush, ...]:
    """The flushes of `plan` alone: of the newest launch first, and there first of what others have begun."""
    found = [
        ranked
        for run in runs(world)
        for name, place in _awake(world, backoff, now).items()
        for ranked in _flushes(world, place, config.named(name).retention, run, name)
    ]
    found.sort(key=lambda ranked: ranked[0], reverse=True)
    return tuple(flush for _, flush in found)


def _begun(tier: Place, run: str) -> dict[CheckpointId, int]:
    """How many parts there are of each checkpoint that is newer than all complete ones. Where saves outrun flushes,
    nodes that each sent their newest would never send parts of the same one; so they finish what any of them began."""
    newest = max((seen.id for seen in tier.copies(run) if seen.usable), default=None)
    sizes = {
        seen.id: sum(map(len, seen.ranks.values())) - len(seen.defects)
        for seen in tier.copies(run)
        if not seen.usable and (newest is None or seen.id > newest)
    }
    return {one: size for one, size in sizes.items() if size}


def _awake(world: World, backoff: Backoff, now: float) -> dict[str, Place]:
    return {name: place for name, place in world.tiers.items() if place and backoff.get(name, now) <= now}


def _corrupt(place: Place) -> list[PartId]:
    return [part for part, defect in place.defects() if isinstance(defect, ManifestError)]


def _flushes(
    world: World, tier: Place, policy: RetentionPolicy, run: str, name: str
) -> Iterator[tuple[tuple[str, int, int], Flush]]:
    """What a tier is to be sent, each with its rank: the highest first."""
    waiting = pending(world.spool, tier, run)
    if not waiting:
        return
    begun = _begun(tier, run)
    wanted = {verdict.id for verdict in judge_tier(world, tier, policy, run, pending=True) if verdict.keep}
    wanted |= set(begun)
    # A restore elsewhere waits for it, and does not hope for anything newer.
    needed = judge_tier(world, tier, policy, run, pending=True, hoped=world.needed) if world.needed else ()
    wanted |= {verdict.id for verdict in needed if verdict.keep and verdict.id in world.needed}
    # Ranks that never come must not keep what is whole already from the tier.
    for verdict in judge_tier(world, tier, policy, run, pending=True, hoped=()):
        both = [place.checkpoints[verdict.id] for place in (world.spool, tier) if verdict.id in place.checkpoints]
        if verdict.keep and is_complete(union(*(seen.ranks for seen in both))):
            wanted.add(verdict.id)
    for part in waiting:
        one = part.checkpoint
        if one in wanted:
            yield (one.attempt, begun.get(one, 0), one.step), Flush(part, name)


def pending(spool: Place, tier: Place, run: str) -> list[PartId]:
    """The readable parts of `run` in the spool that the tier has no usable manifest of."""
    return [
        part
        for seen in spool.copies(run)
        for there in [tier.checkpoints.get(seen.id)]
        for part in seen.facts
        if there is None or not there.has(part)
    ]


def lender(tier: Place, part: PartId) -> PartId | None:
    """Whose chunks a flush of `part` may name where they are equal: the same rank's part of the newest checkpoint that
    is complete on the tier. Nobody's while a part of that rank is set aside there: what is proven bad may be shared."""
    own = part.checkpoint
    if any((one.checkpoint.run, one.rank) == (own.run, part.rank) for one in tier.quarantined):
        return None
    whole = [seen for seen in tier.copies(own.run) if seen.id != own and seen.usable]
    newest = max(whole, key=lambda seen: seen.id, default=None)
    if newest is None:
        return None
    found = (PartId(newest.id, part.rank, world) for world in sorted(newest.ranks))
    return next((one for one in found if tier.has(one)), None)


def judge_tier(
    world: World,
    tier: Place,
    policy: RetentionPolicy,
    run: str,
    *,
    pending: bool = False,
    hoped: Collection[CheckpointId] | None = None,
) -> tuple[Verdict, ...]:
    """Retention's verdicts over what a tier holds of `run`; with `pending`, as if the spool's parts were there too, and
    of what is `hoped` for also the other ranks' parts, that other spools may hold. If nothing is said of that, then of
    all that may still become complete."""
    over = _over(tier, policy, run)
    if pending:
        # A pin or a restore that the janitor does not know of keeps nothing on the tier: it would be sent and pruned.
        pins = tier.pins | world.spool.pins if is_janitor(world, tier, run) else tier.pins
        if hoped is None:
            hoped = {seen.id for seen in world.spool.copies(run) if seen.id.attempt >= over}
        return decide(_infos(tier, run, world.spool, pins, hoped), policy, world.origins(run))
    infos = _infos(tier, run, Place(), _pins(world) | world.held)
    verdicts = _patient(infos, policy, world.origins(run), over)
    if any(isinstance(defect, FormatTooNew) and part.checkpoint.run == run for part, defect in tier.defects()):
        # Which chunks a newer tierd's manifest names cannot be known, nor what it would keep.
        return tuple(
            verdict if verdict.keep else Verdict(verdict.id, True, ("a newer tierd writes here, or another key",))
            for verdict in verdicts
        )
    return verdicts


def _over(tier: Place, policy: RetentionPolicy, run: str) -> str:
    """The oldest attempt whose checkpoints may still become complete. `keep_last` complete ones of later launches are
    enough: nobody writes the rest of an earlier one's any more."""
    whole = sorted((seen.id.attempt for seen in tier.copies(run) if seen.usable), reverse=True)
    return whole[policy.keep_last - 1] if len(whole) >= policy.keep_last else ""


def _infos(
    tier: Place, run: str, spool: Place, pins: frozenset[CheckpointId], hoped: Collection[CheckpointId] = ()
) -> list[CheckpointInfo]:
    """What retention is told of a tier, as if it held what is readable in `spool` as well, and all of what is `hoped`
    for."""
    lent = {owner for seen in tier.copies(run) for facts in seen.facts.values() for owner in facts.borrowed}
    aside = {part.checkpoint for part in tier.quarantined}
    extra = aside | (tier.owners - lent - tier.lent) | tier.cut
    own = {seen.id: seen for seen in tier.copies(run)}
    local = {seen.id: _readable(seen) for seen in spool.copies(run)}
    infos = [
        _info(both, pins, complete=is_complete(both.ranks) or both.id in hoped)
        for checkpoint in {**own, **{one: seen for one, seen in local.items() if seen.ranks}}
        for both in [_added(own.get(checkpoint), local.get(checkpoint))]
    ]
    known = {info.id for info in infos}
    infos += [
        CheckpointInfo(checkpoint, complete=False, verified=True, pinned=checkpoint in pins, aside=checkpoint in aside)
        for checkpoint in extra - known
        if checkpoint.run == run
    ]
    return infos


def _readable(seen: Seen) -> Seen:
    """A spool's copy without the parts that cannot be sent."""
    if not seen.defects:
        return seen
    bad = {(part.rank, part.world) for part in seen.defects}
    ranks = {world: frozenset(rank for rank in some if (rank, world) not in bad) for world, some in seen.ranks.items()}
    return Seen(seen.id, {world: some for world, some in ranks.items() if some}, seen.facts)


def _added(own: Seen | None, local: Seen | None) -> Seen:
    """A tier's copy as it would be with the spool's parts: they are sent where they lack, or cannot be used there."""
    if own is None or local is None:
        found = own or local
        assert found is not None
        return found
    bad = {part: why for part, why in own.defects.items() if part not in local.facts}
    return Seen(own.id, union(own.ranks, local.ranks), {**local.facts, **own.facts}, bad)


def _patient(infos: list[CheckpointInfo], policy: RetentionPolicy, origins: Origins, over: str) -> tuple[Verdict, ...]:
    """Retention's verdicts, but an incomplete checkpoint stays where it would stay if it were whole: another node may
    still hold the rest of it, and would send what is deleted here again and again. Not of attempts before `over`."""
    halves = {
        info.id: replace(info, complete=True)
        for info in infos
        if not info.complete and info.created and info.id.attempt >= over
    }
    reasons: dict[CheckpointId, tuple[str, ...]] = {}
    for some in (infos, [halves.get(info.id, info) for info in infos]):  # each alone, and all of them
        ranking = Ranking(some, policy, origins)
        verdicts = [ranking.verdict(half) for half in halves.values()]
        reasons |= {verdict.id: verdict.reasons for verdict in verdicts if verdict.keep}
    return tuple(
        verdict
        if verdict.keep or verdict.id not in reasons
        else Verdict(verdict.id, True, ("incomplete; if the rest comes:", *reasons[verdict.id]))
        for verdict in decide(infos, policy, origins)
    )


def _info(seen: Seen, pins: frozenset[CheckpointId], *, complete: bool, verified: bool = True) -> CheckpointInfo:
    # The lowest rank speaks for the checkpoint; a part whose manifest cannot be used makes it incomplete.
    facts = seen.spoken
    return CheckpointInfo(
        seen.id,
        complete=complete and not seen.defects,
        verified=verified,
        pinned=seen.id in pins,
        created=facts.created if facts else None,
        metrics=facts.metrics if facts else None,
        origin=facts.origin if facts else None,
    )


def _tier_prunes(world: World, tier: Place, policy: RetentionPolicy, run: str, name: str) -> Iterator[Prune]:
    if not is_janitor(world, tier, run):
        return
    going = [verdict for verdict in judge_tier(world, tier, policy, run) if not verdict.keep]
    if not going:
        return
    wanted = {verdict.id for verdict in judge_tier(world, tier, policy, run, pending=True) if verdict.keep}
    # What the spool would send again at once stays, even where the other ranks' parts never came.
    coming = {seen.id for seen in world.spool.copies(run) if seen.facts} & wanted
    coming |= {part.checkpoint for part in world.busy}
    for verdict in reversed(going):
        if verdict.id not in coming:
            yield Prune(verdict.id, name, verdict.reasons)


def is_janitor(world: World, tier: Place, run: str) -> bool:
    """Whether this daemon may prune `run` on a shared tier: its spool holds rank 0 of the newest attempt."""
    mine = {seen.id.attempt for seen in world.spool.copies(run) if any(0 in some for some in seen.ranks.values())}
    known = {seen.id.attempt for place in (world.spool, tier) for seen in place.copies(run)}
    return bool(known) and max(known) in mine


def judge_spool(world: World, config: Config, run: str) -> tuple[Verdict, ...]:
    """Retention's verdicts over the spool's copies of `run`: a copy counts as verified when a tier verified it, or when
    every tier would drop it at once because newer verified ones have retired it there."""
    retired = [_retired(world, place, config.named(name).retention, run) for name, place in world.tiers.items()]
    gone = frozenset.intersection(*retired) if retired else frozenset()
    pins = _pins(world) | world.held
    verdicts = decide(
        [
            _info(
                seen,
                pins,
                complete=is_complete(seen.ranks) or any(_complete_on(seen.id, place) for place in world.tiers.values()),
                verified=_on_a_tier(seen, world) or seen.id in gone,
            )
            for seen in world.spool.copies(run)
        ],
        config.retention,
        world.origins(run),
    )
    return _bounded(verdicts, config.retention.keep_last)


def _bounded(verdicts: tuple[Verdict, ...], count: int) -> tuple[Verdict, ...]:
    """Of verified copies that only wait for other ranks' parts, `count` stay: where a rank never saves again, they must
    not fill the other nodes' spools. A tier has what goes, or none would keep it."""
    waiting = [verdict.id for verdict in verdicts if verdict.keep and verdict.reasons == (HOPED_FOR,)]
    reason = (f"incomplete, and {count} newer ones wait here, too",)
    gone = set(waiting[count:])
    return tuple(Verdict(verdict.id, False, reason) if verdict.id in gone else verdict for verdict in verdicts)


def _pins(world: World) -> frozenset[CheckpointId]:
    return world.spool.pins.union(*(place.pins for place in world.tiers.values() if place))


def _retired(world: World, tier: Place | None, policy: RetentionPolicy, run: str) -> frozenset[CheckpointId]:
    if tier is None:
        return frozenset()
    waiting = {part.checkpoint for part in pending(world.spool, tier, run)}
    if not waiting:
        return frozenset()
    # As if only this one were added: others that are merely pending retire nothing.
    pins, over = _pins(world) | world.held, _over(tier, policy, run)
    ranking = Ranking(_infos(tier, run, Place(), pins), policy, world.origins(run))
    gone = set()
    for checkpoint in waiting:
        added = _added(tier.checkpoints.get(checkpoint), _readable(world.spool.checkpoints[checkpoint]))
        complete = is_complete(added.ranks) or checkpoint.attempt >= over
        if not ranking.verdict(_info(added, pins, complete=complete)).keep:
            gone.add(checkpoint)
    return frozenset(gone)


def _complete_on(checkpoint: CheckpointId, tier: Place | None) -> bool:
    seen = tier.checkpoints.get(checkpoint) if tier else None
    return seen is not None and seen.usable


def _on_a_tier(seen: Seen, world: World) -> bool:
    """Whether one tier holds a verified copy of all of the spool's parts: a tier's manifest is put after every byte was
    verified, and those of the spool's own ranks were read."""
    there = [place.checkpoints.get(seen.id) for place in world.tiers.values() if place]
    return any(one and one.covers(seen) for one in there)


def _spool_prunes(world: World, config: Config, run: str) -> Iterator[Prune]:
    verdicts = judge_spool(world, config, run)
    busy = {part.checkpoint for part in world.busy} | world.held
    pins = _pins(world)
    low = world.free * 100 < config.min_free_percent
    counted = {v.id for v in verdicts if low and _on_a_tier(world.spool.checkpoints[v.id], world)}
    newest = max(counted, default=None)
    for verdict in reversed(verdicts):
        if verdict.id in busy:
            continue
        if not verdict.keep:
            yield Prune(verdict.id, SPOOL, verdict.reasons)
        elif verdict.id in counted and verdict.id != newest and verdict.id not in pins:
            yield Prune(verdict.id, SPOOL, (f"under {config.min_free_percent:g} % of the spool's disk is free",))


def _aged_quarantine(world: World, config: Config, run: str) -> Iterator[Discard]:
    # Kept for a person to look at until as many newer verified checkpoints exist as the policy keeps.
    aside = [part for part in world.spool.quarantined if part.checkpoint.run == run]
    if not aside:
        return
    verified = sorted(seen.id for seen in world.spool.copies(run) if _on_a_tier(seen, world))
    low = world.free * 100 < config.min_free_percent
    for part in aside:
        newer = len(verified) - bisect_right(verified, part.checkpoint)
        if newer >= config.retention.keep_last or low:
            yield Discard(f"quarantine/{part.path}")
