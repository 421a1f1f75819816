"""Which chunks of an older checkpoint a flush may name instead of sending its own.

Law: one damaged or lost object costs a bounded number of checkpoints. A chunk is shared only if that saves enough to be
worth the dependence, and only until `MOST_SHARERS` checkpoints of a tier depend on the checkpoint that wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tierd.core.ids import CheckpointId, PartId, chunk_owner
from tierd.core.manifest import Chunk, Manifest
from tierd.core.world import Place

# Smaller chunks hold less than 1 % of a transformer's bytes, and sending one again costs a single request, as does
# asking whether it is still there. Below this size a loss would therefore cost checkpoints and save next to nothing.
SMALLEST_SHARED_BYTES = 1 << 20

# Where nothing but an adapter changes, 16 sharers send the frozen bytes 7 times in 100 checkpoints, and no bound once
# (SCALE.md). Each doubling halves that, and doubles the number of checkpoints that one bad chunk takes along.
MOST_SHARERS = 16


def worn(tier: Place, part: PartId) -> frozenset[CheckpointId]:
    """The checkpoints whose chunks a new flush of `part` must not name, because enough others depend on them.

    Counted are the checkpoints on the tier whose manifest of the same rank names its chunks, and that checkpoint itself
    while it is there. The part's own checkpoint does not count, because it would only be flushed once more.
    """
    run, own = part.checkpoint.run, part.checkpoint
    sharers: Counter[CheckpointId] = Counter()
    for seen in tier.copies(run):
        facts = [found for one, found in seen.facts.items() if one.rank == part.rank]
        if facts and seen.id != own:
            sharers.update({seen.id}.union(*(found.borrowed for found in facts)))
    return frozenset(one for one, count in sharers.items() if count >= MOST_SHARERS)


def shareable(base: Manifest, worn_out: Collection[CheckpointId]) -> list[Chunk]:
    """The chunks that `base`, another checkpoint's manifest on the tier, offers to be named.

    Args:
        worn_out: as `worn` gives them.
    """
    found = []
    for chunk in base.chunks():
        if chunk.stored and chunk.size >= SMALLEST_SHARED_BYTES:
            owner = chunk_owner(base.run, chunk.stored.key)
            if owner and owner not in worn_out:
                found.append(chunk)
    return found
