"""Delete the names of one launch from a tier, because a person declares that nobody owns them.

Invariant: all of it is read first, so that the person asked knows whether any checkpoint of it can be restored. Chunks
are kept, because other checkpoints may name them; retention deletes those that none names. Nothing of another launch is
deleted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.ids import (
    CheckpointId,
    PartId,
    flushing_prefix,
    manifests_prefix,
    pins_prefix,
    pruning_prefix,
    quarantine_prefix,
)
from tierd.core.planning.copies import is_complete
from tierd.daemon.tiers.intents import marked
from tierd.daemon.tiers.manifests import READERS
from tierd.daemon.tiers.objects import read_manifest
from tierd.daemon.transfer.concurrency import each
from tierd.spool.leases import on_this_machine
from tierd.stores.base import ObjectInfo, Store

# Manifests are deleted first.
_SORTS = (manifests_prefix, quarantine_prefix, flushing_prefix, pins_prefix, pruning_prefix)


@dataclass(frozen=True, slots=True)
class LaunchObjectCounts:
    """The objects of one launch on one tier, as counts.

    Attributes:
        checkpoints: checkpoints that have any manifest.
        readable: of these, the checkpoints that have a manifest that this tierd, a newer one, or another key can read.
        complete: of the readable ones, the checkpoints that have every rank's manifest.
        objects: all objects that `disown` deletes.
    """

    place: str
    checkpoints: int
    readable: int
    complete: int
    objects: int


@dataclass(slots=True)
class LaunchObjects:
    """A launch's objects on one tier, in the order in which they are deleted."""

    keys: list[str] = field(default_factory=list)
    ranks: dict[CheckpointId, dict[int, set[int]]] = field(default_factory=dict)
    readable: set[CheckpointId] = field(default_factory=set)

    def claim(self, place: str) -> LaunchObjectCounts:
        complete = {checkpoint for checkpoint in self.readable if is_complete(self.ranks.get(checkpoint, {}))}
        return LaunchObjectCounts(place, len(self.ranks), len(self.readable), len(complete), len(self.keys))


def leases_here(run: str, attempt: str) -> dict[int, str]:
    """Return, by process id, the spools in which trainers on this node save a launch, as far as this user can see."""
    return on_this_machine(run, attempt)


async def claimed(store: Store, run: str, attempt: str) -> LaunchObjects:
    """List the objects of a launch on a tier, and read all its manifests, quarantined or not.

    Raises:
        StoreUnavailable, StoreRefused: the tier failed.
    """
    holdings = LaunchObjects()
    manifests: list[tuple[ObjectInfo, PartId]] = []
    for prefix in (sort(run) for sort in _SORTS):
        async for info in store.scan(prefix):
            name = info.key[len(prefix) :].partition("/")[0]
            owner = marked(run, info.key) if prefix == pruning_prefix(run) else CheckpointId.parse(run, name)
            if owner is None or owner.attempt != attempt:
                continue
            holdings.keys.append(info.key)
            if part := PartId.parse_key(info.key):
                manifests.append((info, part))
                holdings.ranks.setdefault(owner, {}).setdefault(part.world, set()).add(part.rank)

    async def read(entry: tuple[ObjectInfo, PartId]) -> None:
        info, part = entry
        try:
            await read_manifest(store, part, info.key, info.size)
        except (ObjectNotFound, ManifestError):
            return
        except FormatTooNew:  # readable by a newer tierd, or with another key
            pass
        holdings.readable.add(part.checkpoint)

    await each(READERS, read, manifests)
    return holdings


async def disown(store: Store, keys: Collection[str]) -> None:
    """Delete the objects that `claimed` found, one kind after the other.

    Raises:
        StoreUnavailable, StoreRefused: the rest is still there.
    """
    for sort in dict.fromkeys(key.split("/")[1] for key in keys):
        await store.delete([key for key in keys if key.split("/")[1] == sort])
