"""`tierd.open`: read a run's checkpoints from its tiers, without a spool, without a daemon, and without a write.

Invariant: this package never puts or deletes an object. Every byte that it loads was verified on this read.
"""

from __future__ import annotations

from tierd.reading.listing import Listed
from tierd.reading.reader import Reader, open
from tierd.reading.restoring import Loaded

__all__ = ["Listed", "Loaded", "Reader", "open"]
