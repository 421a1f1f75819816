"""Removal on a person's demand: of a whole run from one place, or of the names of one launch from a tier.

Invariants: manifests are deleted first, so that an interruption leaves nothing that seems complete. Nothing of another
run or launch is deleted. Before a launch is disowned, all of it is read; its chunks are kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from tierd.core.errors import ConfigError, FormatTooNew, ManifestError, ObjectNotFound, StoreRefused
from tierd.core.ids import (
    CheckpointId,
    PartId,
    chunks_prefix,
    flushing_prefix,
    is_of_run,
    manifests_prefix,
    parse_summary,
    pins_prefix,
    pruning_prefix,
    quarantine_prefix,
    summaries_prefix,
)
from tierd.core.planning.copies import is_complete
from tierd.daemon.concurrency import for_each_limited
from tierd.daemon.tiers.intents import checkpoint_of_mark
from tierd.daemon.tiers.manifest_listing import MAX_MANIFEST_READS
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.spool import leases
from tierd.spool.leases import trainers_on_this_machine
from tierd.spool.run_records import forget_launch, forget_run, record_files, saved_attempts
from tierd.spool.spool import Spool
from tierd.stores.base import ObjectInfo, Store

_BATCH = 1000  # keys that one call deletes
_PASSES = 3  # passes, because objects may be put meanwhile
# What stands for manifests is deleted first, then manifests.
_SORTS = (summaries_prefix, manifests_prefix, quarantine_prefix, flushing_prefix, pins_prefix, pruning_prefix)


@dataclass(frozen=True, slots=True)
class RunSize:
    """The size of one run in one place.

    Attributes:
        checkpoints: how many checkpoints.
        objects: how many objects; in the spool, files.
        stored_bytes: their size.
    """

    place: str
    checkpoints: int
    objects: int
    stored_bytes: int


async def measure_on_tier(store: Store, name: str, run: str) -> RunSize:
    """Count a run's objects on a tier."""
    checkpoints, objects, size = set[str](), 0, 0
    async for info in store.scan(f"{run}/"):
        if not is_of_run(run, info.key):
            continue
        objects, size = objects + 1, size + info.size
        if PartId.parse_key(info.key) and info.key.startswith(manifests_prefix(run)):
            checkpoints.add(info.key.split("/")[2])
    return RunSize(name, len(checkpoints), objects, size)


def measure_in_spool(spool: Spool, name: str, run: str) -> RunSize:
    """Count a run's files in the spool."""
    checkpoints = {part.checkpoint for part in spool.parts() if part.checkpoint.run == run}
    sizes = [
        Path(directory, name).lstat().st_size for directory, _, names in os.walk(spool.root / run) for name in names
    ]
    if not sizes:  # records of it may exist all the same
        sizes = [path.lstat().st_size for path in record_files(spool.control, run)]
    return RunSize(name, len(checkpoints), len(sizes), sum(sizes))


async def remove_from_tier(store: Store, run: str) -> None:
    """Delete every object of a run, and nothing of a tier whose prefix lies below the run's.

    Raises:
        StoreUnavailable: the rest is still there; every deleted chunk had lost its manifest before.
        StoreRefused: another process keeps writing there, or the store refuses.
    """
    names = (*_SORTS, chunks_prefix)
    for _ in range(_PASSES):
        deleted_any = False
        for prefix in (*(name(run) for name in names), f"{run}/"):
            async for keys in _batches(store, run, prefix):
                deleted_any = True
                await store.delete(keys)
        if not deleted_any:
            return
    raise StoreRefused(f"run {run}: something still writes there; end its trainer and its daemon, and try again")


async def _batches(store: Store, run: str, prefix: str) -> AsyncIterator[list[str]]:
    """Yield a run's keys under `prefix`, `_BATCH` at a time; each is listed after the caller has processed the last."""
    after = ""
    while True:
        keys: list[str] = []
        async with aclosing(store.scan(prefix, after)) as listing:
            async for info in listing:
                if is_of_run(run, info.key):
                    keys.append(info.key)
                if len(keys) == _BATCH:
                    break
        if not keys:
            return
        yield keys
        after = keys[-1]


