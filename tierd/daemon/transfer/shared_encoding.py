"""Share encoding between tiers: a chunk of the spool is read, verified and encoded once for concurrent flushes.

The first flush that needs a chunk has it encoded. The other flushes of the part join, and prefer a chunk that is ready
to the next one in the manifest. Invariants: no flush waits for another tier. A chunk that is kept for a slower tier is
dropped, oldest first, as soon as its memory is needed. Whether a chunk is compressed is decided once, by the measured
throughput of links and encoder, so that it is byte-identical on every tier.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias

from tierd.codec.byte_planes import packing_size
from tierd.codec.chunk_codec import PLANES, EncodedChunk, encode
from tierd.core.chunk_boundaries import CompressionChoice, compression_choice
from tierd.core.ids import PartId
from tierd.core.manifest import Chunk, ContentId
from tierd.daemon.concurrency import (
    ENCODING_BYTES,
    FLUSH_BYTES,
    BudgetHold,
    Buffers,
    MemoryBudget,
    thread_uncancelled,
    wait_for_end,
)
from tierd.stores.base import Buffer
from tierd.threads import BACKGROUND_THREADS

_FADE = 60.0  # seconds of work
_MIN_MEASURED_BYTES = 64 << 20  # bytes; fewer measure the latency rather than the rate
_FADE_BYTES = 4 << 30  # bytes that were compressed; older ones fade, because ratios change as training goes on
_TRY = 64  # one chunk in so many is compressed even if that does not pay, as a measurement
ReadInto: TypeAlias = Callable[[memoryview], Buffer]


class ThroughputMeter:
    """Bytes over time. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, enough: int = _MIN_MEASURED_BYTES) -> None:
        self._clock, self._min_bytes, self._lock = clock, enough, Lock()
        self._active, self._since = 0, 0.0
        self._bytes = self._seconds = 0.0

    @contextmanager
    def measured(self, size: int) -> Iterator[None]:
        """Measure the transfer of `size` bytes until the context ends. An exception leaves the bytes uncounted."""
        with self._lock:
            self._settle()
            self._active += 1
        moved_bytes = 0
        try:
            yield
            moved_bytes = size
        finally:
            with self._lock:
                self._settle()
                self._active -= 1
                self._bytes += moved_bytes

    @property
    def rate(self) -> float | None:
        """Bytes per second; None until enough bytes have been measured."""
        with self._lock:
            self._settle()
            return self._bytes / self._seconds if self._bytes >= self._min_bytes and self._seconds else None

    def _settle(self) -> None:
        now = self._clock()
        if self._active:
            self._seconds += now - self._since
        self._since = now
        if self._seconds > 2 * _FADE:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2


class Throughput:
    """The measurements of one daemon's flushes, and the encoder that uses them.

    The decision is the same for all tiers, because a chunk has the same bytes on each. Chunks are compressed as long as
    one tier gains by it.
    """

    def __init__(self) -> None:
        self._links: dict[str, ThroughputMeter] = {}
        self._encoder = ThroughputMeter()
        self._raw = self._stored = 0.0  # bytes that were compressed, before and after
        self._choices: dict[str, CompressionChoice] = {}
        self._unpacked = 0

    def link(self, tier: str) -> ThroughputMeter:
        """Return the meter of the bytes that are put on a tier."""
        return self._links.setdefault(tier, ThroughputMeter())

    def compression(self, tier: str) -> CompressionChoice:
        """Return whether compression pays for this tier alone, and why."""
        before = self._choices.get(tier)
        ratio = self._stored / self._raw if self._raw >= _MIN_MEASURED_BYTES else None
        choice = compression_choice(self.link(tier).rate, self._encoder.rate, ratio, before.pack if before else True)
        self._choices[tier] = choice
        return choice

    def should_compress(self) -> bool:
        """Whether to compress the next chunk: if that pays for any tier, and sometimes as a measurement."""
        pays = any([self.compression(tier).pack for tier in tuple(self._links)] or [True])
        self._unpacked = 0 if pays else self._unpacked + 1
        return pays or not self._unpacked % _TRY

    def encode(
        self, part: PartId, chunk: Chunk, raw: Buffer, pack: bool, into: memoryview | None = None
    ) -> EncodedChunk:
        """Encode a chunk as `chunk_codec.encode` does, and measure it."""
        if not pack:
            return encode(part, chunk, raw, pack=False)
        with self._encoder.measured(chunk.size):
            encoded = encode(part, chunk, raw, into=into)
        fade = 0.5 if self._raw > _FADE_BYTES else 1.0
        self._raw = self._raw * fade + chunk.size
        self._stored = self._stored * fade + encoded.stored.size
        return encoded


@dataclass(eq=False, slots=True)
class _Entry:
    """A chunk that is being encoded, or was."""

    chunk: Chunk
    work: asyncio.Task[EncodedChunk]
    users: int = 0  # flushes that use it now; each accounts for its bytes in its own budget
    kept: BudgetHold | None = None  # the budget for its bytes while it has no user
    memory: memoryview | None = None  # the buffer in which its bytes lie; None if they lie elsewhere


