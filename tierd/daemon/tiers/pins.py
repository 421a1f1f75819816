"""Pin checkpoints in the spool and on the tiers, also while a prune deletes them there."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from tierd.core.errors import ObjectNotFound, StoreUnavailable
from tierd.core.ids import CheckpointId, manifests_prefix, pin_key
from tierd.daemon.tiers.intents import DEADLINE_S, being_deleted
from tierd.daemon.timings import USUAL, DaemonTimings
from tierd.spool.spool import Spool
from tierd.stores.base import Store


async def pin(
    spool: Spool | None, stores: Collection[Store], checkpoint: CheckpointId, timings: DaemonTimings = USUAL
) -> None:
    """Pin a checkpoint in the spool and on every tier, also where it is not yet.

    A prune puts its marks first and lists the pins afterwards. So it sees this pin, or its mark is seen here and its
    end awaited.

    Raises:
        ObjectNotFound: a prune that had begun before deleted the last copy. The pins are removed.
        StoreUnavailable: the mark of such a prune stays: the prune is slow, or was cut off. Or a tier does not answer.
            The pin is kept.
    """
    if spool:
        await asyncio.to_thread(spool.pin, checkpoint, pinned=True)
    # First on every tier: one that fails, or whose prune is awaited, keeps no other tier from getting the pin.
    puts = [store.put(pin_key(checkpoint), b"") for store in stores]
    for answer in await asyncio.gather(*puts, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
    outlasts = False
    for store in stores:
        for _ in range(timings.mark_reads):
            # A mark that looks old counts too, because the pruning node's clock may be behind.
            if checkpoint not in await being_deleted(store, checkpoint.run, timings):
                break
            await asyncio.sleep(timings.mark_pause_s)
        else:
            raise StoreUnavailable(
                f"{checkpoint} is pinned, but a prune that began before may be under way and delete it; "
                f"if it is still there in {DEADLINE_S / 60:.0f} minutes, it is kept"
            )
        outlasts |= bool([info async for info in store.scan(f"{manifests_prefix(checkpoint.run)}{checkpoint.name}/")])
    if not outlasts and not (spool and spool.parts_of(checkpoint)):
        await unpin(spool, stores, checkpoint)
        raise ObjectNotFound(f"{checkpoint} was being deleted when it was pinned, and is gone")


async def unpin(spool: Spool | None, stores: Collection[Store], checkpoint: CheckpointId) -> None:
    """Give a checkpoint back to retention."""
    if spool:
        await asyncio.to_thread(spool.pin, checkpoint, pinned=False)
    for store in stores:
        await store.delete([pin_key(checkpoint)])
