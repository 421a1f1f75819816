"""The timeline: the chain of attempts from which the newest attempt descends.

Invariant: a resume walks down the timeline only. Below an attempt's first checkpoint, it continues with the checkpoint
from which that attempt resumed, never with a later one of an abandoned branch. An attempt that no readable manifest or
head names does not count as the newest, because anybody may have put an object of that name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tierd.core.errors import ManifestError
from tierd.core.ids import CheckpointId
from tierd.core.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run's complete checkpoints, each either on the path or on a branch.

    Attributes:
        path: the complete checkpoints on the timeline, newest first.
        branches: the complete checkpoints off the timeline, newest first.
        lost: the attempt at which the walk had to end, because its origin is unknown: its manifests are deleted or
            unreadable.
        unvouched: checkpoints, complete or not, of attempts that are newer by name than every attempt whose origin is
            known.
    """

    path: tuple[CheckpointId, ...]
    branches: tuple[CheckpointId, ...]
    lost: str | None
    unvouched: tuple[CheckpointId, ...] = ()


def timeline(
    observed: Collection[CheckpointId], complete: Collection[CheckpointId], origins: Mapping[str, CheckpointId | None]
) -> Timeline:
    """Order one run's checkpoints for a resume.

    Args:
        observed: every checkpoint that any place shows, complete or not.
        complete: the checkpoints of which every rank's part is there.
        origins: by attempt, the checkpoint it resumed from (None: it began from nothing), if a manifest or a head says
            so. The newest attempt in `origins` counts as the newest. If `origins` is empty, the newest name does.
    """
    steps: dict[str, list[CheckpointId]] = {checkpoint.attempt: [] for checkpoint in observed}
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
        unvouched=tuple(
            sorted((checkpoint for checkpoint in observed if newest and checkpoint.attempt > newest), reverse=True)
        ),
    )


def way(attempt: str, origins: Mapping[str, CheckpointId | None]) -> dict[str, int | None]:
    """The chain of attempts from `attempt` down to its first ancestor.

    Returns:
        The attempts in order, each with its last step that is on the chain (None: all its steps are). The last attempt
        may be one that `origins` does not contain.
    """
    chain: dict[str, int | None] = {attempt: None}
    # The loop ends because every manifest's origin is an earlier attempt (core/manifest_codec.py).
    while origin := origins.get(attempt):
        attempt = origin.attempt
        chain[attempt] = origin.step
    return chain


def check_origin(manifest: Manifest, origins: dict[str, CheckpointId | None]) -> None:
    """Raise `ManifestError` if this manifest names another origin than the other parts of its attempt.

    Ranks that cannot talk may have resumed from different checkpoints under one given attempt. Then a checkpoint is
    complete by its name, and its parts belong to different histories.

    Args:
        manifest: of a part that is about to be read.
        origins: by attempt, the origin that its other parts name. The manifest's own is added if there is none yet.
    """
    attempt_origin = origins.setdefault(manifest.attempt, manifest.origin)
    if attempt_origin != manifest.origin:
        raise ManifestError(
            f"{manifest.part} goes on from {manifest.origin}, and other parts of its attempt from "
            f"{attempt_origin}: they "
            "do not belong together"
        )
