"""What a watch reports, passed on from its thread to the event loop."""

from __future__ import annotations

import asyncio

from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.place import SPOOL
from tierd.daemon.reconcile import Reconciler
from tierd.spool.commit import CommittedPart


class ToReconciler:
    """The `Reports` of a run's watch, for a reconciler: made on its event loop, called in any thread."""

    def __init__(self, reconciler: Reconciler, run: str) -> None:
        self._reconciler, self._run = reconciler, run
        self._loop = asyncio.get_running_loop()

    def taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        self._loop.call_soon_threadsafe(self._reconciler.taken, part, outcome)

    def not_taken(self, path: str, why: str) -> None:
        def report() -> None:
            self._reconciler.journal.record("not taken", SPOOL, path, why, run=self._run)

        self._loop.call_soon_threadsafe(report)

    def in_doubt(self, path: str, checkpoint: CheckpointId) -> None:
        why = (
            f"{path} has a later step and an earlier time than other checkpoints: its program went back, or the times "
            "are wrong. Each such one is pinned, so that nothing is lost; `tierd unpin` frees it"
        )

        def report() -> None:
            self._reconciler.journal.record("in doubt", SPOOL, checkpoint, why)

        self._loop.call_soon_threadsafe(report)
