"""Repair a tier's copy, chunk by chunk, from any other place that has the bytes.

Invariant: an object is restored byte for byte under its key, because other manifests may name it; that of a base, too.
An object that several nodes put, and that has the right content in another encoding, is kept, and the manifest changed.
The bytes come from another tier that has the same, or from the encoder if it still produces them. Only if neither does
is the chunk put raw, which is always the same bytes, under a key of its own. The manifest is then replaced by one that
names this key. A chunk counts as repaired only after it was read back and compared, and as lost only after every place
was asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tierd.codec.chunk_codec import RAW, EncodedChunk, encode, encode_patch
from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.core.ids import PartId, chunk_key, chunk_owner
from tierd.core.manifest import Chunk, ChunkPlace, Manifest, StoredChunk, patch_kind
from tierd.core.manifest_codec import encode as encode_manifest
from tierd.core.planning.place import SPOOL
from tierd.daemon.concurrency import MemoryBudget, thread_uncancelled
from tierd.daemon.tiers.intents import protect_chunks
from tierd.daemon.tiers.summaries import void_summary
from tierd.daemon.tiers.tier_objects import find_chunk_defect, get_recognized, get_stored, manifest_bytes, put_manifest
from tierd.daemon.tiers.tier_observer import missing_chunks
from tierd.daemon.tiers.tier_pauses import Pause, no_pause
from tierd.daemon.transfer.replicas import Replicas
from tierd.spool.spool import Spool
from tierd.spool.spool_directory import node_id
from tierd.spool.verified_reads import read_chunk
from tierd.stores.base import Buffer, Store


class TierRepairer:
    """Repairs one tier's copy of one part."""

    def __init__(
        self,
        spool: Spool,
        stores: Mapping[str, Store],
        tier: str,
        part: PartId,
        budget: MemoryBudget,
        pause: Pause = no_pause,
    ) -> None:
        self._spool, self._store, self._part, self._budget, self._pause = spool, stores[tier], part, budget, pause
        self._tier, self._run = tier, part.checkpoint.run
        self._other_stores = {name: store for name, store in stores.items() if name != tier}
        # Includes the repaired tier, because an equal chunk may exist there under another checkpoint's name.
        self._copies = Replicas(part, stores)
        self.repaired = 0
        self.lost_reasons: list[str] = []  # why other chunks could not be repaired
        self._lost_chunks: list[Chunk] = []
        # Chunks whose objects are as bad as before: lost, or now stored under another key.
        self.unrepaired: set[ChunkPlace] = set()
        self.sources: set[str] = set()

    async def repair(self, manifest: Manifest, places: Iterable[ChunkPlace]) -> None:
        """Repair these chunks of the tier's copy.

        Raises:
            StoreUnavailable, StoreRefused: a place could not be asked, so the repair is incomplete or its result
                unknown. Chunks that were repaired before remain repaired, and no chunk was counted as lost that might
                not be.
        """
        now = await self._repair_chunks(manifest, places)
        if now is not manifest:
            await self._show(now)

    async def _repair_chunks(self, manifest: Manifest, places: Iterable[ChunkPlace]) -> Manifest:
        """Repair chunks, and return the manifest that names them; the same object unless chunks have a new key."""
        await self._copies.read_manifests()
        self._copies.trust(manifest)
        moved: dict[Chunk, Chunk] = {}
        to_repair = list(places)
        for where in to_repair:
            chunk = manifest.chunk(where)
            if chunk in moved:  # equal chunks of one part are one object
                continue
            await self._pause()
            async with self._budget.take(3 * _memory_bytes(chunk)):  # raw, encoded, and read back
                try:
                    now = await self._repair(manifest, where)
                except CorruptChunk as error:
                    self.lost_reasons.append(str(error))
                    self._lost_chunks.append(chunk)
                    self.unrepaired.add(where)
                    continue
            if now is not chunk:
                moved[chunk] = now
        self.unrepaired |= {where for where in to_repair if manifest.chunk(where) in moved}
        if not moved or self.lost_reasons:
            return manifest
        self.repaired += len(moved)
        return manifest.with_chunks({where: moved[manifest.chunk(where)] for where in self.unrepaired})

    async def are_repaired(self) -> bool:
        """Whether the chunks of `repair` that were lost are right now, because another node repaired them since."""
        for chunk in self._lost_chunks:
            async with self._budget.take(_memory_bytes(chunk)):
                for link in chunk.chain():
                    if not await self._is_right(link):
                        return False
        return True

    async def rebuild(self) -> None:
        """Replace the tier's manifest, which is proven bad, from another tier's manifest and the tier's own objects.

        Raises:
            CorruptChunk: no other tier has a manifest.
        """
        copies = Replicas(self._part, self._other_stores)
        await copies.read_manifests()
        manifest = copies.first_content()
        places: list[ChunkPlace] = []
        replacements: dict[ChunkPlace, Chunk] = {}
        for where, chunk in manifest.places():
            await self._pause()
            # The tier's object may be twice as long as the raw bytes.
            async with self._budget.take(3 * _memory_bytes(chunk)):
                entry = await self._find_stored_entry(chunk)
            if entry is None:
                places.append(where)
                if chunk.stored and chunk.stored.base:  # the other tier's bases are not put here
                    replacements[where] = self._raw_entry(chunk)
            elif entry is not chunk:
                replacements[where] = entry
        manifest = await self._repair_chunks(manifest.with_chunks(replacements), places)
        if not self.lost_reasons:
            await self._show(manifest)

    async def _repair(self, manifest: Manifest, where: ChunkPlace) -> Chunk:
        """Repair one chunk, unless another process has done so, and return its entry for the manifest."""
        chunk = manifest.chunk(where)
        bad_links = [link for link in chunk.chain() if not await self._is_right(link)]
        if not bad_links:
            return chunk
        # Several nodes put the chunk, perhaps with encoders that give different bytes. If each restored its own bytes,
        # the others' manifests would become wrong in turn.
        if chunk.home is not None and (entry := await self._find_stored_entry(chunk)):
            return entry
        if await self._restore(manifest, where, bad_links):
            self.repaired += 1
            return chunk
        plain = self._raw_entry(chunk)
        await self._put_verified(EncodedChunk(plain, await self._read_raw(manifest, where)))
        return plain

    async def _is_right(self, link: Chunk) -> bool:
        return await find_chunk_defect(self._store, self._run, link) is None

    async def _restore(self, manifest: Manifest, where: ChunkPlace, bad_links: Iterable[Chunk]) -> bool:
        """Put objects of a chunk's chain again, byte for byte; return whether that was possible for all.

        Raises:
            CorruptChunk: no place has the bytes of the chunk itself.
        """
        chunk = manifest.chunk(where)
        for link in reversed(list(bad_links)):  # a base first, because the patches above it are made from it
            try:
                encoded = await self._same_bytes(link, where) or await self._encoded_again(manifest, link, where)
            except CorruptChunk:
                if link is chunk:
                    raise
                return False
            if encoded is None:
                return False
            await self._put_verified(encoded)
        return True

    async def _put_verified(self, encoded: EncodedChunk) -> None:
        key = f"{self._run}/{encoded.stored.key}"
        await self._store.put(key, encoded.data)
        if defect := await find_chunk_defect(self._store, self._run, encoded.chunk):
            raise StoreUnavailable(f"{key}: what was read back differs from what was put: {defect}")

    async def _same_bytes(self, link: Chunk, where: ChunkPlace) -> EncodedChunk | None:
        """Read an object's bytes from another tier; None if no tier has the same bytes."""
        for name, store in self._other_stores.items():
            manifest = self._copies.manifests.get(name)
            chain = manifest.chunk(where).chain() if manifest else ()
            for candidate in (*(chunk for chunk in chain if _are_equal(chunk, link)), link):
                try:
                    data = await get_stored(store, self._run, candidate)
                except TierdError:
                    continue
                self.sources.add(name)
                return EncodedChunk(link, data)
        return None

    async def _encoded_again(self, manifest: Manifest, link: Chunk, where: ChunkPlace) -> EncodedChunk | None:
        """Encode a link of a chunk's chain as its manifest says; None if the encoder does not produce that any more."""
        base = link.stored.base if link.stored else None
        raw = await self._link(manifest, link, where)
        base_raw = await self._link(manifest, base, where) if base else None
        encoded = await thread_uncancelled(self._encode, link, raw, base, base_raw)
        return EncodedChunk(link, encoded.data) if encoded and _are_equal(encoded.chunk, link) else None

    async def _link(self, manifest: Manifest, link: Chunk, where: ChunkPlace) -> Buffer:
        """Return the raw bytes of a link of a chunk's chain: from the part that wrote it in the spool, or the tiers."""
        if link is manifest.chunk(where):
            return await self._read_raw(manifest, where)
        try:
            data = await thread_uncancelled(self._read_older_part, link, manifest.files[where[0]].path)
            self.sources.add(SPOOL)
            return data
        except (CorruptChunk, ManifestError, ObjectNotFound, OSError):
            return await self._copies.link(self._tier, link, where)

    def _read_older_part(self, link: Chunk, path: str) -> Buffer:
        """Read a chunk of an older part of this rank from the spool."""
        assert link.stored is not None
        owner = chunk_owner(self._run, link.stored.key)
        if owner is None:
            raise ObjectNotFound(link.stored.key)
        part = PartId(owner, self._part.rank, self._part.world)
        for file in self._spool.manifest(part).files:
            contents = [chunk.content for chunk in file.chunks] if file.path == path else []
            if link.content in contents:
                return read_chunk(self._spool.path(part) / path, file, contents.index(link.content))
        raise ObjectNotFound(f"{part}: {path} has no such chunk")

    async def _read_raw(self, manifest: Manifest, where: ChunkPlace) -> Buffer:
        number, index = where
        file = manifest.files[number]
        path = self._spool.path(self._part) / file.path
        try:
            data = await thread_uncancelled(read_chunk, path, file, index)
            self.sources.add(SPOOL)
            return data
        except CorruptChunk:
            pass
        except OSError as error:  # a disk error proves nothing about the bytes
            self._copies.unavailable[SPOOL] = f"{SPOOL}: {error}"
        raw = await self._copies.chunk(number, index, file.path)
        self.sources |= self._copies.used_tiers
        return raw

    def _encode(self, link: Chunk, raw: Buffer, base: Chunk | None, base_raw: Buffer | None) -> EncodedChunk | None:
        if link.stored is not None and base is not None and base_raw is not None:
            return encode_patch(self._part, link, raw, base, base_raw, patch_kind(link.stored.codec))
        return encode(self._part, link, raw, pack=link.stored is None or link.stored.codec != RAW)

    def _raw_entry(self, chunk: Chunk) -> Chunk:
        """Return the entry of a chunk that is stored raw, under a key of its own."""
        key = chunk_key(self._part, chunk.xxh3_128, RAW, chunk.home)
        stored = StoredChunk(codec=RAW, size=chunk.size, xxh3_128=chunk.xxh3_128, key=key)
        return msgspec.structs.replace(chunk, stored=stored)

    async def _find_stored_entry(self, chunk: Chunk) -> Chunk | None:
        """Return the manifest entry for the tier's own object of another tier's chunk; None if the object is bad."""
        stored = chunk.stored
        for link in chunk.chain():
            if not await self._is_right(link):
                break
        else:
            return chunk
        if stored is None:
            return None
        try:
            entry, _ = await get_recognized(self._store, f"{self._run}/{stored.key}", chunk, self._run, stored.codec)
        except (CorruptChunk, ObjectNotFound, StoreRefused):
            return None
        return entry

    async def _show(self, manifest: Manifest) -> None:
        """Replace the tier's manifest, unless the part was pruned meanwhile."""
        data = encode_manifest(manifest)
        owners = manifest.owners | {self._part.checkpoint}
        async with protect_chunks(self._store, self._part, data, owners, node_id(self._spool.root)):
            try:
                await manifest_bytes(self._store, self._part)  # also if it is damaged
            except ObjectNotFound:
                return  # and no prune of it begins before this context ends
            missing = await missing_chunks(self._store, manifest)
            if not missing:
                await void_summary(self._store, self._part.checkpoint)
                await put_manifest(self._store, self._part.manifest_key, data, reread=True)
        if missing:
            raise StoreUnavailable(f"{self._part}: {len(missing)} chunks were deleted while it was being repaired")


def _are_equal(chunk: Chunk, other_chunk: Chunk) -> bool:
    """Whether two chunks are stored as the same bytes, to be decoded in the same way.

    The codec counts, because a manifest may name a wrong one: the repaired object would match its entry's digest, and
    no reader could decode it. Patches are excepted, because earlier versions named each by its flush.
    """
    first, second = chunk.stored, other_chunk.stored
    if first is None or second is None:
        return False
    kind = patch_kind(first.codec)
    alike = first.codec == second.codec or (kind and kind == patch_kind(second.codec))
    return bool(alike) and (first.size, first.xxh3_128) == (second.size, second.xxh3_128)


def _memory_bytes(chunk: Chunk) -> int:
    return max(chunk.size, chunk.stored.size if chunk.stored else 0)
