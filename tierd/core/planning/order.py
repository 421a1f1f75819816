"""The order in which a daemon sends checkpoints to a tier.

The newest checkpoint is first, because a resume needs it. Checkpoints that the tier wants for good are second. Of these
the one with the fewest copies is first, because another tier may hold it only for this tier. The others follow, newest
first.

A tier that is slower than the saves would never receive anything but the newest checkpoint. Therefore the daemon sends
some checkpoints that are wanted for good after each newest one: about the square root of the number that wait. So both
kinds make progress however slow the tier is. The queue shrinks as long as saves add less than the tier can receive.

Before the node ends, only the newest count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tierd.core.ids import CheckpointId
from tierd.core.planning.inventory import Sent
from tierd.core.planning.place import Place


@dataclass(frozen=True, slots=True)
class FlushCandidate:
    """A checkpoint of which a tier lacks parts.

    Attributes:
        begun: how many parts of it the tier has; 0 if the tier has a newer complete checkpoint.
        for_good: whether a rule wants it however many newer checkpoints follow.
        copies: how many other tiers have a complete copy.
        at_home: whether one of those tiers wants it by its own policy, and does not only hold it for other tiers.
    """

    checkpoint: CheckpointId
    begun: int
    for_good: bool
    copies: int
    at_home: bool


def in_turn(
    candidates: Collection[FlushCandidate],
    newest: Mapping[str, CheckpointId],
    sent: Sent | None,
    awaited: Collection[CheckpointId] = (),
    *,
    newest_first: bool = False,
) -> list[CheckpointId]:
    """The candidates for one tier in the order in which to send them.

    Args:
        newest: by run, the newest checkpoint that is complete on the tier.
        sent: the checkpoint that this daemon sent there last, which is finished first.
        awaited: the checkpoints for which a restore on another node waits.
        newest_first: the newest checkpoints are first in any case, because the node ends.
    """
    if newest_first:
        return sorted((candidate.checkpoint for candidate in candidates), key=_newest, reverse=True)
    by_age = sorted(candidates, key=_age, reverse=True)
    first_of: dict[str, FlushCandidate | None] = {}
    for candidate in by_age:
        run = candidate.checkpoint.run
        if first_of.setdefault(run, None) is None and _is_ahead(candidate, newest.get(run), sent):
            first_of[run] = candidate
    heads = [candidate for candidate in first_of.values() if candidate]
    permanent = sorted(
        (
            candidate
            for candidate in by_age
            if candidate.for_good and first_of[candidate.checkpoint.run] is not candidate
        ),
        key=_danger,
    )
    if sent is not None and sent.others**2 < len(permanent):
        first: list[FlushCandidate] = [permanent[0], *heads, *permanent[1:]]
    else:
        first = [*heads, *permanent]
    urgent = [
        candidate
        for candidate in by_age
        if candidate.checkpoint in awaited or (sent and candidate.checkpoint == sent.last)
    ]
    return list(dict.fromkeys(candidate.checkpoint for candidate in [*urgent, *first, *by_age]))


def leads(checkpoint: CheckpointId, spool: Place, tier: Place) -> bool:
    """Whether a checkpoint that is about to be sent is its run's newest.

    Two conditions have to hold. The checkpoint is newer than every complete checkpoint on the tier. And the tier has a
    part of it, or the spool has no newer one. The second condition excludes a checkpoint that is wanted for good: when
    several of these are sent one after another, each is newer than all on the tier although newer ones wait.
    """
    complete, newest = tier.run(checkpoint.run).whole, spool.run(checkpoint.run).newest
    if complete and complete[-1] > checkpoint:
        return False
    return checkpoint in tier.checkpoints or newest is None or newest <= checkpoint


def _is_ahead(candidate: FlushCandidate, newest: CheckpointId | None, sent: Sent | None) -> bool:
    """Whether a candidate is newer than its run's newest on the tier, and either begun or newer than the last sent."""
    if newest is not None and candidate.checkpoint <= newest:
        return False
    return (
        bool(candidate.begun)
        or sent is None
        or sent.last.run != candidate.checkpoint.run
        or candidate.checkpoint > sent.last
    )


def _age(candidate: FlushCandidate) -> tuple[str, int, int, str]:
    """Sort key, largest first: the newest launch, and in it the checkpoint of which other nodes have sent most."""
    return candidate.checkpoint.attempt, candidate.begun, candidate.checkpoint.step, candidate.checkpoint.run


def _newest(checkpoint: CheckpointId) -> tuple[str, int, str]:
    return checkpoint.attempt, checkpoint.step, checkpoint.run


def _danger(candidate: FlushCandidate) -> tuple[int, bool, CheckpointId]:
    return candidate.copies, candidate.at_home, candidate.checkpoint
