"""The inventory: the observed contents of the spool and the tiers, for planning and restoring; and from it, the policy
that holds for a run in a place, and the node that prunes or fills a tier.

Invariant: an inventory holds observed facts only. A tier that did not answer is None in the `Inventory`, because a
missing answer does not mean an empty place. Every decision to keep or to delete asks this module for the policy, so
that the daemon, `ls` and `prune` cannot disagree. If several policies hold, what any of them keeps is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tierd.core.config import Config
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import CheckpointCopy, is_complete, union_ranks
from tierd.core.planning.place import SPOOL, Place
from tierd.core.retention.policy import RetentionPolicy, StoredRetention, merge_policies
from tierd.core.timeline.launch_chain import LaunchRecord, merge_heads, newest_recorded


@dataclass(frozen=True, slots=True)
class LastSent:
    """The checkpoint that this daemon sent to a tier last, and how many it sent since the newest one (`sent_since`)."""

    last: CheckpointId
    sent_since: int = 0


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything observed. Nothing in `being_restored` and `busy` is deleted, because the daemon itself is using it.

    `trainerless` are the runs in the spool that had neither an attached trainer nor a new part for minutes. `finished`
    are the runs that had neither for as long as the configuration's `finished` says.
    """

    spool: Place
    tiers: Mapping[str, Place | None]  # in order of preference; None: it did not answer
    free: float = 1.0  # share of the spool's file system that is free, 0..1
    leftovers: tuple[str, ...] = ()  # stages whose writer is gone
    being_restored: frozenset[CheckpointId] = frozenset()  # being restored
    awaited: frozenset[CheckpointId] = frozenset()  # by a restore on another node, which can read them from a tier only
    busy: frozenset[PartId] = frozenset()  # being flushed
    trainerless: frozenset[str] = frozenset()
    finished: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()  # tiers that have not answered for `hold_for`
    full: frozenset[str] = frozenset()  # tiers that refused a put as full, and from which nothing was deleted since
    append_only: frozenset[str] = frozenset()  # tiers that refuse deletions
    sent: Mapping[str, LastSent] = field(default_factory=dict)  # by tier
    filling: frozenset[str] = frozenset()  # runs never saved here that tiers with `backfill` may lack
    node_ends: bool = False  # soon, so that the newest checkpoints are sent first
    node_id: str = ""  # this node's id among the nodes that share a tier, 8 hex digits

    @property
    def places(self) -> dict[str, Place]:
        """Every place that answered, by name, the spool first."""
        return {SPOOL: self.spool, **{name: place for name, place in self.tiers.items() if place}}

    def of_run(self, run: str) -> Inventory:
        """The part of this inventory that concerns one run: everything on which the run's plan depends."""
        return Inventory(
            self.spool.of_run(run),
            {name: place and place.of_run(run) for name, place in self.tiers.items()},
            self.free,
            being_restored=frozenset(checkpoint for checkpoint in self.being_restored if checkpoint.run == run),
            awaited=frozenset(checkpoint for checkpoint in self.awaited if checkpoint.run == run),
            busy=frozenset(part for part in self.busy if part.checkpoint.run == run),
            trainerless=self.trainerless & {run},
            finished=self.finished & {run},
            silent=self.silent,
            full=self.full,
            append_only=self.append_only,
            filling=self.filling & {run},
            node_id=self.node_id,
        )

    @property
    def pins(self) -> frozenset[CheckpointId]:
        """Every pin that any place shows."""
        return frozenset[CheckpointId]().union(*(place.pins for place in self.places.values()))

    @property
    def local_pins(self) -> frozenset[CheckpointId]:
        """The pins that the spool shows and no tier does."""
        return self.spool.pins.difference(*(place.pins for place in self.tiers.values() if place))

    def is_on_a_tier(self, copy: CheckpointCopy) -> bool:
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
        known_facts = [copy.facts.get(part) for copy in copies] + [copy.metadata_facts for copy in copies]
        return next((facts.size for facts in known_facts if facts), 0)

    def copies(self, run: str) -> dict[CheckpointId, dict[str, CheckpointCopy]]:
        """Every checkpoint of a run that any place shows, with its copies by place."""
        copies: dict[CheckpointId, dict[str, CheckpointCopy]] = defaultdict(dict)
        for name, place in self.places.items():
            for checkpoint, copy in place.run(run).copies.items():
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
        return merge_heads(head for place in self.places.values() for head in place.heads.get(run, ()))

    def missing_newest(self, run: str) -> CheckpointId | None:
        """The newest checkpoint that was complete anywhere according to the heads, if it is not complete any more."""
        checkpoint = newest_recorded(self.remembered(run), run)
        return None if checkpoint is None or self.has_complete(checkpoint) else checkpoint

    def has_complete(self, checkpoint: CheckpointId) -> bool:
        """Whether all places together have every part of a checkpoint, not counting parts known to be unusable; or
        whether some place has quarantined a part of it."""
        places = self.places.values()
        sound = union_ranks(*(copy.sound_ranks for place in places if (copy := place.checkpoints.get(checkpoint))))
        return is_complete(sound) or any(
            part.checkpoint == checkpoint for place in places for part in place.quarantined
        )

    def sound_checkpoints(self, run: str) -> set[CheckpointId]:
        """The checkpoints of which some place has a part that is not known to be unusable, or a quarantined part."""
        checkpoints = {part.checkpoint for place in self.places.values() for part in place.quarantined}
        for place in self.places.values():
            checkpoints |= {copy.id for copy in place.copies(run) if any(copy.sound_ranks.values())}
        return checkpoints


def observed_runs(inventory: Inventory) -> list[str]:
    """Every run that any place shows."""
    return sorted({run for place in inventory.places.values() for run in place.runs})


