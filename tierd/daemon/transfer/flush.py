"""Spool -> tier: read, verify, encode, put, confirm, and put the manifest last.

Invariant: a manifest is put only after every chunk that it names is confirmed on the tier. A chunk is confirmed by
reading it back and comparing it; a directory digests it where it lies. A checksum also confirms it, if the server has
shown that it refuses a wrong checksum. So a manifest on a tier means a verified copy for every reader at any time. An
interrupted flush is continued: a chunk that is on the tier already is compared, not sent. So each chunk that several
ranks hold is sent by one of their nodes, and read and compared by the others. A large chunk that the newest
complete checkpoint has is named, not sent, as far as `core/planning/flush_order.py` permits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from tierd.codec.chunk_codec import verify_stored, verify_stored_digest
from tierd.core.errors import CorruptChunk, FormatTooNew, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId, chunk_owner
from tierd.core.manifest import Chunk, ChunkPlace, ContentId, File, Manifest, StoredChunk, is_patch
from tierd.core.manifest_codec import encode as encode_manifest
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.flush_order import is_patchable, shareable_chunks
from tierd.core.replicas.sending_order import SendingOrder
from tierd.daemon.concurrency import BudgetHold, gather_limited, thread_uncancelled
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.tiers.intents import long_marked, protect_chunks
from tierd.daemon.tiers.tier_identity import introduce_tier
from tierd.daemon.tiers.tier_objects import get_object, get_recognized, put_manifest, read_until_certain
from tierd.daemon.tiers.tier_observer import list_chunks, missing_chunks
from tierd.daemon.tiers.tier_pauses import FlushSpread, Pause
from tierd.daemon.transfer.chunk_source import (
    ChunkSource,
    FlushProgress,
    PatchBase,
    ReferenceCopy,
    SpoolChunkSource,
    TierUploadContext,
)
from tierd.daemon.transfer.object_listing import ObjectListing
from tierd.spool.spool import Spool
from tierd.stores.base import Store, delete_if_permitted

log = logging.getLogger("tierd.daemon")
_CHUNKS = 8  # chunks in transfer at once, as far as the budget permits


class ChunkUpload:
    """One chunk in transfer. After `send`, `encoded` is its entry for the manifest."""

    def __init__(
        self,
        source: ChunkSource,
        route: TierUploadContext,
        part: PartId,
        listing: ObjectListing,
        where: ChunkPlace,
        file: File,
    ) -> None:
        self._source, self._route, self._part, self._listing = source, route, part, listing
        self._where, self._file = where, file
        self.encoded: Chunk = file.chunks[where[1]]
        self._taken: str | None = None  # the chunk's key, once an object of another node's was met there

    @property
    def home(self) -> tuple[int, bool]:
        """The rank under which the chunk is stored, and whether only this part has it; the least is chosen."""
        home = self.encoded.home
        return (self._part.rank, True) if home is None else (home, False)

    def name(self, shared: Chunk) -> None:
        """Let the manifest name another checkpoint's object instead of one of its own."""
        self.encoded = msgspec.structs.replace(shared, home=self.encoded.home)

    @property
    def weight(self) -> int:
        """The most bytes that the chunk takes in memory, without those that its source accounts for."""
        may_be_read = self.encoded.home is not None or self._listing.keys(self.encoded)
        copies = max(self._source.memory_copies(self.encoded.content), 2 if may_be_read else 1)
        return max(copies * self.encoded.size, self._route.store.memory_for(self.encoded.size))

    async def send(self, hold: BudgetHold) -> int | None:
        """Put the chunk, unless it is on the tier intact. An object that other nodes may name is first verified.

        Args:
            hold: bytes of the budget for the chunk's `weight`.

        Returns:
            The number of bytes put; None if an object came after the listing, which the next call verifies.
        """
        confirmed = self._route.confirmed
        if confirmed is None:
            return await self._send(hold)
        async with confirmed.exclusive(self.encoded):
            if entry := confirmed.entry(self.encoded):
                self.encoded = entry
                self._source.skip(entry.content)
                return 0
            sent = await self._send(hold)
            if sent is not None:
                confirmed.add(self.encoded)
            return sent

    async def _send(self, hold: BudgetHold) -> int | None:
        hold.shrink_to(self.weight)
        await self._listing.refresh(self.encoded)  # again, because the caller may have waited for the budget
        if await self._is_already_stored():
            self._source.skip(self.encoded.content)
            return 0
        async with self._source.read(self._where, self._file) as encoded:
            self.encoded, stored = encoded.chunk, encoded.stored
            hold.shrink_to(self._route.store.memory_for(stored.size))
            key = f"{self._part.checkpoint.run}/{stored.key}"
            is_taken = key == self._taken
            may_be_right = self._listing.has_patch(key) or (is_taken and is_patch(stored.codec))
            if may_be_right and await self._is_right(key, stored):
                return 0
            store = self._route.store
            put = store.put if is_taken or self.encoded.home is None else store.put_if_absent
            with self._route.throughput.link(self._route.tier).measured(stored.size):
                checked = await put(key, encoded.data)
            del encoded  # the bytes that are read back take its place
        if checked is None:
            self._taken = key
            return None
        if checked and not self._route.reread:
            stored = msgspec.structs.replace(stored, checked=checked)
            self.encoded = msgspec.structs.replace(self.encoded, stored=stored)
        else:
            try:
                await self._read_back(key, stored)
            except (CorruptChunk, ObjectNotFound) as error:
                raise StoreUnavailable(f"{key}: what was read back differs from what was put") from error
        return stored.size

    async def _is_already_stored(self) -> bool:
        """Whether an earlier try or another node has put the chunk, in any encoding; that encoding is then used."""
        taken = [self._taken] if self._taken and not is_patch(self._taken.rpartition(".")[2]) else []
        for key in dict.fromkeys([*taken, *self._listing.keys(self.encoded)]):
            try:
                self.encoded, _ = await get_recognized(self._route.store, key, self.encoded, self._route.tier)
            except (ObjectNotFound, CorruptChunk, FormatTooNew):
                continue
            except (StoreUnavailable, StoreRefused) as error:  # perhaps this object alone; else the put fails, too
                if self._may_be_named(error):
                    raise
                log.warning("%s: it is sent again, because what lies there cannot be read: %s", key, error)
                continue
            return True
        return False

    async def _is_right(self, key: str, stored: StoredChunk) -> bool:
        """Whether an earlier try or another node has put this very object."""
        try:
            await self._read_back(key, stored)
        except (CorruptChunk, ObjectNotFound, StoreUnavailable, StoreRefused) as error:
            if self._may_be_named(error):
                raise
            return False
        return True

    def _may_be_named(self, error: Exception) -> bool:
        """Whether an error proves nothing of an object that another node's manifest may name, in its own encoding."""
        return self.encoded.home is not None and isinstance(error, StoreUnavailable)

    async def _read_back(self, key: str, stored: StoredChunk) -> None:
        async def read() -> None:
            if self._route.store.can_digest:
                verify_stored_digest(stored, *await self._route.store.digest(key), key)
            else:
                with self._route.encoding.buffers.hold(stored.size) as memory:
                    data = await get_object(self._route.store, key, stored, into=memory)
                    await thread_uncancelled(verify_stored, stored, data, key)

        await read_until_certain(read)


