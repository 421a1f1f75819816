"""Read, put and verify one tier's objects: a part's manifest, and the objects of its chunks.

Invariant: only a second read that gives the same wrong bytes proves corruption, and an error of a tier proves
nothing about its objects.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import TypeAlias, TypeVar

from tierd.codec.chunk_codec import identify_object, verify_stored
from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId, manifests_prefix
from tierd.core.manifest import Chunk, Manifest, StoredChunk
from tierd.core.manifest_codec import MAX_MANIFEST_SIZE, decode
from tierd.core.storage_faults import Reading, ReadVerdict, judge_readings, reading_of, unstable_error
from tierd.daemon.concurrency import thread_uncancelled
from tierd.spool.direct_io import memory_for
from tierd.spool.file_io import digest
from tierd.spool.spool import Spool
from tierd.stores.base import Buffer, Store, octets

log = logging.getLogger("tierd.daemon")
T = TypeVar("T")
# An object's key and form, as a manifest describes it -> what is wrong with it; None if it is right.
ObjectDefects: TypeAlias = MutableMapping[tuple[str, str, int, str] | None, str | None]


async def read_until_certain(read: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `read`, which is called again until its errors prove corruption (`core.storage_faults`).

    A bit that flipped in transfer is not corruption of the stored bytes.

    Raises:
        CorruptChunk, ManifestError: two calls read the same wrong bytes.
        UnstableRead: all calls read different wrong bytes.
    """
    readings: list[Reading] = []
    while True:
        try:
            return await read()
        except (CorruptChunk, ManifestError) as error:
            readings.append(reading_of(error))
            verdict = judge_readings(readings)
            if verdict is ReadVerdict.CORRUPT:
                raise
            if verdict is ReadVerdict.UNSTABLE:
                raise unstable_error(str(error)) from None
            log.warning("read once more: %s", error)
        # The next read is outside the handler, where the error no longer keeps the first bytes in memory.


async def read_manifest(store: Store, part: PartId | None, key: str = "", size: int = 0) -> Manifest:
    """Read a part's manifest from its place on a tier, or from `key`.

    Args:
        part: the part; None to accept any part.
        key: the object to read; empty for the part's own key.
        size: the object's listed size in bytes; an object that is too large for a manifest is not read.

    Raises:
        ObjectNotFound, ManifestError, FormatTooNew: the manifest is absent or, after two reads, not usable.
    """
    key = key or (part.manifest_key if part else "")
    if size > MAX_MANIFEST_SIZE:
        raise ManifestError(f"{key}: it has {size} bytes, and a manifest at most {MAX_MANIFEST_SIZE}")
    return (await read_stored_manifest(store, part, key))[1]


async def read_stored_manifest(store: Store, part: PartId | None, key: str) -> tuple[bytes, Manifest]:
    """Read a manifest as `read_manifest` does; return its bytes, too, as they lie on the tier."""
    return await read_sealed(store, key, lambda data: (data, decode(data, part)))


async def read_sealed(store: Store, key: str, decoded: Callable[[bytes], T]) -> T:
    """Read and decode an object that ends in its own digest: a manifest or a head.

    Args:
        decoded: decodes the object, and raises `ManifestError` for wrong bytes.

    Raises:
        ManifestError: two reads gave the same bytes, and these are wrong.
        ObjectNotFound, StoreUnavailable, StoreRefused: as `Store.get`. What else `decoded` raises is not read again.
    """

    async def read() -> T:
        try:
            data = bytes(octets(await store.get(key)))
        except CorruptChunk as error:  # larger than any object of tierd's
            raise ManifestError(str(error)) from error
        try:
            return decoded(data)
        except ManifestError as error:
            error.read_digest = digest(data)
            raise

    return await read_until_certain(read)


async def manifest_bytes(store: Store, part: PartId) -> bytes:
    """Return a part's manifest as it lies on a tier; empty if it is too large, or not what this key encrypted.

    Raises:
        ObjectNotFound: it is absent.
    """
    try:
        return bytes(octets(await read_until_certain(lambda: store.get(part.manifest_key))))
    except (CorruptChunk, ManifestError):
        return b""


async def reread_manifest(store: Store, part: PartId) -> tuple[bytes, Manifest | None]:
    """Read a tier's manifest once more; return its bytes, and the manifest unless it is proven corrupt.

    Raises: as `manifest_bytes`, and UnstableRead if the reads differ from each other.
    """
    data = b""

    def decoded(read_bytes: bytes) -> Manifest:
        nonlocal data
        data = read_bytes  # the last ones read are those that proved corrupt
        return decode(read_bytes, part)

    try:
        manifest = await read_sealed(store, part.manifest_key, decoded)
    except ManifestError:
        return data, None
    return data, manifest


async def put_manifest(store: Store, key: str, data: Buffer, *, reread: bool = False) -> None:
    """Put a manifest, or the rest of one, and confirm it.

    It is confirmed because it may be the only record of its attempt once the node that wrote it is lost.

    Args:
        reread: read it back, even if the server shows that it verifies.

    Raises:
        StoreUnavailable: the manifest is not on the tier as it should be, or that is not known.
    """
    if await store.put(key, data) and not reread:
        return

    async def read_back() -> None:
        stored = octets(await store.get(key))
        if stored != octets(data):
            error = ManifestError(f"{key}: what was read back differs from what was put")
            error.read_digest = digest(stored)
            raise error

    try:
        await read_until_certain(read_back)
    except (ObjectNotFound, CorruptChunk, ManifestError) as error:
        raise StoreUnavailable(f"{key}: what was read back differs from what was put") from error


