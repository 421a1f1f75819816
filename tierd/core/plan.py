"""The plan: from what was observed to what should be done next. The daemon's only source of decisions.

Law: only `plan` may decide to delete, and only from complete, verified facts: a tier that did not answer is `None` in
the `World` and proves nothing. Called again on an unchanged world, it gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tierd.core.config import Config
from tierd.core.errors import FormatTooNew, ManifestError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.retention import CheckpointInfo, RetentionPolicy, Verdict, decide
from tierd.core.world import SPOOL, Facts, Place, World, by_checkpoint, is_complete, runs

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
    awake = {name: place for name, place in world.tiers.items() if place and backoff.get(name, now) <= now}
    flushes = [
        flush
        for run in runs(world)
        for name, place in awake.items()
        for flush in _flushes(world, place, config.named(name).retention, run, name)
    ]
    flushes.sort(key=lambda flush: (flush.part.checkpoint.attempt, flush.part.checkpoint.step), reverse=True)
    mends = [Mend(part) for part in _corrupt(world.spool)]
    anew = {(flush.part, flush.tier) for flush in flushes}
    for name, place in awake.items():  # what is flushed anew needs no mending
        mends += [Mend(part, name) for part in _corrupt(place) if (part, name) not in anew and part not in world.busy]
    actions: list[Action] = [*flushes, *mends]
    for run in runs(world):
        for name, place in awake.items():
            actions += _tier_prunes(world, place, config.named(name).retention, run, name)
        actions += _spool_prunes(world, config, run)
        actions += _aged_quarantine(world, config, run)
    actions += [Discard(name) for name in world.leftovers]
    return tuple(actions)


def _corrupt(place: Place) -> list[PartId]:
    return [part for part, defect in place.defects.items() if isinstance(defect, ManifestError)]


def _flushes(world: World, tier: Place, policy: RetentionPolicy, run: str, name: str) -> Iterator[Flush]:
    wanted = {verdict.id for verdict in judge_tier(world, tier, policy, run, pending=True) if verdict.keep}
    # Ranks that never come must not keep what is whole already from the tier.
    sure = judge_tier(world, tier, policy, run, pending=True, hoping=False)
    parts = by_checkpoint({*world.spool.parts, *tier.parts})
    wanted |= {verdict.id for verdict in sure if verdict.keep and is_complete(parts.get(verdict.id, ()))}
    for part in pending(world.spool, tier, run):
        if part.checkpoint in wanted:
            yield Flush(part, name)


def pending(spool: Place, tier: Place, run: str) -> list[PartId]:
    """The readable parts of `run` in the spool that the tier has no readable manifest of."""
    return [
        part for part, facts in spool.parts.items() if part.checkpoint.run == run and facts and not tier.parts.get(part)
    ]


def lender(tier: Place, part: PartId) -> PartId | None:
    """Whose chunks a flush of `part` may name where they are equal: the same rank's part of the newest checkpoint that
    is complete on the tier. Nobody's while a part of that rank is set aside there: what is proven bad may be shared."""
    if any((one.checkpoint.run, one.rank) == (part.checkpoint.run, part.rank) for one in tier.quarantined):
        return None
    for checkpoint, found in sorted(tier.checkpoints.items(), reverse=True):
        readable = [one for one in found if tier.parts[one]]
        if checkpoint.run == part.checkpoint.run and checkpoint != part.checkpoint and is_complete(readable):
            return next((one for one in readable if one.rank == part.rank), None)
    return None


