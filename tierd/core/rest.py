"""How long a daemon rests between two looks at a tier when nothing is left to do.

Law: at rest, all looks of a daemon together make at most `REQUESTS_AN_HOUR`, however much there is to look at. An event
(a save, a trainer that attaches, a request) begins a look at once; resting delays only what other nodes did.
"""

from __future__ import annotations

from tierd.core.world import Place

REQUESTS_AN_HOUR = 60  # at S3's price for listings, $0.22 a month
SETTLED_S = 600.0  # a checkpoint of which nothing came for so long is not waited for


def pause_s(rescan_s: float, requests: int, tiers: int) -> float:
    """Seconds until a daemon at rest looks at a tier again.

    Args:
        rescan_s: as configured: the least.
        requests: of the last look at this tier.
        tiers: how many there are, each with an equal share of what is allowed.
    """
    return max(rescan_s, requests * tiers * 3600 / REQUESTS_AN_HOUR)


def is_on_the_way(spool: Place, tier: Place) -> bool:
    """Whether the tier has parts of a checkpoint of this node and lacks others, which other nodes may be sending."""
    found = (tier.checkpoints.get(one) for one in spool.checkpoints)
    return any(seen is not None and not seen.usable for seen in found)
