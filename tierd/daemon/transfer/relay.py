"""Tier -> tier: copy a part that is no longer in the spool to a tier that wants it.

A relay is a flush (`daemon/transfer/flush.py`) whose chunks come from other tiers. Stored bytes are copied unchanged,
because a chunk has the same bytes on every tier.

Invariant: every chunk is compared with the digest of its stored bytes before it is put. If a tier's object is wrong or
missing, the chunk is read from the next tier. The relay fails with `CorruptChunk` only if no tier has the chunk right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from tierd.codec.codec import EncodedChunk
from tierd.core.errors import CorruptChunk, ObjectNotFound, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Content, File, Manifest, Where
from tierd.daemon.tiers.objects import get_stored, surely
from tierd.daemon.transfer.chunk_source import PatchBase, stored_as
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.flush import FlushResult, send
from tierd.daemon.transfer.replicas import Replicas
from tierd.daemon.transfer.route import TierUploadContext
from tierd.stores.base import Store


async def relay(
    stores: Mapping[str, Store],
    part: PartId,
    route: TierUploadContext,
    *,
    base: Manifest | None = None,
    worn_out: Collection[CheckpointId] = (),
    run: str = "",
    read: Callable[[int], None] = lambda size: None,
) -> FlushResult:
    """Copy a part to a tier from the other tiers that have it.

    Args:
        stores: the other tiers.
        part: the part.
        route: the route to the tier.
        base, worn_out: as for `flush.flush`.
        run: the run's name on the tier; empty for the part's own run.
        read: called with the raw bytes of each chunk that was read from another tier.

    Raises:
        ObjectNotFound: no other tier has the part.
        CorruptChunk: every copy of a chunk, or of the manifest, is proven bad; nothing was made visible.
        StoreUnavailable, StoreRefused: the tier did not accept the part, or another tier could not be asked.
    """
    copies = Replicas(part, stores)
    await copies.ask()
    manifest = next(iter(copies.contents()), None)
    if manifest is None:
        if not copies.unavailable and not copies.defects:
            raise ObjectNotFound(f"{part} is on no other tier")
        raise copies.lost("its manifest", copies.unavailable)
    copies.trust(manifest)
    manifest = manifest.under(run or manifest.run)
    return await send(
        manifest, manifest.part, route, _TierChunkSource(copies, manifest.part, route, read), base, worn_out
    )


class _TierChunkSource:
    """The other tiers' copies of a part, in order of preference.

    Args:
        copies: the copies.
        part: the part's name on the tier to which it is sent.
        route: the route to that tier.
        read: called with the raw bytes of each chunk that was read.
    """

    def __init__(self, copies: Replicas, part: PartId, route: TierUploadContext, read: Callable[[int], None]) -> None:
        self._copies, self._part, self._route, self._on_read = copies, part, route, read

    def copies(self, content: Content) -> int:
        return 3

    async def compare(self, bases: Mapping[Content, PatchBase], token: str) -> None:
        """Choose no patches, because a base's bytes would have to be read from a tier as well."""

    @contextmanager
    def reading(self, contents: Collection[Content]) -> Iterator[None]:
        yield

    def next(self, todo: Collection[Content], accepts: Callable[[Content], bool]) -> Content | None:
        return next(filter(accepts, todo), None)

    @asynccontextmanager
    async def read(self, where: Where, file: File) -> AsyncIterator[EncodedChunk]:
        yield await self._read(where, file)
        self._on_read(file.chunks[where[1]].size)

    async def _read(self, where: Where, file: File) -> EncodedChunk:
        for name, manifest in list(self._copies.manifests.items()):
            chunk = manifest.chunk(where)
            if chunk.stored and chunk.stored.base:
                break  # the base may not be on this tier
            try:
                store, source = self._copies.stores[name], self._copies.part.checkpoint.run
                data = await surely(partial(get_stored, store, source, chunk))
            except CorruptChunk as error:
                self._copies.defects[name] = str(error)
            except TierdError:
                continue  # `chunk` below asks this tier again, and keeps its error
            else:
                return stored_as(self._part, chunk, data)
        number, index = where
        raw = await self._copies.chunk(number, index, file.path)
        throughput = self._route.throughput
        return await to_the_end(throughput.encode, self._part, file.chunks[index], raw, throughput.packs())
