"""The order in which a flush sends a part's chunks, so that several nodes do not send the same bytes at a time.

Chunks of one home are the same on several ranks, and lie on the tier once. Each of these ranks begins at another place
of the same sequence and goes on around it. Where it comes to chunks that another rank has sent, it skips them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierd.core.ids import PartId
from tierd.core.manifest import Chunk


def sending_order(part: PartId, chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the chunks of a part in the order in which a flush sends them: first those of other ranks, by home.

    They come first, because all nodes begin at about the same time, and each node's own chunks take their own time.
    The ranks that hold the same bytes mostly have the same distance to each other, one node's number of ranks.
    """
    by_home: dict[int, list[Chunk]] = {}
    own = []
    for chunk in chunks:
        if chunk.home is None:
            own.append(chunk)
        else:
            by_home.setdefault(chunk.home, []).append(chunk)
    order = []
    for home in sorted(by_home):
        alike = by_home[home]
        begin = len(alike) * part.rank // part.world
        order += alike[begin:] + alike[:begin]
    return order + own
