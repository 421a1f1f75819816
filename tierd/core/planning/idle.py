"""How long an idle daemon waits between two listings of a tier.

Invariant: an idle daemon makes at most `REQUESTS_AN_HOUR` requests over all tiers, however much the tiers hold. An
event (a save, a trainer that attaches, a request) begins a listing at once. So waiting delays only the observation of
changes by other nodes.
"""

from __future__ import annotations

from tierd.core.planning.place import Place

REQUESTS_AN_HOUR = 60  # at S3's price for listings, $0.22 a month
SETTLED_S = 600.0  # the daemon stops waiting for a checkpoint of which no part arrived for this long


def pause_s(rescan_s: float, requests: int, tiers: int) -> float:
    """Seconds until an idle daemon lists a tier again.

    Args:
        rescan_s: the configured minimum, in seconds.
        requests: the number of requests that the last listing of this tier took.
        tiers: the number of tiers, each of which gets an equal share of `REQUESTS_AN_HOUR`.
    """
    return max(rescan_s, requests * tiers * 3600 / REQUESTS_AN_HOUR)


def is_on_the_way(spool: Place, tier: Place) -> bool:
    """Whether the tier has an incomplete checkpoint that is also in this spool: other nodes may be sending the rest."""
    tier_copies = (tier.checkpoints.get(checkpoint) for checkpoint in spool.checkpoints)
    return any(copy is not None and not copy.usable for copy in tier_copies)
