"""Spool -> tier: read, verify, encode, put, confirm, and put the manifest last.

Invariant: a manifest is put only after every chunk that it names is confirmed on the tier. A chunk is confirmed by
reading it back and comparing it; a directory digests it where it lies. A checksum also confirms it, if the server has
shown that it refuses a wrong checksum. The manifest is confirmed in the same manner before a part counts as flushed. So
a manifest on a tier means a verified copy for every reader at any time.

An interrupted flush is continued: a chunk that is on the tier already is compared, not sent. A large chunk that the
newest complete checkpoint has is named, not sent, as far as `core/planning/sharing.py` permits. Flushes of one part to
several tiers share their reads (`daemon/transfer/shared_encoding.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources

from tierd.core.errors import (
    ManifestError,
    StoreRefused,
    StoreUnavailable,
)
from tierd.core.ids import IDENTITY_KEY, README_KEY, CheckpointId, PartId, chunk_owner
from tierd.core.manifest import Chunk, Content, Manifest, is_patch
from tierd.core.manifest_codec import encode as encode_manifest
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.sharing import patchable, shareable
from tierd.daemon.pause import Pause
from tierd.daemon.tiers.identity import put_identity
from tierd.daemon.tiers.intents import left_over, naming
from tierd.daemon.tiers.objects import put_manifest
from tierd.daemon.tiers.observe import chunks_there, missing_chunks
from tierd.daemon.timings import DaemonTimings
from tierd.daemon.transfer.chunk_source import ChunkSource, PatchBase, ReferenceCopy, SpoolChunkSource
from tierd.daemon.transfer.chunk_upload import ChunkUpload
from tierd.daemon.transfer.concurrency import together
from tierd.daemon.transfer.flush_pacing import Spread
from tierd.daemon.transfer.route import FlushProgress, TierUploadContext
from tierd.spool.file_io import digest
from tierd.spool.spool import Spool
from tierd.stores.base import Store, clear

_CHUNKS = 8  # chunks in transfer at once, as far as the budget permits


@dataclass(frozen=True, slots=True)
class FlushResult:
    """The result of one flush.

    Attributes:
        raw: size of the part's files in bytes, before encoding.
        stored: size in bytes of all chunks that the part's manifest names, as they are stored on the tier.
        sent: bytes of chunks that this flush put; less than `stored` if some chunks were on the tier already.
        shared: raw bytes in chunks of other checkpoints, which were named and not sent.
        facts: facts of the manifest on the tier.
    """

    raw: int
    stored: int
    sent: int
    shared: int
    facts: ManifestFacts


async def flush(
    spool: Spool,
    part: PartId,
    route: TierUploadContext,
    *,
    twin: ReferenceCopy | None = None,
    base: Manifest | None = None,
    worn_out: Collection[CheckpointId] = (),
    spread: Spread | None = None,
) -> FlushResult:
    """Copy a committed part to a tier.

    Args:
        spool: the spool that holds the part.
        part: the part.
        route: the route to the tier.
        twin: another tier's copy of the part. Chunks are stored in its encoding, even if today's encoder would differ.
        base: another checkpoint's manifest on this tier, at the same rank. Its equal large chunks are named, not
            sent.
        worn_out: checkpoints whose chunks are not named, because enough others depend on them (`sharing.worn`).
        spread: the pauses between chunks; None for no pauses.

    Raises:
        ObjectNotFound: the part is not in the spool any more.
        CorruptChunk, ManifestError: the spool's copy is proven bad; nothing was made visible on the tier.
        StoreUnavailable, StoreRefused: the tier did not accept the part.
    """
    manifest = await asyncio.to_thread(spool.manifest, part)
    if twin and not twin.manifest.same_content(manifest):
        twin = None
    return await send(
        manifest, part, route, SpoolChunkSource(spool, part, route.encoding, twin), base, worn_out, spread
    )


async def send(
    manifest: Manifest,
    part: PartId,
    route: TierUploadContext,
    source: ChunkSource,
    base: Manifest | None,
    worn_out: Collection[CheckpointId],
    spread: Spread | None = None,
) -> FlushResult:
    """Put the chunks that a part's manifest describes on a tier, and the manifest last.

    Args:
        manifest: the part's manifest.
        part: the part.
        route: the route to the tier.
        source: provides the chunks.
        base, worn_out, spread: as for `flush`.

    Raises:
        As `flush`.
    """
    await _introduce(route.store)
    keys_by_digest: dict[str, list[str]] = {}  # digest -> keys of objects that earlier tries have put
    for key in await chunks_there(route.store, part.rank, [part.checkpoint]):
        name, _, codec = key.rpartition("/")[2].partition(".")
        if not is_patch(codec):  # the base of a left one is not known
            keys_by_digest.setdefault(name, []).append(key)
    work: dict[Content, ChunkUpload] = {}  # a chunk that the part holds twice is one object
    for where, chunk in manifest.places():
        if chunk.content not in work:
            work[chunk.content] = ChunkUpload(source, route, part, keys_by_digest, where, manifest.files[where[0]])
    shared = await _shared_with(route.store, part, base, worn_out, route.timings)
    for content in work.keys() & shared.keys():
        work[content].encoded = shared[content]
    todo = OrderedDict((content, chunk) for content, chunk in work.items() if content not in shared)
    if base and (bases := _bases(manifest, todo, base, shared)):
        token = digest(f"{route.timings.now_ms()} {route.who or secrets.token_hex(4)}".encode())[:11]
        await source.compare(bases, token)
    with source.reading([content for content in todo if content[0] not in keys_by_digest]):
        pauses = partial((spread or Spread()).pause, len(todo))
        moved = route.moving[part] = FlushProgress(sum(size for _, size in todo))
        hands = [_send_each(todo, source, route, pauses, moved) for _ in range(min(_CHUNKS, len(todo)))]
        try:
            sent = await together(_CHUNKS, hands)
        finally:
            route.moving.pop(part, None)
    tiered = manifest.with_chunks({where: work[chunk.content].encoded for where, chunk in manifest.places()})
    await _show(route, part, tiered)
    await clear(route.store, [part.quarantine_key])
    reused = sum(size for _, size in work.keys() & shared.keys())
    return FlushResult(manifest.size, tiered.stored_size, sum(sent), reused, ManifestFacts.of(tiered))


async def _send_each(
    todo: OrderedDict[Content, ChunkUpload],
    source: ChunkSource,
    route: TierUploadContext,
    pauses: Pause,
    moved: FlushProgress,
) -> int:
    """Send chunks of `todo`, together with concurrent calls, until none is left. Returns the bytes that were put."""
    sent = 0
    while todo:
        await route.pause()
        await pauses()
        likely = source.next(todo, lambda _: True)
        if likely is None:  # concurrent calls took the last ones
            break
        async with route.budget.take(todo[likely].weight) as hold:
            # Chosen again, because other chunks may have been encoded while this call waited for the budget.
            content = source.next(todo, lambda content: route.budget.share(todo[content].weight) <= hold.size)
            if content is not None:
                sent += await todo.pop(content).send(hold)
                moved.done += content[1]
    return sent


def _bases(
    manifest: Manifest, todo: Collection[Content], base: Manifest, shared: Mapping[Content, Chunk]
) -> dict[Content, PatchBase]:
    """Return, by content, the chunk at the same place of the same file of `base`, if it may be a patch's base."""
    files = {file.path: file for file in base.files}
    bases: dict[Content, PatchBase] = {}
    for file in manifest.files:
        older = files.get(file.path)
        for index, (chunk, old) in enumerate(zip(file.chunks, older.chunks if older else (), strict=False)):
            link = shared.get(old.content) if old.size == chunk.size and chunk.content in todo else None
            if older and link and patchable(link):
                bases.setdefault(chunk.content, PatchBase(file, index, base.part, older, link))
    return bases


