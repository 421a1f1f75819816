"""Whether the spool's disk is large enough for what the daemon keeps there: said once, before it is full."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tierd.client.launchers import local_ranks
from tierd.core.retention import RetentionPolicy
from tierd.spool import Spool

log = logging.getLogger("tierd")


class SpaceCheck:
    """Warns when the disk holds fewer states than are kept at a time: `keep_last`, and the one being written.

    Args:
        keep_last: how many checkpoints the daemon keeps in the spool; None where no daemon has said so.
    """

    def __init__(self, spool: Spool, keep_last: Callable[[], int | None]) -> None:
        self._spool, self._keep_last = spool, keep_last
        self.done = False

    def check(self, size_bytes: int) -> None:
        """Compare, at the first call.

        Args:
            size_bytes: of one rank's state. The ranks of a node are taken to share the disk (`local_ranks`).
        """
        if self.done:
            return
        self.done = True
        try:
            _, total = self._spool.free()
        except OSError:  # a save will say so
            return
        ranks = local_ranks()
        needed = (self._keep_last() or RetentionPolicy().keep_last) + 1
        if total >= needed * ranks * size_bytes:
            return
        log.warning(
            "spool %s: its disk has %d bytes, too few for %d checkpoints of %d bytes%s: keep_last = %d and the one "
            "being written; saves may find it full. Use a larger disk, or a lower keep_last for the spool",
            self._spool.root,
            total,
            needed,
            size_bytes,
            f" from each of {ranks} ranks" if ranks > 1 else "",
            needed - 1,
        )
