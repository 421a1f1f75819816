"""How much room runs take in a place, and how much of it several checkpoints share. Reads every manifest there."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.ids import PartId, manifests_prefix
from tierd.core.world import SPOOL
from tierd.daemon.copies import read_manifest
from tierd.daemon.manifests import READERS
from tierd.daemon.remove import held_in_spool, held_on_tier
from tierd.daemon.together import each
from tierd.spool import Spool
from tierd.stores.base import ObjectInfo, Store


@dataclass(frozen=True, slots=True)
class Usage:
    """What one run takes in one place.

    Attributes:
        stored_bytes: of all its objects; in the spool, of all its files.
        shared_bytes: of chunks that more than one checkpoint names, each counted once; 0 in the spool.
        unreadable: manifests that cannot be used, so the chunks that they name count as nobody's.
    """

    place: str
    run: str
    checkpoints: int
    stored_bytes: int
    shared_bytes: int
    unreadable: int


def usage_in_spool(spool: Spool, run: str) -> Usage:
    """What a run takes in the spool. Raises OSError where that cannot be told."""
    held = held_in_spool(spool, SPOOL, run)
    return Usage(SPOOL, run, held.checkpoints, held.stored_bytes, 0, 0)


async def usage_on_tier(store: Store, name: str, run: str) -> Usage:
    """What a run takes on a tier.

    Raises:
        StoreUnavailable, StoreRefused: some of it could not be asked.
    """
    held = await held_on_tier(store, name, run)
    naming = _Naming(store)
    await each(READERS, naming.read, [info async for info in store.scan(manifests_prefix(run))])
    return Usage(name, run, held.checkpoints, held.stored_bytes, sum(naming.shared.values()), naming.unreadable)


class _Naming:
    """Which checkpoint named each chunk first, and the sizes of those that another named, too."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._first: dict[str, str] = {}
        self.shared: dict[str, int] = {}
        self.unreadable = 0

    async def read(self, info: ObjectInfo) -> None:
        part = PartId.parse_key(info.key)
        if part is None:
            return
        try:
            manifest = await read_manifest(self._store, part, size=info.size)
        except ObjectNotFound:  # pruned since the listing
            return
        except (ManifestError, FormatTooNew):
            self.unreadable += 1
            return
        name = part.checkpoint.name
        for chunk in manifest.chunks():
            if chunk.stored and self._first.setdefault(chunk.stored.key, name) != name:
                self.shared[chunk.stored.key] = chunk.stored.size