def judge_tier(
    world: World, tier: Place, policy: RetentionPolicy, run: str, *, pending: bool = False, hoping: bool = True
) -> tuple[Verdict, ...]:
    """Retention's verdicts over what a tier holds of `run`; with `pending`, as if the spool's parts were there too, and
    when `hoping`, also the other ranks' parts that other spools may hold."""
    parts: dict[PartId, Facts | None] = {
        part: facts for part, facts in tier.parts.items() if part.checkpoint.run == run
    }
    lent = {owner for facts in parts.values() if facts for owner in facts.borrowed}
    aside = {part.checkpoint for part in tier.quarantined}
    extra = aside | (tier.owners - lent)
    if pending:
        local = {part: facts for part, facts in world.spool.parts.items() if part.checkpoint.run == run and facts}
        parts = {**local, **{part: facts or local.get(part) for part, facts in parts.items()}}
    coming = {part.checkpoint for part in world.spool.parts} if pending and hoping else set()
    pins = tier.pins | world.spool.pins | world.held
    infos = [
        _info(checkpoint, found, parts, pins, complete=checkpoint in coming or is_complete(found))
        for checkpoint, found in by_checkpoint(parts).items()
    ]
    known = {info.id for info in infos}
    infos += [
        CheckpointInfo(checkpoint, complete=False, verified=True, pinned=checkpoint in pins, aside=checkpoint in aside)
        for checkpoint in extra - known
        if checkpoint.run == run
    ]
    if pending:
        return decide(infos, policy)
    verdicts = _patient(infos, policy)
    if any(isinstance(defect, FormatTooNew) and part.checkpoint.run == run for part, defect in tier.defects.items()):
        # Which chunks a newer tierd's manifest names cannot be known, nor what it would keep.
        return tuple(
            verdict if verdict.keep else Verdict(verdict.id, True, ("a newer tierd writes here",))
            for verdict in verdicts
        )
    return verdicts


def _patient(infos: list[CheckpointInfo], policy: RetentionPolicy) -> tuple[Verdict, ...]:
    """Retention's verdicts, but an incomplete checkpoint stays where it would stay if it were whole: another node may
    still hold the rest of it, and would send what is deleted here again and again."""
    halves = {info.id: replace(info, complete=True) for info in infos if not info.complete and info.created}
    reasons: dict[CheckpointId, tuple[str, ...]] = {}
    for group in (*({half} for half in halves), set(halves)):
        verdicts = decide([halves[info.id] if info.id in group else info for info in infos], policy)
        reasons |= {verdict.id: verdict.reasons for verdict in verdicts if verdict.keep and verdict.id in group}
    return tuple(
        verdict
        if verdict.keep or verdict.id not in reasons
        else Verdict(verdict.id, True, ("incomplete; if the rest comes:", *reasons[verdict.id]))
        for verdict in decide(infos, policy)
    )


def _info(
    checkpoint: CheckpointId,
    found: list[PartId],
    parts: Mapping[PartId, Facts | None],
    pins: frozenset[CheckpointId],
    *,
    complete: bool,
    verified: bool = True,
) -> CheckpointInfo:
    # The lowest rank speaks for the checkpoint; a part whose manifest cannot be used makes it incomplete.
    facts = parts[min(found)]
    return CheckpointInfo(
        checkpoint,
        complete=complete and all(parts[part] for part in found),
        verified=verified,
        pinned=checkpoint in pins,
        created=facts.created if facts else None,
        metrics=facts.metrics if facts else None,
        origin=facts.origin if facts else None,
    )


def _tier_prunes(world: World, tier: Place, policy: RetentionPolicy, run: str, name: str) -> Iterator[Prune]:
    if not is_janitor(world, tier, run):
        return
    wanted = {verdict.id for verdict in judge_tier(world, tier, policy, run, pending=True) if verdict.keep}
    # What the spool would send again at once stays, even where the other ranks' parts never came.
    coming = {part.checkpoint for part, facts in world.spool.parts.items() if facts} & wanted
    coming |= {part.checkpoint for part in world.busy}
    for verdict in reversed(judge_tier(world, tier, policy, run)):
        if not verdict.keep and verdict.id not in coming:
            yield Prune(verdict.id, name, verdict.reasons)