@dataclass(eq=False, slots=True)
class _Pass:
    """The shared state of the concurrent flushes of one part."""

    flushes: list[EncodedChunkConsumer] = field(default_factory=list)
    entries: dict[ContentId, _Entry] = field(default_factory=dict)  # the oldest first
    packed: dict[ContentId, bool] = field(default_factory=dict)


class SharedEncoder:
    """Encodes chunks of the spool for all flushes of a daemon.

    Args:
        budget: of bytes that are being read, and of encoded bytes that are kept for a flush that lacks them.
    """

    def __init__(self, throughput: Throughput | None = None, budget: MemoryBudget | None = None) -> None:
        self.throughput = throughput or Throughput()
        self._budget = budget or MemoryBudget(ENCODING_BYTES)
        # Taken first, because a chunk that waits for a thread needs no memory yet.
        self._threads = MemoryBudget(BACKGROUND_THREADS)
        self.buffers = Buffers(FLUSH_BYTES)  # the memory of chunks; freed when no flush runs
        self._passes: dict[PartId, _Pass] = {}
        self._window: dict[_Entry, _Pass] = {}  # kept chunks, the oldest first

    @contextmanager
    def registered_consumer(self, part: PartId, contents: Collection[ContentId]) -> Iterator[EncodedChunkConsumer]:
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

    def _begin(self, shared: _Pass, part: PartId, chunk: Chunk, room: int, read: ReadInto) -> _Entry:
        if chunk.content not in shared.packed:
            shared.packed[chunk.content] = self.throughput.should_compress()
        entry: _Entry

        async def work() -> EncodedChunk:
            return await self._encode(entry, part, room, read, shared.packed[chunk.content])

        entry = _Entry(chunk, asyncio.ensure_future(work()))
        return shared.entries.setdefault(chunk.content, entry)

    async def _encode(self, entry: _Entry, part: PartId, room: int, read: ReadInto, pack: bool) -> EncodedChunk:
        async with self._threads.take(1):
            self._make_room(entry.chunk.size)
            async with self._budget.take(entry.chunk.size):
                memory = self.buffers.take(room)
                packed = self.buffers.take(packing_size(entry.chunk.size)) if pack else None

                def work() -> EncodedChunk:
                    raw = read(memory[:room])
                    encoded = self.throughput.encode(part, entry.chunk, raw, pack, packed)
                    if encoded.data is raw:
                        entry.memory = memory
                    elif encoded.stored.codec == PLANES:
                        entry.memory = packed
                    return encoded

                try:
                    return await thread_uncancelled(work)
                finally:
                    for buffer in (memory, packed):
                        if buffer is not None and buffer is not entry.memory:
                            self.buffers.give_back(buffer)

    def _free(self, entry: _Entry) -> None:
        """Give back the memory of an entry that nothing reads any more."""
        if entry.memory is not None:
            self.buffers.give_back(entry.memory)
            entry.memory = None

    def _make_room(self, size: int) -> None:
        while self._window and not self._budget.has_free(size):
            self._drop(next(iter(self._window)))

    def _keep(self, shared: _Pass, entry: _Entry) -> None:
        """Keep a chunk without a user while another flush lacks it, as far as the budget permits."""
        if entry.work.cancelled() or entry.work.exception() or not _is_lacked(shared, entry):
            self._forget(shared, entry)
            return
        size = entry.work.result().stored.size
        if not self._budget.has_waiters:
            self._make_room(size)
        entry.kept = self._budget.try_take(size)
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
            entry.kept.shrink_to(0)

    def _use(self, entry: _Entry) -> None:
        entry.users += 1
        if entry.kept:
            entry.kept.shrink_to(0)
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
                if await wait_for_end(entry.work):  # its thread may still read
                    raise asyncio.CancelledError
            finally:
                self._free(entry)
            return
        self._keep(shared, entry)


class EncodedChunkConsumer:
    """One flush's access to the shared chunks of its part."""

    def __init__(self, encoding: SharedEncoder, part: PartId, shared: _Pass, lacking: set[ContentId]) -> None:
        self._encoding, self._part, self._shared = encoding, part, shared
        self.lacking = lacking  # the contents that the flush has not had yet

    def next_content(self, todo: Collection[ContentId], accepts: Callable[[ContentId], bool]) -> ContentId | None:
        """Return the content to send next, among those of `todo` for which `accepts` is true.

        That is the oldest chunk that is or was encoded for another flush; otherwise the first of `todo`.
        """
        ready = (content for content in self._shared.entries if content in todo and accepts(content))
        return next(ready, None) or next(filter(accepts, todo), None)

    def skip(self, content: ContentId) -> None:
        """Note that the flush does not need this content: no encoding of it is kept for the flush."""
        self.lacking.discard(content)

    @asynccontextmanager
    async def take(self, chunk: Chunk, room: int, read: ReadInto) -> AsyncIterator[EncodedChunk]:
        """A context with one encoded chunk for the tier.

        The caller's own budget must cover the chunk until the context ends.

        Args:
            room: the bytes of memory that `read` needs.
            read: reads the chunk's verified raw bytes into memory and returns them; called in a thread, unless another
                flush has had them read.
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
