"""Which place wants which checkpoint of a run, judged over all places together.

A place wants a checkpoint if its policy would keep the checkpoint in a place that held every complete checkpoint known
anywhere, verified or not. So a rule that keeps checkpoints for good counts from the oldest known checkpoint, and a tier
also wants checkpoints that only another tier has.

Invariant: deleting a checkpoint that no place wants does not change which checkpoints any place wants. Therefore
sending wanted checkpoints and deleting unwanted ones comes to an end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from tierd.core.config import Config
from tierd.core.errors import FormatTooNew
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import CheckpointCopy, changed_checkpoints, is_complete, union_ranks
from tierd.core.planning.inventory import KEEP_EVERYTHING, Inventory, fills_tier, policy_for, unknown_policy_reason
from tierd.core.planning.place import SPOOL, Place
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.retention.retention_verdicts import Ages, CheckpointInfo, Ranking
from tierd.core.timeline.concurrent_launches import live_launches


@dataclass(frozen=True, slots=True)
class DemandedCheckpoints:
    """The checkpoints that a place wants. `is_permanent` says whether the place wants one however many newer follow."""

    ids: frozenset[CheckpointId]
    is_permanent: Callable[[CheckpointId], bool]

    def __or__(self, preferred: DemandedCheckpoints) -> DemandedCheckpoints:
        """The checkpoints that either wants. Where both want one, `preferred` decides whether it is wanted for good."""

        def is_permanent(checkpoint: CheckpointId) -> bool:
            return preferred.is_permanent(checkpoint) if checkpoint in preferred.ids else self.is_permanent(checkpoint)

        return DemandedCheckpoints(self.ids | preferred.ids, is_permanent)

    def __and__(self, checkpoints: Collection[CheckpointId]) -> DemandedCheckpoints:
        """The wanted checkpoints that are also in `checkpoints`."""
        return DemandedCheckpoints(self.ids.intersection(checkpoints), self.is_permanent)


class Demand:
    """One run's checkpoints over all places that answer, and which place wants which of them.

    Attributes:
        copies: by checkpoint and place, the copy that each answering place shows.
        merged: each checkpoint with the parts that are usable in any place.
        complete_ids: the checkpoints that are complete by their merged parts.

    Args:
        before: the demand of an earlier inventory, so that only checkpoints that differ are computed again.
    """

    def __init__(self, inventory: Inventory, config: Config, run: str, before: Demand | None = None) -> None:
        self.inventory, self.run = inventory, run
        self.copies: dict[CheckpointId, dict[str, CheckpointCopy]]
        self.merged: dict[CheckpointId, CheckpointCopy] = {}
        self.complete_ids: frozenset[CheckpointId]
        self._infos: dict[CheckpointId, CheckpointInfo] = {}
        self._pending: dict[str, dict[CheckpointId, tuple[PartId, ...]]] = {}  # by tier; empty ones are left out
        changed = None if before is None else self._go_on_from(before)
        complete_before = before.complete_ids if before and changed is not None else frozenset[CheckpointId]()
        if changed is None:
            self.copies = inventory.copies(run)
            changed = self.copies.keys()
        for checkpoint in changed:
            self.merged.pop(checkpoint, None)
            self._infos.pop(checkpoint, None)
            if checkpoint in self.copies:
                self.merged[checkpoint] = merged = merge_usable_copies(tuple(self.copies[checkpoint].values()))
                if merged.complete or any(merged.ranks.values()):
                    self._infos[checkpoint] = retention_info(merged, frozenset(), complete=merged.complete)
        fresh = [checkpoint for checkpoint in changed if checkpoint in self.merged and self.merged[checkpoint].usable]
        self.complete_ids = complete_before.difference(changed).union(fresh)
        for tier in self._pending:
            self._note_pending(tier, changed)
        self.origins = inventory.origins(run)
        self.config = config
        self._policies: dict[str, RetentionPolicy] = {}
        self._rankings: dict[str, Ranking] = {}
        self._live: dict[str, frozenset[str]] = {}

    def _go_on_from(self, before: Demand) -> Collection[CheckpointId] | None:
        """Take over the results of `before` and return the checkpoints that differ since; None if the places differ."""
        places, old = self.inventory.places, before.inventory.places
        if list(old) != list(places):
            return None
        current = {name: place.run(self.run).copies for name, place in places.items()}
        changed = set[CheckpointId]().union(
            *(changed_checkpoints(old[name].run(self.run).copies, current[name]) for name in current)
        )
        self.copies, self.merged, self._infos = dict(before.copies), dict(before.merged), dict(before._infos)
        self._pending = {tier: dict(parts) for tier, parts in before._pending.items()}
        for checkpoint in changed:
            self.copies.pop(checkpoint, None)
            if copies := {
                name: run_copies[checkpoint] for name, run_copies in current.items() if checkpoint in run_copies
            }:
                self.copies[checkpoint] = copies
        return changed

    def pending(self, tier: str) -> dict[CheckpointId, tuple[PartId, ...]]:
        """The parts that the spool has with a readable manifest, and a tier that answers without a usable one."""
        if tier not in self._pending:
            self._pending[tier] = {}
            self._note_pending(tier, self.inventory.spool.run(self.run).copies)
        return self._pending[tier]

    def _note_pending(self, tier: str, changed: Iterable[CheckpointId]) -> None:
        pending = self._pending[tier]
        for checkpoint in changed:
            pending.pop(checkpoint, None)
            copies = self.copies.get(checkpoint, {})
            if SPOOL in copies and (parts := pending_parts(copies[SPOOL], copies.get(tier))):
                pending[checkpoint] = parts

    def policy(self, place: str) -> RetentionPolicy:
        if place not in self._policies:
            self._policies[place] = policy_for(self.inventory, self.config, self.run, place)
        return self._policies[place]

    def fills(self, tier: str) -> bool:
        """Whether this daemon copies the run to a tier although it never saved the run."""
        return fills_tier(self.inventory, self.config, self.run, tier)

    def _wants(self, place: str) -> RetentionPolicy:
        """The policy by which a place wants checkpoints: a tier wants all while the run's policy cannot be read."""
        tier = self.inventory.tiers.get(place)
        policy_unknown = tier and (
            unknown_policy_reason(tier, self.run) or unknown_policy_reason(self.inventory.spool, self.run)
        )
        return KEEP_EVERYTHING if policy_unknown else self.policy(place)

    def live(self, place: str) -> frozenset[str]:
        """The launches that keep in a place the checkpoints that they would keep if no later launch existed."""
        if place not in self._live:
            self._live[place] = live_launches(self.inventory, self.run, place)
        return self._live[place]

    def ranking(self, place: str) -> Ranking:
        """The ranking of checkpoints by a place's policy as if the place held every known complete checkpoint."""
        if place not in self._rankings:
            infos = list(self._infos.values())
            self._rankings[place] = Ranking(infos, self._wants(place), self.origins, self.live(place))
        return self._rankings[place]

    def reasons(self, place: str, checkpoint: CheckpointId, *, hoped: bool = False) -> tuple[str, ...]:
        """Why a place wants a checkpoint; empty if it does not. `hoped` judges it as if it were complete."""
        info = self._infos.get(checkpoint)
        if info is None or not (info.complete or hoped):
            return ()
        if info.complete:
            return self.ranking(place).verdict(info).reasons if checkpoint in self.ranking(place).kept_ids else ()
        verdict = self.ranking(place).verdict(replace(info, complete=True))
        return verdict.reasons if verdict.keep else ()

    def keeps(self, place: str, checkpoint: CheckpointId) -> bool:
        """Whether a place wants a checkpoint that is complete."""
        info = self._infos.get(checkpoint)
        return info is not None and info.complete and checkpoint in self.ranking(place).kept_ids

    def demanded(
        self, place: str, pins: frozenset[CheckpointId], hoped: Collection[CheckpointId] = ()
    ) -> DemandedCheckpoints:
        """The checkpoints that a place wants if it held every known part, and the missing parts of those in `hoped`.

        An incomplete checkpoint that is not in `hoped` counts as incomplete.
        """
        infos, pinned = self._infos, pins & self._infos.keys()
        hopes = frozenset(hoped)
        if halves := [checkpoint for checkpoint in self.incomplete_ids if checkpoint in hopes]:
            infos = infos | {checkpoint: replace(infos[checkpoint], complete=True) for checkpoint in halves}
            ranking = Ranking(list(infos.values()), self._wants(place), self.origins, self.live(place))
        else:
            ranking = self.ranking(place)
        return DemandedCheckpoints(
            ranking.kept_ids | pinned,
            lambda checkpoint: checkpoint in pinned or ranking.is_permanent(infos[checkpoint]),
        )

    @cached_property
    def newest_attempt(self) -> str:
        """The newest launch of which any place shows a checkpoint."""
        return max((checkpoint.attempt for checkpoint in self.merged), default="")

    @cached_property
    def ages(self) -> Ages:
        """The ages of all checkpoints, complete or not, whose manifest was read."""
        facts = {checkpoint: copy.metadata_facts for checkpoint, copy in self.merged.items() if copy.metadata_facts}
        dated = (
            ((checkpoint.run, checkpoint.attempt, checkpoint.step), facts[checkpoint].created) for checkpoint in facts
        )
        return Ages(dated, by_files=any(read.is_watched for read in facts.values()))

    @cached_property
    def incomplete_ids(self) -> tuple[CheckpointId, ...]:
        """The checkpoints of which some part is usable and which are incomplete."""
        return tuple(checkpoint for checkpoint, info in self._infos.items() if not info.complete)

    def lacks_complete(self, tier: str, checkpoint: CheckpointId, copy: CheckpointCopy | None = None) -> bool:
        """Whether a tier has no complete copy of a checkpoint.

        A tier lacks an incomplete checkpoint if it does not have all parts of `copy`. A tier that does not answer lacks
        every checkpoint.
        """
        place = self.inventory.tiers[tier]
        tier_copy = place.checkpoints.get(checkpoint) if place else None
        if tier_copy is None:
            return True
        if any(isinstance(why, FormatTooNew) for why in tier_copy.defects.values()):
            return False  # the copy is readable by a newer tierd or by one with another key
        return not (tier_copy.usable or (checkpoint not in self.complete_ids and copy and tier_copy.covers(copy)))

    def waiting_tiers(
        self, tier: str, checkpoint: CheckpointId, copy: CheckpointCopy, *, hoped: bool
    ) -> tuple[str, ...]:
        """The other tiers that want a checkpoint and lack it. `copy` is the copy that `tier` has."""
        return tuple(
            name
            for name in self.inventory.tiers
            if name != tier
            and self.lacks_complete(name, checkpoint, copy)
            and self.reasons(name, checkpoint, hoped=hoped)
        )

    def is_last(self, place: str, checkpoint: CheckpointId) -> bool:
        """Whether a checkpoint is complete with the copy in `place` and incomplete without that copy."""
        other_copies = [
            without_defects(copy) for name, copy in self.copies.get(checkpoint, {}).items() if name != place
        ]
        return checkpoint in self.complete_ids and not is_complete(union_ranks(*(copy.ranks for copy in other_copies)))

    def complete_elsewhere(self, checkpoint: CheckpointId, tier: str) -> tuple[int, bool]:
        """How many tiers other than `tier` have a complete copy, and whether one of them wants it by its policy."""
        tiers = [
            name
            for name, copy in self.copies[checkpoint].items()
            if name in self.inventory.tiers and name != tier and copy.usable
        ]
        return len(tiers), any(self.reasons(name, checkpoint) for name in tiers)


