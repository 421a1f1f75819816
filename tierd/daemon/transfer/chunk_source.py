"""Sources of the chunks that a flush sends: the protocol, and the spool's copy of a part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import msgspec

from tierd.codec.codec import Encoded, decode
from tierd.core.errors import CorruptChunk, FormatTooNew, ObjectNotFound, TierdError
from tierd.core.ids import PartId, chunk_key
from tierd.core.manifest import Chunk, File, Manifest
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.shared_encoding import Content, Encoding, Taker
from tierd.spool.file_io import read_chunk
from tierd.spool.spool import Spool
from tierd.stores.base import Buffer, Store

_ANSWER = 60.0  # seconds that a chunk waits for another tier's encoding of it

Where: TypeAlias = tuple[int, int]  # a chunk in a manifest: the file's number, the chunk's index in it


class ChunkSource(Protocol):
    """Provides the chunks of a part.

    Attributes:
        copies: how many copies of a chunk's bytes are in memory at once.
    """

    copies: int

    def reading(self, wanted: Collection[Content]) -> AbstractContextManager[None]:
        """A context within which the caller reads the chunks with the contents `wanted`."""
        ...

    def next(self, todo: Collection[Content], fits: Callable[[Content], bool]) -> Content | None:
        """Return the content in `todo` that is cheapest to read next, among those that `fits` accepts; None if none."""
        ...

    def read(self, where: Where, file: File) -> AbstractAsyncContextManager[Encoded]:
        """A context with one verified chunk, encoded for the tier under a key of this part.

        The chunk is in memory until the context ends.

        Raises:
            CorruptChunk: no copy of the chunk is right.
            ObjectNotFound: the part was removed.
        """
        ...


@dataclass(slots=True)
class Twin:
    """Another tier's copy of the part. While that tier answers, its stored bytes are copied byte for byte.

    Attributes:
        store: the other tier's store.
        manifest: the part's manifest there.
        answers: whether the tier has answered so far.
    """

    store: Store
    manifest: Manifest
    answers: bool = True


class Spooled:
    """The spool's copy of a part, in the encoding that the twin uses."""

    def __init__(self, spool: Spool, part: PartId, encoding: Encoding, twin: Twin | None) -> None:
        self._home, self._part, self._encoding, self._twin = spool.path(part), part, encoding, twin
        self._taker: Taker | None = None
        self.copies = 3 if twin else 1

    @contextmanager
    def reading(self, wanted: Collection[Content]) -> Iterator[None]:
        with self._encoding.taking(self._part, wanted) as self._taker:
            yield

    def next(self, todo: Collection[Content], fits: Callable[[Content], bool]) -> Content | None:
        assert self._taker is not None
        return self._taker.next(todo, fits)

    @asynccontextmanager
    async def read(self, where: Where, file: File) -> AsyncIterator[Encoded]:
        assert self._taker is not None
        async with self._taker.take(file.chunks[where[1]], partial(self._read, file, where[1])) as encoded:
            yield await self._as_the_twin(where, encoded)

    def _read(self, file: File, index: int) -> Buffer:
        try:
            return read_chunk(self._home / file.path, file, index)
        except CorruptChunk:
            if not self._home.is_dir():
                raise ObjectNotFound(f"{self._part} is not in the spool any more") from None
            raise

    async def _as_the_twin(self, where: Where, encoded: Encoded) -> Encoded:
        twin = self._twin
        chunk = twin.manifest.files[where[0]].chunks[where[1]] if twin else None
        if not (twin and twin.answers and chunk and chunk.stored) or chunk.stored.form == encoded.stored.form:
            return encoded
        try:
            async with asyncio.timeout(_ANSWER):
                data = await twin.store.get(f"{self._part.checkpoint.run}/{chunk.stored.key}")
            await to_the_end(decode, chunk, data, "the other tier")
        except (ObjectNotFound, CorruptChunk, FormatTooNew):
            return encoded  # the spool's encoding is right too, and is available now
        except (TierdError, TimeoutError):
            twin.answers = False  # so that later chunks do not wait for that tier
            return encoded
        return stored_as(self._part, chunk, data)


def stored_as(part: PartId, chunk: Chunk, data: Buffer) -> Encoded:
    """Return a chunk in another tier's encoding, under its key in `part`."""
    assert chunk.stored is not None
    key = chunk_key(part, chunk.xxh3_128, chunk.stored.codec)
    own = msgspec.structs.replace(chunk.stored, key=key, checked="")
    return Encoded(msgspec.structs.replace(chunk, stored=own), data)
