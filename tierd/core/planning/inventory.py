"""The inventory: the observed contents of the spool and the tiers, for planning and restoring.

Invariant: an inventory holds observed facts only. A tier that did not answer is None in the `Inventory`, because a
missing answer does not mean an empty place. A checkpoint takes the same memory whatever its number of ranks, so that an
inventory can hold a million parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from tierd.core.errors import TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.retention.stored import StoredRetention
from tierd.core.timeline.head import Head, Known, newest, together

T = TypeVar("T")
SPOOL = "local"  # the spool's name wherever a tier's name can stand


class Trainer(NamedTuple):
    """A trainer process that runs on this node.

    Attributes:
        attempt: the launch that the trainer belongs to.
        rank: the rank that the trainer saves.
        pid: the process id; 0 if the trainer is in another pid namespace.
        since: when the trainer first saved for this launch, seconds since 1970.
    """

    attempt: str
    rank: int
    pid: int
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """The members of one readable manifest that planning needs. Sizes are bytes; `stored_size` is 0 in the spool."""

    created: datetime
    metrics: Mapping[str, float]
    origin: CheckpointId | None
    size: int
    stored_size: int
    borrowed: frozenset[CheckpointId]  # other checkpoints whose chunks this manifest names

    @staticmethod
    def of(manifest: Manifest) -> ManifestFacts:
        return ManifestFacts(
            manifest.created_at,
            manifest.numbers,
            manifest.origin,
            manifest.size,
            manifest.stored_size,
            manifest.owners - {manifest.part.checkpoint},
        )


@dataclass(frozen=True)
class CheckpointCopy:
    """The observed copy of one checkpoint in one place. It has at least one part.

    A copy is immutable, so derived values are cached; `memo` caches values that other modules derive.

    The daemon reads only some of the listed manifests. A manifest that was not read counts by its name, and code that
    deletes because of such a manifest reads it first. Complete copies share their set of ranks, so that a checkpoint
    of a thousand ranks takes as much memory as a checkpoint of one rank.

    Attributes:
        ranks: by world size, the ranks whose manifests are listed.
        facts: the contents of the manifests that were read and are usable.
        defects: why the manifests that were read and are unusable are so.
    """

    id: CheckpointId
    ranks: Mapping[int, frozenset[int]]
    facts: Mapping[PartId, ManifestFacts] = field(default_factory=dict)
    defects: Mapping[PartId, TierdError] = field(default_factory=dict)

    @property
    def origin(self) -> CheckpointId | None:
        """The checkpoint that the attempt resumed from, by the first manifest that was read; there must be one."""
        return next(iter(self.facts.values())).origin

    def lists(self, part: PartId) -> bool:
        return part.rank in self.ranks.get(part.world, ())

    def has(self, part: PartId) -> bool:
        """Whether the part's manifest is listed and not known to be unusable."""
        return self.lists(part) and part not in self.defects

    def covers(self, other: CheckpointCopy) -> bool:
        """Whether this copy has every part that `other` lists."""
        if not self.defects and self.ranks == other.ranks:
            return True
        listed = all(ranks <= self.ranks.get(world, frozenset()) for world, ranks in other.ranks.items())
        return listed and not any(other.lists(part) for part in self.defects)

    def parts(self) -> Iterator[PartId]:
        """The parts in order of rank and world size."""
        pairs = sorted((rank, world) for world, ranks in self.ranks.items() for rank in ranks)
        return (PartId(self.id, rank, world) for rank, world in pairs)

    @property
    def lowest(self) -> PartId:
        """The part that gives the checkpoint's metadata: its time of creation, its metrics and its attempt's origin."""
        rank, world = min((min(ranks), world) for world, ranks in self.ranks.items() if ranks)
        return PartId(self.id, rank, world)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def spoken(self) -> ManifestFacts | None:
        """The facts that give the checkpoint's metadata: those of the lowest rank whose manifest was read."""
        return self.facts[min(self.facts, key=lambda part: (part.rank, part.world))] if self.facts else None

    @cached_property
    def sound(self) -> Mapping[int, frozenset[int]]:
        """`ranks` without the parts that are known to be unusable."""
        if not self.defects:
            return self.ranks
        return {
            world: some - {part.rank for part in self.defects if part.world == world}
            for world, some in self.ranks.items()
        }

    @cached_property
    def complete(self) -> bool:
        """Whether the manifests of all ranks are listed, usable or not."""
        return is_complete(self.ranks)

    @cached_property
    def whole(self) -> bool:
        """Whether the copy is complete and every manifest was read and is usable."""
        return self.complete and not self.defects and all(part in self.facts for part in self.parts())

    @cached_property
    def usable(self) -> bool:
        """Whether the copy is complete without the parts that are known to be unusable."""
        return is_complete(self.sound)


