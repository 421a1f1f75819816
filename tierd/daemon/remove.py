"""Removing a whole run from one place, because a person said so.

Law: manifests go first, so that whatever is cut off leaves nothing that looks whole; and nothing of another run goes.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from tierd import living
from tierd.core.errors import StoreRefused
from tierd.core.ids import (
    chunks_prefix,
    flushing_prefix,
    manifests_prefix,
    pins_prefix,
    pruning_prefix,
    quarantine_prefix,
)
from tierd.records import forget, recorded
from tierd.spool import Spool
from tierd.stores.base import Store

_BATCH = 1000  # keys
_PASSES = 3  # over what came meanwhile


@dataclass(frozen=True, slots=True)
class Held:
    """What one place holds of a run; all of its objects count, in the spool all of its files."""

    place: str
    checkpoints: int
    objects: int
    stored_bytes: int


async def held_on_tier(store: Store, name: str, run: str) -> Held:
    """What lies under the run's name on a tier.

    Raises:
        StoreUnavailable, StoreRefused: some of it could not be asked.
    """
    checkpoints, objects, size = set[str](), 0, 0
    async for info in store.scan(f"{run}/"):
        objects, size = objects + 1, size + info.size
        if info.key.startswith(manifests_prefix(run)):
            checkpoints.add(info.key.split("/")[2])
    return Held(name, len(checkpoints), objects, size)


def held_in_spool(spool: Spool, name: str, run: str) -> Held:
    """What lies in the spool of a run. Raises OSError where that cannot be told."""
    checkpoints = {part.checkpoint for part in spool.parts() if part.checkpoint.run == run}
    sizes = [
        Path(directory, name).lstat().st_size for directory, _, names in os.walk(spool.root / run) for name in names
    ]
    if not sizes:  # it may be remembered all the same
        sizes = [path.lstat().st_size for path in recorded(spool.control, run)]
    return Held(name, len(checkpoints), len(sizes), sum(sizes))


async def remove_from_tier(store: Store, run: str) -> None:
    """Delete every object of a run.

    Raises:
        StoreUnavailable: the rest is still there; what is gone had no manifest any more.
        StoreRefused: somebody keeps writing there, or the store says no.
    """
    names = (manifests_prefix, quarantine_prefix, pins_prefix, flushing_prefix, pruning_prefix, chunks_prefix)
    for _ in range(_PASSES):
        found = False
        for prefix in (*(name(run) for name in names), f"{run}/"):
            async for keys in _batches(store, prefix):
                found = True
                await store.delete(keys)
        if not found:
            return
    raise StoreRefused(f"run {run}: something still writes there; end its trainer and its daemon, and try again")


async def _batches(store: Store, prefix: str) -> AsyncIterator[list[str]]:
    """The keys under `prefix`, so many at a time, each listed after the ones before may have been deleted."""
    after = ""
    while True:
        keys: list[str] = []
        async with aclosing(store.scan(prefix, after)) as listing:
            async for info in listing:
                keys.append(info.key)
                if len(keys) == _BATCH:
                    break
        if not keys:
            return
        yield keys
        after = keys[-1]


def remove_from_spool(spool: Spool, run: str) -> None:
    """Delete a run's parts, those in quarantine, its pins and records, and what was on its way.

    Whoever calls holds the spool's lock, or is its daemon. Raises OSError where the disk does not let it.
    """
    spool.remove(part for part in spool.parts() if part.checkpoint.run == run)
    for part in spool.quarantined():
        if part.checkpoint.run == run:
            spool.discard(f"quarantine/{part.path}")
    for pin in spool.pins():
        if pin.run == run:
            spool.pin(pin, pinned=False)
    for name in spool.leftovers():
        room, _, rest = name.partition("/")
        if (room in ("stage", "fetch") and _is_of(rest, run)) or (room == "empty" and rest.split("/")[0] == run):
            spool.discard(name)
    forget(spool.control, run, time.time_ns())
    living.forget(spool.control, run)


def _is_of(stage: str, run: str) -> bool:
    # <run>.<step:012>.<attempt>.<part>[.<token>], and a run's name may hold dots, too.
    rest = stage.removeprefix(f"{run}.")
    return rest != stage and rest[:12].isdigit() and rest[12:13] == "."
