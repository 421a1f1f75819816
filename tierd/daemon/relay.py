"""Tier -> tier: a part that the spool has no more, for a tier that wants it.

A relay is a flush (`daemon/flush.py`) whose chunks come from other tiers. Stored bytes are copied as they are, because
a chunk is the same bytes on every tier.

Invariant: every chunk is compared with the digest of its stored bytes before it is put. Where a tier's object is wrong
or missing, the chunk comes from the next tier, and only where none has it right the relay fails with `CorruptChunk`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tierd.codec import Encoded
from tierd.core.errors import CorruptChunk, ObjectNotFound, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Chunk, File, Manifest
from tierd.daemon.copies import Copies
from tierd.daemon.flush import Flushed, Way, Where, send, stored_as
from tierd.daemon.mend import get_stored
from tierd.daemon.together import to_the_end
from tierd.stores.base import Store


async def relay(
    stores: Mapping[str, Store],
    part: PartId,
    way: Way,
    *,
    lender: Manifest | None = None,
    worn_out: Collection[CheckpointId] = (),
) -> Flushed:
    """Copy a part to a tier from those of `stores`, the other tiers, that have it.

    Args:
        lender, worn_out: as for `flush.flush`.

    Raises:
        ObjectNotFound: no other tier has the part.
        CorruptChunk: every copy of a chunk, or of the manifest, is proven bad; nothing was made visible.
        StoreUnavailable, StoreRefused: the tier did not take it, or another one could not be asked.
    """
    copies = Copies(part, stores)
    await copies.ask()
    manifest = next(iter(copies.contents()), None)
    if manifest is None:
        if not copies.unavailable and not copies.defects:
            raise ObjectNotFound(f"{part} is on no other tier")
        copies.give_up("its manifest", copies.unavailable)
        raise AssertionError
    copies.agree(manifest)
    return await send(manifest, part, way, _Tiered(copies, part, way), lender, worn_out)


class _Tiered:
    """What other tiers have of a part, in the order of preference."""

    copies = 3

    def __init__(self, copies: Copies, part: PartId, way: Way) -> None:
        self._copies, self._part, self._way = copies, part, way

    async def read(self, where: Where, file: File) -> Encoded:
        number, index = where
        for name, manifest in list(self._copies.manifests.items()):
            chunk: Chunk = manifest.files[number].chunks[index]
            try:
                data = await get_stored(self._copies.stores[name], self._part.checkpoint.run, chunk)
            except CorruptChunk as error:
                self._copies.defects[name] = str(error)
            except TierdError:
                continue  # asked once more below, where what it says counts
            else:
                return stored_as(self._part, chunk, data)
        raw = await self._copies.chunk(number, index, file.path)
        return await to_the_end(self._way.pace.encode, self._part, file.chunks[index], raw)
