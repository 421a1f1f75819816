"""Which checkpoints a restore tries, in which order, and what it says when there is none.

Law: names alone decide completeness, manifests alone decide ancestry, and neither decides validity: whether a
candidate's bytes are right is found out by whoever reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.core.errors import CheckpointNotFound
from tierd.core.ids import CheckpointId, PartId
from tierd.core.timeline import timeline
from tierd.core.world import World, complete_worlds, union


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete checkpoint, and the places that show any part of it (`"local"` first)."""

    checkpoint: CheckpointId
    world: int
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """What a restore of one run has to go on.

    `candidates` are to be tried in order. `quarantined` belong between them, and were set aside, whole or in part, as
    proven corrupt everywhere. `branches` are complete checkpoints that the timeline does not reach.
    `incomplete` are newer than the first candidate and lack a rank's part. `lost` is an attempt whose origin nobody can
    tell. `unreached` are tiers that did not answer.
    """

    candidates: tuple[Candidate, ...]
    branches: tuple[CheckpointId, ...]
    incomplete: tuple[CheckpointId, ...]
    lost: str | None
    unreached: tuple[str, ...]
    attempts: tuple[str, ...]
    quarantined: tuple[CheckpointId, ...] = ()


def restore_candidates(world: World, run: str, step: int | None = None, attempt: str | None = None) -> Resume:
    """Order the checkpoints of `run` for a restore.

    Args:
        step: only this step; on the timeline if it is there, else of the newest attempt that has it.
        attempt: only this attempt; with it a branch off the timeline can be asked for.
    """
    found = world.copies(run)
    whole = {
        checkpoint: min(worlds)
        for checkpoint, copies in found.items()
        if (worlds := complete_worlds(union(*(seen.ranks for seen in copies.values()))))
    }
    aside = {
        part
        for place in world.places.values()
        for part in place.quarantined
        if part.checkpoint.run == run and not any(seen.lists(part) for seen in found.get(part.checkpoint, {}).values())
    }
    complete = list(whole)
    origins = world.origins(run)
    known = {*found, *(part.checkpoint for part in aside)}
    line = timeline(known, complete, origins)
    order = line.path
    if step is not None or attempt is not None:
        order = tuple(
            checkpoint
            for checkpoint in (*line.path, *line.branches)
            if step in (None, checkpoint.step) and attempt in (None, checkpoint.attempt)
        )
        # An attempt asked for by name is a line of its own: its newest first, abandoned or not.
        order = order[:1] if step is not None else tuple(sorted(order, reverse=True))
    first = order[0] if order else None
    lost = {part.checkpoint for part in aside} - set(whole)
    if step is None and attempt is None:
        reached = lost & set(timeline(known, known, origins).path)
    else:
        reached = {c for c in lost if step in (None, c.step) and attempt in (None, c.attempt)}
    return Resume(
        candidates=tuple(Candidate(checkpoint, whole[checkpoint], tuple(found[checkpoint])) for checkpoint in order),
        branches=tuple(checkpoint for checkpoint in line.branches if checkpoint not in order),
        incomplete=tuple(
            sorted((c for c in found if c not in whole and c not in lost and (not first or c > first)), reverse=True)
        ),
        lost=line.lost,
        unreached=tuple(name for name, place in world.tiers.items() if place is None),
        attempts=tuple(sorted({checkpoint.attempt for checkpoint in known})),
        quarantined=tuple(sorted(reached, reverse=True)),
    )


def not_found(resume: Resume, run: str, step: int | None, skipped: list[str]) -> CheckpointNotFound:
    """The error that names what was asked, what was skipped and why, and what else could be asked for."""
    asked = f"run {run!r}" if step is None else f"run {run!r} step {step}"
    lines = [f"{asked}: no checkpoint could be verified"] if skipped else [f"{asked}: there is no such checkpoint"]
    lines += [f"  skipped {text}" for text in skipped]
    if resume.quarantined and not resume.candidates and step is None:
        lines.append("  to begin from nothing all the same, give the run another name")
    if resume.lost and resume.branches:
        lines.append(f"  what attempt {resume.lost} resumed from cannot be told any more")
    if resume.branches:
        named = ", ".join(f"step {c.step} of attempt {c.attempt}" for c in resume.branches[:5])
        lines.append(f"  not tried, off the timeline: {named}; restore(step=…, attempt=…) asks for one")
    return CheckpointNotFound("\n".join(lines))


def own_part(candidate: Candidate, rank: int) -> PartId:
    """The part that `rank` restores from."""
    return PartId(candidate.checkpoint, rank, candidate.world)
