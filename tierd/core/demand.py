"""Which place wants which checkpoint of a run, judged over all places together.

A place wants a checkpoint when its policy keeps it in a place that holds every complete checkpoint that is known
anywhere, verified there or not. So a rule that keeps for good counts from the oldest checkpoint known, and a tier wants
what only another tier has.

Invariant: deleting a checkpoint that no place wants changes nothing that any place wants. Therefore sending what a tier
wants and deleting what none wants comes to an end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tierd.core.config import Config
from tierd.core.errors import FormatTooNew
from tierd.core.ids import CheckpointId, PartId
from tierd.core.launches import living
from tierd.core.policies import EVERYTHING, policy_for, unknown
from tierd.core.retention import CheckpointInfo, Ranking, RetentionPolicy
from tierd.core.world import Place, Seen, World, is_complete, union


class Demand:
    """What is known of one run over all places that answer, and who wants what of it.

    Attributes:
        copies: by checkpoint and place, what each place that answers shows.
        merged: each checkpoint with the parts that can be used in any place.
        whole: those that are complete by these parts.
    """

    def __init__(self, world: World, config: Config, run: str) -> None:
        self.world, self.run = world, run
        self.copies = world.copies(run)
        self.merged = {one: merge([readable(seen) for seen in copies.values()]) for one, copies in self.copies.items()}
        self.whole = frozenset(one for one, seen in self.merged.items() if is_complete(seen.ranks))
        self.origins = world.origins(run)
        self._config = config
        self._infos = {
            one: info_of(seen, frozenset(), complete=one in self.whole)
            for one, seen in self.merged.items()
            if any(seen.ranks.values())
        }
        self._policies: dict[str, RetentionPolicy] = {}
        self._rankings: dict[str, Ranking] = {}
        self._living: dict[str, frozenset[str]] = {}

    def policy(self, place: str) -> RetentionPolicy:
        """The run's policy in a place."""
        if place not in self._policies:
            self._policies[place] = policy_for(self.world, self._config, self.run, place)
        return self._policies[place]

    def _wants(self, place: str) -> RetentionPolicy:
        """What a place counts as wanting: a tier wants everything while the run's policy cannot be read."""
        here = self.world.tiers.get(place)
        lost = here and (unknown(here, self.run) or unknown(self.world.spool, self.run))
        return EVERYTHING if lost else self.policy(place)

    def living(self, place: str) -> frozenset[str]:
        """The launches that keep in a place what they would keep alone."""
        if place not in self._living:
            self._living[place] = living(self.world, self.run, place)
        return self._living[place]

    def ranking(self, place: str) -> Ranking:
        """Where checkpoints stand by a place's policy if it held every complete one that is known."""
        if place not in self._rankings:
            infos = list(self._infos.values())
            self._rankings[place] = Ranking(infos, self._wants(place), self.origins, self.living(place))
        return self._rankings[place]

    def reasons(self, place: str, checkpoint: CheckpointId, *, hoped: bool = False) -> tuple[str, ...]:
        """Why a place wants a checkpoint; empty if it does not. `hoped`: as if it were complete in any case."""
        info = self._infos.get(checkpoint)
        if info is None or not (info.complete or hoped):
            return ()
        verdict = self.ranking(place).verdict(replace(info, complete=True))
        return verdict.reasons if verdict.keep else ()

    def wanted(
        self, place: str, pins: frozenset[CheckpointId], hoped: Collection[CheckpointId] = ()
    ) -> dict[CheckpointId, bool]:
        """What a place wants if it holds everything known, and also the missing parts of what is `hoped` for; whether
        for good. What is incomplete and not hoped for counts as incomplete."""
        infos = [
            replace(info, complete=info.complete or info.id in hoped, pinned=info.id in pins)
            if info.id in pins or (not info.complete and info.id in hoped)
            else info
            for info in self._infos.values()
        ]
        if not hoped:
            ranking = self.ranking(place)
        else:
            ranking = Ranking(infos, self._wants(place), self.origins, self.living(place))
        return {info.id: ranking.is_for_good(info) for info in infos if ranking.verdict(info).keep}

    def lacking(self, tier: str, checkpoint: CheckpointId, copy: Seen | None = None) -> bool:
        """Whether a tier has no complete copy: of an incomplete checkpoint, not all parts of `copy`. A tier that does
        not answer lacks everything."""
        place = self.world.tiers[tier]
        seen = place.checkpoints.get(checkpoint) if place else None
        if seen is None:
            return True
        if any(isinstance(why, FormatTooNew) for why in seen.defects.values()):
            return False  # it is there, for a newer tierd or one with another key
        return not (seen.usable or (checkpoint not in self.whole and copy and seen.covers(copy)))

    def waiting(self, tier: str, checkpoint: CheckpointId, copy: Seen, *, hoped: bool) -> tuple[str, ...]:
        """The other tiers that want a checkpoint, of which `tier` has this copy, and lack it."""
        return tuple(
            name
            for name in self.world.tiers
            if name != tier and self.lacking(name, checkpoint, copy) and self.reasons(name, checkpoint, hoped=hoped)
        )

    def is_last(self, place: str, checkpoint: CheckpointId) -> bool:
        """Whether a checkpoint is complete, and without `place` no more."""
        others = [readable(seen) for name, seen in self.copies.get(checkpoint, {}).items() if name != place]
        return checkpoint in self.whole and not is_complete(union(*(seen.ranks for seen in others)))

    def spread(self, checkpoint: CheckpointId, tier: str) -> tuple[int, bool]:
        """How many tiers beside `tier` have a complete copy, and whether one of them wants it by its policy."""
        found = [
            name
            for name, seen in self.copies[checkpoint].items()
            if name in self.world.tiers and name != tier and seen.usable
        ]
        return len(found), any(self.reasons(name, checkpoint) for name in found)


def merge(copies: list[Seen]) -> Seen:
    """One checkpoint with the parts of all these copies."""
    first = copies[0]
    if len(copies) == 1:
        return first
    facts = {part: found for seen in reversed(copies) for part, found in seen.facts.items()}
    return Seen(first.id, union(*(seen.ranks for seen in copies)), facts)


def readable(seen: Seen) -> Seen:
    """A copy without the parts that are known to be unusable."""
    if not seen.defects:
        return seen
    bad = {(part.rank, part.world) for part in seen.defects}
    ranks = {world: frozenset(rank for rank in some if (rank, world) not in bad) for world, some in seen.ranks.items()}
    return Seen(seen.id, {world: some for world, some in ranks.items() if some}, seen.facts)


def info_of(seen: Seen, pins: frozenset[CheckpointId], *, complete: bool, verified: bool = True) -> CheckpointInfo:
    """What retention is told of a copy. The lowest rank speaks for the checkpoint; a part whose manifest cannot be used
    makes it incomplete."""
    facts = seen.spoken
    return CheckpointInfo(
        seen.id,
        complete=complete and not seen.defects,
        verified=verified,
        pinned=seen.id in pins,
        created=facts.created if facts else None,
        metrics=facts.metrics if facts else None,
        origin=facts.origin if facts else None,
    )


def lacked(place: Place, merged: Seen, ranks: Collection[int], beyond: float) -> list[PartId]:
    """The parts of a complete checkpoint, of `ranks` and of those from `beyond` on, that a place does not list."""
    return [
        part
        for world, some in merged.ranks.items()
        if len(some) == world
        for rank in sorted(some if beyond < world else some.intersection(ranks))
        if rank in ranks or rank >= beyond
        for part in [PartId(merged.id, rank, world)]
        if not place.lists(part)
    ]
