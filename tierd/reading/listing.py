"""Describe a run's checkpoints from one listing of its tiers, without reading a chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tierd.core.errors import ManifestError
from tierd.core.ids import CheckpointId
from tierd.core.planning.copies import CheckpointCopy, is_complete, union
from tierd.core.planning.inventory import Inventory
from tierd.core.timeline.candidates import restore_candidates


@dataclass(frozen=True, slots=True)
class Listed:
    """One checkpoint on the tiers, described from names and manifests alone; no chunk was read.

    Attributes:
        step: the step at which it was saved.
        attempt: the launch that saved it.
        created: when rank 0 began to save it, by that node's clock, in UTC; None if no manifest can be read.
        metrics: rank 0's metrics, as given to `save`.
        world_size: how many ranks saved it.
        complete: whether the tiers together have every rank's part. A part whose manifest is known to be unusable
            (corrupt, or encrypted with another key) does not count.
        tiers: the tiers that each have every rank's part.
        resumes: whether a restore would load this checkpoint, unless a chunk turns out to be corrupt.
    """

    step: int
    attempt: str
    created: datetime | None
    metrics: dict[str, float]
    world_size: int
    complete: bool
    tiers: tuple[str, ...]
    resumes: bool


def list_checkpoints(inventory: Inventory, run: str) -> tuple[Listed, ...]:
    """Describe every checkpoint: first those that a restore would try, in that order, then all others, newest first."""
    copies = inventory.copies(run)
    tried = [candidate.checkpoint for candidate in restore_candidates(inventory, run).candidates]
    first = _restore_choice(inventory, {tried_id: copies[tried_id] for tried_id in tried})
    listing = []
    for checkpoint in (*tried, *sorted(copies.keys() - set(tried), reverse=True)):
        copies_by_tier = copies[checkpoint]
        ranks = union(*(place.ranks for place in copies_by_tier.values()))
        sound = union(*(place.sound for place in copies_by_tier.values()))
        facts = next((place.spoken for place in copies_by_tier.values() if place.spoken), None)
        listing.append(
            Listed(
                step=checkpoint.step,
                attempt=checkpoint.attempt,
                created=facts.created if facts else None,
                metrics=dict(facts.metrics) if facts else {},
                world_size=min(
                    (size for size, sound_ranks in ranks.items() if len(sound_ranks) == size), default=max(ranks)
                ),
                complete=is_complete(sound),
                tiers=tuple(name for name, place in copies_by_tier.items() if place.usable),
                resumes=checkpoint == first,
            )
        )
    return tuple(listing)


def _restore_choice(
    inventory: Inventory, tried: Mapping[CheckpointId, Mapping[str, CheckpointCopy]]
) -> CheckpointId | None:
    """Return the candidate that a restore would load, as far as the manifests show; None if that cannot be known.

    A restore passes over a candidate only if its manifests are proven corrupt.
    """
    for checkpoint, copies_by_tier in tried.items():
        if is_complete(union(*(place.sound for place in copies_by_tier.values()))):
            return checkpoint
        corrupt = all(
            isinstance(why, ManifestError) for place in copies_by_tier.values() for why in place.defects.values()
        )
        if not corrupt or None in inventory.tiers.values():
            return None  # another key, or a tier that does not answer now, may prove this candidate valid
    return None
