"""The time over which a flush is spread.

Training loses least if the work in the background is even. So a flush ends about half-way to the next save, which is
predicted from past intervals. It ends no later than `LONGEST_S` after it began. A node that is lost before the end
costs two intervals of training instead of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

SAVES = 8  # the latest saves, from which the interval is estimated
LONGEST_S = 30.0

_FEWEST = 4  # saves from which an interval can be estimated
_SHARE = 0.5  # of an interval; the other half is a reserve for a flush that takes longer than expected


def spread_s(saved_at: Sequence[float], now: float) -> float:
    """Seconds over which a flush that begins at `now` is spread; 0 if it should run at full speed.

    Args:
        saved_at: when the run's latest checkpoints were saved, oldest first; monotonic seconds, like `now`.
    """
    if len(saved_at) < _FEWEST:
        return 0.0
    interval = median(later - earlier for earlier, later in pairwise(saved_at))
    return min(max(saved_at[-1] + _SHARE * interval - now, 0.0), LONGEST_S)
