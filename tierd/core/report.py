"""What `ls` and `show` tell, as plain data. Its JSON form is a stable contract, written down in the README."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierd.core.config import Config
from tierd.core.ids import CheckpointId, PartId
from tierd.core.plan import judge_spool, judge_tier
from tierd.core.resume import restore_candidates
from tierd.core.retention import Verdict
from tierd.core.world import SPOOL, Facts, Place, World, is_complete, runs


@dataclass(frozen=True, slots=True)
class Copy:
    """One place's copy of a checkpoint.

    `state` is one of: `verified` (a tier: every byte was read back), `committed` (the spool: durable, digests taken
    from memory), `incomplete` (parts are missing), `corrupt` (a manifest cannot be used), `quarantined`. Sizes: bytes.
    """

    place: str
    state: str
    ranks: tuple[int, ...]
    size: int
    stored_size: int
    keep: bool
    reasons: tuple[str, ...]
    defects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint and its copies. `resumes`: a restore would try this one first. `created` is RFC 3339, UTC."""

    run: str
    step: int
    attempt: str
    world_size: int
    created: str | None
    metrics: dict[str, float | None]
    resumed_from: str | None
    complete: bool
    pinned: bool
    resumes: bool
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything known of the asked runs, newest checkpoint first; `unreached` tiers did not answer."""

    checkpoints: tuple[Checkpoint, ...]
    unreached: tuple[str, ...]


def report(world: World, config: Config | None, run: str | None = None) -> Report:
    """Describe `run`, or every run. Without a configuration no verdicts are given: every copy says `keep`."""
    asked = [name for name in runs(world) if run in (None, name)]
    found = [checkpoint for name in asked for checkpoint in _run(world, config, name)]
    unreached = tuple(name for name, place in world.tiers.items() if place is None)
    return Report(tuple(found), unreached)


def _run(world: World, config: Config | None, run: str) -> list[Checkpoint]:
    places = {SPOOL: world.spool, **{name: place for name, place in world.tiers.items() if place}}
    verdicts = {name: _verdicts(world, config, run, name, place) for name, place in places.items()}
    resume = restore_candidates(world, run)
    first = resume.candidates[0].checkpoint if resume.candidates else None
    known = {
        part.checkpoint
        for place in places.values()
        for part in (*place.parts, *place.quarantined)
        if part.checkpoint.run == run
    }
    return [
        _checkpoint(checkpoint, places, verdicts, resumes=checkpoint == first)
        for checkpoint in sorted(known, reverse=True)
    ]


def _verdicts(world: World, config: Config | None, run: str, name: str, place: Place) -> dict[CheckpointId, Verdict]:
    if config is None:
        return {}
    judged = (
        judge_spool(world, config, run)
        if name == SPOOL
        else judge_tier(world, place, config.named(name).retention, run)
    )
    return {verdict.id: verdict for verdict in judged}


def _checkpoint(
    checkpoint: CheckpointId,
    places: Mapping[str, Place],
    verdicts: Mapping[str, Mapping[CheckpointId, Verdict]],
    *,
    resumes: bool,
) -> Checkpoint:
    parts = {part for place in places.values() for part in place.parts if part.checkpoint == checkpoint}
    aside = {part for place in places.values() for part in place.quarantined if part.checkpoint == checkpoint}
    facts = next(
        (
            found
            for place in places.values()
            for part in sorted({*place.parts, *place.quarantined})
            if part.checkpoint == checkpoint and (found := place.parts.get(part) or place.quarantined.get(part))
        ),
        None,
    )
    copies = [_copy(checkpoint, name, place, verdicts[name].get(checkpoint)) for name, place in places.items()]
    return Checkpoint(
        run=checkpoint.run,
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        world_size=max(part.world for part in parts | aside),
        created=facts.created.isoformat() if facts else None,
        metrics={name: value if value == value else None for name, value in facts.metrics.items()} if facts else {},
        resumed_from=facts.origin.name if facts and facts.origin else None,
        complete=is_complete(parts),
        pinned=any(checkpoint in place.pins for place in places.values()),
        resumes=resumes,
        copies=tuple(copy for copy in copies if copy),
    )


def _copy(checkpoint: CheckpointId, name: str, place: Place, verdict: Verdict | None) -> Copy | None:
    own = {part: facts for part, facts in place.parts.items() if part.checkpoint == checkpoint}
    aside = [part for part in place.quarantined if part.checkpoint == checkpoint]
    if not own and not aside:
        return None
    return Copy(
        place=name,
        state=_state(name, own) if own else "quarantined",
        ranks=tuple(sorted(part.rank for part in (own or aside))),
        size=sum(facts.size for facts in own.values() if facts),
        stored_size=sum(facts.stored_size for facts in own.values() if facts),
        keep=verdict.keep if verdict else True,
        reasons=verdict.reasons if verdict else (),
        defects=tuple(str(place.defects[part]) for part in own if part in place.defects),
    )


def _state(name: str, parts: Mapping[PartId, Facts | None]) -> str:
    if not all(parts.values()):
        return "corrupt"
    if name == SPOOL:
        return "committed"
    return "verified" if is_complete(parts) else "incomplete"
