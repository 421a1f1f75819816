"""What `ls` and `show` tell, as plain data. Its JSON form is a stable contract, written down in the README."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tierd.core.config import Config
from tierd.core.demand import Demand
from tierd.core.errors import FormatTooNew
from tierd.core.ids import CheckpointId, PartId
from tierd.core.plan import judge
from tierd.core.policies import known_policy
from tierd.core.resume import restore_candidates
from tierd.core.retention import HOPED_FOR, Verdict
from tierd.core.world import SPOOL, Facts, Place, Seen, World, is_complete, runs, union


@dataclass(frozen=True, slots=True)
class Copy:
    """One place's copy of a checkpoint.

    `state` is one of: `verified` (a tier: every byte was read back), `committed` (the spool: durable, digests taken
    from memory), `incomplete` (parts are missing), `corrupt` (a manifest cannot be used), `unreadable` (by this
    tierd, or without its key), `quarantined`. Sizes: bytes, of the `read` ranks whose manifests were read.
    """

    place: str
    state: str
    ranks: tuple[int, ...]
    read: int
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


def report(world: World, config: Config | None, run: str | None = None, *, defaults: bool = True) -> Report:
    """Describe `run`, or every run. Without a configuration no verdicts are given: every copy says `keep`.

    Args:
        defaults: where nobody said what a run keeps, judge by the default policy; without, that place has no verdicts.
    """
    asked = [name for name in runs(world) if run in (None, name)]
    found = [checkpoint for name in asked for checkpoint in _run(world, config, name, defaults)]
    unreached = tuple(name for name, place in world.tiers.items() if place is None)
    return Report(tuple(found), unreached)


def _run(world: World, config: Config | None, run: str, defaults: bool) -> list[Checkpoint]:
    places = world.places
    demand = Demand(world, config, run) if config else None
    verdicts = {
        name: {one.id: one for one in judge(demand, name)}
        for name in places
        if demand and config and (defaults or known_policy(world, config, run, name))
    }
    resume = restore_candidates(world, run)
    first = resume.candidates[0].checkpoint if resume.candidates else None
    copies = world.copies(run)
    aside: dict[CheckpointId, dict[str, list[PartId]]] = defaultdict(lambda: defaultdict(list))
    for name, place in places.items():
        for part in sorted(place.quarantined):
            if part.checkpoint.run == run:
                aside[part.checkpoint][name].append(part)
    return [
        _checkpoint(
            checkpoint,
            places,
            copies.get(checkpoint, {}),
            aside.get(checkpoint, {}),
            {name: found[checkpoint] for name, found in verdicts.items() if checkpoint in found},
            resumes=checkpoint == first,
        )
        for checkpoint in sorted({*copies, *aside}, reverse=True)
    ]


def _checkpoint(
    checkpoint: CheckpointId,
    places: Mapping[str, Place],
    copies: Mapping[str, Seen],
    aside: Mapping[str, list[PartId]],
    verdicts: Mapping[str, Verdict],
    *,
    resumes: bool,
) -> Checkpoint:
    ranks = union(*(seen.ranks for seen in copies.values()))
    facts = next((found for name in places if (found := _facts(places[name], copies.get(name), aside.get(name)))), None)
    return Checkpoint(
        run=checkpoint.run,
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        world_size=max([*ranks, *(part.world for parts in aside.values() for part in parts)]),
        created=facts.created.isoformat() if facts else None,
        metrics={name: value if value == value else None for name, value in facts.metrics.items()} if facts else {},
        resumed_from=facts.origin.name if facts and facts.origin else None,
        complete=is_complete(ranks),
        pinned=any(checkpoint in place.pins for place in places.values()),
        resumes=resumes,
        copies=tuple(
            _copy(name, copies.get(name), aside.get(name, []), verdicts.get(name))
            for name in places
            if name in copies or name in aside
        ),
    )


def _facts(place: Place, seen: Seen | None, aside: list[PartId] | None) -> Facts | None:
    """What the lowest rank of which anything was read says."""
    known = {**{part: place.quarantined[part] for part in aside or ()}, **(seen.facts if seen else {})}
    found = [(part.rank, part.world, part) for part, facts in known.items() if facts]
    return known[min(found)[-1]] if found else None


def _copy(name: str, seen: Seen | None, aside: list[PartId], verdict: Verdict | None) -> Copy:
    ranks = sorted(rank for some in seen.ranks.values() for rank in some) if seen else [part.rank for part in aside]
    facts = seen.facts.values() if seen else ()
    return Copy(
        place=name,
        state=_state(name, seen) if seen else "quarantined",
        ranks=tuple(ranks),
        read=len(facts),
        size=sum(found.size for found in facts),
        stored_size=sum(found.stored_size for found in facts),
        keep=verdict.keep if verdict else True,
        reasons=_reasons(seen, verdict) if verdict else (),
        defects=tuple(str(seen.defects[part]) for part in sorted(seen.defects)) if seen else (),
    )


def _reasons(seen: Seen | None, verdict: Verdict) -> tuple[str, ...]:
    """The verdict's reasons; where no part is missing, unusable manifests make the copy incomplete, and it says so."""
    if seen is None or not seen.defects or not is_complete(seen.ranks):
        return verdict.reasons
    count = sum(map(len, seen.ranks.values()))
    unusable = f"incomplete: {len(seen.defects)} of its {count} manifests cannot be used"
    return tuple(unusable if reason == HOPED_FOR else reason for reason in verdict.reasons)


def _state(name: str, seen: Seen) -> str:
    if seen.defects:
        strange = all(isinstance(defect, FormatTooNew) for defect in seen.defects.values())
        return "unreadable" if strange else "corrupt"
    if name == SPOOL:
        return "committed"
    return "verified" if is_complete(seen.ranks) else "incomplete"
