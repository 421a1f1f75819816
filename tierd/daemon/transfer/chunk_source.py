"""From where a flush gets its chunks, and its way to one tier: the sources' protocol, the spool's copy, the context.

A chunk of which few bytes differ from that of another checkpoint, whose copy is in the spool as well, is stored as a
patch.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby

import msgspec

from tierd.codec.chunk_codec import EncodedChunk, cheapest_patch, decode, encode_patch
from tierd.core.errors import CorruptChunk, FormatTooNew, ObjectNotFound, TierdError
from tierd.core.ids import PartId, chunk_key
from tierd.core.manifest import Chunk, ChunkPlace, ContentId, File, Manifest, StoredChunk
from tierd.daemon.concurrency import FLUSH_BYTES, MemoryBudget, thread_uncancelled
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.daemon.tiers.tier_pauses import Pause, no_pause
from tierd.daemon.transfer.confirmed_chunks import ConfirmedChunks
from tierd.daemon.transfer.shared_encoding import EncodedChunkConsumer, SharedEncoder, Throughput
from tierd.spool.direct_io import memory_for
from tierd.spool.file_io import open_plain
from tierd.spool.spool import Spool
from tierd.spool.verified_reads import chunk_buffer_size, read_recent_chunk
from tierd.stores.base import Buffer, Store

_SAMPLE, _SAMPLES = 16 << 10, 16  # bytes of a sampled piece of a chunk, and about how many


@dataclass(slots=True)
class FlushProgress:
    """How far a flush is, in raw bytes: `done` are confirmed on the tier, of `total`."""

    total: int
    done: int = 0


@dataclass(frozen=True, slots=True)
class TierUploadContext:
    """Everything that a flush needs to reach one tier."""

    store: Store
    tier: str = ""
    who: str = ""  # 8 hex digits that identify this node; random if no later process sweeps this node's intents
    reread: bool = False  # read everything back, even if the server shows that it verifies
    # The budget of encoded bytes in transfer to this tier.
    budget: MemoryBudget = field(default_factory=lambda: MemoryBudget(FLUSH_BYTES))
    encoding: SharedEncoder = field(default_factory=SharedEncoder)  # the encoder that all flushes of a daemon share
    pause: Pause = no_pause
    # By run, how long other nodes may send nothing: less once they were waited for in vain.
    silences: dict[str, float] = field(default_factory=dict)
    progress_by_part: dict[PartId, FlushProgress] = field(default_factory=dict)
    confirmed: ConfirmedChunks | None = None  # given if one process sends all ranks' parts of a checkpoint
    timings: DaemonTimings = USUAL

    @property
    def throughput(self) -> Throughput:
        """The measured throughput, which decides whether compression pays."""
        return self.encoding.throughput


@dataclass(frozen=True, slots=True)
class PatchBase:
    """The base of a chunk: the one at the same place of the same file of an older checkpoint."""

    file: File
    index: int  # the index of both chunks in the file
    part: PartId
    older: File  # the same file in it
    chunk: Chunk  # the base's entry on the tier


class ChunkSource(ABC):
    """Provides the chunks of a part, one by one: a subclass may know a better order, and may share its work.

    Attributes:
        is_local: whether this node has the part, so that other nodes probably send theirs at the same time.
    """

    is_local = False

    def memory_copies(self, content: ContentId) -> int:
        """Return how many copies of a chunk's bytes are in memory at once."""
        return 3

    async def choose_patches(self, bases: Mapping[ContentId, PatchBase]) -> None:
        """Choose the chunks that are provided as patches of these bases from now on."""
        return  # none, where a base would have to be read from a tier

    def reading(self, contents: Collection[ContentId]) -> AbstractContextManager[None]:
        """A context within which the caller reads the chunks with these `contents`."""
        return nullcontext()

    def skip(self, content: ContentId) -> None:
        """Note that the caller does not read this content."""
        return

    def next_content(self, todo: Collection[ContentId], accepts: Callable[[ContentId], bool]) -> ContentId | None:
        """Return the content in `todo` that is cheapest to read next, of those that `accepts` allows; None if none."""
        return next(filter(accepts, todo), None)

    @abstractmethod
    def read(self, where: ChunkPlace, file: File) -> AbstractAsyncContextManager[EncodedChunk]:
        """A context with one verified chunk in memory, encoded for the tier under a key of this part.

        Raises:
            CorruptChunk: no copy of the chunk is right.
            ObjectNotFound: the part was removed.
        """


@dataclass(slots=True)
class ReferenceCopy:
    """Another tier's copy of the part. While that tier answers, its stored bytes are copied byte for byte."""

    store: Store
    manifest: Manifest
    is_answering: bool = True
    answer_s: float = 60.0  # how long a chunk waits for that tier's encoding of it


