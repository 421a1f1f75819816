"""Making room on the spool's disk at once, for a save that met it full.

Law: what goes is what `core/eviction.py` names, in its order, each copy only after its tier was asked once more; and
whoever waits for it waits seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from tierd.core.errors import TierdError
from tierd.core.ids import CheckpointId
from tierd.core.world import World
from tierd.spool import Spool

log = logging.getLogger("tierd.daemon")

_PATIENCE = 5.0  # seconds at most: flushes that are under way may still verify what can then go
_MARGIN = 256 << 10  # bytes that a save takes beside its files: manifest, directories; and its size's sixteenth
_TURN = 0.5  # seconds between two looks while nothing can go


@dataclass(frozen=True, slots=True)
class Made:
    """How it ended. `enough`: whether a second try is worth it."""

    freed_bytes: int
    enough: bool


class Room:
    """Makes room, for one save after the other.

    Args:
        look: looks at the spool afresh; what it shows is in `world` then.
        release: deletes the spool's copy of a checkpoint if a tier holds it still; whether it did.
        wake: has flushes go on at once.
        evictable: the copies that a full disk may take, in this order (`plan.evictable`).
    """

    def __init__(
        self,
        spool: Spool,
        world: Callable[[], World],
        look: Callable[[], Awaitable[None]],
        release: Callable[[CheckpointId, tuple[str, ...]], Awaitable[bool]],
        wake: Callable[[], None],
        evictable: Callable[[World], Iterable[CheckpointId]],
    ) -> None:
        self._spool, self._world, self._look, self._release, self._wake = spool, world, look, release, wake
        self._evictable = evictable
        self._one = asyncio.Lock()

    async def make(self, run: str, size_bytes: int, *, quota: bool = False) -> Made:
        """Delete verified local copies until `size_bytes` and a margin are free, or nothing more can go.

        Args:
            run: whose save met the full disk; it has a trainer, attached or not.
            quota: free space says nothing; count what is deleted instead.
        """
        wanted, freed = size_bytes + size_bytes // 16 + _MARGIN, 0

        def is_enough() -> bool:
            return (freed if quota else self._spool.free()[0]) >= wanted

        try:
            async with asyncio.timeout(_PATIENCE), self._one:
                if not is_enough():
                    await asyncio.to_thread(self._spool.drop_recycled, ())
                while not is_enough():
                    await self._look()
                    size = await self._release_next(run, is_enough)
                    freed += size
                    if not size and not self._may_come():
                        break
                    if not size:
                        self._wake()
                        await asyncio.sleep(_TURN)
        except TimeoutError:
            pass
        enough = is_enough()
        if freed or not enough:
            outcome = "" if enough else ", which is not enough: the rest is on no tier yet, or not the spool's"
            done = f"{freed} bytes of verified copies were deleted{outcome}"
            log.warning("the spool's disk is full for a save of %s (%d bytes): %s", run, size_bytes, done)
        return Made(freed, enough or freed > 0)

    async def _release_next(self, run: str, is_enough: Callable[[], bool]) -> int:
        """Delete the next copy that may go; its size in bytes, 0 where none may."""
        world = self._world()
        world = replace(world, trainerless=world.trainerless - {run})
        for checkpoint in self._evictable(world):
            size = sum(facts.size for facts in world.spool.checkpoints[checkpoint].facts.values())
            try:
                if await self._release(checkpoint, ("the spool's disk is full, and a save needs room",)):
                    return max(size, 1)
            except TierdError as error:  # its tier cannot be asked now: the next copy may lie on another
                log.warning("%s stays in the spool: %s", checkpoint, error)
            if is_enough():
                break
        return 0

    def _may_come(self) -> bool:
        """Whether a copy may still turn out to be verified: the spool holds some that no tier was seen to have.

        A daemon that has just started has seen no tier yet.
        """
        world = self._world()
        return any(not world.on_a_tier(seen) for seen in world.spool.checkpoints.values())
