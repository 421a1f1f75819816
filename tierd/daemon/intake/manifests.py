"""Read a manifest from the first place that has it right."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from tierd.core.errors import ManifestError, ObjectNotFound, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import Manifest
from tierd.daemon.tiers.objects import read_manifest
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.spool.spool import Spool
from tierd.stores.base import Store


async def first_manifest(part: PartId, spool: Spool | None, stores: Mapping[str, Store]) -> Manifest | None:
    """Return a part's manifest from the first place that has it right; None if no place has.

    Raises:
        StoreUnavailable: a tier did not answer.
    """
    if spool is not None:
        with suppress(TierdError, OSError):
            return await to_the_end(spool.manifest, part)
    for store in stores.values():
        with suppress(ObjectNotFound, ManifestError):
            return await read_manifest(store, part)
    return None