class SpoolChunkSource(ChunkSource):
    """The spool's copy of a part, in the encoding that the twin uses."""

    is_local = True

    def __init__(self, spool: Spool, part: PartId, encoding: SharedEncoder, twin: ReferenceCopy | None) -> None:
        self._spool, self._home, self._part = spool, spool.path(part), part
        self._encoding, self._twin = encoding, twin
        self._taker: EncodedChunkConsumer | None = None
        self._bases: dict[ContentId, tuple[PatchBase, str]] = {}  # with the kind of patch

    def memory_copies(self, content: ContentId) -> int:
        return 3 if self._twin or content in self._bases else 1

    async def choose_patches(self, bases: Mapping[ContentId, PatchBase]) -> None:
        self._bases = await thread_uncancelled(self._similar_bases, bases)

    def _similar_bases(self, bases: Mapping[ContentId, PatchBase]) -> dict[ContentId, tuple[PatchBase, str]]:
        """Return the bases that seem to differ little, by samples, and the kind of patch that is cheapest."""
        alike: dict[ContentId, tuple[PatchBase, str]] = {}
        for path, pairs in groupby(bases.items(), key=lambda item: item[1].file.path):
            of_file = dict(pairs)
            first = next(iter(of_file.values()))
            begins, old_begins = _chunk_offsets(first.file), _chunk_offsets(first.older)
            try:
                with (
                    os.fdopen(open_plain(self._home / path), "rb", buffering=0) as new,
                    os.fdopen(open_plain(self._spool.path(first.part) / path), "rb", buffering=0) as old,
                ):
                    for content, base in of_file.items():
                        places = (new.fileno(), begins[base.index]), (old.fileno(), old_begins[base.index])
                        if kind := _sampled_kind(*places, content[1]):
                            alike[content] = base, kind
            except (CorruptChunk, OSError):
                continue  # the older checkpoint has left the spool
        return alike

    @contextmanager
    def reading(self, contents: Collection[ContentId]) -> Iterator[None]:
        with self._encoding.registered_consumer(self._part, contents) as self._taker:
            yield

    def next_content(self, todo: Collection[ContentId], accepts: Callable[[ContentId], bool]) -> ContentId | None:
        assert self._taker is not None
        return self._taker.next_content(todo, accepts)

    def skip(self, content: ContentId) -> None:
        assert self._taker is not None
        self._taker.skip(content)

    @asynccontextmanager
    async def read(self, where: ChunkPlace, file: File) -> AsyncIterator[EncodedChunk]:
        assert self._taker is not None
        chunk, room = file.chunks[where[1]], chunk_buffer_size(file, where[1])
        base = self._bases.get(chunk.content)
        patched = await thread_uncancelled(self._encode_patch, file, where[1], *base) if base else None
        if patched:
            self._taker.skip(chunk.content)
            yield patched
            return
        async with self._taker.take(chunk, room, partial(self._read, file, where[1])) as encoded:
            yield await self._encode_as_reference(where, encoded)

    def _encode_patch(self, file: File, index: int, base: PatchBase, kind: str) -> EncodedChunk | None:
        """Return the chunk as a patch; None if too much differs, or the base is not right in the spool any more."""
        path, size = self._spool.path(base.part) / base.older.path, chunk_buffer_size(base.older, base.index)
        try:
            old = read_recent_chunk(path, base.older, base.index, memory_for(size))
        except (CorruptChunk, OSError):
            return None
        raw = self._read(file, index, memory_for(chunk_buffer_size(file, index)))
        return encode_patch(self._part, file.chunks[index], raw, base.chunk, old, kind)

    def _read(self, file: File, index: int, memory: memoryview) -> Buffer:
        try:
            return read_recent_chunk(self._home / file.path, file, index, memory)
        except CorruptChunk:
            if not self._home.is_dir():
                raise ObjectNotFound(f"{self._part} is not in the spool any more") from None
            raise

    async def _encode_as_reference(self, where: ChunkPlace, encoded: EncodedChunk) -> EncodedChunk:
        twin = self._twin
        chunk = twin.manifest.chunk(where) if twin else None
        if not (twin and twin.is_answering and chunk and chunk.stored) or chunk.stored.form == encoded.stored.form:
            return encoded
        if chunk.stored.base:  # it may not be on this tier
            return encoded
        try:
            async with asyncio.timeout(twin.answer_s):
                data = await twin.store.get(f"{self._part.checkpoint.run}/{chunk.stored.key}")
            await thread_uncancelled(decode, chunk, data, "the other tier")
        except (ObjectNotFound, CorruptChunk, FormatTooNew):
            return encoded  # the spool's encoding is right too, and is available now
        except (TierdError, TimeoutError):
            twin.is_answering = False  # so that later chunks do not wait for that tier
            return encoded
        return stored_as(self._part, encoded.chunk, chunk.stored, data)


def _chunk_offsets(file: File) -> list[int]:
    """Return where each chunk of a file begins, in bytes."""
    return list(accumulate((chunk.size for chunk in file.chunks), initial=0))


def _sampled_kind(new: tuple[int, int], old: tuple[int, int], size: int) -> str:
    """Return the kind of patch that turns one chunk of `size` bytes into another, by samples; empty for none.

    Args:
        new, old: of each chunk, the descriptor of its file, and where it begins.
    """
    piece = min(_SAMPLE, size)
    places = range(0, size - piece + 1, max(piece, size // _SAMPLES & ~7))
    samples = [b"".join(os.pread(fd, piece, begin + place) for place in places) for fd, begin in (new, old)]
    if {len(sample) for sample in samples} != {piece * len(places)}:
        return ""  # a file was cut; the read of the chunk finds out
    return cheapest_patch(*samples)


def stored_as(part: PartId, chunk: Chunk, other: StoredChunk, data: Buffer) -> EncodedChunk:
    """Return a chunk of `part` in the encoding of an `other` copy, under its key in `part`."""
    key = chunk_key(part, chunk.xxh3_128, other.codec, chunk.home)
    stored = msgspec.structs.replace(other, key=key, checked="")
    return EncodedChunk(msgspec.structs.replace(chunk, stored=stored), data)
