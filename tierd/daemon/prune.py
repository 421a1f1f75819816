"""Deleting and setting aside on a tier. What goes was decided by `core/plan.py`; how it goes is decided here.

Law: the manifest first, then what it names, minus what a surviving manifest names. Cut off anywhere, the next look
finds either a whole checkpoint or chunks that no manifest names, and the plan comes back for those.
"""

from __future__ import annotations

from collections.abc import Callable

from tierd.codec import check_stored
from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound
from tierd.core.ids import CheckpointId, PartId, chunks_prefix, manifests_prefix, quarantine_prefix
from tierd.core.manifest import Manifest, decode
from tierd.stores.base import Store


async def prune(store: Store, checkpoint: CheckpointId) -> int:
    """Delete a checkpoint from a tier; the number of objects that went.

    Raises:
        ManifestError: a surviving manifest cannot be read, so what it names is not known; nothing was deleted.
    """
    run = checkpoint.run
    survivors: set[str] = set()
    own: list[str] = []
    async for info in store.scan(manifests_prefix(run)):
        part = PartId.parse_key(info.key)
        if part is None:
            continue
        if part.checkpoint == checkpoint:
            own.append(info.key)
        else:
            survivors |= await _named(store, part)
    await store.delete(own)
    chunks = [info.key async for info in store.scan(f"{chunks_prefix(run)}{checkpoint.name}/")]
    aside = [info.key async for info in store.scan(f"{quarantine_prefix(run)}{checkpoint.name}/")]
    gone = [key for key in chunks if key not in survivors] + aside
    await store.delete(gone)
    return len(own) + len(gone)


async def _named(store: Store, part: PartId) -> set[str]:
    try:
        manifest = decode(bytes(await store.get(part.manifest_key)), part)
    except ObjectNotFound:
        return set()
    return {f"{part.checkpoint.run}/{chunk.stored.key}" for chunk in manifest.chunks() if chunk.stored}


async def quarantine(store: Store, part: PartId) -> bool:
    """Take a part's manifest out of sight on a tier: its copy is proven corrupt. The chunks stay to be looked at.

    Returns:
        Whether there was a manifest.
    """
    try:
        data = await store.get(part.manifest_key)
    except ObjectNotFound:
        return False
    await store.put(part.quarantine_key, data)
    await store.delete([part.manifest_key])
    return True


async def holds(store: Store, part: PartId, local: Manifest | None) -> bool:
    """Whether a tier holds a copy of a part: the content that `local` describes, every chunk there at its stored size.

    The bytes were verified before the manifest was put; this is asked once more before the spool's copy goes.
    """
    try:
        manifest = decode(bytes(await store.get(part.manifest_key)), part)
    except (ObjectNotFound, ManifestError):
        return False
    if local is not None and not manifest.same_content(local):
        return False
    sizes: dict[str, int] = {}
    for owner in {chunk.stored.key.rsplit("/", 1)[0] for chunk in manifest.chunks() if chunk.stored}:
        sizes |= {info.key: info.size async for info in store.scan(f"{part.checkpoint.run}/{owner}/")}
    return all(
        chunk.stored and sizes.get(f"{part.checkpoint.run}/{chunk.stored.key}") == chunk.stored.size
        for chunk in manifest.chunks()
    )


async def verify(store: Store, part: PartId, read: Callable[[int], None]) -> tuple[Manifest, list[str]]:
    """Re-read every stored byte of a part on a tier and compare; the manifest, and what is wrong.

    Args:
        read: told the stored bytes of each chunk as it has been compared.

    Raises:
        ObjectNotFound, ManifestError, FormatTooNew: the manifest is not there or cannot be used.
        StoreUnavailable, StoreRefused: says nothing about the bytes.
    """
    manifest = decode(bytes(await store.get(part.manifest_key)), part)
    wrong: list[str] = []
    for chunk in manifest.chunks():
        if chunk.stored is None:
            wrong.append(f"chunk {chunk.xxh3_128}: the manifest does not say where it is")
            continue
        key = f"{part.checkpoint.run}/{chunk.stored.key}"
        try:
            check_stored(chunk.stored, await store.get(key), part.checkpoint.run)
        except ObjectNotFound:
            wrong.append(f"{key}: missing")
        except CorruptChunk as error:
            wrong.append(str(error))
        read(chunk.stored.size)
    return manifest, wrong
