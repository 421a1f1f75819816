"""The ranks of one launch that restore, each by tierd's own client, but for the socket: for `faults.corruption`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from faults.corruption.places import RUN, Places

from tierd.client.ranks.attempts import RankClock
from tierd.client.restoring.consensus import RestoreAgreement
from tierd.client.restoring.part_image import PartImage
from tierd.client.restoring.part_source import NodeSource
from tierd.client.restoring.restorer import Restorer, VerifiedPart
from tierd.core.errors import CheckpointNotFound
from tierd.core.ids import CheckpointId, PartId
from tierd.core.timeline.run_view import RunView, run_view_of
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.tiers.tier_observer import observe_places

Read = Callable[[PartId], "Mapping[str, bytes] | None"]  # what the spool gives of a part, None where it is corrupt


class _Ranks:
    """One rank of several that are threads."""

    can_communicate = True

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world = rank, len(said)
        self._said, self._barrier = said, barrier

    def gather(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found


class _Source:
    """As `tierd.client.restoring.part_source.NodeSource`, with the daemon's own code at the other end of no line."""

    arena = link = None
    images: Sequence[PartImage] = ()
    deep = True
    odd: Mapping[CheckpointId, str] = {}

    def __init__(self, places: Places, repairer: Repairer, loop: asyncio.AbstractEventLoop, read: Read) -> None:
        self._places, self._repairer, self._loop, self._read = places, repairer, loop, read

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def run_view(self) -> RunView:
        return run_view_of(self._wait(observe_places(self._places.spool, self._places.stores, RUN)), RUN)

    def obtain(self, part: PartId, *, direct: bool = False, node_ranks: Collection[int] = ()) -> Any:
        tier = "local"
        files = self._read(part)
        if files is None:
            tier = (*self._wait(self._repairer.repair_spool(part)).tiers, tier)[0]
            files = self._read(part)
            assert files is not None, f"{part} was healed and does not read"
        return self._places.spool.manifest(part), files, tier

    def flush(self, checkpoint: CheckpointId) -> None:
        """Every rank sees what the others see."""

    def close(self) -> None:
        """Nothing is held."""


async def launch(
    places: Places, repairer: Repairer, world: int, read: Read, at_least: int | None = None
) -> Sequence[VerifiedPart | str | None]:
    """What each rank restores: a checkpoint's part; or why none can be; or None, to begin from nothing."""
    loop = asyncio.get_running_loop()
    said: list[Any] = [None] * world
    barrier = threading.Barrier(world, timeout=240)

    def one(rank: int) -> VerifiedPart | str | None:
        source = _Source(places, repairer, loop, read)
        ranks: Any = _Ranks(rank, said, barrier)
        restorer = Restorer(NodeSource(places.spool, RUN, tiers=True), ranks)
        restorer.source = source  # type: ignore[assignment]
        restorer.agreement = RestoreAgreement(ranks, RUN, source.run_view, lambda: RankClock(1, "00000000", None))
        try:
            return restorer.restore(None, None, at_least=at_least)
        except CheckpointNotFound as error:
            return str(error)
        except BaseException:
            barrier.abort()
            raise

    found = await asyncio.gather(*(asyncio.to_thread(one, rank) for rank in range(world)), return_exceptions=True)
    errors = [one for one in found if isinstance(one, BaseException)]
    # A rank that waited in vain for the others says least.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [one for one in found if not isinstance(one, BaseException)]
