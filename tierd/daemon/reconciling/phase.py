"""Whether the reconciler works on, drains, or halts for another configuration, and how flushes hurry."""

from __future__ import annotations

import asyncio
import math
import time

_HURRY = 60.0  # seconds after `hurry` for which no flush pauses
_ENDING = 600.0  # seconds after `node_ends` for which the newest checkpoints are sent first


class RunMode:
    """The phase of the reconciler.

    Attributes:
        draining: only flushes are begun, because the daemon ends.
        halted: set while workers begin no further action, because the configuration changes.
    """

    def __init__(self) -> None:
        self.draining = False
        self.halted = asyncio.Event()
        self._hurried = self._ending = -math.inf  # monotonic seconds

    def hurry(self) -> None:
        """Let flushes make no pauses for the next `_HURRY` seconds."""
        self._hurried = time.monotonic()

    def node_ends(self) -> bool:
        """Let flushes make no pauses and send the newest first for the next `_ENDING` seconds; return whether they did
        not before.
        """
        before, self._ending = self.newest_first, time.monotonic()
        return not before

    @property
    def newest_first(self) -> bool:
        """Whether the newest checkpoints are sent first, whatever else tiers lack."""
        return time.monotonic() - self._ending < _ENDING

    @property
    def ends(self) -> bool:
        """Whether the daemon, the node or this configuration ends soon, so that no long action may go on."""
        return self.draining or self.halted.is_set() or self.newest_first

    @property
    def hurries(self) -> bool:
        """Whether flushes make no pauses."""
        return self.ends or time.monotonic() - self._hurried < _HURRY