@dataclass(frozen=True, slots=True)
class LocalLaunch:
    """The newest launch of a run that was saved in a spool, and the ranks that were saved, by world size.

    The node that saved the launch finishes the run's flushes and prunes on the tiers. It does so even after a full disk
    forced it to evict every copy.
    """

    attempt: str
    ranks: Mapping[int, frozenset[int]]


class RunCopies:
    """One place's copies of one run, with cached values that are derived from them."""

    def __init__(self, seen: Mapping[CheckpointId, CheckpointCopy]) -> None:
        self.seen = seen

    @cached_property
    def whole(self) -> list[CheckpointId]:
        """The usable checkpoints, oldest first."""
        return sorted(one for one, seen in self.seen.items() if seen.usable)

    @cached_property
    def halves(self) -> list[CheckpointCopy]:
        """The copies that are not usable."""
        return [seen for seen in self.seen.values() if not seen.usable]

    @cached_property
    def newest(self) -> CheckpointId | None:
        """The newest checkpoint, usable or not."""
        return max(self.seen, key=lambda one: (one.attempt, one.step), default=None)

    @cached_property
    def newest_of_each(self) -> list[CheckpointId]:
        """The newest checkpoint of each attempt, usable or not."""
        found: dict[str, CheckpointId] = {}
        for one in self.seen:
            if one.attempt not in found or found[one.attempt].step < one.step:
                found[one.attempt] = one
        return list(found.values())

    @cached_property
    def newest_whole(self) -> list[CheckpointId]:
        """The newest usable checkpoint of each attempt."""
        return list({one.attempt: one for one in self.whole}.values())

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The ranks of which any checkpoint has a part."""
        return frozenset[int]().union(*{some for seen in self.seen.values() for some in seen.ranks.values()})

    @cached_property
    def attempts(self) -> frozenset[str]:
        return frozenset(one.attempt for one in self.seen)

    @cached_property
    def led(self) -> frozenset[str]:
        """The attempts of which this place has a part of rank 0."""
        return frozenset(
            one.attempt for one, seen in self.seen.items() if any(0 in some for some in seen.ranks.values())
        )

    @cached_property
    def made(self) -> dict[str, float]:
        """By attempt, the time when its newest checkpoint was made; seconds since 1970 by the clock of its node."""
        found: dict[str, float] = {}
        for one, seen in self.seen.items():
            if facts := seen.spoken:
                found[one.attempt] = max(facts.created.timestamp(), found.get(one.attempt, 0.0))
        return found

    @cached_property
    def borrowed(self) -> frozenset[CheckpointId]:
        """The other checkpoints whose chunks the manifests that were read name."""
        return frozenset().union(*{facts.borrowed for seen in self.seen.values() for facts in seen.facts.values()})

    @cached_property
    def origins(self) -> dict[str, CheckpointId | None]:
        """The checkpoint that each attempt resumed from, if a manifest of it was read. All manifests of one attempt
        name the same origin."""
        return {one.attempt: seen.origin for one, seen in self.seen.items() if seen.facts}


_NO_COPIES = RunCopies({})


@dataclass(frozen=True)
class Place:
    """The observed contents of one place, the spool or a tier. A `Place` is immutable.

    Attributes:
        checkpoints: the copies.
        pins: the pinned checkpoints.
        owners: on a tier, the checkpoints under whose name chunks are stored.
        quarantined: the quarantined parts. Their facts still give origins to the timeline, if they were readable.
        lent: checkpoints whose chunks are named by a manifest that was read for a prune and is not among the facts.
        cut: the checkpoints whose deletion was interrupted.
        policies: the retention policies that are stored there, by run; in the spool, the trainer's.
        restored: the spool only: the runs whose newest attempt was only restored there, so that this node never saved
            it.
        launches: the spool only: by run, the newest launch that was saved there, whether the spool still has copies of
            it or not.
        alive: the spool only: by run, the trainers that save there now.
        ended: the spool only: by run, the launches that saved there lately and have no trainer any more.
        committed: the spool only: the newest part that each rank of a run's newest launch committed, whether the part
            is still there or not.
        heads: the readable heads that are stored there, by run; in the spool, what this node remembers of all places.
        announced: a tier only: the other nodes whose intents name parts of a checkpoint, as far as intents were read.
    """

    checkpoints: Mapping[CheckpointId, CheckpointCopy] = field(default_factory=dict)
    pins: frozenset[CheckpointId] = frozenset()
    owners: frozenset[CheckpointId] = frozenset()
    quarantined: Mapping[PartId, ManifestFacts | None] = field(default_factory=dict)
    lent: frozenset[CheckpointId] = frozenset()
    cut: frozenset[CheckpointId] = frozenset()
    policies: Mapping[str, tuple[StoredRetention, ...]] = field(default_factory=dict)
    restored: frozenset[str] = frozenset()
    launches: Mapping[str, LocalLaunch] = field(default_factory=dict)
    alive: Mapping[str, tuple[Trainer, ...]] = field(default_factory=dict)
    ended: Mapping[str, frozenset[str]] = field(default_factory=dict)
    committed: frozenset[PartId] = frozenset()
    heads: Mapping[str, tuple[Head, ...]] = field(default_factory=dict)
    announced: Mapping[CheckpointId, frozenset[str]] = field(default_factory=dict)

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
        bad: dict[CheckpointId, dict[PartId, TierdError]] = defaultdict(dict)
        for part, found in parts.items():
            ranks[part.checkpoint][part.world].add(part.rank)
            if found:
                facts[part.checkpoint][part] = found
            else:
                unknown = TierdError(f"manifest of {part}: it could not be read")
                bad[part.checkpoint][part] = (defects or {}).get(part, unknown)
        return Place(
            {
                owner: CheckpointCopy(
                    owner, {world: frozenset(some) for world, some in own.items()}, facts[owner], bad[owner]
                )
                for owner, own in ranks.items()
            },
            pins,
            owners,
            quarantined or {},
        )

    @cached_property
    def runs(self) -> dict[str, RunCopies]:
        """The checkpoints, by run."""
        found: dict[str, dict[CheckpointId, CheckpointCopy]] = {}
        for one, seen in self.checkpoints.items():
            found.setdefault(one.run, {})[one] = seen
        return {run: RunCopies(some) for run, some in found.items()}

    def run(self, run: str) -> RunCopies:
        """The copies of one run, with the values derived from them."""
        return self.runs.get(run, _NO_COPIES)

    def alone(self, run: str) -> Place:
        """The part of this place that concerns one run, without `committed`."""
        pins, owners, lent, cut = (some.get(run, frozenset()) for some in self._named)
        found = Place(
            self.run(run).seen,
            pins,
            owners,
            {part: facts for part, facts in self.quarantined.items() if part.checkpoint.run == run},
            lent,
            cut,
            _only(self.policies, run),
            self.restored & {run},
            _only(self.launches, run),
            _only(self.alive, run),
            _only(self.ended, run),
            heads=_only(self.heads, run),
            announced={one: nodes for one, nodes in self.announced.items() if one.run == run},
        )
        found.__dict__["runs"] = {run: self.run(run)} if run in self.runs else {}  # keeps the cached derived values
        return found

    @cached_property
    def _named(self) -> list[dict[str, frozenset[CheckpointId]]]:
        """`pins`, `owners`, `lent` and `cut`, by run."""
        found = []
        for some in (self.pins, self.owners, self.lent, self.cut):
            named: dict[str, set[CheckpointId]] = {}
            for one in some:
                named.setdefault(one.run, set()).add(one)
            found.append({run: frozenset(own) for run, own in named.items()})
        return found

    def copies(self, run: str) -> Iterable[CheckpointCopy]:
        """The copies of one run."""
        return self.run(run).seen.values()

    def parts(self) -> Iterator[PartId]:
        """Every part. Meant for the spool, because a tier may have a million."""
        return (part for seen in self.checkpoints.values() for part in seen.parts())

    @property
    def ranks(self) -> dict[str, frozenset[int]]:
        """By run, the ranks of which any checkpoint has a part, or which were saved there."""
        found = {run: frozenset[int]().union(*launch.ranks.values()) for run, launch in self.launches.items()}
        for run, copies in self.runs.items():
            found[run] = found.get(run, frozenset()) | copies.ranks
        return found

    def lists(self, part: PartId) -> bool:
        """Whether the part's manifest is listed, usable or not."""
        seen = self.checkpoints.get(part.checkpoint)
        return seen is not None and seen.lists(part)

    def has(self, part: PartId) -> bool:
        """Whether the part's manifest is listed and not known to be unusable."""
        seen = self.checkpoints.get(part.checkpoint)
        return seen is not None and seen.has(part)

    def facts(self, part: PartId) -> ManifestFacts | None:
        """The contents of the part's manifest; None if it was not read or is unusable."""
        seen = self.checkpoints.get(part.checkpoint)
        return seen.facts.get(part) if seen else None

    def defects(self) -> Iterator[tuple[PartId, TierdError]]:
        """The parts whose manifests are listed and unusable, each with its error."""
        return (defect for seen in self._defective for defect in seen.defects.items())

    @cached_property
    def _defective(self) -> list[CheckpointCopy]:
        return [seen for seen in self.checkpoints.values() if seen.defects]

    def adding(self, part: PartId, facts: ManifestFacts) -> Place:
        """This place after a part was put there."""
        own = self.checkpoints.get(part.checkpoint) or CheckpointCopy(part.checkpoint, {})
        fresh = CheckpointCopy(
            own.id,
            union(own.ranks, {part.world: frozenset({part.rank})}),
            {**own.facts, part: facts},
            {bad: why for bad, why in own.defects.items() if bad != part},
        )
        aside = {one: found for one, found in self.quarantined.items() if one != part}
        return replace(self, checkpoints={**self.checkpoints, fresh.id: fresh}, quarantined=aside)

    def with_policies(self, fresh: Collection[StoredRetention]) -> Place:
        """This place after policies were recorded there."""
        policies = dict(self.policies)
        for one in fresh:
            others = [old for old in policies.get(one.run, ()) if (old.by, old.given) != (one.by, one.given)]
            policies[one.run] = (*others, one)
        return replace(self, policies=policies)

    def with_heads(self, run: str, heads: tuple[Head, ...]) -> Place:
        """This place with these heads of a run."""
        return replace(self, heads={**self.heads, run: heads})

    def without(self, checkpoint: CheckpointId) -> Place:
        """This place after a checkpoint was pruned there."""
        left = {owner: seen for owner, seen in self.checkpoints.items() if owner != checkpoint}
        return replace(self, checkpoints=left, owners=self.owners - {checkpoint}, cut=self.cut - {checkpoint})

    def without_parts(self, parts: Collection[PartId]) -> Place:
        """This place after exactly these parts were removed there."""
        checkpoints = dict(self.checkpoints)
        for owner in {part.checkpoint for part in parts} & checkpoints.keys():
            seen, gone = checkpoints.pop(owner), {part for part in parts if part.checkpoint == owner}
            if left := [part for part in seen.parts() if part not in gone]:
                checkpoints[owner] = CheckpointCopy(
                    owner,
                    {
                        world: frozenset(one.rank for one in left if one.world == world)
                        for world in {p.world for p in left}
                    },
                    {part: facts for part, facts in seen.facts.items() if part not in gone},
                    {part: why for part, why in seen.defects.items() if part not in gone},
                )
        return replace(self, checkpoints=checkpoints)