def is_janitor(world: World, tier: Place, run: str) -> bool:
    """Whether this daemon may prune `run` on a shared tier: its spool holds rank 0 of the newest attempt."""
    mine = {part.checkpoint.attempt for part in world.spool.parts if part.checkpoint.run == run and part.rank == 0}
    seen = {part.checkpoint.attempt for part in (*world.spool.parts, *tier.parts) if part.checkpoint.run == run}
    return bool(seen) and max(seen) in mine


def judge_spool(world: World, config: Config, run: str) -> tuple[Verdict, ...]:
    """Retention's verdicts over the spool's copies of `run`: a copy counts as verified when a tier verified it, or when
    every tier would drop it at once because newer verified ones have retired it there."""
    retired = [_retired(world, place, config.named(name).retention, run) for name, place in world.tiers.items()]
    gone = frozenset.intersection(*retired) if retired else frozenset()
    parts = {part: facts for part, facts in world.spool.parts.items() if part.checkpoint.run == run}
    pins = _pins(world) | world.held
    return decide(
        [
            _info(
                checkpoint,
                found,
                parts,
                pins,
                complete=is_complete(found) or any(_complete_on(checkpoint, place) for place in world.tiers.values()),
                verified=_on_a_tier(found, world) or checkpoint in gone,
            )
            for checkpoint, found in by_checkpoint(parts).items()
        ],
        config.retention,
    )


def _pins(world: World) -> frozenset[CheckpointId]:
    return world.spool.pins.union(*(place.pins for place in world.tiers.values() if place))


def _retired(world: World, tier: Place | None, policy: RetentionPolicy, run: str) -> frozenset[CheckpointId]:
    if tier is None:
        return frozenset()
    # As if only this one were added: others that are merely pending retire nothing.
    gone = set()
    for part in pending(world.spool, tier, run):
        alone = World(Place({part: world.spool.parts[part]}, pins=world.spool.pins), {}, held=world.held)
        verdicts = judge_tier(alone, tier, policy, run, pending=True)
        gone |= {verdict.id for verdict in verdicts if verdict.id == part.checkpoint and not verdict.keep}
    return frozenset(gone)


def _complete_on(checkpoint: CheckpointId, tier: Place | None) -> bool:
    return tier is not None and is_complete(
        part for part, facts in tier.parts.items() if part.checkpoint == checkpoint and facts
    )


def _on_a_tier(parts: Iterable[PartId], world: World) -> bool:
    """Whether one tier holds a verified copy of all of `parts`: its manifest was put after every byte was verified."""
    wanted = list(parts)
    return any(place and all(place.parts.get(part) for part in wanted) for place in world.tiers.values())


def _spool_prunes(world: World, config: Config, run: str) -> Iterator[Prune]:
    verdicts = judge_spool(world, config, run)
    busy = {part.checkpoint for part in world.busy} | world.held
    pins = _pins(world)
    low = world.free * 100 < config.min_free_percent
    counted = [verdict for verdict in verdicts if _on_a_tier(world.spool.checkpoints[verdict.id], world)]
    for verdict in reversed(verdicts):
        if verdict.id in busy:
            continue
        if not verdict.keep:
            yield Prune(verdict.id, SPOOL, verdict.reasons)
        elif low and verdict in counted[1:] and verdict.id not in pins:
            yield Prune(verdict.id, SPOOL, (f"under {config.min_free_percent:g} % of the spool's disk is free",))


def _aged_quarantine(world: World, config: Config, run: str) -> Iterator[Discard]:
    # Kept for a person to look at until as many newer verified checkpoints exist as the policy keeps.
    verified = {c for c, parts in world.spool.checkpoints.items() if c.run == run and _on_a_tier(parts, world)}
    low = world.free * 100 < config.min_free_percent
    for part in world.spool.quarantined:
        newer = sum(checkpoint > part.checkpoint for checkpoint in verified)
        if part.checkpoint.run == run and (newer >= config.retention.keep_last or low):
            yield Discard(f"quarantine/{part.path}")
