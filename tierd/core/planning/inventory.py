"""The inventory: the observed contents of the spool and the tiers, for planning and restoring.

Invariant: an inventory holds observed facts only. A tier that did not answer is None in the `Inventory`, because a
missing answer does not mean an empty place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import CheckpointCopy, is_complete, union
from tierd.core.planning.place import SPOOL, Place
from tierd.core.timeline.head import LaunchRecord, newest, together


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
    filling: frozenset[str] = frozenset()  # runs never saved here that tiers with `backfill` may lack
    node_ends: bool = False  # soon, so that the newest checkpoints are sent first
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
            held=frozenset(checkpoint for checkpoint in self.held if checkpoint.run == run),
            needed=frozenset(checkpoint for checkpoint in self.needed if checkpoint.run == run),
            busy=frozenset(part for part in self.busy if part.checkpoint.run == run),
            trainerless=self.trainerless & {run},
            finished=self.finished & {run},
            silent=self.silent,
            full=self.full,
            append_only=self.append_only,
            filling=self.filling & {run},
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

    def on_a_tier(self, copy: CheckpointCopy) -> bool:
        """Whether one tier holds a verified copy of all parts that the spool has of a checkpoint.

        A listed manifest proves this, because a flush puts the manifest after it verified every byte. The daemon has
        also read the tier's manifests of the spool's own ranks.
        """
        tier_copies = [place.checkpoints.get(copy.id) for place in self.tiers.values() if place]
        return any(tier_copy and tier_copy.covers(copy) for tier_copy in tier_copies)

    def size_bytes(self, part: PartId) -> int:
        """A part's size in raw bytes. If its manifest was not read, the size of the checkpoint's lowest rank that was
        read; 0 if none was."""
        copies = [copy for place in self.places.values() if (copy := place.checkpoints.get(part.checkpoint))]
        known_facts = [copy.facts.get(part) for copy in copies] + [copy.spoken for copy in copies]
        return next((facts.size for facts in known_facts if facts), 0)

    def copies(self, run: str) -> dict[CheckpointId, dict[str, CheckpointCopy]]:
        """Every checkpoint of a run that any place shows, with its copies by place."""
        copies: dict[CheckpointId, dict[str, CheckpointCopy]] = defaultdict(dict)
        for name, place in self.places.items():
            for checkpoint, copy in place.run(run).seen.items():
                copies[checkpoint][name] = copy
        return dict(copies)

    def origins(self, run: str) -> dict[str, CheckpointId | None]:
        """The checkpoint that each attempt of a run resumed from, if any manifest, quarantined or not, or else any
        head says so."""
        origins: dict[str, CheckpointId | None] = {}
        for place in self.places.values():
            origins |= place.run(run).origins
            for part, facts in place.quarantined.items():
                if facts and part.checkpoint.run == run:
                    origins[part.checkpoint.attempt] = facts.origin
        for attempt, launch in self.remembered(run).items():
            origin = launch.resumed_from
            origins.setdefault(attempt, CheckpointId(run, origin.attempt, origin.step) if origin else None)
        return origins

    def remembered(self, run: str) -> dict[str, LaunchRecord]:
        """A run's launches according to all heads together."""
        return together(head for place in self.places.values() for head in place.heads.get(run, ()))

    def gone(self, run: str) -> CheckpointId | None:
        """The newest checkpoint that was complete anywhere according to the heads, if it is not complete any more.

        A checkpoint is complete here if all places together show every part, and none of these is known to be unusable.

        Returns:
            None if the checkpoint is still complete, if a part of it is quarantined, or if no head knows any.
        """
        checkpoint = newest(self.remembered(run), run)
        return None if checkpoint is None or self.has_whole(checkpoint) else checkpoint

    def has_whole(self, checkpoint: CheckpointId) -> bool:
        """Whether all places together have every part of a checkpoint, not counting parts known to be unusable; or
        whether some place has quarantined a part of it."""
        places = self.places.values()
        sound = union(*(copy.sound for place in places if (copy := place.checkpoints.get(checkpoint))))
        return is_complete(sound) or any(
            part.checkpoint == checkpoint for place in places for part in place.quarantined
        )

    def sound(self, run: str) -> set[CheckpointId]:
        """The checkpoints of which some place has a part that is not known to be unusable, or a quarantined part."""
        checkpoints = {part.checkpoint for place in self.places.values() for part in place.quarantined}
        for place in self.places.values():
            checkpoints |= {copy.id for copy in place.copies(run) if any(copy.sound.values())}
        return checkpoints


def runs(inventory: Inventory) -> list[str]:
    """Every run that any place shows."""
    return sorted({run for place in inventory.places.values() for run in place.runs})
