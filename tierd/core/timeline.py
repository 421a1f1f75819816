"""The timeline: the chain of attempts that the newest one descends from.

Law: a resume walks down the timeline only. Past an attempt's first checkpoint it goes on at the checkpoint which that
attempt resumed from, never at a later one of a branch that was abandoned. An attempt that nothing readable tells of is
a name, which anybody may have put there: it does not decide which one is the newest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tierd.core.ids import CheckpointId


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run's complete checkpoints, each once.

    `path` is newest first; `branches` are complete checkpoints off the path, newest first; `lost` is the attempt whose
    origin nobody can tell any more (its manifests are gone or unreadable), where the walk had to end. `unvouched` are
    checkpoints, complete or not, of attempts that are newer by name than the newest of which anything can be told.
    """

    path: tuple[CheckpointId, ...]
    branches: tuple[CheckpointId, ...]
    lost: str | None
    unvouched: tuple[CheckpointId, ...] = ()


def timeline(
    known: Collection[CheckpointId], complete: Collection[CheckpointId], origins: Mapping[str, CheckpointId | None]
) -> Timeline:
    """Order one run's checkpoints for a resume.

    Args:
        known: every checkpoint that any place shows, complete or not.
        complete: those of which every rank's part is there.
        origins: attempt -> the checkpoint it resumed from (None: it began from nothing), where a manifest or a head
            tells. The newest of these is the newest; where nobody can tell of any, the newest name is.
    """
    steps: dict[str, list[CheckpointId]] = {checkpoint.attempt: [] for checkpoint in known}
    for checkpoint in complete:
        steps[checkpoint.attempt].append(checkpoint)
    path: list[CheckpointId] = []
    newest = max(origins or steps, default=None)
    attempts = way(newest, origins) if newest else {}
    for attempt, limit in attempts.items():
        path += sorted((c for c in steps.get(attempt, ()) if limit is None or c.step <= limit), reverse=True)
    last = next(reversed(attempts), None)
    return Timeline(
        tuple(path),
        branches=tuple(sorted(set(complete) - set(path), reverse=True)),
        lost=last if last not in origins else None,
        unvouched=tuple(sorted((one for one in known if newest and one.attempt > newest), reverse=True)),
    )


def way(attempt: str, origins: Mapping[str, CheckpointId | None]) -> dict[str, int | None]:
    """The attempts on the way down from `attempt`, in order, each with the last step of it that the way passes (None:
    all do). The last one may be an attempt that `origins` does not tell of."""
    found: dict[str, int | None] = {attempt: None}
    # Every manifest's origin is an earlier attempt (core/manifest.py), so this ends.
    while origin := origins.get(attempt):
        attempt = origin.attempt
        found[attempt] = origin.step
    return found
