"""Verify a part on a tier, for `tierd verify`. The scrub, which also repairs, is in `daemon/scrub/`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tierd.core.errors import CorruptChunk
from tierd.core.ids import PartId
from tierd.core.manifest import Chunk, Manifest
from tierd.daemon.tiers.objects import get_stored, read_manifest, surely
from tierd.stores.base import Store


async def verify(store: Store, part: PartId, read: Callable[[int], None]) -> tuple[Manifest, list[str]]:
    """Re-read every stored byte of a part on a tier and compare it with the digests.

    Args:
        store: the tier's store.
        part: the part to verify.
        read: callback that gets the stored size of each chunk, in bytes, after the chunk was compared.

    Returns:
        The manifest, and a description of each defect.

    Raises:
        ObjectNotFound, ManifestError, FormatTooNew: the manifest is not there or cannot be used.
        StoreUnavailable, StoreRefused: the tier failed, which says nothing about the bytes.
    """
    manifest = await read_manifest(store, part)
    wrong: list[str] = []
    for chunk in manifest.chunks():
        if chunk.stored is None:
            wrong.append(f"chunk {chunk.xxh3_128}: the manifest does not say where it is")
            continue
        if defect := await _defect(store, part.checkpoint.run, chunk):
            wrong.append(defect)
        read(chunk.stored.size)
    return manifest, wrong


async def _defect(store: Store, run: str, chunk: Chunk) -> str | None:
    """Describe the first of a chunk's objects that is not right; None if all are."""
    for link in chunk.chain():
        try:
            await surely(partial(get_stored, store, run, link))
        except CorruptChunk as error:
            return str(error)
    return None