def remove_from_spool(spool: Spool, run: str) -> bool:
    """Delete a run's parts, quarantined parts, pins, records and unfinished stages from the spool.

    The caller holds the spool's lock, or is its daemon.

    Returns:
        Whether the spool had anything of the run.

    Raises:
        ConfigError: a trainer that saves the run lives on this node.
    """
    before_ns = time.time_ns()  # a launch that begins during the removal records its policy later
    if alive := leases.living_trainers(spool.control, [run]).get(run):
        pids = ", ".join(str(trainer.pid) for trainer in alive)
        raise ConfigError(f"run {run!r}: a trainer that saves it lives (pid {pids}); end it first")
    has_records, attempts = bool(record_files(spool.control, run)), saved_attempts(spool.control, [run]).get(run, ())
    parts = [part for part in spool.parts() if part.checkpoint.run == run]
    spool.remove(parts)
    quarantined = [part for part in spool.quarantined() if part.checkpoint.run == run]
    for part in quarantined:
        spool.discard(f"quarantine/{part.path}")
    pins = [pin for pin in spool.pins() if pin.run == run]
    for pin in pins:
        spool.pin(pin, pinned=False)
    leftovers = [name for name in spool.leftovers() if _is_leftover(name, run)]
    for name in leftovers:
        spool.discard(name, before_ns)
    for attempt in attempts:  # by name, because the removal of parts has changed the times of their records
        forget_launch(spool.control, run, attempt)
    forget_run(spool.control, run, before_ns)
    leases.forget_dead_trainers(spool.control, run)
    return bool(has_records or parts or quarantined or pins or leftovers)


def _is_leftover(name: str, run: str) -> bool:
    room, _, stage = name.partition("/")
    return (room in ("stage", "fetch") and _is_of(stage, run)) or (room == "empty" and stage.split("/")[0] == run)


def _is_of(stage: str, run: str) -> bool:
    # A stage is named <run>.<step:012>.<attempt>.<part>[.<token>], and a run's name may contain dots too.
    suffix = stage.removeprefix(f"{run}.")
    return suffix != stage and suffix[:12].isdigit() and suffix[12:13] == "."


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

    def count(self, place: str) -> LaunchObjectCounts:
        complete = {checkpoint for checkpoint in self.readable if is_complete(self.ranks.get(checkpoint, {}))}
        return LaunchObjectCounts(place, len(self.ranks), len(self.readable), len(complete), len(self.keys))


def local_leases(run: str, attempt: str) -> dict[int, str]:
    """Return, by process id, the spools in which trainers on this node save a launch, as far as this user can see."""
    return trainers_on_this_machine(run, attempt)


async def list_launch_objects(store: Store, run: str, attempt: str) -> LaunchObjects:
    """List the objects of a launch on a tier, and read all its manifests, quarantined or not."""
    holdings = LaunchObjects()
    manifests: list[tuple[ObjectInfo, PartId]] = []
    for prefix in (sort(run) for sort in _SORTS):
        async for info in store.scan(prefix):
            if prefix == manifests_prefix(run) and parse_summary(run, info.key):
                continue
            name = info.key[len(prefix) :].partition("/")[0]
            owner = (
                checkpoint_of_mark(run, info.key) if prefix == pruning_prefix(run) else CheckpointId.parse(run, name)
            )
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

    await for_each_limited(MAX_MANIFEST_READS, read, manifests)
    return holdings


async def disown(store: Store, keys: Collection[str]) -> None:
    """Delete the objects that `list_launch_objects` found, one kind after the other.

    Raises:
        StoreUnavailable, StoreRefused: the rest is still there.
    """
    by_sort: dict[str, list[str]] = {}
    for key in keys:
        sort = key.split("/")[1] if parse_summary(key.split("/")[0], key) is None else "summaries"
        by_sort.setdefault(sort, []).append(key)
    for sorted_keys in by_sort.values():
        await store.delete(sorted_keys)