def merge_usable_copies(copies: tuple[CheckpointCopy, ...]) -> CheckpointCopy:
    """One checkpoint with the usable parts of all these copies. The result for the same copies is cached."""
    memo = copies[0].memo
    cached_copies, merged = memo.get(merge_usable_copies, ((), None))
    if merged is None or len(cached_copies) != len(copies) or any(map(operator.is_not, cached_copies, copies)):
        merged = merge_copies([without_defects(copy) for copy in copies])
        memo[merge_usable_copies] = copies, merged
    return cast(CheckpointCopy, merged)


def merge_copies(copies: list[CheckpointCopy]) -> CheckpointCopy:
    """One checkpoint with the parts of all these copies."""
    first = copies[0]
    if len(copies) == 1:
        return first
    facts = {part: part_facts for copy in reversed(copies) for part, part_facts in copy.facts.items()}
    return CheckpointCopy(first.id, union_ranks(*(copy.ranks for copy in copies)), facts)


def without_defects(copy: CheckpointCopy) -> CheckpointCopy:
    """A copy without the parts that are known to be unusable."""
    if not copy.defects:
        return copy
    defective = {(part.rank, part.world) for part in copy.defects}
    ranks = {
        world: frozenset(rank for rank in listed if (rank, world) not in defective)
        for world, listed in copy.ranks.items()
    }
    return CheckpointCopy(copy.id, {world: usable for world, usable in ranks.items() if usable}, copy.facts)


