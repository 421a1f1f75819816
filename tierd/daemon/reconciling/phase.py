"""Whether the reconciler works on, drains, or halts for another configuration, and whether flushes hurry."""

from __future__ import annotations

import asyncio
import math
import time

_HURRY = 60.0  # seconds after `hurry` for which no flush pauses


class Phase:
    """The phase of the reconciler.

    Attributes:
        draining: only flushes are begun, because the daemon ends.
        halted: set while workers begin no further action, because the configuration changes.
    """

    def __init__(self) -> None:
        self.draining = False
        self.halted = asyncio.Event()
        self._hurried = -math.inf  # monotonic seconds

    def hurry(self) -> None:
        """Let flushes make no pauses for the next `_HURRY` seconds."""
        self._hurried = time.monotonic()

    @property
    def hurries(self) -> bool:
        """Whether flushes make no pauses."""
        return self.draining or self.halted.is_set() or time.monotonic() - self._hurried < _HURRY
