"""Verify quarantined copies on a tier once more before a prune deletes them, and use again what proves right.

Invariant: no quarantined copy is deleted before its bytes were proven corrupt once more, after its quarantine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from tierd.core.errors import FormatTooNew, TierdError
from tierd.core.ids import PartId
from tierd.core.planning.actions import Prune
from tierd.core.planning.place import Place
from tierd.daemon.reconciling.setup import ReconcilerContext
from tierd.daemon.tiers.release import QuarantinedCopy

log = logging.getLogger("tierd.daemon")

_VERIFYING_S = 10.0  # for which copies are read in a row, because flushes to their tier wait meanwhile


class Releases:
    """The quarantined copies on tiers that are being verified once more."""

    def __init__(self, setup: ReconcilerContext) -> None:
        self._setup = setup
        self._copies: dict[tuple[str, PartId], QuarantinedCopy] = {}

    async def proven_corrupt(self, prunes: Sequence[Prune], place: Place | None) -> list[Prune]:
        """Return the prunes of a tier that delete no quarantined copy, or only such as were proven corrupt once more.

        If a copy proves right, it is used again and no prune is returned, because the plan did not count it. A prune
        whose copies were not all read yet is due again, and then goes on reading.

        Args:
            prunes: prunes of one tier.
            place: the tier's contents from which they were planned.

        Raises:
            TierdError, OSError: a copy could not be judged. Its checkpoint was put off, so that others go first.
        """
        if place is None or not place.quarantined or not prunes:
            return list(prunes)
        quarantined = [part for part in place.quarantined if not place.has(part)]
        tier, ends_s, going = prunes[0].tier, time.monotonic() + _VERIFYING_S, list[Prune]()
        self._copies = {
            key: copy for key, copy in self._copies.items() if key[0] != tier or key[1] in place.quarantined
        }
        for prune in prunes:
            own_parts = [part for part in quarantined if part.checkpoint == prune.checkpoint]
            verdict = await self._verify_quarantined(prune, own_parts, ends_s)
            if verdict is True:
                return []
            if verdict is False:
                going.append(prune)
        return going

    async def _verify_quarantined(self, prune: Prune, parts: Iterable[PartId], ends_s: float) -> bool | None:
        """Verify a checkpoint's quarantined parts. Returns whether one is used again; None if that is not known yet."""
        setup, tier = self._setup, prune.tier
        worker, released = setup.workers[tier], False
        for part in parts:
            store, who, timings = setup.stores[tier], setup.tiers.who, setup.timings
            copy = self._copies.setdefault((tier, part), QuarantinedCopy(store, part, who, timings))
            try:
                verdict = await copy.release(ends_s)
            except FormatTooNew as error:  # a newer tierd, or one with the key, can judge it
                log.warning("%s: %s is kept, because its quarantined copy cannot be read: %s", tier, part, error)
                worker.put_off(prune.checkpoint)
                return None
            except (TierdError, OSError):
                worker.put_off_stuck(prune.checkpoint)
                raise
            if verdict is None:
                return released or None
            if verdict:
                setup.journal.released(tier, part)
                setup.tiers.observed.doubt(tier)
                released = True
        return released
