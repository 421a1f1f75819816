"""What one place shows of a checkpoint and of a run: observed facts only.

Invariant: a checkpoint takes the same memory whatever its number of ranks, so that an inventory can hold a million
parts.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from tierd.core.errors import DivisionMismatch, TierdError
from tierd.core.ids import CheckpointId, PartId, checkpoint_order
from tierd.core.manifest import Manifest
from tierd.core.replicas.replica_comparison import NO_REPLICAS, replicas_digest
from tierd.core.replicas.shares import differing_divisions


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """The members of one readable manifest that planning needs. Sizes are bytes; `stored_size` is 0 in the spool."""

    created: datetime
    metrics: Mapping[str, float]
    origin: CheckpointId | None
    size: int
    stored_size: int
    bases: frozenset[CheckpointId]  # other checkpoints whose chunks this manifest names
    is_watched: bool = False  # whether it is of a watched program's checkpoint, so that `created` is that of a file
    # Digest of a set of chunks that other ranks may name, too -> their stored size.
    homed_sizes: Mapping[int, int] = field(default_factory=dict)
    replicas: bytes = NO_REPLICAS  # the digest of its fingerprints, because the fingerprints themselves are too many
    # The same of chunks under the names of `bases`, with a home or without; empty if a summary gave these facts.
    borrowed_sizes: Mapping[int, int] = field(default_factory=dict)
    division: str = ""  # as in the manifest

    @staticmethod
    def of(manifest: Manifest) -> ManifestFacts:
        return ManifestFacts(
            manifest.created_at,
            manifest.numbers,
            manifest.origin,
            manifest.size,
            manifest.stored_size,
            manifest.owners - {manifest.part.checkpoint},
            manifest.is_watched,
            manifest.homed_sizes,
            replicas_digest(manifest.replicas),
            manifest.borrowed_sizes,
            sys.intern(manifest.division),
        )


def total_stored_size(facts: Mapping[PartId, ManifestFacts]) -> int:
    """The stored size of these parts of one checkpoint, in bytes. Equal sets of chunks that
    several of them name are counted once, as nodes name them that divide a state alike.
    """
    borrowed: dict[int, int] = {}
    for part_facts in facts.values():
        borrowed |= part_facts.borrowed_sizes
    return _own_stored_size(facts.values()) + sum(borrowed.values())


def _own_stored_size(facts: Iterable[ManifestFacts]) -> int:
    """The part of `total_stored_size` under the checkpoint's own name."""
    shared: dict[int, int] = {}
    total = 0
    for part_facts in facts:
        groups = {**part_facts.homed_sizes, **part_facts.borrowed_sizes}
        total += part_facts.stored_size - sum(groups.values())
        shared |= {name: size for name, size in groups.items() if name not in part_facts.borrowed_sizes}
    return total + sum(shared.values())


def most_freed_size(copies: Iterable[CheckpointCopy], present: Collection[CheckpointId]) -> int:
    """Return the most bytes that the deletion of these copies frees, each object counted for one of them.

    What they borrow from a checkpoint that is `present` is counted with that one. Chunks that other checkpoints name
    stay, so less may be freed.
    """
    total, orphans = 0, dict[int, int]()
    for copy in copies:
        total += _own_stored_size(copy.facts.values())
        for facts in copy.facts.values():
            if not facts.bases.issubset(present):
                orphans |= facts.borrowed_sizes
    return total + sum(orphans.values())


