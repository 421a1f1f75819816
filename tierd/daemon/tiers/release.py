"""Verify a quarantined copy on a tier once more before it is deleted, and use it again if every byte is right.

Invariant: nothing is deleted here but the quarantined manifest, and only after the same bytes were put back and
confirmed. An error says nothing about the copy, which then stays in quarantine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial

from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreUnavailable
from tierd.core.ids import PartId
from tierd.core.manifest import Chunk, Manifest
from tierd.daemon.tiers.intents import naming
from tierd.daemon.tiers.objects import get_stored, manifest_bytes, put_manifest, read_stored_manifest, surely
from tierd.daemon.tiers.observe import missing_chunks
from tierd.daemon.timings import USUAL, DaemonTimings
from tierd.stores.base import Store, clear


class QuarantinedCopy:
    """A quarantined copy on a tier, and how much of it was read again.

    Args:
        store: the tier's store.
        part: the part.
        who, timings: as for `naming`.
    """

    def __init__(self, store: Store, part: PartId, who: str = "", timings: DaemonTimings = USUAL) -> None:
        self._store, self._part, self._who, self._timings = store, part, who, timings
        self._data = b""
        self._chunks_to_check: Iterator[Chunk] = iter(())
        self._defect = ""

    async def release(self, ends_s: float = math.inf) -> bool | None:
        """Read on, and put the manifest back in its place once every byte has proved right.

        Args:
            ends_s: when to stop reading, monotonic seconds. The next call goes on where this one stopped, so that the
                flushes that wait for a prune wait for seconds.

        Returns:
            Whether the copy is used again; None if not all of it was read yet. False if its bytes are proven corrupt,
            if it is not in quarantine, or if another copy of the part is on the tier.

        Raises:
            FormatTooNew, StoreUnavailable, StoreRefused: not all bytes could be judged (`core.corruption`), or the
                manifest could not be put; the quarantined manifest is kept.
        """
        try:
            data, manifest = await read_stored_manifest(self._store, self._part, self._part.quarantine_key)
        except (ObjectNotFound, ManifestError):
            return False
        if data != self._data:
            self._data, self._defect = data, ""
            self._chunks_to_check = (link for chunk in manifest.chunks() for link in chunk.chain())
        if self._defect or not await self._is_right(ends_s):
            return False if self._defect else None
        return await self._put_back(manifest)

    async def _is_right(self, ends_s: float) -> bool:
        """Read on until `ends_s`; whether all was read, and is right."""
        while time.monotonic() < ends_s:
            link = next(self._chunks_to_check, None)
            if link is None:
                return True
            try:
                await surely(partial(get_stored, self._store, self._part.checkpoint.run, link))
            except CorruptChunk as error:
                self._defect = str(error)
                return False
            except BaseException:
                self._data = b""  # the next call begins anew, because this chunk was not judged
                raise
        return False

    async def _put_back(self, manifest: Manifest) -> bool:
        store, part = self._store, self._part
        owners = manifest.owners | {part.checkpoint}
        async with naming(store, part, self._data, owners, self._who, self._timings):
            try:
                if await manifest_bytes(store, part) != self._data:
                    return False  # it was sent again meanwhile, and that copy is judged as any other
            except ObjectNotFound:
                pass
            missing = await missing_chunks(store, manifest)
            if not missing:
                await put_manifest(store, part.manifest_key, self._data, reread=True)
        if missing:
            raise StoreUnavailable(f"{part}: {len(missing)} chunks were deleted while it was verified again")
        await clear(store, [part.quarantine_key])
        return True
