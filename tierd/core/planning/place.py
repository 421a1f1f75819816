"""The observed contents of one place, which is the spool or a tier, and the actions that a plan can take there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from tierd.core.errors import TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import NO_COPIES, CheckpointCopy, ManifestFacts, RunCopies, union_ranks
from tierd.core.retention.policy import StoredRetention
from tierd.core.timeline.launch_chain import Head

T = TypeVar("T")
SPOOL = "local"  # the spool's name wherever a tier's name can stand


class Trainer(NamedTuple):
    """A trainer process that runs on this node and saves a rank of a launch.

    `pid` is 0 for another pid namespace; `since` is when it first saved for the launch, in seconds since 1970.
    """

    attempt: str
    rank: int
    pid: int
    since: float = 0.0
    world: int = 1


@dataclass(frozen=True, slots=True)
class LocalLaunch:
    """The newest launch of a run that was saved in a spool, and the ranks that were saved, by world size.

    The node that saved the launch finishes the run's flushes and prunes on the tiers. It does so even after a full disk
    forced it to evict every copy.
    """

    attempt: str
    ranks: Mapping[int, frozenset[int]]


@dataclass(frozen=True)
class Place:
    """The observed contents of one place, the spool or a tier. A `Place` is immutable."""

    checkpoints: Mapping[CheckpointId, CheckpointCopy] = field(default_factory=dict)
    pins: frozenset[CheckpointId] = frozenset()
    owners: frozenset[CheckpointId] = frozenset()  # on a tier, the checkpoints under whose name chunks are stored
    # the quarantined parts. Their facts still give origins to the timeline, if they were readable.
    quarantined: Mapping[PartId, ManifestFacts | None] = field(default_factory=dict)
    # checkpoints whose chunks are named by a manifest that was read for a prune and is not among the facts
    bases: frozenset[CheckpointId] = frozenset()
    interrupted_prunes: frozenset[CheckpointId] = frozenset()  # the checkpoints whose deletion was interrupted
    # the retention policies that are stored there, by run; in the spool, the trainer's
    policies: Mapping[str, tuple[StoredRetention, ...]] = field(default_factory=dict)
    # the spool only: the runs whose newest attempt was only restored there, so that this node never saved it
    restored: frozenset[str] = frozenset()
    # the spool only: by run, the newest launch that was saved there, whether the spool still has copies of it or not
    launches: Mapping[str, LocalLaunch] = field(default_factory=dict)
    # the spool only: by run, the trainers that save there now
    alive: Mapping[str, tuple[Trainer, ...]] = field(default_factory=dict)
    # the spool only: by run, the launches that saved there lately and have no trainer any more
    ended_launches: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # the spool only: the newest part that each rank of a run's newest launch committed, whether the part is still there
    # or not
    committed: frozenset[PartId] = frozenset()
    # the readable heads that are stored there, by run; in the spool, what this node remembers of all places
    heads: Mapping[str, tuple[Head, ...]] = field(default_factory=dict)
    # a tier only: by checkpoint, the other nodes that announce that they send its parts
    announced: Mapping[CheckpointId, frozenset[str]] = field(default_factory=dict)
    # the spool only: by run, the first launch of those that name no tier (`to=[]`). Nothing of the run is deleted from
    # the spool, and what this launch and later ones saved is not sent.
    local_only: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        parts: Mapping[PartId, ManifestFacts | None],
        defects: Mapping[PartId, TierdError] | None = None,
        pins: frozenset[CheckpointId] = frozenset(),
        owners: frozenset[CheckpointId] = frozenset(),
        quarantined: Mapping[PartId, ManifestFacts | None] | None = None,
    ) -> Place:
        """Make a place of a few parts, whose manifests were all read. None stands for an unusable manifest, and
        `defects` may give the error."""
        ranks: dict[CheckpointId, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        facts: dict[CheckpointId, dict[PartId, ManifestFacts]] = defaultdict(dict)
        defective: dict[CheckpointId, dict[PartId, TierdError]] = defaultdict(dict)
        for part, part_facts in parts.items():
            ranks[part.checkpoint][part.world].add(part.rank)
            if part_facts:
                facts[part.checkpoint][part] = part_facts
            else:
                unknown = TierdError(f"manifest of {part}: it could not be read")
                defective[part.checkpoint][part] = (defects or {}).get(part, unknown)
        return Place(
            {
                owner: CheckpointCopy(
                    owner,
                    {world: frozenset(rank_set) for world, rank_set in by_world.items()},
                    facts[owner],
                    defective[owner],
                )
                for owner, by_world in ranks.items()
            },
            pins,
            owners,
            quarantined or {},
        )

    @cached_property
    def runs(self) -> dict[str, RunCopies]:
        by_run: dict[str, dict[CheckpointId, CheckpointCopy]] = {}
        for checkpoint, copy in self.checkpoints.items():
            by_run.setdefault(checkpoint.run, {})[checkpoint] = copy
        return {run: RunCopies(copies) for run, copies in by_run.items()}

    def with_values_of(self, before: Place) -> Place:
        """This place, which has the copies of `before`, with the values that were derived from them there."""
        assert self.checkpoints is before.checkpoints
        self.__dict__.update({name: before.__dict__[name] for name in _OF_COPIES if name in before.__dict__})
        return self

    def run(self, run: str) -> RunCopies:
        """The copies of one run, with the values derived from them."""
        return self.runs.get(run, NO_COPIES)

    def of_run(self, run: str) -> Place:
        """The part of this place that concerns one run, without `committed`."""
        pins, owners, bases, cut = (by_run.get(run, frozenset()) for by_run in self._ids_by_run)
        place = Place(
            self.run(run).copies,
            pins,
            owners,
            {part: facts for part, facts in self.quarantined.items() if part.checkpoint.run == run},
            bases,
            cut,
            _only(self.policies, run),
            self.restored & {run},
            _only(self.launches, run),
            _only(self.alive, run),
            _only(self.ended_launches, run),
            heads=_only(self.heads, run),
            announced={checkpoint: nodes for checkpoint, nodes in self.announced.items() if checkpoint.run == run},
            local_only=_only(self.local_only, run),
        )
        place.__dict__["runs"] = {run: self.run(run)} if run in self.runs else {}  # keeps the cached derived values
        return place

    def is_local_only(self, checkpoint: CheckpointId) -> bool:
        """Whether a launch that names no tier saved a checkpoint here, and no launch has named tiers since."""
        first = self.local_only.get(checkpoint.run)
        return first is not None and checkpoint.attempt >= first

    @cached_property
    def managed(self) -> Place:
        """This place without the checkpoints that are local only, for every decision about sending and deleting."""
        checkpoints = {
            checkpoint: copy for checkpoint, copy in self.checkpoints.items() if not self.is_local_only(checkpoint)
        }
        if len(checkpoints) == len(self.checkpoints):
            return self
        committed = frozenset(part for part in self.committed if not self.is_local_only(part.checkpoint))
        return replace(self, checkpoints=checkpoints, committed=committed)

    @cached_property
    def _ids_by_run(self) -> list[dict[str, frozenset[CheckpointId]]]:
        """`pins`, `owners`, `bases` and `interrupted_prunes`, by run."""
        indexes = []
        for checkpoints in (self.pins, self.owners, self.bases, self.interrupted_prunes):
            by_run: dict[str, set[CheckpointId]] = {}
            for checkpoint in checkpoints:
                by_run.setdefault(checkpoint.run, set()).add(checkpoint)
            indexes.append({run: frozenset(ids) for run, ids in by_run.items()})
        return indexes

    def copies(self, run: str) -> Iterable[CheckpointCopy]:
        return self.run(run).copies.values()

    def parts(self) -> Iterator[PartId]:
        """Every part. Meant for the spool, because a tier may have a million."""
        return (part for copy in self.checkpoints.values() for part in copy.parts())

    @property
    def ranks(self) -> dict[str, frozenset[int]]:
        """By run, the ranks of which any checkpoint has a part, or which were saved there."""
        ranks = {run: frozenset[int]().union(*launch.ranks.values()) for run, launch in self.launches.items()}
        for run, copies in self.runs.items():
            ranks[run] = ranks.get(run, frozenset()) | copies.ranks
        return ranks

    def lists(self, part: PartId) -> bool:
        """Whether the part's manifest is listed, usable or not."""
        copy = self.checkpoints.get(part.checkpoint)
        return copy is not None and copy.lists(part)

    def has(self, part: PartId) -> bool:
        """Whether the part's manifest is listed and not known to be unusable."""
        copy = self.checkpoints.get(part.checkpoint)
        return copy is not None and copy.has(part)

    def facts(self, part: PartId) -> ManifestFacts | None:
        """The contents of the part's manifest; None if it was not read or is unusable."""
        copy = self.checkpoints.get(part.checkpoint)
        return copy.facts.get(part) if copy else None

    def defects(self) -> Iterator[tuple[PartId, TierdError]]:
        """The parts whose manifests are listed and unusable, each with its error."""
        return (defect for copy in self._defective for defect in copy.defects.items())

    @cached_property
    def _defective(self) -> list[CheckpointCopy]:
        return [copy for copy in self.checkpoints.values() if copy.defects]

    def adding(self, part: PartId, facts: ManifestFacts) -> Place:
        """This place after a part was put there."""
        copy = self.checkpoints.get(part.checkpoint) or CheckpointCopy(part.checkpoint, {})
        fresh = CheckpointCopy(
            copy.id,
            union_ranks(copy.ranks, {part.world: frozenset({part.rank})}),
            {**copy.facts, part: facts},
            {defective: why for defective, why in copy.defects.items() if defective != part},
        )
        quarantined = {
            other_part: part_facts for other_part, part_facts in self.quarantined.items() if other_part != part
        }
        return replace(self, checkpoints={**self.checkpoints, fresh.id: fresh}, quarantined=quarantined)

    def with_policies(self, fresh: Collection[StoredRetention]) -> Place:
        """This place after policies were recorded there."""
        policies = dict(self.policies)
        for retention in fresh:
            other_policies = [
                old for old in policies.get(retention.run, ()) if (old.by, old.given) != (retention.by, retention.given)
            ]
            policies[retention.run] = (*other_policies, retention)
        return replace(self, policies=policies).with_values_of(self)

    def with_heads(self, run: str, heads: tuple[Head, ...]) -> Place:
        return replace(self, heads={**self.heads, run: heads}).with_values_of(self)

    def without(self, checkpoint: CheckpointId) -> Place:
        """This place after a checkpoint was pruned there."""
        checkpoints = {owner: copy for owner, copy in self.checkpoints.items() if owner != checkpoint}
        return replace(
            self,
            checkpoints=checkpoints,
            owners=self.owners - {checkpoint},
            interrupted_prunes=self.interrupted_prunes - {checkpoint},
        )

    def without_parts(self, parts: Collection[PartId]) -> Place:
        """This place after exactly these parts were removed there."""
        checkpoints = dict(self.checkpoints)
        for owner in {part.checkpoint for part in parts} & checkpoints.keys():
            copy, removed = checkpoints.pop(owner), {part for part in parts if part.checkpoint == owner}
            if remaining_parts := [part for part in copy.parts() if part not in removed]:
                checkpoints[owner] = CheckpointCopy(
                    owner,
                    {
                        world: frozenset(part.rank for part in remaining_parts if part.world == world)
                        for world in {p.world for p in remaining_parts}
                    },
                    {part: facts for part, facts in copy.facts.items() if part not in removed},
                    {part: why for part, why in copy.defects.items() if part not in removed},
                )
        return replace(self, checkpoints=checkpoints)


_OF_COPIES = ("runs", "_defective")  # the cached properties that depend on `checkpoints` alone


def _only(by_run: Mapping[str, T], run: str) -> dict[str, T]:
    return {run: by_run[run]} if run in by_run else {}


@dataclass(frozen=True, slots=True)
class Flush:
    """Copy a part to a tier: from the spool, or `relayed` from another tier if the spool does not have it."""

    part: PartId
    tier: str
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete a checkpoint from a tier, or its copy from the spool (`tier` is then `SPOOL`)."""

    checkpoint: CheckpointId
    tier: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove a file or directory of the spool by `name`: an abandoned stage, an old quarantined part, or a finished
    run's pin or record of its launch."""

    name: str
    tier: str = SPOOL


@dataclass(frozen=True, slots=True)
class RepairCopy:
    """Repair a part whose manifest is corrupt in one place from another copy, or quarantine it."""

    part: PartId
    tier: str = SPOOL


Action = Flush | Prune | Discard | RepairCopy
