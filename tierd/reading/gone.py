"""What it means that a checkpoint was not found, or could not be verified, on the tiers."""

from __future__ import annotations

from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.timeline.alternatives import runs_there
from tierd.core.timeline.candidates import Candidate
from tierd.reading.tiers import RunOnTiers


def corrupt_or_gone(tiers: RunOnTiers, candidate: Candidate, error: CorruptChunk | ManifestError) -> Exception:
    """Return `error`, or another one if the checkpoint was pruned while it was read, or that cannot be told."""
    try:
        exists = tiers.has(candidate.checkpoint, candidate.world)
    except (StoreUnavailable, StoreRefused) as unknown:
        return unknown
    pruned = ObjectNotFound(f"{candidate.checkpoint} was pruned, or quarantined, while it was read")
    return error.with_traceback(None) if exists else pruned


def none_there(tiers: RunOnTiers) -> str:
    """Return why nothing was found: the message names the runs that exist."""
    runs_text = runs_there(tiers.run, tiers.runs())
    return f"run {tiers.run!r}: the tiers have no complete checkpoint of it; {runs_text}"