@dataclass(frozen=True, slots=True)
class FlushResult:
    raw: int  # size of the part's files in bytes, before encoding
    stored: int  # size in bytes of all chunks that the part's manifest names, as they are stored on the tier
    sent: int  # bytes of chunks that this flush put; less than `stored` if some chunks were on the tier already
    shared: int  # raw bytes in chunks of other checkpoints, which were named and not sent
    facts: ManifestFacts


async def flush(
    spool: Spool,
    part: PartId,
    route: TierUploadContext,
    *,
    twin: ReferenceCopy | None = None,
    base: Manifest | None = None,
    worn_out: Collection[CheckpointId] = (),
    spread: FlushSpread | None = None,
) -> FlushResult:
    """Copy a committed part to a tier.

    Args:
        twin: another tier's copy of the part. Chunks are stored in its encoding, even if today's encoder would differ.
        base: another checkpoint's manifest on this tier, at the same rank. Its equal large chunks are named, not sent.
        worn_out: checkpoints whose chunks are not named, because enough others depend on them (`sharing.worn`).

    Raises:
        ObjectNotFound: the part is not in the spool any more.
        CorruptChunk, ManifestError: the spool's copy is proven bad; nothing was made visible on the tier.
    """
    manifest = await asyncio.to_thread(spool.manifest, part)
    if twin and not twin.manifest.same_content(manifest):
        twin = None
    return await send_part(
        manifest, part, route, SpoolChunkSource(spool, part, route.encoding, twin), base, worn_out, spread
    )


