"""Stored chunks of a part -> memory of a client, for a restore that verifies and decodes them itself.

Invariant: this is a shortcut that decides nothing. Nothing is quarantined or repaired here, and a chunk that is found
wrong in any place is an error, because the client then asks for a whole `Fetch`, which finds out what is wrong where.
The client may change or read the memory at any time, so nothing here depends on its content.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from tierd.codec.chunk_codec import RAW
from tierd.core.errors import ConfigError, ObjectNotFound, StoreUnavailable, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import ChunkPlace, Manifest, StoredChunk
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.tiers.tier_objects import get_object
from tierd.daemon.transfer.replicas import Replicas
from tierd.ipc import message_codec, messages
from tierd.spool.file_io import flat_bytes
from tierd.stores.base import Store
from tierd.threads import mark_foreground

T = TypeVar("T")

_MAX_FILLS = 64  # of one client at a time; a client that asks for more is none of tierd's


class SlotFills:
    """The chunks of one part, got from the tiers into `memory`."""

    def __init__(self, part: PartId, stores: Mapping[str, Store], budget: MemoryBudget, memory: memoryview) -> None:
        self._copies, self._budget, self._memory = Replicas(part, stores), budget, memory

    async def open(self) -> Manifest:
        """Return the manifest by which chunks are asked for. Raises as `tier_fetch.fetch`."""
        copies = self._copies
        await copies.read_manifests()
        if not (copies.manifests or copies.defects or copies.unavailable):
            raise ObjectNotFound(f"{copies.part}: no tier has a copy")
        manifest = copies.first_content()
        copies.trust(manifest)
        return manifest

    async def fill(self, request: message_codec.FillSlot) -> dict[str, object]:
        """Get one chunk; return the members of the answer.

        Raises:
            ConfigError: the part has no such chunk, or it does not fit there.
            TierdError: the chunk could not be had, or not every tier has it right.
        """
        where, manifest = (request.file, request.index), self._copies.reference
        if manifest is None or request.file >= len(manifest.files):
            raise ConfigError(f"{self._copies.part}: it has no such chunk: {where}")
        file = manifest.files[request.file]
        slot = self._memory[request.begin : request.begin + request.room]
        if request.index >= len(file.chunks) or len(slot) < max(request.room, file.chunks[request.index].size):
            raise ConfigError(f"{self._copies.part}: it has no such chunk, or it does not fit there: {where}")
        got = await self._as_stored(where, slot)
        if got is None:
            chunk = manifest.chunk(where)
            async with self._budget.take(self._copies.weight(*where)):
                into = slot[: chunk.size]
                raw = flat_bytes(await self._copies.chunk(*where, file.path, into, self._budget.buffers))
                if raw.obj is not into.obj:
                    into[:] = raw
            got = "", StoredChunk(codec=RAW, size=chunk.size, xxh3_128=chunk.xxh3_128, key="")
        if self._copies.defects:
            raise StoreUnavailable(f"{self._copies.part}: {'; '.join(self._copies.defects.values())}")
        tier, stored = got
        answer = {"codec": stored.codec, "size": stored.size, "digest": stored.xxh3_128}
        return {"begin": request.begin, "tier": tier or min(self._copies.used_tiers, default=""), **answer}

    async def _as_stored(self, where: ChunkPlace, slot: memoryview) -> tuple[str, StoredChunk] | None:
        """Get the stored bytes from the first tier; None if they have to be decoded here, or that tier fails."""
        copies = self._copies
        for name, manifest in copies.manifests.items():
            stored, store = manifest.chunk(where).stored, copies.stores[name]
            if stored is None or stored.base or stored.size > len(slot):
                return None
            try:
                async with AsyncExitStack() as stack:
                    if more := store.memory_for(stored.size) - stored.size:
                        await stack.enter_async_context(self._budget.take(more))
                    key = f"{copies.part.checkpoint.run}/{stored.key}"
                    data = await get_object(store, key, stored, f"{name}: ", slot[: stored.size])
            except TierdError:
                return None
            copies.used_tiers.add(name)
            return (name, stored) if len(data) == stored.size else None
        return None


class SlotSession:
    """A client's `SlotFills`, whose requests come from the thread of its connection and run in the event loop.

    `reply` sends an answer, or a sign of life, without waiting.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fills: SlotFills, reply: Callable[[dict[str, object]], None]
    ) -> None:
        self._loop, self._fills, self._reply = loop, fills, reply
        self._running: set[concurrent.futures.Future[None]] = set()

    def open(self) -> concurrent.futures.Future[Manifest]:
        """Begin to read the manifest."""
        return self._begin(self._fills.open())

    def request(self, request: message_codec.FillSlot) -> None:
        """Begin to answer. Raises ValueError for more requests at a time than a client has."""
        if len(self._running) >= _MAX_FILLS:
            raise ValueError(f"more than {_MAX_FILLS} chunks at a time")
        running = self._begin(self._answer(request))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:  # the daemon ends
            work.close()
            raise ConnectionError(str(error)) from error

    async def _answer(self, request: message_codec.FillSlot) -> None:
        mark_foreground()
        work = asyncio.ensure_future(self._fills.fill(request))
        try:
            while not (await asyncio.wait([work], timeout=messages.HEARTBEAT))[0]:
                self._reply({"working": True})
            self._reply({"ok": True, **work.result()})
        except (TierdError, OSError, MemoryError) as error:
            self._reply(message_codec.error_reply(error))
        finally:
            work.cancel()

    def close(self) -> None:
        """End what runs. No store writes to the memory any more once its call was cancelled."""
        for running in list(self._running):
            running.cancel()
