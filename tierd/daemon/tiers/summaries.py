"""Put and delete the summaries of checkpoints on a tier (`core/planning/checkpoint_summary.py`).

Invariants: a summary is put after all manifests that it describes, and deleted before the first of them. A maker puts
the summary, then looks for marks and quarantined parts; who deletes a manifest first puts one of these, then deletes
the summary. So of a maker and a deleter at least one sees the other, and an observation that sees a mark or a
quarantined part lists that checkpoint's manifests.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import aclosing

from tierd.core.errors import DeleteRefused, FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.ids import CheckpointId, PartId, pruning_prefix, quarantine_prefix, summary_key
from tierd.core.planning.checkpoint_summary import MAX_NAMED, encode_summary, make_summary
from tierd.core.planning.copies import CheckpointCopy, ManifestFacts
from tierd.core.planning.place import Place
from tierd.daemon.concurrency import for_each_limited
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.tiers.manifest_index import ManifestIndex
from tierd.daemon.tiers.manifest_listing import MAX_MANIFEST_READS, ListedManifest, list_checkpoints, listing_digest
from tierd.daemon.tiers.shared_chunks import NamedChunks, pack_chunks
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.stores.base import ObjectInfo, Store

_BUDGET_S = 10.0  # seconds that summaries of one run take at a time, because flushes and prunes wait


async def void_summary(store: Store, checkpoint: CheckpointId) -> None:
    """Delete a checkpoint's summary, or replace it by nothing on a tier that refuses deletions."""
    key = summary_key(checkpoint)
    try:
        await store.delete([key])
    except DeleteRefused:
        if any([info.key == key async for info in store.scan(key)]):
            await store.put(key, b"")


def due_summaries(place: Place, index: ManifestIndex, run: str, timings: DaemonTimings) -> list[CheckpointCopy]:
    """Return the copies of a run that should get a summary, newest first.

    There are none if the names of the run's manifests fill few pages: to list these costs no more.
    """
    copies = list(place.copies(run))
    if sum(len(ranks) for copy in copies for ranks in copy.ranks.values()) < timings.summarised_manifests:
        return []
    doubted = {part.checkpoint for part in place.quarantined} | place.interrupted_prunes
    due = [
        copy
        for copy in copies
        if copy.complete
        and not copy.defects
        and len(copy.ranks) == 1
        and min(copy.ranks) >= timings.summarised_ranks
        and copy.id not in doubted
        and index.summaries.get(copy.id) is None
        and not index.mismatched(copy.id)
    ]
    return sorted(due, key=lambda copy: copy.id, reverse=True)


async def put_summaries(store: Store, index: ManifestIndex, due: Collection[CheckpointCopy]) -> None:
    """Put these summaries, as many as there is time for; what was read of the next one is remembered."""
    ends_s = time.monotonic() + _BUDGET_S
    for copy in due:
        if time.monotonic() >= ends_s:
            return
        try:
            await _put_summary(store, index, copy.id, min(copy.ranks), ends_s)
        except (ObjectNotFound, ManifestError, FormatTooNew):
            continue  # pruned meanwhile; or a defect, which `index` has recorded


async def _put_summary(store: Store, index: ManifestIndex, checkpoint: CheckpointId, world: int, ends_s: float) -> None:
    listed = await _listed(store, checkpoint)
    if [(manifest.rank, manifest.world) for manifest in listed] != [(rank, world) for rank in range(world)]:
        return

    async def read(info: ObjectInfo) -> None:
        if time.monotonic() < ends_s:
            await index.read(info)

    unread = [manifest.info for manifest in listed if index.shared_chunks(checkpoint, manifest.info) is None]
    await for_each_limited(MAX_MANIFEST_READS, read, unread)
    facts = ManifestFacts.of(await read_manifest(store, PartId(checkpoint, 0, world)))
    shared = _shared_chunks(index, checkpoint, listed)
    listing = listing_digest(listed)
    # Listed again, because a manifest that was replaced before it was read is not the one that was listed.
    if shared is None or index.mismatched(checkpoint) or listing_digest(await _listed(store, checkpoint)) != listing:
        return
    await store.put(summary_key(checkpoint), encode_summary(make_summary(checkpoint, world, listing, facts, shared)))
    index.summaries.forget(checkpoint)
    if await _is_being_deleted(store, checkpoint):
        await void_summary(store, checkpoint)


async def _listed(store: Store, checkpoint: CheckpointId) -> list[ListedManifest]:
    return [
        manifest async for _, manifests in list_checkpoints(store, checkpoint.run, checkpoint) for manifest in manifests
    ]


def _shared_chunks(
    index: ManifestIndex, checkpoint: CheckpointId, listed: Collection[ListedManifest]
) -> dict[str, bytes | None] | None:
    """Return what a summary says of shared chunks; None if a manifest was not read."""
    each = [index.shared_chunks(checkpoint, manifest.info) for manifest in listed]
    owners = frozenset[CheckpointId]().union(*(shared.owners for shared in each if shared))
    if not all(each):
        return None
    named = NamedChunks(owners)
    for shared in each:
        if shared:
            named.add(shared)
    count = sum(len(named.of_owner(owner)) for owner in owners)
    is_known = count <= MAX_NAMED and all(shared.chunks is not None for shared in each if shared)
    return {owner.name: pack_chunks(named.of_owner(owner)) if is_known else None for owner in sorted(owners)}


async def _is_being_deleted(store: Store, checkpoint: CheckpointId) -> bool:
    """Whether a prune or a quarantine that the maker may have missed has begun."""
    for prefix in (
        f"{pruning_prefix(checkpoint.run)}{checkpoint.name}.",
        f"{quarantine_prefix(checkpoint.run)}{checkpoint.name}/",
    ):
        async with aclosing(store.scan(prefix)) as listing:
            if await anext(listing, None) is not None:
                return True
    return False
