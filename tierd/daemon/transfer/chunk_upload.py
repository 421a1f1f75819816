"""One chunk's way to a tier: compared if it is there already, else read, encoded, put and confirmed.

Invariant: after `ChunkUpload.send` the tier has the chunk's bytes: they were compared there, or the server has verified
their checksum and has shown before that it refuses a wrong one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from tierd.codec.codec import check_digest, check_stored
from tierd.core.errors import CorruptChunk, FormatTooNew, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import PartId
from tierd.core.manifest import Chunk, File, Stored, Where
from tierd.daemon.tiers.objects import get_object, get_recognized, surely
from tierd.daemon.transfer.chunk_source import ChunkSource
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.memory_budget import Hold
from tierd.daemon.transfer.route import TierUploadContext

log = logging.getLogger("tierd.daemon")


class ChunkUpload:
    """One chunk in transfer. After `send`, `encoded` is its entry for the manifest."""

    def __init__(
        self,
        source: ChunkSource,
        route: TierUploadContext,
        part: PartId,
        keys_by_digest: Mapping[str, list[str]],
        where: Where,
        file: File,
    ) -> None:
        self._source, self._route, self._part, self._keys_by_digest = source, route, part, keys_by_digest
        self._where, self._file = where, file
        self.encoded: Chunk = file.chunks[where[1]]

    @property
    def weight(self) -> int:
        """The most bytes that the chunk takes in memory, without those that its source accounts for."""
        copies = max(
            self._source.copies(self.encoded.content), 2 if self.encoded.xxh3_128 in self._keys_by_digest else 1
        )
        return max(copies * self.encoded.size, self._route.store.memory_for(self.encoded.size))

    async def send(self, hold: Hold) -> int:
        """Put the chunk, unless it is on the tier intact. Returns the number of bytes put.

        Args:
            hold: bytes of the budget for the chunk's `weight`.
        """
        hold.keep(self.weight)
        if await self._is_already_stored():
            return 0
        async with self._source.read(self._where, self._file) as encoded:
            self.encoded, stored = encoded.chunk, encoded.stored
            hold.keep(self._route.store.memory_for(stored.size))
            key = f"{self._part.checkpoint.run}/{stored.key}"
            with self._route.throughput.link(self._route.tier).moving(stored.size):
                checked = await self._route.store.put(key, encoded.data)
            del encoded  # the bytes that are read back take its place
        if checked and not self._route.reread:
            stored = msgspec.structs.replace(stored, checked=checked)
            self.encoded = msgspec.structs.replace(self.encoded, stored=stored)
        else:
            await self._read_back(key, stored)
        return stored.size

    async def _is_already_stored(self) -> bool:
        """Whether an earlier try has put the chunk, in any encoding; that encoding is then used."""
        for key in self._keys_by_digest.get(self.encoded.xxh3_128, ()):
            try:
                self.encoded, _ = await get_recognized(self._route.store, key, self.encoded, self._route.tier)
            except (ObjectNotFound, CorruptChunk, FormatTooNew):
                continue
            except (StoreUnavailable, StoreRefused) as error:  # perhaps this object alone; else the put fails, too
                log.warning("%s: it is sent again, because what lies there cannot be read: %s", key, error)
                continue
            return True
        return False

    async def _read_back(self, key: str, stored: Stored) -> None:
        async def read() -> None:
            if self._route.store.can_digest:
                check_digest(stored, *await self._route.store.digest(key), key)
            else:
                with self._route.encoding.buffers.hold(stored.size) as memory:
                    data = await get_object(self._route.store, key, stored, into=memory)
                    await to_the_end(check_stored, stored, data, key)

        try:
            await surely(read)
        except (CorruptChunk, ObjectNotFound) as error:
            raise StoreUnavailable(f"{key}: what was read back differs from what was put") from error
