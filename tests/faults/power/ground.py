"""A spool and a tier, what is done there with tierd's own calls, and what is said of it outside.

Invariant: whatever is said to be done was answered by tierd's own call; nothing is said that a caller of it could not
know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.power.truth import SPOOL, TIER, TIER_PINNED, Sizes, Thing
from faults.rounds import Lost
from support.nodes import Inline
from support.timed import give
from support.world import RUN, config, part

import tierd.core.planning.flush_order
import tierd.daemon.concurrency
import tierd.daemon.reconciling.reconciler_context
import tierd.daemon.tiers.announcements
import tierd.stores.file_store
from tierd.core.errors import StepRefused
from tierd.core.ids import CheckpointId, PartId, pins_prefix
from tierd.core.manifest import VERSION, Manifest
from tierd.core.manifest_codec import decode
from tierd.core.planning.plan import plan
from tierd.core.timeline.restore_order import restore_candidates
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.commit import CHUNK_SIZE, FileSource, write_part
from tierd.spool.spool import Spool
from tierd.spool.spool_directory import node_id
from tierd.stores.file_store import FileStore

Things = Iterable[Thing]
_PAGE = 4096
_TURNS = 200  # of a daemon that should come to rest after some tens


@dataclass
class Ground:
    """Where a scene is played.

    Attributes:
        say: tells what is known outside, where no power is cut.
        again: it was played before, cut off anywhere: what is done already may be refused.
        pieces: saves come in pieces of so many pages; 0: as one.
    """

    spool: Path
    tier: Path
    sizes: Sizes
    say: Callable[[list[Any]], None]
    again: bool = False
    pieces: int = 0

    @contextmanager
    def change(self, adds: Things = (), drops: Things = ()) -> Iterator[None]:
        said = [list(adds), list(drops)]
        self.say(["begun", *said])
        yield
        self.say(["done", *said])

    def opened(self) -> tuple[Spool, FileStore]:
        return Spool(self.spool), FileStore(self.tier)

    def save(self, spool: Spool, which: PartId) -> None:
        with self.change([(SPOOL, which.path)]):
            try:
                write_part(spool, manifest_of(which), self._sources(which), self.sizes.chunk or CHUNK_SIZE)
            except StepRefused:
                if not (self.again and spool.has(which)):
                    raise

    def _sources(self, which: PartId) -> dict[str, FileSource]:
        files = self.sizes.files_of(which.path)
        return {name: _Pieces(data, self.pieces * _PAGE) if self.pieces else data for name, data in files.items()}

    async def flush(self, spool: Spool, store: FileStore, which: PartId, base: PartId | None = None) -> None:
        if self.again and [info async for info in store.scan(which.manifest_key)]:
            return  # no daemon would send it again
        with self.change([(TIER, which.path)]):
            shared = decode(bytes(await store.get(base.manifest_key)), base) if base else None
            await flush(spool, which, TierUploadContext(store, "tier", node_id(spool.root)), base=shared)

    async def pin_there(self, store: FileStore, checkpoint: CheckpointId) -> None:
        with self.change([(TIER_PINNED, f"{RUN}/{checkpoint.name}")]):
            await store.put(f"{pins_prefix(RUN)}{checkpoint.name}", b"")


@dataclass
class _Pieces:
    """A file's bytes, a few at a time."""

    data: bytes
    size: int

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[memoryview]:
        view = memoryview(self.data)
        return (view[at : at + self.size] for at in range(0, len(view), self.size))


def manifest_of(which: PartId) -> Manifest:
    checkpoint = which.checkpoint
    return Manifest(
        version=VERSION,
        run=checkpoint.run,
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        resumed_from=None,
        rank=which.rank,
        world_size=which.world,
        created=f"2026-01-01T00:00:{checkpoint.step:02}+00:00",
        writer="test",
        metrics={},
        files=(),
    )


def alone(work: Coroutine[Any, Any, None]) -> None:
    """Run what is asynchronous, with every call in a thread made where it is asked for: one order of events."""
    inline = Inline(1)
    tierd.core.planning.flush_order.SMALLEST_SHARED_BYTES = 1  # chunks of this kit are small
    tierd.daemon.concurrency.BACKGROUND_POOL = inline
    tierd.stores.file_store.PriorityPools.current = lambda pools: inline  # type: ignore[method-assign]

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(inline)
        await work

    asyncio.run(main())


# -- the daemon -----------------------------------------------------------------------------------------------------


async def _settle(ground: Ground, keep: int, keep_local: int) -> None:
    spool, store = ground.opened()
    with spool.lock():
        daemon = Reconciler(config(spool, TIER, keep=keep, keep_local=keep_local), spool, {TIER: store})
        daemon.requests.writers = lambda: frozenset({part(1).writer})
        if daemon.pause.paused:
            await daemon.pause.end()
        for _ in range(_TURNS):
            await daemon.observe(TIER)
            await daemon.tiers.sweep_leftovers(TIER, {RUN})
            actions = plan(daemon.inventory(), daemon.config, {}, 0.0)
            if not actions:
                break
            await daemon._loop.act(actions[0])
        else:
            raise Lost(f"the daemon does not come to rest: {actions[0]}")
    await store.aclose()


def later() -> None:
    """What was cut off has come of age: nothing of it is worth waiting for."""
    give(abandoned_s=0.0, taken_up_s=0.0, own_stale_ms=0, mark_reads=3)


def settle(ground: Ground, keep: int = 100, keep_local: int = 100) -> None:
    """Start a daemon, until it has nothing left to do."""
    alone(_settle(ground, keep, keep_local))


def offered(ground: Ground) -> set[str]:
    """The checkpoints that a restore would try."""
    found: set[str] = set()

    async def ask() -> None:
        spool, store = ground.opened()
        resume = restore_candidates(await observe_places(spool, {TIER: store}, RUN), RUN)
        found.update(f"{RUN}/{one.checkpoint.name}" for one in resume.candidates)

    alone(ask())
    return found
