"""Stored chunks of a part -> memory of a client, for a restore that verifies and decodes them itself.

Chunks that several ranks of this node read are got from a tier once: the ranks read them in the same order, and one
that is ahead waits for the others. This only saves reads, so a rank that does not come ends it, and costs no more than
`_PATIENCE_S`.

Invariant: this is a shortcut that decides nothing. Nothing is quarantined or repaired here, and a chunk that is found
wrong in any place is an error, because the client then asks for a whole `Fetch`, which finds out what is wrong where.
The client may change or read the memory at any time, so nothing here depends on its content.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tierd.codec.chunk_codec import RAW
from tierd.core.errors import ConfigError, ObjectNotFound, StoreUnavailable, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import ChunkPlace, Manifest, StoredChunk
from tierd.daemon.concurrency import MemoryBudget, thread_uncancelled
from tierd.daemon.tiers.tier_objects import get_object
from tierd.daemon.transfer.replicas import Replicas
from tierd.ipc import message_codec, messages
from tierd.spool.direct_io import copy_bytes
from tierd.spool.file_io import flat_bytes
from tierd.stores.base import Buffer, Store
from tierd.threads import mark_foreground

T = TypeVar("T")

_MAX_FILLS = 64  # of one client at a time; a client that asks for more is none of tierd's
_PATIENCE_S = 2.0  # that a chunk waits for memory in which chunks lie that other ranks have not read

_ChunkKey = tuple[str, str]  # a tier, and the key of an object there
_Get = Callable[[memoryview], Awaitable[Buffer]]


@dataclass(eq=False)
class _SharedChunk:
    awaited: int  # clients that have not read it
    users: int = 0  # clients that read it now
    data: asyncio.Future[Buffer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    unused: asyncio.Event = field(default_factory=asyncio.Event)


class SharedReads:
    """Stored chunks that several clients of one daemon read, in memory of `budget` until all of them have.

    Invariant: a chunk's memory is given back when no client reads it, and all have, or another chunk has waited for
    memory for `patience_s`, or no client is left. All methods are for one event loop.
    """

    def __init__(self, budget: MemoryBudget, patience_s: float = _PATIENCE_S) -> None:
        self.budget, self._patience_s = budget, patience_s
        self._is_patient = True  # until another chunk has waited in vain
        self._chunks: dict[_ChunkKey, _SharedChunk] = {}
        self._keepers: set[asyncio.Task[None]] = set()
        self._clients = 0

    def join(self) -> None:
        """Count one more client."""
        self._clients += 1

    def leave(self) -> None:
        """Count one client less."""
        self._clients -= 1
        if not self._clients:
            self._forget_unused()
            self._is_patient = True

    @asynccontextmanager
    async def read(self, key: _ChunkKey, readers: int, weight: int, get: _Get) -> AsyncIterator[Buffer]:
        """Provide what `get` returns, or has returned for another one of the `readers`.

        `get` is called with memory of `weight` bytes. Raises as `get`, which is then called for the next client.
        """
        if (chunk := self._chunks.get(key)) is None:
            chunk = self._chunks[key] = _SharedChunk(readers)
            keeper = asyncio.ensure_future(self._keep(key, chunk, weight, get))
            self._keepers.add(keeper)
            keeper.add_done_callback(self._keepers.discard)
        chunk.awaited -= 1
        chunk.users += 1
        try:
            yield await asyncio.shield(chunk.data)
        finally:
            chunk.users -= 1
            if not chunk.users and (chunk.awaited <= 0 or not self._is_patient):
                self._forget(key, chunk)

    async def _keep(self, key: _ChunkKey, chunk: _SharedChunk, weight: int, get: _Get) -> None:
        timer = asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience)
        try:
            async with self.budget.take(weight):
                timer.cancel()
                with self.budget.buffers.hold(weight) as memory:
                    chunk.data.set_result(await get(memory))
                    await chunk.unused.wait()
        except Exception as error:  # any, because clients would wait for the data without end
            self._forget(key, chunk)
            chunk.data.set_exception(error)
            chunk.data.exception()  # retrieved, because every client may be gone
        finally:
            timer.cancel()

    def _lose_patience(self) -> None:
        self._is_patient = False
        self._forget_unused()

    def _forget_unused(self) -> None:
        for key, chunk in list(self._chunks.items()):
            if not chunk.users:
                self._forget(key, chunk)

    def _forget(self, key: _ChunkKey, chunk: _SharedChunk) -> None:
        if self._chunks.get(key) is chunk:
            del self._chunks[key]
        chunk.unused.set()


class SlotFills:
    """The chunks of one part, got from the tiers into `memory`."""

    def __init__(self, part: PartId, stores: Mapping[str, Store], shared: SharedReads, memory: memoryview) -> None:
        self._copies, self.shared, self._memory = Replicas(part, stores), shared, memory
        self._budget = shared.budget

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
        got = await self._as_stored(where, slot, request.readers)
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

    async def _as_stored(self, where: ChunkPlace, slot: memoryview, readers: int) -> tuple[str, StoredChunk] | None:
        """Get the stored bytes from the first tier; None if they have to be decoded here, or that tier fails."""
        copies = self._copies
        for name, manifest in copies.manifests.items():
            stored, store = manifest.chunk(where).stored, copies.stores[name]
            if stored is None or stored.base or stored.size > len(slot):
                return None
            get = partial(get_object, store, f"{copies.part.checkpoint.run}/{stored.key}", stored, f"{name}: ")
            try:
                size = await self._get(get, (name, stored.key), slot[: stored.size], readers, store)
            except TierdError:
                return None
            copies.used_tiers.add(name)
            return (name, stored) if size == stored.size else None
        return None

    async def _get(self, get: _Get, key: _ChunkKey, into: memoryview, readers: int, store: Store) -> int:
        """Get an object into `into`; return its size."""
        size, weight = len(into), store.memory_for(len(into))
        if readers > 1:
            async with self.shared.read(key, readers, weight, lambda memory: get(memory[:size])) as data:
                if len(data) == size:
                    await thread_uncancelled(_copy, into, data)
                return len(data)
        async with AsyncExitStack() as stack:
            if weight > size:
                await stack.enter_async_context(self._budget.take(weight - size))
            return len(await get(into))


def _copy(target: memoryview, data: Buffer) -> None:
    source = flat_bytes(data)
    if source.readonly:
        target[:] = source
    else:
        copy_bytes(target, source)


class SlotSession:
    """A client's `SlotFills`, whose requests come from the thread of its connection and run in the event loop.

    `reply` sends an answer, or a sign of life, without waiting.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fills: SlotFills, reply: Callable[[dict[str, object]], None]
    ) -> None:
        self._loop, self._fills, self._reply = loop, fills, reply
        self._running: set[concurrent.futures.Future[None]] = set()
        self._has_joined = False

    def open(self) -> concurrent.futures.Future[Manifest]:
        """Begin to read the manifest."""
        opening = self._begin(self._fills.open())
        self._loop.call_soon_threadsafe(self._fills.shared.join)
        self._has_joined = True
        return opening

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
        if self._has_joined:
            self._has_joined = False
            with suppress(RuntimeError):  # the daemon ends
                self._loop.call_soon_threadsafe(self._fills.shared.leave)
