"""Repair and fetch copies, for the plan and for clients, and hold those from which a client restores."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from tierd.core.errors import CorruptChunk, DeleteRefused, ObjectNotFound, TierdError
from tierd.core.ids import PartId
from tierd.core.planning.place import SPOOL
from tierd.daemon.reconciling.setup import ReconcilerContext
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.download import Progress, Wanted

log = logging.getLogger("tierd.daemon")

REFUSED_S = 3600.0  # until a quarantine is tried again on a tier that refuses deletions, or is full


class Repairs:
    """Carry out repairs and fetches.

    Args:
        setup: what the parts of the reconciler share.
        repairer: replaces corrupt and missing bytes.
    """

    def __init__(self, setup: ReconcilerContext, repairer: Repairer) -> None:
        self._setup, self._repairer = setup, repairer

    async def repair(self, part: PartId, tier: str, *, counted: bool = False) -> None:
        """Repair a part's copy in a place; a copy that cannot be repaired yet is put off.

        Args:
            part: the part.
            tier: the place, the spool or a tier.
            counted: the caller has counted the corruption already.

        Raises:
            TierdError: the spool's copy cannot be repaired yet.
        """
        try:
            if tier == SPOOL:
                await self.fetch(part, counted=counted)
            else:
                await self._repairer.rebuild(tier, part, "its manifest is corrupt")
        except (CorruptChunk, ObjectNotFound):
            pass  # reported and quarantined by `fetch`; or deleted meanwhile
        except TierdError as error:
            # Put the part off so that the worker acts on others first.
            if isinstance(error, DeleteRefused):
                self._setup.workers[tier].put_off(part, REFUSED_S)
            else:
                self._setup.workers[tier].put_off_stuck(part)
            if tier == SPOOL:
                raise
            log.warning("%s: %s cannot be repaired yet: %s", tier, part, error)  # the other tier's worker backs off

    async def unquarantine(self, name: str) -> bool:
        """Move a part of the spool out of quarantine if it proves right, because it is about to be deleted.

        Args:
            name: the name of the object to delete (`Spool.discard`); nothing is done unless it is a quarantined part.

        Raises:
            OSError, TierdError: nothing is known about its bytes, so it must not be deleted.
        """
        room, *pieces = name.split("/")
        part = PartId.parse(*pieces) if room == "quarantine" and len(pieces) == 3 else None
        if part is None or not await to_the_end(self._setup.spool.unquarantine, part):
            return False
        self._setup.journal.released(SPOOL, part)
        self._setup.live.doubt(part.checkpoint)
        return True

    async def fetch(self, part: PartId, *, counted: bool = False, wanted: Wanted | None = None) -> tuple[str, ...]:
        """Repair the spool's copy of `part`, or fetch some of it, by `Repairer`; then observe the spool."""
        self._setup.save_events.fetched(part)
        try:
            return await self._repairer.repair_spool(part, counted=counted, wanted=wanted)
        finally:
            self._setup.live.doubt(part.checkpoint)  # its manifest may have been replaced
            self._setup.wake()

    @property
    def under_way(self) -> Mapping[PartId, Progress]:
        """By part, the progress of repairs and fetches that run now."""
        return self._repairer.fetching

    def hold(self, part: PartId) -> None:
        """Keep all parts of the part's checkpoint in the spool until `release`, for a restore from the part."""
        self._setup.requests.held[part.checkpoint] += 1
        self._repairer.hold(part)

    def release(self, part: PartId) -> None:
        """End a `hold`."""
        self._setup.requests.held -= Counter([part.checkpoint])
        self._repairer.release(part)
