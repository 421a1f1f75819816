"""Share encoding between tiers: a chunk of the spool is read, verified and encoded once for concurrent flushes.

Flushes of one part run concurrently, each to its own tier. The first flush that needs a chunk has it encoded. The other
flushes join, and prefer a chunk that is ready to the next one in the manifest. So a flush that begins later or falls
behind takes the chunks that the others are sending. It reads again only the chunks that it missed.

Invariant: no flush waits for another tier. Only reading and encoding are shared. A chunk that is kept for a slower tier
is dropped, oldest first, as soon as its memory is needed. Whether a chunk is compressed is decided once for all
concurrent flushes of the part, so that it is byte-identical on every tier.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from tierd.codec.codec import EncodedChunk
from tierd.core.ids import PartId
from tierd.core.manifest import Chunk, Content
from tierd.daemon.transfer.buffers import Buffers
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.memory_budget import ENCODING, FLUSHES, Budget, Hold
from tierd.daemon.transfer.throughput import Throughput
from tierd.priority import POLITE_THREADS
from tierd.stores.base import Buffer

Read: TypeAlias = Callable[[memoryview], Buffer]


@dataclass(eq=False, slots=True)
class _Entry:
    """A chunk that is being encoded, or was.

    Attributes:
        chunk: the chunk.
        work: the task that encodes it.
        users: flushes that use it now; each accounts for its bytes in its own budget.
        kept: the budget for its bytes while it has no user.
        memory: the buffer in which its bytes lie; None if they lie elsewhere.
    """

    chunk: Chunk
    work: asyncio.Task[EncodedChunk]
    users: int = 0
    kept: Hold | None = None
    memory: memoryview | None = None


@dataclass(eq=False, slots=True)
class _Pass:
    """The shared state of the concurrent flushes of one part.

    Attributes:
        flushes: the flushes.
        entries: by content, the encoded chunks.
        packed: by content, whether the chunk is compressed.
    """

    flushes: list[EncodedChunkConsumer] = field(default_factory=list)
    entries: dict[Content, _Entry] = field(default_factory=dict)  # the oldest first
    packed: dict[Content, bool] = field(default_factory=dict)


class Encoding:
    """Encodes chunks of the spool for all flushes of a daemon.

    Args:
        throughput: decides whether to compress, and measures the encoder.
        budget: of bytes that are being read, and of encoded bytes that are kept for a flush that lacks them.

    Attributes:
        throughput: as given.
        buffers: the memory of chunks; freed when no flush runs.
    """

    def __init__(self, throughput: Throughput | None = None, budget: Budget | None = None) -> None:
        self.throughput = throughput or Throughput()
        self._budget = budget or Budget(ENCODING)
        # Taken first, because a chunk that waits for a thread needs no memory yet.
        self._threads = Budget(POLITE_THREADS)
        self.buffers = Buffers(FLUSHES)
        self._passes: dict[PartId, _Pass] = {}
        self._window: dict[_Entry, _Pass] = {}  # kept chunks, the oldest first

    @contextmanager
    def taking(self, part: PartId, contents: Collection[Content]) -> Iterator[EncodedChunkConsumer]:
        """Register a flush of `part` that needs the chunks with these `contents`, until the context ends."""
        shared = self._passes.setdefault(part, _Pass())
        taker = EncodedChunkConsumer(self, part, shared, set(contents))
        shared.flushes.append(taker)
        try:
            yield taker
        finally:
            shared.flushes.remove(taker)
            for entry in [entry for entry in self._window if self._window[entry] is shared]:
                if not _is_lacked(shared, entry):
                    self._drop(entry)
            if not shared.flushes:
                del self._passes[part]
            if not self._passes:
                self.buffers.clear()

    def _begin(self, shared: _Pass, part: PartId, chunk: Chunk, room: int, read: Read) -> _Entry:
        if chunk.content not in shared.packed:
            shared.packed[chunk.content] = self.throughput.packs()
        entry: _Entry

        async def work() -> EncodedChunk:
            return await self._encode(entry, part, room, read, shared.packed[chunk.content])

        entry = _Entry(chunk, asyncio.ensure_future(work()))
        return shared.entries.setdefault(chunk.content, entry)

    async def _encode(self, entry: _Entry, part: PartId, room: int, read: Read, pack: bool) -> EncodedChunk:
        async with self._threads.take(1):
            self._make_room(entry.chunk.size)
            async with self._budget.take(entry.chunk.size):
                entry.memory = memory = self.buffers.take(room)

                def work() -> tuple[EncodedChunk, bool]:
                    raw = read(memory[:room])
                    encoded = self.throughput.encode(part, entry.chunk, raw, pack)
                    return encoded, encoded.data is raw

                is_raw = False
                try:
                    encoded, is_raw = await to_the_end(work)
                    return encoded
                finally:
                    if not is_raw:  # a compressed chunk lies elsewhere
                        self._free(entry)

    def _free(self, entry: _Entry) -> None:
        """Give back the memory of an entry that nothing reads any more."""
        if entry.memory is not None:
            self.buffers.give_back(entry.memory)
            entry.memory = None

    def _make_room(self, size: int) -> None:
        while self._window and not self._budget.has(size):
            self._drop(next(iter(self._window)))

    def _keep(self, shared: _Pass, entry: _Entry) -> None:
        """Keep a chunk without a user while another flush lacks it, as far as the budget permits."""
        if entry.work.cancelled() or entry.work.exception() or not _is_lacked(shared, entry):
            self._forget(shared, entry)
            return
        size = entry.work.result().stored.size
        if not self._budget.is_wanted:
            self._make_room(size)
        entry.kept = self._budget.take_at_once(size)
        if entry.kept:
            self._window[entry] = shared
        else:
            self._forget(shared, entry)

    def _forget(self, shared: _Pass, entry: _Entry) -> None:
        shared.entries.pop(entry.chunk.content, None)
        self._free(entry)

    def _drop(self, entry: _Entry) -> None:
        self._forget(self._window.pop(entry), entry)
        if entry.kept:
            entry.kept.keep(0)

    def _use(self, entry: _Entry) -> None:
        entry.users += 1
        if entry.kept:
            entry.kept.keep(0)
            entry.kept = None
            del self._window[entry]

    async def _leave(self, shared: _Pass, entry: _Entry) -> None:
        entry.users -= 1
        if entry.users:
            return
        if not entry.work.done():  # no flush waits for it any more
            shared.entries.pop(entry.chunk.content, None)
            entry.work.cancel()
            try:
                await _await_end(entry.work)
            finally:
                self._free(entry)
            return
        self._keep(shared, entry)


class EncodedChunkConsumer:
    """One flush's access to the shared chunks of its part.

    Attributes:
        lacking: the contents that the flush has not had yet.
    """

    def __init__(self, encoding: Encoding, part: PartId, shared: _Pass, lacking: set[Content]) -> None:
        self._encoding, self._part, self._shared = encoding, part, shared
        self.lacking = lacking

    def next(self, todo: Collection[Content], accepts: Callable[[Content], bool]) -> Content | None:
        """Return the content to send next, among those of `todo` for which `accepts` is true.

        That is the oldest chunk that is or was encoded for another flush; otherwise the first of `todo`.
        """
        ready = (content for content in self._shared.entries if content in todo and accepts(content))
        return next(ready, None) or next(filter(accepts, todo), None)

    def passes(self, content: Content) -> None:
        """Note that the flush does not need this content: no encoding of it is kept for the flush."""
        self.lacking.discard(content)

    @asynccontextmanager
    async def take(self, chunk: Chunk, room: int, read: Read) -> AsyncIterator[EncodedChunk]:
        """A context with one encoded chunk for the tier.

        The caller's own budget must cover the chunk until the context ends.

        Args:
            chunk: the chunk.
            room: the bytes of memory that `read` needs.
            read: reads the chunk's verified raw bytes into memory and returns them; called in a thread, unless another
                flush has had them read.

        Raises:
            As `read`.
        """
        entry = self._shared.entries.get(chunk.content)
        entry = entry or self._encoding._begin(self._shared, self._part, chunk, room, read)
        self._encoding._use(entry)
        try:
            yield await asyncio.shield(entry.work)
        finally:
            self.lacking.discard(chunk.content)
            await self._encoding._leave(self._shared, entry)


def _is_lacked(shared: _Pass, entry: _Entry) -> bool:
    return any(entry.chunk.content in flush.lacking for flush in shared.flushes)


async def _await_end(work: asyncio.Task[EncodedChunk]) -> None:
    """Wait until a cancelled task has ended, even if the wait is cancelled, because its thread may still read."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if not work.cancelled():
        work.exception()  # retrieved, so that asyncio does not warn
    if cancelled:
        raise asyncio.CancelledError
