"""Spool -> tier: read, verify, encode, put, read back, manifest last.

Law: a manifest is put only after every chunk that it names was read back from the tier and compared. So a manifest on a
tier means a verified copy, whoever looks and whenever. A flush that was cut off goes on where it stopped: a chunk that
already lies there is compared, not sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from importlib import resources

import msgspec

from tierd.codec import Encoded, check_stored, decode, encode
from tierd.core.errors import CorruptChunk, ObjectNotFound, StoreUnavailable, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import Chunk, File, Manifest
from tierd.core.manifest import encode as encode_manifest
from tierd.daemon.together import together
from tierd.persist import read_chunk
from tierd.spool import Spool
from tierd.stores.base import Store

_CHUNKS = 3  # chunks in hand at once: at most about 3 x (raw + stored + read back) bytes of memory
_ANSWER = 60.0  # seconds that a chunk waits for another tier's form of it
README_KEY = "README.md"


@dataclass(frozen=True, slots=True)
class Flushed:
    """What one flush moved, in bytes: `raw` read and verified, `sent` put (less than stored when some was there)."""

    raw: int
    stored: int
    sent: int


@dataclass(frozen=True, slots=True)
class Twin:
    """Another tier's copy of the part: what it stores is what this tier shall store, byte for byte."""

    store: Store
    manifest: Manifest


async def flush(spool: Spool, part: PartId, store: Store, twin: Twin | None = None) -> Flushed:
    """Copy a committed part to a tier.

    Args:
        twin: where a tier holds the part already: chunks are stored as there, even if today's encoder packs otherwise.

    Raises:
        ObjectNotFound: the part is not in the spool any more.
        CorruptChunk, ManifestError: the spool's copy is proven bad; nothing was made visible on the tier.
        StoreUnavailable, StoreRefused: the tier did not take it.
    """
    manifest = await asyncio.to_thread(spool.manifest, part)
    prefix = f"{part.checkpoint.run}/chunks/{part.checkpoint.name}/{part.rank:05}/"
    there = {info.key async for info in store.scan(prefix)}
    await _introduce(store)
    if twin and not twin.manifest.same_content(manifest):
        twin = None
    work = [
        _Chunk(spool, store, part, there, twin, number, index, file)
        for number, file in enumerate(manifest.files)
        for index in range(len(file.chunks))
    ]
    sent = await together(_CHUNKS, [chunk.send() for chunk in work])
    tiered = _with_stored(manifest, [chunk.encoded for chunk in work])
    await store.put(part.manifest_key, encode_manifest(tiered))
    await _look_once_more(store, part, tiered, prefix)
    await store.delete([part.quarantine_key])
    return Flushed(manifest.size, tiered.stored_size, sum(sent))


class _Chunk:
    """One chunk on its way. After `send`, `encoded` is its entry for the manifest."""

    def __init__(
        self,
        spool: Spool,
        store: Store,
        part: PartId,
        there: set[str],
        twin: Twin | None,
        number: int,
        index: int,
        file: File,
    ) -> None:
        self._store, self._part, self._there, self._file, self._index = store, part, there, file, index
        self._twin = (twin.store, twin.manifest.files[number].chunks[index]) if twin else None
        self._home = spool.path(part)
        self._path = self._home / file.path
        self.encoded: Chunk = file.chunks[index]

    async def send(self) -> int:
        """Put the chunk unless it lies there intact; the number of bytes put."""
        encoded = await self._as_the_twin(await asyncio.to_thread(self._read))
        self.encoded = encoded.chunk
        key = f"{self._part.checkpoint.run}/{encoded.stored.key}"
        if key in self._there and await self._is_there(key, encoded):
            return 0
        await self._store.put(key, encoded.data)
        if not await self._is_there(key, encoded):
            raise StoreUnavailable(f"{key}: what was read back differs from what was put")
        return encoded.stored.size

    def _read(self) -> Encoded:
        try:
            raw = read_chunk(self._path, self._file, self._index)
        except CorruptChunk:
            if not self._home.is_dir():
                raise ObjectNotFound(f"{self._part} is not in the spool any more") from None
            raise
        return encode(self._part, self._file.chunks[self._index], raw)

    async def _as_the_twin(self, encoded: Encoded) -> Encoded:
        if self._twin is None or self._twin[1].stored in (None, encoded.stored):
            return encoded
        store, chunk = self._twin
        same = Encoded(chunk, b"")
        try:
            async with asyncio.timeout(_ANSWER):
                data = await store.get(f"{self._part.checkpoint.run}/{same.stored.key}")
            await asyncio.to_thread(decode, chunk, data, "the other tier")
        except (TierdError, TimeoutError):
            return encoded  # better right in other bytes than late
        return Encoded(chunk, data)

    async def _is_there(self, key: str, encoded: Encoded) -> bool:
        try:
            check_stored(encoded.stored, await self._store.get(key), key)
        except (ObjectNotFound, CorruptChunk):
            return False
        return True


def _with_stored(manifest: Manifest, chunks: list[Chunk]) -> Manifest:
    rest = iter(chunks)
    files = tuple(
        File(path=file.path, size=file.size, chunks=tuple(next(rest) for _ in file.chunks)) for file in manifest.files
    )
    return msgspec.structs.replace(manifest, files=files)


async def _look_once_more(store: Store, part: PartId, manifest: Manifest, prefix: str) -> None:
    # Two launches of one run could prune under each other: what the manifest names must still be there after its put.
    there = {info.key async for info in store.scan(prefix)}
    missing = {f"{part.checkpoint.run}/{chunk.stored.key}" for chunk in manifest.chunks() if chunk.stored} - there
    if missing:
        await store.delete([part.manifest_key])
        raise StoreUnavailable(f"{part}: {len(missing)} chunks were deleted while it was being flushed")


async def _introduce(store: Store) -> None:
    # Whoever finds the bucket in five years should be able to recover from it by hand.
    text = resources.files("tierd").joinpath("TIER_README.md").read_bytes()
    async for info in store.scan(README_KEY):
        if info.key == README_KEY:
            return
    await store.put(README_KEY, text)
