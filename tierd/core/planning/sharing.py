"""Which chunks of an older checkpoint a flush may name instead of sending its own.

Invariant: one damaged or lost object costs a bounded number of checkpoints. A chunk is shared only if sharing saves
enough to be worth the dependence. At most `MOST_SHARERS` checkpoints of a tier depend on the checkpoint that wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tierd.core.ids import CheckpointId, PartId, chunk_owner
from tierd.core.manifest import Chunk, Manifest
from tierd.core.planning.place import Place

# Sharing a smaller chunk would risk checkpoints and save next to nothing. Such chunks hold less than 1 % of a
# transformer's bytes, and sending one again costs a single request, as does asking whether it still exists.
SMALLEST_SHARED_BYTES = 1 << 20

# If only an adapter changes, 100 checkpoints send the frozen bytes 7 times with 16 sharers, and once without a bound
# (docs/explanation/scale.md). Doubling the bound halves these uploads, and doubles the number of checkpoints that one
# bad chunk costs.
MOST_SHARERS = 16

# A reader fetches a patch and every base below it, each a request. An embedding of which 5 % of the rows change at each
# save sends 16 % of its bytes with 8 patches in a row, and 29 % where each patch starts from the whole chunk.
MOST_PATCHES = 8


def worn(tier: Place, part: PartId) -> frozenset[CheckpointId]:
    """The checkpoints whose chunks a new flush of `part` must not name, because enough others depend on them.

    The dependents of a checkpoint are those on the tier whose manifest of the same rank names its chunks. The
    checkpoint itself counts too while it exists. The part's own checkpoint does not count, because it would only be
    flushed again.
    """
    run, checkpoint = part.checkpoint.run, part.checkpoint
    if not tier.run(run).bases:
        return frozenset()
    sharers: Counter[CheckpointId] = Counter()
    for copy in tier.copies(run):
        facts = [part_facts for other_part, part_facts in copy.facts.items() if other_part.rank == part.rank]
        if facts and copy.id != checkpoint:
            sharers.update({copy.id}.union(*(part_facts.bases for part_facts in facts)))
    return frozenset(owner for owner, count in sharers.items() if count >= MOST_SHARERS)


def shareable(base: Manifest, worn_out: Collection[CheckpointId]) -> list[Chunk]:
    """The chunks of `base`, another checkpoint's manifest on the tier, that a flush may name.

    Args:
        worn_out: the result of `worn`.
    """
    chunks = []
    for chunk in base.chunks():
        if chunk.stored and chunk.size >= SMALLEST_SHARED_BYTES:
            owners = {chunk_owner(base.run, stored.key) for stored in chunk.objects()}
            if None not in owners and owners.isdisjoint(worn_out):
                chunks.append(chunk)
    return chunks


def patchable(base: Chunk) -> bool:
    """Whether a flush may store a chunk as a patch of `base`, a result of `shareable` at the same place of a file."""
    return sum(1 for _ in base.objects()) <= MOST_PATCHES


def base_part(tier: Place, part: PartId) -> PartId | None:
    """The base of a flush of `part`: the part whose equal chunks the flush may name instead of sending its own.

    It is the same rank's part of the newest checkpoint that is complete on the tier. It is None while the tier has a
    quarantined part of that rank, because the base may share a chunk that is proven corrupt.
    """
    checkpoint = part.checkpoint
    if any(
        (quarantined.checkpoint.run, quarantined.rank) == (checkpoint.run, part.rank)
        for quarantined in tier.quarantined
    ):
        return None
    newest = next(
        (candidate for candidate in reversed(tier.run(checkpoint.run).whole) if candidate != checkpoint), None
    )
    if newest is None:
        return None
    candidates = (PartId(newest, part.rank, world) for world in sorted(tier.checkpoints[newest].ranks))
    return next((candidate for candidate in candidates if tier.has(candidate)), None)