async def _shared_with(
    store: Store, part: PartId, base: Manifest | None, worn_out: Collection[CheckpointId], timings: DaemonTimings
) -> dict[Content, Chunk]:
    """Return, by content, the chunks of `base` that may be named and are on the tier."""
    if base is None or base.rank != part.rank:
        return {}
    offered = shareable(base, worn_out)
    if not offered:
        return {}
    owners = {chunk_owner(base.run, stored.key) for chunk in offered for stored in chunk.objects()}
    owners -= await left_over(store, base.run, timings)
    sizes = await chunks_there(store, part.rank, [owner for owner in owners if owner])
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
    async with naming(route.store, part, data, manifest.owners, route.who, route.timings):
        missing = await missing_chunks(route.store, manifest)
        if not missing:
            await put_manifest(route.store, part.manifest_key, data, reread=route.reread)
    if missing:
        raise StoreUnavailable(f"{part}: {len(missing)} chunks were deleted while it was being flushed")


async def _introduce(store: Store) -> None:
    # A person who finds the bucket in five years should be able to recover from it by hand.
    present = {info.key async for info in store.scan(README_KEY)}
    if README_KEY not in present:
        await store.put(README_KEY, introduction())
    if IDENTITY_KEY not in present:
        await put_identity(store)


def introduction() -> bytes:
    """Return the content of a tier's README.md."""
    return resources.files("tierd").joinpath("TIER_README.md").read_bytes()