async def get_object(
    store: Store, key: str, stored: StoredChunk, where: str = "", into: memoryview | None = None
) -> Buffer:
    """Read a chunk's object. The caller must compare it with `stored`.

    Args:
        where: a prefix of the key in messages.
        into: memory of the object's size to read into; if None, memory is allocated.

    Raises:
        CorruptChunk: the object is missing, or longer than `stored` says.
    """
    memory = memory_for(max(stored.size, 1))[: stored.size] if into is None else into
    try:
        return await store.get(key, memory)
    except ObjectNotFound:
        raise CorruptChunk(f"{where}{key} is missing") from None
    except StoreRefused as refusal:
        # An object that is too long is proven bad; any other refusal of a store proves nothing.
        async for info in store.scan(key):
            if info.key == key and info.size > stored.size:
                raise CorruptChunk(f"{where}{key}: {info.size} bytes, not the {stored.size} of its manifest") from None
            if info.key == key:
                try:
                    return await store.get(key, memory)  # because it may have been too long, and repaired since
                except ObjectNotFound:  # deleted since; the next read tells
                    raise refusal from None
            break
        raise


async def read_agreed(store: Store, key: str) -> bytes:
    """Return the bytes of an object that has no digest, once two reads gave the same.

    Raises:
        UnstableRead: all reads gave different bytes.
    """
    readings: list[Reading] = []
    while True:
        data = bytes(octets(await store.get(key)))
        readings.append(Reading(digest(data)))
        verdict = judge_readings(readings)
        if verdict is ReadVerdict.CORRUPT:  # the same bytes twice, whatever they are
            return data
        if verdict is ReadVerdict.UNSTABLE:
            raise unstable_error(key)


async def get_recognized(store: Store, key: str, chunk: Chunk, where: str, codec: str = "") -> tuple[Chunk, Buffer]:
    """Read an object that no manifest at hand describes, and whose key has the digest of `chunk`.

    Args:
        codec: the object's codec; empty for the one in its key.

    Returns:
        The object's entry for a manifest, and the chunk's raw bytes.

    Raises:
        ObjectNotFound, CorruptChunk, FormatTooNew: it is not there, is proven to be another, or has another codec.
    """

    async def read() -> tuple[Chunk, Buffer]:
        # No encoder makes a chunk longer than twice its size.
        data = await store.get(key, memory_for(2 * chunk.size)[: 2 * chunk.size])
        return await thread_uncancelled(
            identify_object, chunk, codec or key.rpartition(".")[2], key.partition("/")[2], data, where
        )

    return await read_until_certain(read)


async def get_stored(store: Store, run: str, chunk: Chunk) -> Buffer:
    """Read a chunk's object until it agrees with its entry in the manifest, or is proven not to.

    Raises:
        CorruptChunk: the object is missing, or differs from its entry in the manifest.
    """
    stored = chunk.stored
    if stored is None:
        raise CorruptChunk(f"the manifest does not say where chunk {chunk.xxh3_128} is")

    async def read() -> Buffer:
        data = await get_object(store, f"{run}/{stored.key}", stored)
        await thread_uncancelled(verify_stored, stored, data, run)
        return data

    return await read_until_certain(read)


async def find_chunk_defect(store: Store, run: str, chunk: Chunk) -> str | None:
    """Say what is proven wrong with a chunk's object; None if it is right. The bytes are not kept in memory."""
    try:
        await get_stored(store, run, chunk)
    except CorruptChunk as error:
        return str(error)
    return None


async def has_all_manifests(stores: Mapping[str, Store], checkpoint: CheckpointId, world: int) -> bool:
    """Whether the tiers together still list a manifest of every rank. A prune deletes manifests first."""
    ranks: set[int] = set()
    for store in stores.values():
        async for info in store.scan(f"{manifests_prefix(checkpoint.run)}{checkpoint.name}/"):
            part = PartId.parse_key(info.key)
            if part and part.world == world:
                ranks.add(part.rank)
    return len(ranks) == world


async def first_manifest(part: PartId, spool: Spool | None, stores: Mapping[str, Store]) -> Manifest | None:
    """Return a part's manifest from the first place that has it right; None if no place has."""
    if spool is not None:
        with suppress(TierdError, OSError):
            return await thread_uncancelled(spool.manifest, part)
    for store in stores.values():
        with suppress(ObjectNotFound, ManifestError):
            return await read_manifest(store, part)
    return None


async def verify_part(
    store: Store, part: PartId, read: Callable[[int], None], defects: ObjectDefects | None = None
) -> tuple[Manifest, list[str]]:
    """Re-read every stored byte of a part on a tier and compare it with the digests.

    Args:
        read: callback that gets the stored size of each chunk, in bytes, after the chunk was compared.
        defects: results of earlier calls for ranks of this checkpoint, to which this call adds its own. A chunk that
            several ranks hold is read once.

    Returns:
        The manifest, and a description of each defect.

    Raises:
        ObjectNotFound, ManifestError, FormatTooNew: the manifest is not there or cannot be used.
    """
    manifest = await read_manifest(store, part)
    wrong: list[str] = []
    for chunk in manifest.chunks():
        if chunk.stored is None:
            wrong.append(f"chunk {chunk.xxh3_128}: the manifest does not say where it is")
            continue
        results: ObjectDefects = {} if defects is None or chunk.home is None else defects
        for link in chunk.chain():
            name = (link.stored.key, *link.stored.form) if link.stored else None
            if name not in results:
                results[name] = await find_chunk_defect(store, part.checkpoint.run, link)
            if defect := results[name]:
                wrong.append(defect)
                break
        read(chunk.stored.size)
    return manifest, wrong
