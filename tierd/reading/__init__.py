"""`tierd.open`: read a run's checkpoints from its tiers, without a spool, without a daemon, and without a write.

Invariant: this package never puts or deletes an object. Every byte that it loads was verified on this read.
"""

from __future__ import annotations

from tierd.reading.checkpoint_deliveries import ListedCheckpoint
from tierd.reading.reader_opening import open
from tierd.reading.restore_from_tiers import Loaded
from tierd.reading.run_reader import Reader

__all__ = ["ListedCheckpoint", "Loaded", "Reader", "open"]