@dataclass(frozen=True, slots=True)
class Sent:
    """The checkpoint that this daemon sent to a tier `last`, and how many `others` it sent since it sent the newest."""

    last: CheckpointId
    others: int = 0


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything observed. Nothing in `held` and `busy` is deleted, because the daemon itself is using it.

    `trainerless` are the runs in the spool that had neither an attached trainer nor a new part for minutes. `finished`
    are the runs that had neither for as long as the configuration's `finished` says.
    """

    spool: Place
    tiers: Mapping[str, Place | None]  # in order of preference; None: it did not answer
    free: float = 1.0  # share of the spool's file system that is free, 0..1
    leftovers: tuple[str, ...] = ()  # stages whose writer is gone
    held: frozenset[CheckpointId] = frozenset()  # being restored
    needed: frozenset[CheckpointId] = frozenset()  # by a restore on another node, which can read them from a tier only
    busy: frozenset[PartId] = frozenset()  # being flushed
    trainerless: frozenset[str] = frozenset()
    finished: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()  # tiers that have not answered for `hold_for`
    full: frozenset[str] = frozenset()  # tiers that refused a put as full, and from which nothing was deleted since
    append_only: frozenset[str] = frozenset()  # tiers that refuse deletions
    sent: Mapping[str, Sent] = field(default_factory=dict)  # by tier
    who: str = ""  # this node's id among the nodes that share a tier, 8 hex digits

    @property
    def places(self) -> dict[str, Place]:
        """Every place that answered, by name, the spool first."""
        return {SPOOL: self.spool, **{name: place for name, place in self.tiers.items() if place}}

    def alone(self, run: str) -> Inventory:
        """The part of this inventory that concerns one run: everything on which the run's plan depends."""
        return Inventory(
            self.spool.alone(run),
            {name: place and place.alone(run) for name, place in self.tiers.items()},
            self.free,
            held=frozenset(one for one in self.held if one.run == run),
            needed=frozenset(one for one in self.needed if one.run == run),
            busy=frozenset(part for part in self.busy if part.checkpoint.run == run),
            trainerless=self.trainerless & {run},
            finished=self.finished & {run},
            silent=self.silent,
            full=self.full,
            append_only=self.append_only,
            who=self.who,
        )

    @property
    def pins(self) -> frozenset[CheckpointId]:
        """Every pin that any place shows."""
        return frozenset[CheckpointId]().union(*(place.pins for place in self.places.values()))

    @property
    def local_pins(self) -> frozenset[CheckpointId]:
        """The pins that the spool shows and no tier does."""
        return self.spool.pins.difference(*(place.pins for place in self.tiers.values() if place))

    def on_a_tier(self, seen: CheckpointCopy) -> bool:
        """Whether one tier holds a verified copy of all parts that the spool has of a checkpoint.

        A listed manifest proves this, because a flush puts the manifest after it verified every byte. The daemon has
        also read the tier's manifests of the spool's own ranks.
        """
        there = [place.checkpoints.get(seen.id) for place in self.tiers.values() if place]
        return any(one and one.covers(seen) for one in there)

    def size_bytes(self, part: PartId) -> int:
        """A part's size in raw bytes. If its manifest was not read, the size of the checkpoint's lowest rank that was
        read; 0 if none was."""
        copies = [seen for place in self.places.values() if (seen := place.checkpoints.get(part.checkpoint))]
        known = [seen.facts.get(part) for seen in copies] + [seen.spoken for seen in copies]
        return next((facts.size for facts in known if facts), 0)

    def copies(self, run: str) -> dict[CheckpointId, dict[str, CheckpointCopy]]:
        """Every checkpoint of a run that any place shows, with its copies by place."""
        found: dict[CheckpointId, dict[str, CheckpointCopy]] = defaultdict(dict)
        for name, place in self.places.items():
            for one, seen in place.run(run).seen.items():
                found[one][name] = seen
        return dict(found)

    def origins(self, run: str) -> dict[str, CheckpointId | None]:
        """The checkpoint that each attempt of a run resumed from, if any manifest, quarantined or not, or else any
        head says so."""
        found: dict[str, CheckpointId | None] = {}
        for place in self.places.values():
            found |= place.run(run).origins
            for part, aside in place.quarantined.items():
                if aside and part.checkpoint.run == run:
                    found[part.checkpoint.attempt] = aside.origin
        for attempt, known in self.remembered(run).items():
            origin = known.resumed_from
            found.setdefault(attempt, CheckpointId(run, origin.attempt, origin.step) if origin else None)
        return found

    def remembered(self, run: str) -> dict[str, Known]:
        """A run's launches according to all heads together."""
        return together(head for place in self.places.values() for head in place.heads.get(run, ()))

    def gone(self, run: str) -> CheckpointId | None:
        """The newest checkpoint that was complete anywhere according to the heads, if it is not complete any more.

        A checkpoint is complete here if all places together show every part, and none of these is known to be unusable.

        Returns:
            None if the checkpoint is still complete, if a part of it is quarantined, or if no head knows any.
        """
        one = newest(self.remembered(run), run)
        return None if one is None or self.has_whole(one) else one

    def has_whole(self, one: CheckpointId) -> bool:
        """Whether all places together have every part of a checkpoint, not counting parts known to be unusable; or
        whether some place has quarantined a part of it."""
        places = self.places.values()
        sound = union(*(seen.sound for place in places if (seen := place.checkpoints.get(one))))
        return is_complete(sound) or any(part.checkpoint == one for place in places for part in place.quarantined)

    def sound(self, run: str) -> set[CheckpointId]:
        """The checkpoints of which some place has a part that is not known to be unusable, or a quarantined part."""
        found = {part.checkpoint for place in self.places.values() for part in place.quarantined}
        for place in self.places.values():
            found |= {seen.id for seen in place.copies(run) if any(seen.sound.values())}
        return found