async def send_part(
    manifest: Manifest,
    part: PartId,
    route: TierUploadContext,
    source: ChunkSource,
    base: Manifest | None,
    worn_out: Collection[CheckpointId],
    spread: FlushSpread | None = None,
) -> FlushResult:
    """Put the chunks that a part's manifest describes on a tier, and the manifest last."""
    await introduce_tier(route.store)
    listing = ObjectListing(route.store, part, route.timings)
    work: dict[ContentId, ChunkUpload] = {}  # a chunk that the part holds twice is one object
    for where, chunk in manifest.places():
        upload = ChunkUpload(source, route, part, listing, where, manifest.files[where[0]])
        if chunk.content not in work or upload.home < work[chunk.content].home:
            work[chunk.content] = upload
    await listing.read(upload.encoded for upload in work.values())
    shared = await _shared_with(route.store, part, base, worn_out, route.timings)
    todo = OrderedDict((content, upload) for content, upload in work.items() if content not in shared)
    sending = SendingOrder(
        part,
        [upload.encoded for upload in todo.values()],
        _CHUNKS,
        time.monotonic(),
        route.timings.chunks_listed_s,
        route.silences.get(part.checkpoint.run, route.timings.chunks_awaited_s),
        manifest.senders if source.is_local else {},
    )
    order = SharedOrder(sending, listing, todo)
    for content in work.keys() & shared.keys():
        work[content].name(shared[content])
    if base and (bases := _bases(manifest, todo, base, shared)):
        await source.choose_patches(bases)
    with source.reading([content for content, upload in todo.items() if not listing.keys(upload.encoded)]):
        pauses = partial((spread or FlushSpread()).pause, len(todo))
        moved = route.progress_by_part[part] = FlushProgress(sum(size for _, size in todo))
        hands = [_send_each(order, source, route, pauses, moved) for _ in range(min(_CHUNKS, len(todo)))]
        try:
            sent = await gather_limited(_CHUNKS, hands)
        finally:
            route.progress_by_part.pop(part, None)
    if sending.was_vain is not None:
        timings = route.timings
        route.silences[part.checkpoint.run] = timings.chunks_listed_s if sending.was_vain else timings.chunks_awaited_s
    tiered = manifest.with_chunks({where: work[chunk.content].encoded for where, chunk in manifest.places()})
    await _show(route, part, tiered)
    await delete_if_permitted(route.store, [part.quarantine_key])
    reused = sum(size for _, size in work.keys() & shared.keys())
    return FlushResult(manifest.size, tiered.stored_size, sum(sent), reused, ManifestFacts.of(tiered))


class SharedOrder:
    """Keeps the chunks that a flush has still to send in an order by which several nodes send each chunk about once.

    Attributes:
        waiting: the contents of `todo` that are left to other nodes now.
    """

    def __init__(self, order: SendingOrder, listing: ObjectListing, todo: OrderedDict[ContentId, ChunkUpload]) -> None:
        self.todo, self._order, self._listing = todo, order, listing
        self._version, self.waiting = -1, set[ContentId]()
        homed = {upload.encoded.home: upload.encoded for upload in todo.values() if upload.encoded.home is not None}
        self._homed = list(homed.values())  # a chunk of each directory that other nodes fill as well

    async def update(self) -> None:
        """Sort `todo` by what other nodes have put. While only chunks are left that wait for them, wait."""
        while self.todo:
            for chunk in self._homed:
                await self._listing.refresh(chunk, self._order.ended_s or 0.0)
            if self._version != self._listing.version:
                self._sort()
            if not self.todo.keys() <= self.waiting:
                return
            await self._listing.wait()

    def finish(self, content: ContentId) -> None:
        """Note that a chunk which was taken from `todo` is on the tier."""
        self._order.finish(content, time.monotonic())

    def _sort(self) -> None:
        self._version = self._listing.version
        listed = {content for content, upload in self.todo.items() if self._listing.is_put(upload.encoded)}
        ordered, self.waiting = self._order.order(self.todo, listed, time.monotonic())
        for content in ordered:
            self.todo.move_to_end(content)


