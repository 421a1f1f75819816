"""What one place's copy of a checkpoint shows of its replicas: whether the digests of their fingerprints are equal.

Invariant: equal digests prove that the fingerprints are equal. Different ones prove nothing yet, because manifests may
have fingerprints of other functions or of other tensors; `core.replicas.replica_comparison` compares the fingerprints.
"""

from __future__ import annotations

from collections import defaultdict

from tierd.core.planning.copies import CheckpointCopy, complete_world_sizes
from tierd.core.replicas.replica_comparison import NO_REPLICAS


def replica_digests(copy: CheckpointCopy) -> dict[int, dict[int, bytes]]:
    """By world size and rank, the digests of the manifests that were read and have fingerprints."""
    digests: dict[int, dict[int, bytes]] = defaultdict(dict)
    for part, facts in copy.facts.items():
        if facts.replicas != NO_REPLICAS:
            digests[part.world][part.rank] = facts.replicas
    return digests


def unequal_worlds(copy: CheckpointCopy) -> list[int]:
    """The world sizes of which the digests of some ranks differ."""
    if len({facts.replicas for facts in copy.facts.values()}) < 2:  # true of nearly all copies
        return []
    return [world for world, by_rank in replica_digests(copy).items() if len(set(by_rank.values())) > 1]


def compared_worlds(copy: CheckpointCopy) -> list[int]:
    """The world sizes of which all ranks are listed and the digests of at least two are known."""
    digests = replica_digests(copy)
    return [world for world in complete_world_sizes(copy.ranks) if len(digests.get(world, ())) > 1]