def differing(
    before: Mapping[CheckpointId, CheckpointCopy], now: Mapping[CheckpointId, CheckpointCopy]
) -> set[CheckpointId]:
    """The checkpoints whose copies differ between two observations of a place.

    Copies are compared by identity, because an unchanged copy is mostly the same object. An equal copy that is another
    object counts as different.
    """
    if before is now:
        return set()
    return {one for one, seen in now.items() if before.get(one) is not seen} | (before.keys() - now.keys())


def _only(some: Mapping[str, T], run: str) -> dict[str, T]:
    return {run: some[run]} if run in some else {}


def union(*seen: Mapping[int, frozenset[int]]) -> dict[int, frozenset[int]]:
    """By world size, the ranks that have a part in any of these places."""
    found: dict[int, frozenset[int]] = {}
    for ranks in seen:
        for world, some in ranks.items():
            have = found.get(world)
            found[world] = some if have is None or have is some else have if have >= some else have | some
    return found


def complete_world_sizes(ranks: Mapping[int, Collection[int]]) -> list[int]:
    """The world sizes W of which ranks 0..W-1 are all present. Counting suffices, because each rank is less than W."""
    return [world for world, found in ranks.items() if len(found) == world]


def is_complete(ranks: Mapping[int, Collection[int]]) -> bool:
    return bool(complete_world_sizes(ranks))


def runs(inventory: Inventory) -> list[str]:
    """Every run that any place shows."""
    return sorted({run for place in inventory.places.values() for run in place.runs})