def is_janitor(inventory: Inventory, tier: Place, run: str) -> bool:
    """Whether this daemon is the janitor of `run`, which may prune the run on a shared tier.

    The janitor is the node that saved rank 0 of the newest attempt. It remains so after a full disk forced it to evict
    its copies, because no other node would finish the work. A part that was only restored to a spool does not make its
    node a janitor, because reading never deletes.
    """
    led_here, attempts = (
        inventory.spool.run(run).attempts_with_rank_0,
        inventory.spool.run(run).attempts | tier.run(run).attempts,
    )
    if attempts and _saved_first(inventory, run) >= max(attempts):
        return True
    return bool(attempts) and max(attempts) in led_here and run not in inventory.spool.restored


def fills_tier(inventory: Inventory, config: Config, run: str, tier: str) -> bool:
    """Whether this daemon copies a run that it never saved from other tiers to `tier`, because the tier has `backfill`.

    It does not if another node has recorded a policy of the run there, because that node sends what the run needs. This
    daemon records its own policy before it copies, so that no node which saves the run later prunes the copies at once.
    Nor does it once the tiers have all that they want, because it observes the run on none of them from then on.
    """
    if run not in inventory.filling:
        return False
    place = inventory.tiers.get(tier)
    if place is None or not config.tier_named(tier).backfill or run in inventory.spool.launches:
        return False
    by = {record.by for record in place.policies.get(run, ())}
    return not by or inventory.node_id in by


def _saved_first(inventory: Inventory, run: str) -> str:
    """The newest attempt of which this node saved rank 0, if any place shows a checkpoint of it; else empty."""
    launch = inventory.spool.launches.get(run)
    if launch is None or not any(0 in ranks for ranks in launch.ranks.values()):
        return ""
    return (
        launch.attempt if any(launch.attempt in place.run(run).attempts for place in inventory.places.values()) else ""
    )


DEFAULT_POLICY = RetentionPolicy()
KEEP_EVERYTHING = RetentionPolicy(keep_last=1 << 31)


def policy_for(inventory: Inventory, config: Config, run: str, place: str) -> RetentionPolicy:
    """The policy of `run` in `place`, the spool or a tier of the configuration.

    A tier that does not answer, and whose policy is not known here, counts as wanting everything. The policy stored
    there may keep much, and other tiers hold the checkpoints that this tier wants.
    """
    silent = place != SPOOL and inventory.tiers.get(place) is None
    return known_policy(inventory, config, run, place) or (KEEP_EVERYTHING if silent else DEFAULT_POLICY)


def known_policy(inventory: Inventory, config: Config, run: str, place: str) -> RetentionPolicy | None:
    """The policy that was given to `run` in `place`, or was recorded there; None if the default holds.

    In the spool the configuration's policy holds, because it is written for that disk; without one, the trainer's. On a
    tier the policies of all nodes hold together. A recorded default holds if no node gave a policy.
    """
    if place == SPOOL:
        return config.retention or trainers_policy(inventory, run)
    tier = inventory.tiers.get(place)
    stored = list(_standing(inventory, config, run, place, tier)) if tier else []
    local_policies = own_policies(inventory, config, run, place).values()
    given_policies = [
        *local_policies,
        *(record.retention for record in stored if record.given != "default" and record.retention),
    ]
    return merge_policies(given_policies) or merge_policies(record.retention for record in stored if record.retention)


def own_policies(inventory: Inventory, config: Config, run: str, tier: str) -> dict[str, RetentionPolicy]:
    """The policies that this node gives `run` on a tier, by origin: `configuration` or `trainer`."""
    policies = {"configuration": config.tier_named(tier).retention, "trainer": trainers_policy(inventory, run)}
    return {source: policy for source, policy in policies.items() if policy}


def trainers_policy(inventory: Inventory, run: str) -> RetentionPolicy | None:
    """The policy that this node's trainer gave `run`; None if there is none or it cannot be read."""
    return merge_policies(record.retention for record in inventory.spool.policies.get(run, ()) if record.retention)


def unknown_policy_reason(place: Place, run: str) -> str | None:
    """Why the policy of `run` in a place is not known; None if it is known. While it is unknown, nothing of the run may
    be deleted there."""
    reasons = [record.why for record in place.policies.get(run, ()) if record.retention is None]
    return reasons[0] if reasons else None


def disagreeing_policies(place: Place, run: str) -> tuple[StoredRetention, ...]:
    """The policies given to `run` in a place, if they differ or one cannot be read; otherwise none."""
    records = tuple(
        record for record in place.policies.get(run, ()) if record.given != "default" or record.retention is None
    )
    return records if len({record.retention for record in records}) > 1 or unknown_policy_reason(place, run) else ()


def unnamed_tiers(inventory: Inventory, tier: Place, run: str) -> tuple[str, ...]:
    """The tiers on which another node keeps the run, by its record on `tier`, and that this node does not name.

    What such a tier wants is not known here. None are unnamed if the inventory is no node's, because a command that was
    given URLs makes up their names.
    """
    tier_names = {
        name
        for record in tier.policies.get(run, ())
        if record.by != inventory.node_id or record.contested
        for name in record.tiers
    }
    return tuple(sorted(tier_names.difference(inventory.tiers))) if inventory.node_id else ()


def _standing(inventory: Inventory, config: Config, run: str, tier: str, place: Place) -> Iterator[StoredRetention]:
    """The policies stored on a tier, without this node's records of policies that it gives itself now, which may have
    changed since."""
    own_sources = own_policies(inventory, config, run, tier)
    for record in place.policies.get(run, ()):
        if record.by != inventory.node_id or record.contested or record.given not in own_sources:
            yield record
