"""Taking the names of one launch from a tier, because a person says that they are nobody's.

Law: what is there is read first, so that whoever is asked knows whether anything of it can be restored. Chunks stay:
other checkpoints may name them, and retention deletes what none names. Nothing of another launch goes.
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
from tierd.core.world import is_complete
from tierd.daemon.copies import read_manifest
from tierd.daemon.manifests import READERS
from tierd.daemon.together import each
from tierd.daemon.turns import marked
from tierd.living import on_this_machine
from tierd.stores.base import ObjectInfo, Store

_SORTS = (manifests_prefix, quarantine_prefix, flushing_prefix, pins_prefix, pruning_prefix)  # manifests go first


@dataclass(frozen=True, slots=True)
class Claim:
    """What one tier holds under the names of a launch.

    Attributes:
        checkpoints: of which there is any manifest.
        readable: of these, those of which some manifest can be read here, or by a newer tierd, or with another key.
        complete: of the readable ones, those of which every rank's manifest is there.
        objects: all that `disown` deletes.
    """

    place: str
    checkpoints: int
    readable: int
    complete: int
    objects: int


@dataclass(slots=True)
class Claimed:
    """A launch's objects on one tier, in the order in which they are deleted."""

    keys: list[str] = field(default_factory=list)
    ranks: dict[CheckpointId, dict[int, set[int]]] = field(default_factory=dict)
    readable: set[CheckpointId] = field(default_factory=set)

    def claim(self, place: str) -> Claim:
        whole = {one for one in self.readable if is_complete(self.ranks.get(one, {}))}
        return Claim(place, len(self.ranks), len(self.readable), len(whole), len(self.keys))


def living_here(run: str, attempt: str) -> dict[int, str]:
    """By process id, the spools in which trainers on this node save a launch, as far as this user can see."""
    return on_this_machine(run, attempt)


async def claimed(store: Store, run: str, attempt: str) -> Claimed:
    """Look what a tier holds under the names of a launch, and read all manifests of it, quarantined or not.

    Raises:
        StoreUnavailable, StoreRefused: some of it could not be asked.
    """
    found = Claimed()
    manifests: list[tuple[ObjectInfo, PartId]] = []
    for prefix in (sort(run) for sort in _SORTS):
        async for info in store.scan(prefix):
            name = info.key[len(prefix) :].partition("/")[0]
            owner = marked(run, info.key) if prefix == pruning_prefix(run) else CheckpointId.parse(run, name)
            if owner is None or owner.attempt != attempt:
                continue
            found.keys.append(info.key)
            if part := PartId.parse_key(info.key):
                manifests.append((info, part))
                found.ranks.setdefault(owner, {}).setdefault(part.world, set()).add(part.rank)

    async def read(one: tuple[ObjectInfo, PartId]) -> None:
        info, part = one
        try:
            await read_manifest(store, part, info.key, info.size)
        except (ObjectNotFound, ManifestError):
            return
        except FormatTooNew:  # somebody may read it: a newer tierd, or who has the key
            pass
        found.readable.add(part.checkpoint)

    await each(READERS, read, manifests)
    return found


async def disown(store: Store, keys: Collection[str]) -> None:
    """Delete what `claimed` found, each sort after the one before it is gone.

    Raises:
        StoreUnavailable, StoreRefused: the rest is still there.
    """
    for sort in dict.fromkeys(key.split("/")[1] for key in keys):
        await store.delete([key for key in keys if key.split("/")[1] == sort])