def retention_info(
    copy: CheckpointCopy, pins: frozenset[CheckpointId], *, complete: bool, verified: bool = True
) -> CheckpointInfo:
    """The input to retention for a copy.

    The lowest rank's manifest gives the metadata of the checkpoint. A part whose manifest is unusable makes the
    checkpoint incomplete.
    """
    if pins and copy.id in pins:
        return replace(retention_info(copy, frozenset(), complete=complete, verified=verified), pinned=True)
    kind = complete, verified
    info: CheckpointInfo | None = copy.memo.get(kind)
    if info is None:
        info = copy.memo[kind] = _info_of(copy, complete=complete, verified=verified)
    return info


def _info_of(copy: CheckpointCopy, *, complete: bool, verified: bool) -> CheckpointInfo:
    facts = copy.metadata_facts
    return CheckpointInfo(
        copy.id,
        complete=complete and not copy.defects,
        verified=verified,
        created=facts.created if facts else None,
        metrics=facts.metrics if facts else None,
        origin=facts.origin if facts else None,
        is_watched=facts is not None and facts.is_watched,
    )


def pending_parts(spool_copy: CheckpointCopy, tier_copy: CheckpointCopy | None) -> tuple[PartId, ...]:
    """The parts with a readable manifest in the spool and without a usable one on the tier, by rank.

    There are none of a checkpoint whose parts do not belong together, because nobody could restore it.
    """
    if spool_copy.is_mismatched or (tier_copy and tier_copy.is_mismatched):
        return ()
    if tier_copy and not tier_copy.defects and tier_copy.ranks == spool_copy.ranks:
        return ()
    return tuple(part for part in sorted(spool_copy.facts) if tier_copy is None or not tier_copy.has(part))


def unlisted_parts(place: Place, merged: CheckpointCopy, ranks: Collection[int], beyond: float) -> list[PartId]:
    """The parts of a complete checkpoint that a place does not list, for `ranks` and for all ranks >= `beyond`."""
    return [
        part
        for world, listed in merged.ranks.items()
        if len(listed) == world
        for rank in sorted(listed if beyond < world else listed.intersection(ranks))
        if rank in ranks or rank >= beyond
        for part in [PartId(merged.id, rank, world)]
        if not place.lists(part)
    ]
