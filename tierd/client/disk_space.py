"""Warn once if the spool's disk is too small for the checkpoints that the daemon keeps there."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tierd.client.ranks.launchers import local_ranks
from tierd.core.retention.policy import RetentionPolicy
from tierd.spool.spool import Spool

log = logging.getLogger("tierd")


class SpaceCheck:
    """Warn if the disk holds fewer states than are kept at a time: `keep_last`, and the one being written.

    Args:
        keep_last: returns how many checkpoints the daemon keeps in the spool; None if no daemon has said so.
        behind: runs the comparison behind training, because a disk may be slow to answer.
    """

    def __init__(
        self, spool: Spool, keep_last: Callable[[], int | None], behind: Callable[[Callable[[], None]], None]
    ) -> None:
        self._spool, self._keep_last, self._behind = spool, keep_last, behind
        self.done = False

    def check(self, size_bytes: int) -> None:
        """Compare the sizes once, behind training.

        Args:
            size_bytes: size of one rank's state. The ranks of a node are assumed to share the disk (`local_ranks`).
        """
        if not self.done:
            self._behind(lambda: self._compare(size_bytes))

    def _compare(self, size_bytes: int) -> None:
        if self.done:
            return
        self.done = True
        try:
            _, total = self._spool.free()
        except OSError:  # a save reports it
            return
        ranks = local_ranks()
        checkpoints = (self._keep_last() or RetentionPolicy().keep_last) + 1
        if total >= checkpoints * ranks * size_bytes:
            return
        log.warning(
            "spool %s: its disk has %d bytes, too few for %d checkpoints of %d bytes%s: keep_last = %d and the one "
            "being written; saves may find it full. Use a larger disk, or a lower keep_last for the spool",
            self._spool.root,
            total,
            checkpoints,
            size_bytes,
            f" from each of {ranks} ranks" if ranks > 1 else "",
            checkpoints - 1,
        )
