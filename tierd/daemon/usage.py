"""How many bytes runs occupy in a place, and how many of them checkpoints share. Reads every manifest there."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.ids import PartId, manifests_prefix
from tierd.core.planning.place import SPOOL
from tierd.daemon.remove import held_in_spool, held_on_tier
from tierd.daemon.tiers.manifests import READERS
from tierd.daemon.tiers.objects import read_manifest
from tierd.daemon.transfer.concurrency import each
from tierd.spool.spool import Spool
from tierd.stores.base import ObjectInfo, Store


@dataclass(frozen=True, slots=True)
class Usage:
    """The size of one run in one place.

    Attributes:
        stored_bytes: of all its objects; in the spool, of all its files.
        shared_bytes: of chunks that more than one checkpoint names, each counted once; 0 in the spool.
        unreadable: manifests that cannot be used, so that the chunks that they name are not counted as shared.
    """

    place: str
    run: str
    checkpoints: int
    stored_bytes: int
    shared_bytes: int
    unreadable: int


def usage_in_spool(spool: Spool, run: str) -> Usage:
    """Return the size of a run in the spool.

    Raises:
        OSError: the spool cannot be read.
    """
    holding = held_in_spool(spool, SPOOL, run)
    return Usage(SPOOL, run, holding.checkpoints, holding.stored_bytes, 0, 0)


async def usage_on_tier(store: Store, name: str, run: str) -> Usage:
    """Return the size of a run on a tier.

    Raises:
        StoreUnavailable, StoreRefused: the tier failed.
    """
    holding = await held_on_tier(store, name, run)
    naming = _Naming(store)
    await each(READERS, naming.read, [info async for info in store.scan(manifests_prefix(run))])
    return Usage(name, run, holding.checkpoints, holding.stored_bytes, sum(naming.shared.values()), naming.unreadable)


class _Naming:
    """The first checkpoint that names each chunk, and the sizes of chunks that a second one names."""

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
        for stored in manifest.objects():
            if self._first.setdefault(stored.key, name) != name:
                self.shared[stored.key] = stored.size
