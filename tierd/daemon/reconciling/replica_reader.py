"""Read the fingerprints of a checkpoint's ranks, and compare them, when digests show that they differ.

Invariant: the spool's manifests are read first, because they cost no request. Further ranks are read from a tier only
once a difference is proven, and at most about as many as tell which ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import CheckpointCopy
from tierd.core.planning.place import SPOOL
from tierd.core.replicas.replica_comparison import ReplicaDifferences, compare_replicas, replicas_digest
from tierd.core.replicas.replica_digests import replica_digests
from tierd.daemon.concurrency import thread_uncancelled
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.daemon.tiers.tier_operations import TierOperations
from tierd.spool.spool import Spool

_MORE_RANKS = 16  # ranks that are read to see which agree, or one more than those that differ already

Fingerprints = Mapping[str, str]


class ReplicaReader:
    """Reads fingerprints from the spool and the tiers. `tiers` gives those of the present configuration."""

    def __init__(self, spool: Spool, tiers: Callable[[], TierOperations]) -> None:
        self._spool, self._tiers = spool, tiers

    async def compare(
        self, place: str, copy: CheckpointCopy, world: int, *, patient: bool
    ) -> ReplicaDifferences | None:
        """Compare the ranks whose digests a place's copy shows and, if they differ on a tier, further ones.

        Equal maps are held once, by their digest.

        Args:
            patient: whether the call fails if the tier does not answer for a further rank; else that rank is left out.

        Returns:
            The differences; None if some fingerprints are not as they were observed, and the others are equal.

        Raises:
            TierdError: fingerprints cannot be read for now.
        """
        digests = replica_digests(copy).get(world, {})
        maps: dict[bytes, Fingerprints] = {}
        for rank in sorted(digests, key=lambda rank: (not self._spool.holds(PartId(copy.id, rank, world)), rank)):
            if digests[rank] not in maps:
                fingerprints = await self.read(place, PartId(copy.id, rank, world))
                if replicas_digest(fingerprints) == digests[rank]:  # else it was replaced since it was listed
                    maps[digests[rank]] = fingerprints
        by_rank = {rank: maps[digest] for rank, digest in digests.items() if digest in maps}
        differences = await thread_uncancelled(compare_replicas, by_rank)
        if not differences.tensors and len(maps) < len(set(digests.values())):
            return None
        if not differences.tensors or place == SPOOL:
            return differences
        listed = sorted(copy.sound_ranks.get(world, frozenset()) - digests.keys())
        for rank in _spread(listed, max(_MORE_RANKS, len(digests) + 1)):
            try:
                fingerprints = await self.read(place, PartId(copy.id, rank, world))
            except TierdError:
                if patient:
                    raise
                continue
            by_rank[rank] = maps.setdefault(replicas_digest(fingerprints), fingerprints)
        return await thread_uncancelled(compare_replicas, by_rank)

    async def read(self, place: str, part: PartId) -> Fingerprints:
        """Return a part's fingerprints, from the spool if they are readable there; none if its manifest is unusable.

        Raises:
            TierdError: the tier did not answer, or its answers differ from each other.
        """
        try:
            return (await thread_uncancelled(self._spool.manifest, part)).replicas
        except (TierdError, OSError):  # reported by observations
            if place == SPOOL:
                return {}
        try:
            return (await read_manifest(self._tiers().stores[place], part)).replicas
        except (ObjectNotFound, ManifestError, FormatTooNew):
            return {}

    async def names(
        self, places: Mapping[str, Mapping[CheckpointId, CheckpointCopy]], checkpoint: CheckpointId
    ) -> set[str]:
        """Return the tensors of which a checkpoint has fingerprints, by one of its manifests in any of these places."""
        for place, copies in places.items():
            copy = copies.get(checkpoint)
            parts = [part for part, facts in copy.facts.items() if facts.replicas] if copy else []
            for part in sorted(parts, key=lambda part: (not self._spool.holds(part), part))[:1]:
                if fingerprints := await self.read(place, part):
                    return set(fingerprints)
        return set()


def _spread(ranks: list[int], most: int) -> list[int]:
    """Choose at most this many ranks, evenly, because neighbours are often on one node and fail together."""
    return [ranks[at * len(ranks) // most] for at in range(most)] if len(ranks) > most else ranks