async def _send_each(
    order: SharedOrder, source: ChunkSource, route: TierUploadContext, pauses: Pause, moved: FlushProgress
) -> int:
    """Send chunks, together with concurrent calls, until none is left. Returns the bytes that were put."""
    sent, todo = 0, order.todo
    while todo:
        await route.pause()
        await pauses()
        await order.update()
        likely = source.next_content(todo, lambda content: content not in order.waiting)
        if likely is None:  # concurrent calls took the last ones
            continue
        async with route.budget.take(todo[likely].weight) as hold:
            # Chosen again, because other chunks may have been encoded while this call waited for the budget.
            content = source.next_content(
                todo,
                lambda content: (
                    content not in order.waiting and route.budget.granted_size(todo[content].weight) <= hold.size
                ),
            )
            if content is not None:
                upload = todo.pop(content)
                bytes_put = await upload.send(hold)
                if bytes_put is None:
                    todo[content] = upload
                    continue
                sent += bytes_put
                order.finish(content)
                moved.done += content[1]
    return sent


def _bases(
    manifest: Manifest, todo: Collection[ContentId], base: Manifest, shared: Mapping[ContentId, Chunk]
) -> dict[ContentId, PatchBase]:
    """Return, by content, the chunk at the same place of the same file of `base`, if it may be a patch's base."""
    files = {file.path: file for file in base.files}
    bases: dict[ContentId, PatchBase] = {}
    for file in manifest.files:
        older = files.get(file.path)
        for index, (chunk, old) in enumerate(zip(file.chunks, older.chunks if older else (), strict=False)):
            link = shared.get(old.content) if old.size == chunk.size and chunk.content in todo else None
            if older and link and is_patchable(link):
                bases.setdefault(chunk.content, PatchBase(file, index, base.part, older, link))
    return bases


async def _shared_with(
    store: Store, part: PartId, base: Manifest | None, worn_out: Collection[CheckpointId], timings: DaemonTimings
) -> dict[ContentId, Chunk]:
    """Return, by content, the chunks of `base` that may be named and are on the tier."""
    if base is None or base.rank != part.rank:
        return {}
    offered = shareable_chunks(base, worn_out)
    if not offered:
        return {}
    owners = {chunk_owner(base.run, stored.key) for chunk in offered for stored in chunk.objects()}
    owners -= await long_marked(store, base.run, timings)
    objects = [stored for chunk in offered for stored in chunk.objects() if chunk_owner(base.run, stored.key) in owners]
    sizes = await list_chunks(store, base.run, {stored.directory for stored in objects})
    return {
        chunk.content: chunk
        for chunk in offered
        if all(sizes.get(f"{base.run}/{stored.key}") == stored.size for stored in chunk.objects())
    }


async def _show(route: TierUploadContext, part: PartId, manifest: Manifest) -> None:
    """Put and confirm the manifest if every chunk that it names is still there, while no prune deletes those chunks."""
    try:
        data = encode_manifest(manifest)
    except ManifestError as error:  # the spool's manifest is right; with keys it is larger than readers accept
        raise StoreRefused(f"{part}: no tier can describe it: {error}") from error
    async with protect_chunks(route.store, part, data, manifest.owners, route.who, route.timings):
        missing = await missing_chunks(route.store, manifest)
        if not missing:
            await put_manifest(route.store, part.manifest_key, data, reread=route.reread)
    if missing:
        raise StoreUnavailable(f"{part}: {len(missing)} chunks were deleted while it was being flushed")