@dataclass(frozen=True)
class CheckpointCopy:
    """The observed copy of one checkpoint in one place. It has at least one part.

    A copy is immutable, so derived values are cached; `memo` caches values that other modules derive.

    The daemon reads only some of the listed manifests. A manifest that was not read counts by its name, and code that
    deletes because of such a manifest reads it first. Complete copies share their set of ranks, so that a checkpoint
    of a thousand ranks takes as much memory as a checkpoint of one rank.
    """

    id: CheckpointId
    ranks: Mapping[int, frozenset[int]]  # by world size, the ranks whose manifests are listed
    # the contents of the manifests that were read and are usable
    facts: Mapping[PartId, ManifestFacts] = field(default_factory=dict)
    # why the manifests that were read and are unusable are so; also of those that do not belong to the others of their
    # node. These have facts all the same.
    defects: Mapping[PartId, TierdError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        divisions = {part: facts.division for part, facts in self.facts.items() if facts.division}
        if len(divisions) > 1 and (differing := differing_divisions(divisions)):
            mismatches = {
                part: division_mismatch(part, other) for part, other in differing.items() if part not in self.defects
            }
            object.__setattr__(self, "defects", {**self.defects, **mismatches})

    @property
    def origin(self) -> CheckpointId | None:
        """The checkpoint that the attempt resumed from, by the first manifest that was read; there must be one."""
        return next(iter(self.facts.values())).origin

    def lists(self, part: PartId) -> bool:
        return part.rank in self.ranks.get(part.world, ())

    def has(self, part: PartId) -> bool:
        """Whether the part's manifest is listed and not known to be unusable."""
        return self.lists(part) and part not in self.defects

    def covers(self, required: CheckpointCopy) -> bool:
        """Whether this copy has every part that `required` lists."""
        if not self.defects and self.ranks == required.ranks:
            return True
        listed = all(ranks <= self.ranks.get(world, frozenset()) for world, ranks in required.ranks.items())
        return listed and not any(required.lists(part) for part in self.defects)

    def parts(self) -> Iterator[PartId]:
        """The parts in order of rank and world size."""
        pairs = sorted((rank, world) for world, ranks in self.ranks.items() for rank in ranks)
        return (PartId(self.id, rank, world) for rank, world in pairs)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def metadata_facts(self) -> ManifestFacts | None:
        """The facts that give the checkpoint's metadata: those of the lowest rank whose manifest was read."""
        return self.facts[min(self.facts, key=lambda part: (part.rank, part.world))] if self.facts else None

    @cached_property
    def sound_ranks(self) -> Mapping[int, frozenset[int]]:
        """`ranks` without the parts that are known to be unusable."""
        if not self.defects:
            return self.ranks
        return {
            world: ranks - {part.rank for part in self.defects if part.world == world}
            for world, ranks in self.ranks.items()
        }

    @cached_property
    def is_mismatched(self) -> bool:
        """Whether some parts do not belong together, so that no more parts make the checkpoint complete."""
        return any(isinstance(why, DivisionMismatch) for why in self.defects.values())

    @cached_property
    def matching_ranks(self) -> Mapping[int, frozenset[int]]:
        """`ranks` without the parts that do not belong to the others, but with those that are otherwise unusable."""
        if not self.is_mismatched:
            return self.ranks
        mismatched = {part for part, why in self.defects.items() if isinstance(why, DivisionMismatch)}
        return {
            world: ranks - {part.rank for part in mismatched if part.world == world}
            for world, ranks in self.ranks.items()
        }

    @cached_property
    def complete(self) -> bool:
        """Whether the manifests of all ranks are listed, usable or not."""
        return is_complete(self.ranks)

    @cached_property
    def is_whole_by_manifest(self) -> bool:
        """Whether the copy is complete and every manifest was read and is usable."""
        return self.complete and not self.defects and all(part in self.facts for part in self.parts())

    @cached_property
    def usable(self) -> bool:
        """Whether the copy is complete without the parts that are known to be unusable."""
        return is_complete(self.sound_ranks)


def division_mismatch(part: PartId, other: PartId) -> DivisionMismatch:
    """The error of a part that does not belong to another rank's of its node."""
    return DivisionMismatch(
        f"{part} and rank {other.rank} divided different states, so tensors may be in no part: an entry that is "
        "declared replicated is not the same on both ranks"
    )


class RunCopies:
    """One place's copies of one run, with cached values that are derived from them."""

    def __init__(self, copies: Mapping[CheckpointId, CheckpointCopy]) -> None:
        self.copies = copies

    @cached_property
    def usable(self) -> list[CheckpointId]:
        """The usable checkpoints, oldest first."""
        return sorted((checkpoint for checkpoint, copy in self.copies.items() if copy.usable), key=checkpoint_order)

    @cached_property
    def latest_usable(self) -> CheckpointId | None:
        """The usable checkpoint with the highest step of the latest attempt that has one."""
        return self.usable[-1] if self.usable else None

    @cached_property
    def unusable(self) -> list[CheckpointCopy]:
        return [copy for copy in self.copies.values() if not copy.usable]

    @cached_property
    def newest(self) -> CheckpointId | None:
        """The newest checkpoint, usable or not."""
        return max(self.copies, key=checkpoint_order, default=None)

    @cached_property
    def newest_of_each(self) -> list[CheckpointId]:
        """The newest checkpoint of each attempt, usable or not."""
        newest: dict[str, CheckpointId] = {}
        for checkpoint in self.copies:
            if checkpoint.attempt not in newest or newest[checkpoint.attempt].step < checkpoint.step:
                newest[checkpoint.attempt] = checkpoint
        return list(newest.values())

    @cached_property
    def newest_usable(self) -> list[CheckpointId]:
        """The newest usable checkpoint of each attempt."""
        return list({checkpoint.attempt: checkpoint for checkpoint in self.usable}.values())

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The ranks of which any checkpoint has a part."""
        return frozenset[int]().union(*{ranks for copy in self.copies.values() for ranks in copy.ranks.values()})

    @cached_property
    def attempts(self) -> frozenset[str]:
        return frozenset(checkpoint.attempt for checkpoint in self.copies)

    @cached_property
    def attempts_with_rank_0(self) -> frozenset[str]:
        """The attempts of which this place has a part of rank 0."""
        attempts: set[str] = set()
        for checkpoint, copy in self.copies.items():
            if checkpoint.attempt not in attempts and any(0 in ranks for ranks in copy.ranks.values()):
                attempts.add(checkpoint.attempt)
        return frozenset(attempts)

    @cached_property
    def newest_times(self) -> dict[str, float]:
        """By attempt, the time when its newest checkpoint was made; seconds since 1970 by the clock of its node."""
        newest_times: dict[str, datetime] = {}
        for checkpoint, copy in self.copies.items():
            if facts := copy.metadata_facts:
                latest = newest_times.get(checkpoint.attempt)
                newest_times[checkpoint.attempt] = facts.created if latest is None or facts.created > latest else latest
        return {attempt: max(created.timestamp(), 0.0) for attempt, created in newest_times.items()}

    @cached_property
    def bases(self) -> frozenset[CheckpointId]:
        """The other checkpoints whose chunks the manifests that were read name."""
        return frozenset().union(*{facts.bases for copy in self.copies.values() for facts in copy.facts.values()})

    @cached_property
    def origins(self) -> dict[str, CheckpointId | None]:
        """The checkpoint that each attempt resumed from, if a manifest of it was read. All manifests of one attempt
        name the same origin."""
        origins: dict[str, CheckpointId | None] = {}
        for checkpoint, copy in reversed(list(self.copies.items())):
            if checkpoint.attempt not in origins and copy.facts:
                origins[checkpoint.attempt] = copy.origin
        return dict(reversed(origins.items()))


NO_COPIES = RunCopies({})


def changed_checkpoints(
    before: Mapping[CheckpointId, CheckpointCopy], now: Mapping[CheckpointId, CheckpointCopy]
) -> set[CheckpointId]:
    """The checkpoints whose copies differ between two observations of a place.

    Copies are compared by identity, because an unchanged copy is mostly the same object. An equal copy that is another
    object counts as different.
    """
    if before is now:
        return set()
    # Most observations add or drop a few at either end, so all others are skipped without looking any up.
    was, current = list(before.values()), list(now.values())
    first = next(itertools.compress(itertools.count(), map(operator.is_not, was, current)), min(len(was), len(current)))
    was, current = was[first:], current[first:]
    differs_reversed = map(operator.is_not, reversed(was), reversed(current))
    last = next(itertools.compress(itertools.count(), differs_reversed), min(len(was), len(current)))
    older = {copy.id: copy for copy in was[: len(was) - last]}
    newer = {copy.id: copy for copy in current[: len(current) - last]}
    return {checkpoint for checkpoint, copy in newer.items() if older.get(checkpoint) is not copy} | (
        older.keys() - newer.keys()
    )


def union_ranks(*rank_maps: Mapping[int, frozenset[int]]) -> dict[int, frozenset[int]]:
    """By world size, the ranks that have a part in any of these places."""
    merged: dict[int, frozenset[int]] = {}
    for ranks in rank_maps:
        for world, rank_set in ranks.items():
            have = merged.get(world)
            merged[world] = (
                rank_set if have is None or have is rank_set else have if have >= rank_set else have | rank_set
            )
    return merged


def complete_world_sizes(ranks: Mapping[int, Collection[int]]) -> list[int]:
    """The world sizes W of which ranks 0..W-1 are all present. Counting suffices, because each rank is less than W."""
    return [world for world, present in ranks.items() if len(present) == world]


def is_complete(ranks: Mapping[int, Collection[int]]) -> bool:
    return bool(complete_world_sizes(ranks))
