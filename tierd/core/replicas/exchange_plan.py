"""Which ranks of a launch read which replicated bytes from a tier, and to whom they send them.

Invariant: the plan is a pure function of what all ranks offer, so every rank finds the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class ShareOffer(msgspec.Struct, frozen=True):
    """What a rank knows of its part before it reads it."""

    # names the replicated chunks of its part, alike on all ranks whose parts have the same ones; empty if it has none
    content: str = ""
    siblings: tuple[int, ...] = ()  # the ranks in whose parts other tensors of its state lie
    node: int = 0  # the lowest rank of its node
    has_part: bool = False  # whether its node's spool has its part
    header_bytes: int = 0  # of its part's tensor file
    error: str = ""  # why it knows nothing


MOST_MEMBERS = 64  # of one group, because each member connects to all others


class ExchangePlan(NamedTuple):
    """With whom a rank exchanges what, in three steps of all ranks. A step is empty for a rank without a part."""

    leaders: tuple[int, ...] = ()  # ranks whose parts have the same replicated chunks, and which read these
    # those of `leaders` that read, each some of the chunks: ranks whose node has the part, else all
    readers: tuple[int, ...] = ()
    # a leader, and after it the ranks to which it sends what the leaders have. Empty if all are leaders.
    team: tuple[int, ...] = ()
    siblings: tuple[int, ...] = ()  # the ranks that divided a state. Each sends the replicated chunks of its part.


def exchange_plans(offers: Sequence[ShareOffer]) -> list[ExchangePlan]:
    """Return each rank's plan; none if an exchange saves no read from a tier, or some rank cannot take part.

    A part that lies in the spool of its rank's node is read there, because that is faster.
    """
    families = [tuple(sorted({rank, *offer.siblings})) for rank, offer in enumerate(offers)]
    if any(offer.error for offer in offers) or any(
        member >= len(offers) or families[member] != family for family in families for member in family
    ):
        return []
    by_content: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        if offer.content:
            by_content.setdefault(offer.content, []).append(rank)
    plans = [ExchangePlan() for _ in offers]
    for alike in by_content.values():
        if len({offers[rank].node for rank in alike}) > 1 and not all(offers[rank].has_part for rank in alike):
            for rank, plan in _alike_plans(alike, offers).items():
                plans[rank] = plan
    for rank, (offer, family) in enumerate(zip(offers, families, strict=True)):
        is_at_hand = all(offers[member].has_part and offers[member].node == offer.node for member in family)
        if len(family) > 1 and not is_at_hand:
            plans[rank] = plans[rank]._replace(siblings=family)
    return plans if any(map(any, plans)) else []


def _alike_plans(alike: Sequence[int], offers: Sequence[ShareOffer]) -> dict[int, ExchangePlan]:
    """Choose leaders among ranks with the same replicated chunks, and divide the others among them."""
    preferred = sorted(alike, key=lambda rank: not offers[rank].has_part)
    leaders = tuple(sorted(preferred[:MOST_MEMBERS]))
    readers = tuple(rank for rank in leaders if offers[rank].has_part) or leaders
    followers = sorted(preferred[MOST_MEMBERS:])
    plans = dict[int, ExchangePlan]()
    for number, leader in enumerate(leaders):
        team = (leader, *followers[number :: len(leaders)]) if followers[number:] else ()
        plans[leader] = ExchangePlan(leaders, readers, team)
        plans |= {rank: ExchangePlan(team=team) for rank in team[1:]}
    return plans


def reader_of_chunks(sizes: Sequence[int], readers: Sequence[int]) -> list[int]:
    """Return the rank that reads each chunk, of these sizes in bytes: as many bytes each, in one range each.

    Without readers the list is empty.
    """
    total, before = sum(sizes), 0
    ranks = list[int]()
    for size in sizes if readers else ():
        ranks.append(readers[(2 * before + size) * len(readers) // (2 * total)])
        before += size
    return ranks
