"""The clock by which one launch dates its checkpoints.

Invariant: a clock that is set forward during a launch makes no earlier checkpoint of that launch older, because
retention would delete what was saved minutes before.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

log = logging.getLogger("tierd")

_FOLLOWED_S = 60.0  # a step forward of at most this many seconds is followed, because each node corrects its clock


class LaunchClock:
    """The wall clock, without steps forward of more than a minute since the launch began. Steps back are followed."""

    def __init__(self) -> None:
        self._base = time.time(), _elapsed_s()
        self._warned = False

    def now(self) -> datetime:
        """Return the time by which a checkpoint that is made now is dated, in UTC."""
        wall, elapsed = time.time(), _elapsed_s()
        expected = self._base[0] + elapsed - self._base[1]
        if wall - expected > _FOLLOWED_S:
            if not self._warned:
                self._warned = True
                log.warning(
                    "this node's clock was set %.0f s forward during this launch: its checkpoints are dated by the "
                    "time that passes, because keep_within would delete earlier ones; the next launch follows the "
                    "clock",
                    wall - expected,
                )
            wall = expected
        self._base = wall, elapsed
        return datetime.fromtimestamp(wall, UTC)


def _elapsed_s() -> float:
    # It also counts while the machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)
