"""In which order a tier is sent what it lacks.

The newest checkpoint comes first, because it is what a resume needs. Then comes what the tier wants for good, the most
endangered first, because another tier may only hold it for this one. The rest comes last, newest first.

A tier that is slower than the saves would never get beyond the newest one. Therefore, after a newest checkpoint was
sent, some that are wanted for good have their turn: about the square root of as many as wait. So both kinds go on
however slow the tier is, and fewer wait as long as fewer come than the tier can take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tierd.core.ids import CheckpointId
from tierd.core.world import Place, Sent


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint of which a tier lacks parts.

    Attributes:
        begun: how many parts of it the tier has, while it has no newer complete one.
        for_good: whether a rule wants it however many newer ones come.
        copies: how many other tiers have it complete.
        at_home: whether one of those wants it by its own policy, and does not only hold it for others.
    """

    checkpoint: CheckpointId
    begun: int
    for_good: bool
    copies: int
    at_home: bool


def in_turn(
    candidates: Collection[Candidate],
    newest: Mapping[str, CheckpointId],
    sent: Sent | None,
    needed: Collection[CheckpointId] = (),
) -> list[CheckpointId]:
    """The candidates for one tier, the next one first.

    Args:
        newest: by run, the newest checkpoint that is complete on the tier.
        sent: what this daemon sent there last: it is finished first.
        needed: what a restore on another node waits for.
    """
    found = sorted(candidates, key=_age, reverse=True)
    heads = []
    for run in dict.fromkeys(one.checkpoint.run for one in found):
        ahead = [one for one in found if one.checkpoint.run == run and _is_ahead(one, newest.get(run), sent)]
        heads += ahead[:1]
    good = sorted((one for one in found if one.for_good and one not in heads), key=_danger)
    if sent is not None and sent.others**2 < len(good):
        first: list[Candidate] = [good[0], *heads, *good[1:]]
    else:
        first = [*heads, *good]
    urgent = [one for one in found if one.checkpoint in needed or (sent and one.checkpoint == sent.last)]
    return list(dict.fromkeys(one.checkpoint for one in [*urgent, *first, *found]))


def leads(checkpoint: CheckpointId, spool: Place, tier: Place) -> bool:
    """Whether a checkpoint that is about to be sent is its run's newest: newer than all that the tier has complete, and
    begun there by others or the newest of the spool. What is wanted for good is newer than all on the tier as well,
    where one after the other is sent, and yet newer ones wait."""
    if any(seen.usable and seen.id > checkpoint for seen in tier.copies(checkpoint.run)):
        return False
    return checkpoint in tier.checkpoints or not any(seen.id > checkpoint for seen in spool.copies(checkpoint.run))


def _is_ahead(one: Candidate, newest: CheckpointId | None, sent: Sent | None) -> bool:
    """Whether it is newer than all that the tier has of its run, and was begun or is newer than what was sent last."""
    if newest is not None and one.checkpoint <= newest:
        return False
    return bool(one.begun) or sent is None or sent.last.run != one.checkpoint.run or one.checkpoint > sent.last


def _age(one: Candidate) -> tuple[str, int, int, str]:
    """The newest launch's first; of that, what others have begun."""
    return one.checkpoint.attempt, one.begun, one.checkpoint.step, one.checkpoint.run


def _danger(one: Candidate) -> tuple[int, bool, CheckpointId]:
    return one.copies, one.at_home, one.checkpoint
