"""Freeing space on the spool's disk at once, for a save that found it full.

Invariant: only copies that `core/planning/eviction.py` names are deleted, in its order, each after its tier was asked
once more. The caller waits seconds at most.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from tierd.core.disk_full import lacks_inodes
from tierd.core.errors import TierdError
from tierd.core.ids import CheckpointId
from tierd.core.planning.inventory import Inventory
from tierd.spool.spool import Spool

log = logging.getLogger("tierd.daemon")

_MARGIN = 256 << 10  # bytes for manifest and directories, in addition to a sixteenth of the save's size
_PAUSE_S = 0.5  # seconds between two observations while no copy can be deleted


@dataclass(frozen=True, slots=True)
class FreedSpace:
    """The result of freeing space. `enough`: whether a second try is worthwhile."""

    freed_bytes: int
    enough: bool


class SpoolSpace:
    """Free disk space, for one save after the other.

    Args:
        spool: the local tier.
        inventory: returns the latest inventory.
        observe: observes the spool afresh; `inventory` shows the result then.
        release: deletes the spool's copy of a checkpoint if a tier still holds it; returns whether it did.
        wake: makes flushes proceed at once.
        evictable: the copies that may be deleted because the disk is full, in this order (`plan.evictable`).
        patience_s: how long `make` may take; flushes under way may verify more copies meanwhile.
    """

    def __init__(
        self,
        spool: Spool,
        inventory: Callable[[], Inventory],
        observe: Callable[[], Awaitable[None]],
        release: Callable[[CheckpointId, tuple[str, ...]], Awaitable[bool]],
        wake: Callable[[], None],
        evictable: Callable[[Inventory], Iterable[CheckpointId]],
        patience_s: float,
    ) -> None:
        self._spool, self._inventory, self._observe, self._release, self._wake = (
            spool,
            inventory,
            observe,
            release,
            wake,
        )
        self._evictable, self._patience_s = evictable, patience_s
        self._lock = asyncio.Lock()

    async def make(self, run: str, size_bytes: int, *, quota: bool = False) -> FreedSpace:
        """Delete verified local copies until `size_bytes` and a margin are free, or no more can be deleted.

        Args:
            run: the run whose save found the disk full; it has a trainer, attached or not.
            size_bytes: the size of the save.
            quota: the free space of the disk is meaningless because of a quota; count the deleted bytes instead. It
                is meaningless as well if the disk lacks inodes.
        """
        target_bytes, freed = size_bytes + size_bytes // 16 + _MARGIN, 0
        # A copy of that size has about as many files as the save needs.
        counts_deleted = quota or lacks_inodes(os.statvfs(self._spool.root))

        def is_freed() -> bool:
            return (freed if counts_deleted else self._spool.free()[0]) >= target_bytes

        try:
            async with asyncio.timeout(self._patience_s), self._lock:
                if not is_freed():
                    await asyncio.to_thread(self._spool.drop_recycled, ())
                while not is_freed():
                    await self._observe()
                    size = await self._release_next(run, is_freed)
                    freed += size
                    if not size and not self._has_unverified_copies():
                        break
                    if not size:
                        self._wake()
                        await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            pass
        succeeded = is_freed()
        if freed or not succeeded:
            outcome = "" if succeeded else ", which is not enough: the rest is on no tier yet, or not the spool's"
            message = f"{freed} bytes of verified copies were deleted{outcome}"
            log.warning("the spool's disk is full for a save of %s (%d bytes): %s", run, size_bytes, message)
        return FreedSpace(freed, succeeded or freed > 0)

    async def _release_next(self, run: str, is_freed: Callable[[], bool]) -> int:
        """Delete the next copy that may be deleted; return its size in bytes, 0 if there is none."""
        inventory = self._inventory()
        inventory = replace(inventory, trainerless=inventory.trainerless - {run})
        for checkpoint in self._evictable(inventory):
            size = sum(facts.size for facts in inventory.spool.checkpoints[checkpoint].facts.values())
            try:
                if await self._release(checkpoint, ("the spool's disk is full, and a save needs room",)):
                    return max(size, 1)
            except (TierdError, OSError) as error:  # its tier or its directory failed; the next copy has others
                log.warning("%s stays in the spool: %s", checkpoint, error)
            if is_freed():
                break
        return 0

    def _has_unverified_copies(self) -> bool:
        """Whether a copy may still prove verified: the spool holds one that no tier was seen to have.

        A daemon that has just started has observed no tier yet.
        """
        inventory = self._inventory()
        return any(not inventory.on_a_tier(copy) for copy in inventory.spool.checkpoints.values())
