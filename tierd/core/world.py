"""What was observed: the spool and the tiers, as planning and restoring see them.

Law: these are facts and nothing else. A tier that did not answer is None in the `World`: absence of an answer is never
an empty place. A checkpoint takes the same room whatever its number of ranks, so that a million parts are no burden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from tierd.core.errors import TierdError
from tierd.core.head import Head, Known, newest, together
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.run_retention import StoredRetention

SPOOL = "local"  # the spool's name wherever a tier's name can stand


class Trainer(NamedTuple):
    """A trainer that lives on this node; `pid` is 0 where it is in another pid namespace. `since`: when it first saved
    for this launch, seconds since 1970."""

    attempt: str
    rank: int
    pid: int
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What planning needs of one readable manifest. Sizes in bytes; `stored_size` is 0 in the spool."""

    created: datetime
    metrics: Mapping[str, float]
    origin: CheckpointId | None
    size: int
    stored_size: int
    borrowed: frozenset[CheckpointId]  # other checkpoints whose chunks this manifest names

    @staticmethod
    def of(manifest: Manifest) -> Facts:
        return Facts(
            manifest.created_at,
            manifest.numbers,
            manifest.origin,
            manifest.size,
            manifest.stored_size,
            manifest.owners - {manifest.part.checkpoint},
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What one place was seen to hold of one checkpoint. There is always a part of it.

    `ranks` is by world size, and says whose manifests are listed. Some of those were read: `facts` is what they say,
    `defects` why others cannot be used. The rest counts by its name, and whoever deletes on its strength reads it
    first. Complete ones share their set of ranks, so that a thousand ranks' checkpoint costs as much as one rank's.
    """

    id: CheckpointId
    ranks: Mapping[int, frozenset[int]]
    facts: Mapping[PartId, Facts] = field(default_factory=dict)
    defects: Mapping[PartId, TierdError] = field(default_factory=dict)

    def lists(self, part: PartId) -> bool:
        return part.rank in self.ranks.get(part.world, ())

    def has(self, part: PartId) -> bool:
        """Whether the part's manifest is there, and not known to be unusable."""
        return self.lists(part) and part not in self.defects

    def covers(self, other: Seen) -> bool:
        """Whether it has all that `other` lists."""
        listed = all(ranks <= self.ranks.get(world, frozenset()) for world, ranks in other.ranks.items())
        return listed and not any(other.lists(part) for part in self.defects)

    def parts(self) -> Iterator[PartId]:
        """Its parts in order, of which there may be as many as ranks."""
        pairs = sorted((rank, world) for world, ranks in self.ranks.items() for rank in ranks)
        return (PartId(self.id, rank, world) for rank, world in pairs)

    @property
    def lowest(self) -> PartId:
        """The part that speaks for the checkpoint: when it was made, its metrics, where its attempt came from."""
        rank, world = min((min(ranks), world) for world, ranks in self.ranks.items() if ranks)
        return PartId(self.id, rank, world)

    @property
    def spoken(self) -> Facts | None:
        """What speaks for the checkpoint: the lowest rank's manifest of those that were read."""
        return self.facts[min(self.facts, key=lambda part: (part.rank, part.world))] if self.facts else None

    @property
    def sound(self) -> Mapping[int, frozenset[int]]:
        """`ranks` without the parts that are known to be unusable."""
        if not self.defects:
            return self.ranks
        return {
            world: some - {part.rank for part in self.defects if part.world == world}
            for world, some in self.ranks.items()
        }

    @property
    def usable(self) -> bool:
        """Whether it is complete without the parts that are known to be unusable."""
        return is_complete(self.sound)


@dataclass(frozen=True, slots=True)
class Launch:
    """The newest launch of a run that was saved in a spool, and the ranks that were, by world size. Whoever saved it
    sends and deletes what is left to do of the run on the tiers, also when a full disk has taken every copy."""

    attempt: str
    ranks: Mapping[int, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Place:
    """What one place, the spool or a tier, was seen to hold.

    `owners` are the checkpoints under whose name chunks lie on a tier, `lent` those of which some manifest, read for a
    prune and not among the facts, names chunks, `cut` those whose deletion was cut off. Quarantined parts still tell
    the timeline where they can.

    `policies` are the retention policies that lie there, by run; in the spool, the trainer's. `heads` are those that
    lie there and can be read, by run; in the spool, what this node remembers of all places. Of the spool alone,
    `restored` are the runs whose newest attempt there was only restored: this node never saved it; `launches` are, by
    run, what was saved there, whether it still has copies of it or not; `alive` are, by run, the trainers that save
    there now, and `ended` the launches that did so lately and have no trainer any more; `committed` are the newest part
    that each rank of a run's newest launch committed there, whether it is still there or not. Of a tier alone,
    `announced` are the other nodes that said that they send parts of a checkpoint, as far as somebody has asked.
    """

    checkpoints: Mapping[CheckpointId, Seen] = field(default_factory=dict)
    pins: frozenset[CheckpointId] = frozenset()
    owners: frozenset[CheckpointId] = frozenset()
    quarantined: Mapping[PartId, Facts | None] = field(default_factory=dict)
    lent: frozenset[CheckpointId] = frozenset()
    cut: frozenset[CheckpointId] = frozenset()
    policies: Mapping[str, tuple[StoredRetention, ...]] = field(default_factory=dict)
    restored: frozenset[str] = frozenset()
    launches: Mapping[str, Launch] = field(default_factory=dict)
    alive: Mapping[str, tuple[Trainer, ...]] = field(default_factory=dict)
    ended: Mapping[str, frozenset[str]] = field(default_factory=dict)
    committed: frozenset[PartId] = frozenset()
    heads: Mapping[str, tuple[Head, ...]] = field(default_factory=dict)
    announced: Mapping[CheckpointId, frozenset[str]] = field(default_factory=dict)

    @staticmethod
    def of(
        parts: Mapping[PartId, Facts | None],
        defects: Mapping[PartId, TierdError] | None = None,
        pins: frozenset[CheckpointId] = frozenset(),
        owners: frozenset[CheckpointId] = frozenset(),
        quarantined: Mapping[PartId, Facts | None] | None = None,
    ) -> Place:
        """A place of few parts, each of which was read: None is one that cannot be used, and `defects` may say why."""
        ranks: dict[CheckpointId, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        facts: dict[CheckpointId, dict[PartId, Facts]] = defaultdict(dict)
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
                owner: Seen(owner, {world: frozenset(some) for world, some in own.items()}, facts[owner], bad[owner])
                for owner, own in ranks.items()
            },
            pins,
            owners,
            quarantined or {},
        )

    def copies(self, run: str) -> Iterator[Seen]:
        """The checkpoints of one run."""
        return (seen for owner, seen in self.checkpoints.items() if owner.run == run)

    def parts(self) -> Iterator[PartId]:
        """Every part: for the spool. On a tier there may be a million."""
        return (part for seen in self.checkpoints.values() for part in seen.parts())

    @property
    def ranks(self) -> dict[str, frozenset[int]]:
        """The ranks that any checkpoint of each run has a part of, or that were saved there."""
        found = {run: frozenset[int]().union(*launch.ranks.values()) for run, launch in self.launches.items()}
        for seen in self.checkpoints.values():
            found[seen.id.run] = found.get(seen.id.run, frozenset()).union(*seen.ranks.values())
        return found

    def lists(self, part: PartId) -> bool:
        """Whether the part's manifest is there, usable or not."""
        seen = self.checkpoints.get(part.checkpoint)
        return seen is not None and seen.lists(part)

    def has(self, part: PartId) -> bool:
        """Whether the part's manifest is there, and not known to be unusable."""
        seen = self.checkpoints.get(part.checkpoint)
        return seen is not None and seen.has(part)

    def facts(self, part: PartId) -> Facts | None:
        """What the part's manifest says, where it was read and can be used."""
        seen = self.checkpoints.get(part.checkpoint)
        return seen.facts.get(part) if seen else None

    def defects(self) -> Iterator[tuple[PartId, TierdError]]:
        """The parts whose manifests are there and cannot be used, and why."""
        return (defect for seen in self.checkpoints.values() for defect in seen.defects.items())

    def adding(self, part: PartId, facts: Facts) -> Place:
        """The same, after a part was put there."""
        own = self.checkpoints.get(part.checkpoint) or Seen(part.checkpoint, {})
        fresh = Seen(
            own.id,
            union(own.ranks, {part.world: frozenset({part.rank})}),
            {**own.facts, part: facts},
            {bad: why for bad, why in own.defects.items() if bad != part},
        )
        aside = {one: found for one, found in self.quarantined.items() if one != part}
        return replace(self, checkpoints={**self.checkpoints, fresh.id: fresh}, quarantined=aside)

    def with_policies(self, fresh: Collection[StoredRetention]) -> Place:
        """The same, after policies were recorded there."""
        policies = dict(self.policies)
        for one in fresh:
            others = [old for old in policies.get(one.run, ()) if (old.by, old.given) != (one.by, one.given)]
            policies[one.run] = (*others, one)
        return replace(self, policies=policies)

    def with_heads(self, run: str, heads: tuple[Head, ...]) -> Place:
        """The same, with these heads of a run."""
        return replace(self, heads={**self.heads, run: heads})

    def without(self, checkpoint: CheckpointId) -> Place:
        """The same, after a checkpoint was pruned there."""
        left = {owner: seen for owner, seen in self.checkpoints.items() if owner != checkpoint}
        return replace(self, checkpoints=left, owners=self.owners - {checkpoint}, cut=self.cut - {checkpoint})

    def without_parts(self, parts: Collection[PartId]) -> Place:
        """The same, after these parts of checkpoints were removed there, and no others of them."""
        checkpoints = dict(self.checkpoints)
        for owner in {part.checkpoint for part in parts} & checkpoints.keys():
            seen, gone = checkpoints.pop(owner), {part for part in parts if part.checkpoint == owner}
            if left := [part for part in seen.parts() if part not in gone]:
                checkpoints[owner] = Seen(
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
    """What this daemon sent to a tier: `last`, and how many `others` since one was the newest checkpoint there."""

    last: CheckpointId
    others: int = 0


@dataclass(frozen=True, slots=True)
class World:
    """Everything observed. `held` and `busy` are what the daemon itself has in hand: nothing there is deleted.

    `trainerless` are the runs in the spool that had neither an attached trainer nor a new part for minutes; `finished`
    those that had neither for as long as the configuration's `finished` says.
    """

    spool: Place
    tiers: Mapping[str, Place | None]  # in order of preference; None: it did not answer
    free: float = 1.0  # share of the spool's file system that is free, 0..1
    leftovers: tuple[str, ...] = ()  # stages whose writer is gone
    held: frozenset[CheckpointId] = frozenset()  # being restored
    needed: frozenset[CheckpointId] = frozenset()  # by a restore on another node, which finds them only on a tier
    busy: frozenset[PartId] = frozenset()  # being flushed
    trainerless: frozenset[str] = frozenset()
    finished: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()  # tiers that have not answered for `hold_for`
    full: frozenset[str] = frozenset()  # tiers that took no more, and from which nothing was deleted since
    append_only: frozenset[str] = frozenset()  # tiers that let nothing be deleted
    sent: Mapping[str, Sent] = field(default_factory=dict)  # by tier
    who: str = ""  # this node among those that share a tier, 8 hex digits

    @property
    def places(self) -> dict[str, Place]:
        """Every place that answered, by name, the spool first."""
        return {SPOOL: self.spool, **{name: place for name, place in self.tiers.items() if place}}

    @property
    def pins(self) -> frozenset[CheckpointId]:
        """Every pin that any place shows."""
        return frozenset[CheckpointId]().union(*(place.pins for place in self.places.values()))

    @property
    def local_pins(self) -> frozenset[CheckpointId]:
        """The pins that the spool shows and no tier does."""
        return self.spool.pins.difference(*(place.pins for place in self.tiers.values() if place))

    def on_a_tier(self, seen: Seen) -> bool:
        """Whether one tier holds a verified copy of all of the spool's parts: a tier's manifest is put after every byte
        was verified, and those of the spool's own ranks were read."""
        there = [place.checkpoints.get(seen.id) for place in self.tiers.values() if place]
        return any(one and one.covers(seen) for one in there)

    def size_bytes(self, part: PartId) -> int:
        """A part's raw bytes. Where nobody has read its manifest, those of the rank that speaks for its checkpoint; 0
        where nobody has read that either."""
        copies = [seen for place in self.places.values() if (seen := place.checkpoints.get(part.checkpoint))]
        known = [seen.facts.get(part) for seen in copies] + [seen.spoken for seen in copies]
        return next((facts.size for facts in known if facts), 0)

    def copies(self, run: str) -> dict[CheckpointId, dict[str, Seen]]:
        """Every checkpoint of a run that any place shows, by the names of the places that do."""
        found: dict[CheckpointId, dict[str, Seen]] = defaultdict(dict)
        for name, place in self.places.items():
            for seen in place.copies(run):
                found[seen.id][name] = seen
        return dict(found)

    def origins(self, run: str) -> dict[str, CheckpointId | None]:
        """The checkpoint that each attempt of a run resumed from, where any manifest, quarantined or not, or else any
        head tells."""
        found: dict[str, CheckpointId | None] = {}
        for place in self.places.values():
            for seen in place.copies(run):
                for facts in seen.facts.values():
                    found[seen.id.attempt] = facts.origin
                    break  # the manifests of one attempt agree
            for part, aside in place.quarantined.items():
                if aside and part.checkpoint.run == run:
                    found[part.checkpoint.attempt] = aside.origin
        for attempt, known in self.remembered(run).items():
            origin = known.resumed_from
            found.setdefault(attempt, CheckpointId(run, origin.attempt, origin.step) if origin else None)
        return found

    def remembered(self, run: str) -> dict[str, Known]:
        """What all heads together tell of a run's launches."""
        return together(head for place in self.places.values() for head in place.heads.get(run, ()))

    def gone(self, run: str) -> CheckpointId | None:
        """The newest checkpoint that was complete anywhere, as heads remember it, where all places together do not
        show it complete any more, by parts that are not known to be unusable; None where they do, or set it aside."""
        one = newest(self.remembered(run), run)
        return None if one is None or self.has_whole(one) else one

    def has_whole(self, one: CheckpointId) -> bool:
        """Whether all places together show a checkpoint complete, by parts that are not known to be unusable, or have
        set a part of it aside."""
        places = self.places.values()
        sound = union(*(seen.sound for place in places if (seen := place.checkpoints.get(one))))
        return is_complete(sound) or any(part.checkpoint == one for place in places for part in place.quarantined)

    def sound(self, run: str) -> set[CheckpointId]:
        """The checkpoints of which some place has a part that is not known to be unusable, or has set one aside."""
        found = {part.checkpoint for place in self.places.values() for part in place.quarantined}
        for place in self.places.values():
            found |= {seen.id for seen in place.copies(run) if any(seen.sound.values())}
        return found


def union(*seen: Mapping[int, frozenset[int]]) -> dict[int, frozenset[int]]:
    """Whose parts there are, by world size, in any of these places."""
    found: dict[int, frozenset[int]] = {}
    for ranks in seen:
        for world, some in ranks.items():
            have = found.get(world)
            found[world] = some if have is None or have is some else have if have >= some else have | some
    return found


def complete_worlds(ranks: Mapping[int, Collection[int]]) -> list[int]:
    """The world sizes W of which ranks 0..W-1 are all there. Ranks lie below their world size: their number tells."""
    return [world for world, found in ranks.items() if len(found) == world]


def is_complete(ranks: Mapping[int, Collection[int]]) -> bool:
    return bool(complete_worlds(ranks))


def runs(world: World) -> list[str]:
    """Every run that any place shows."""
    return sorted({owner.run for place in world.places.values() for owner in place.checkpoints})
