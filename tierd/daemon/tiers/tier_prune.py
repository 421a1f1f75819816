"""Delete and quarantine copies on a tier. `core/planning/plan.py` decides which; this module decides in which order.

Invariant: a prune deletes the summary first, then the manifests, then the chunks that these name. It spares chunks that
a surviving manifest names, or that an intent names (`intents`). After an interruption the next observation finds either
a whole checkpoint or chunks that no manifest names. The plan then prunes those chunks again. Where the checkpoint's
name still holds shared chunks, the mark that stands there shows that the prune was cut off.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from typing import NamedTuple

from tierd.core.errors import DeleteRefused, FormatTooNew, ManifestError, ObjectNotFound, StoreUnavailable
from tierd.core.ids import (
    CheckpointId,
    PartId,
    chunk_group,
    chunk_groups,
    chunks_prefix,
    group_owner,
    quarantine_prefix,
    summary_key,
)
from tierd.core.planning.place import Place
from tierd.daemon.concurrency import for_each_limited
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.daemon.tiers.intents import deletion_marks
from tierd.daemon.tiers.manifest_index import ManifestIndex
from tierd.daemon.tiers.manifest_listing import MAX_MANIFEST_READS
from tierd.daemon.tiers.prune_pass import Confirm, Deletions, PrunePass
from tierd.daemon.tiers.shared_chunks import key_digest
from tierd.daemon.tiers.tier_objects import manifest_bytes, put_manifest, read_manifest
from tierd.stores.base import ObjectInfo, Store

_FEW = 16  # manifests that may be read while the marks block flushes
_QUARANTINE_S = 60.0  # seconds
_PAGE = 999  # chunks of other checkpoints after which a new listing is cheaper than reading on


class PruneResult(NamedTuple):
    # The checkpoints of which anything was deleted. Not among them: checkpoints of which another node is just putting a
    # manifest, and those of which only shared chunks are left.
    deleted: set[CheckpointId]
    bare: set[CheckpointId]  # other checkpoints, pruned before, whose last shared chunks were deleted now
    kept_reasons: Mapping[CheckpointId, str] = {}  # the checkpoints that are kept for now, each with the reason
    is_stale: bool = False  # whether the tier has lost a checkpoint that the decision counted on
    freed_bytes: int = 0  # of the chunks that were deleted


async def prune(
    store: Store,
    checkpoints: Collection[CheckpointId],
    who: str = "",
    manifest_index: ManifestIndex | None = None,
    decided_on: Place | None = None,
    confirm: Confirm | None = None,
    timings: DaemonTimings = USUAL,
    deleted: Callable[[Collection[CheckpointId]], None] = lambda checkpoints: None,
) -> PruneResult:
    """Delete checkpoints of one run from a tier in one pass, with the chunks that only they named.

    Invariant: every surviving manifest is read before anything is deleted, so its chunks are known. No checkpoint is
    deleted because of a newer one that cannot be used, or that is gone.

    Args:
        who: this node's id, 8 hex digits; random for a process that will not come back to sweep.
        manifest_index: manifests that were read on this tier before and need not be read again.
        decided_on: the inventory on which the decision rests. A checkpoint that has more parts by now is not deleted.
        confirm: asked for the decision once more right before the first deletion; without it, the decision stands.
        deleted: called with the checkpoints whose manifests were just deleted, because the rest may fail.

    Raises:
        ManifestError, FormatTooNew: a surviving manifest cannot be used, so its chunks are unknown. Nothing was
            deleted, and `manifest_index` records the defect.
        FormatTooNew: one of the checkpoints' own manifests is too new; nothing was deleted.
    """
    runs = {checkpoint.run for checkpoint in checkpoints}
    if not runs:
        return PruneResult(set(), set())
    (run,) = runs
    manifest_index = manifest_index or ManifestIndex(store)
    if manifest_index.unread_count(run) > _FEW or not all(
        manifest_index.is_read(checkpoint) for checkpoint in checkpoints
    ):
        await manifest_index.read_all(run, checkpoints)  # before the marks are put, because flushes wait for them
    async with deletion_marks(store, run, who, timings) as marks:
        decided = PrunePass(
            store, set(checkpoints), who, manifest_index, marks, decided_on or Place(), confirm, timings
        )
        going = await decided.settle(listed=decided_on is None)
        if not going.to_delete:
            return PruneResult(set(), set(), going.kept_reasons, going.is_stale)
        manifest_keys = going.listed.deleted_keys
        # Those of the inventory as well, because some stores list what is there only after a while, and no manifest may
        # outlive its chunks.
        copies = decided_on.checkpoints if decided_on else {}
        parts = [part for checkpoint in going.to_delete & copies.keys() for part in copies[checkpoint].parts()]
        await _add_unlisted(store, manifest_keys, parts)
        marks.has_begun = True
        manifests = sorted({*itertools.chain(*manifest_keys.values()), *(part.manifest_key for part in parts)})
        summaries = [info.key for checkpoint, info in going.listed.summaries.items() if checkpoint in going.to_delete]
        try:
            if summaries:  # first, because they stand for the manifests
                await store.delete(summaries)
            await store.delete(manifests)
        except DeleteRefused:
            marks.has_begun = False  # no chunk is being deleted, so the marks may be removed
            raise
        deleted(manifest_keys)
        chunks = {info.key: info.size async for info in _chunks(store, run, going)}
        moved = [
            info.key
            async for info in store.scan(quarantine_prefix(run))
            if CheckpointId.parse(run, info.key.split("/")[2]) in going.to_delete
        ]
        await store.delete([*chunks, *moved])
        await store.delete([mark for checkpoint in sorted(going.to_delete) for mark in going.cut.get(checkpoint, [])])
    manifest_index.cut[run] -= going.to_delete
    bare = {owner for owner in going.orphans if not going.listed.named_chunks.of_owner(owner)}
    return PruneResult(
        going.to_delete & ({*manifest_keys} | {_owner_of(run, key) for key in (*chunks, *moved)}),
        bare,
        going.kept_reasons,
        freed_bytes=sum(chunks.values()),
    )


async def _add_unlisted(store: Store, manifest_keys: dict[CheckpointId, list[str]], parts: Collection[PartId]) -> None:
    """Add the checkpoints of `parts` that the listing does not show although they have a manifest.

    They are read, because a checkpoint that another process deleted meanwhile is no deletion of this prune.
    """

    async def add(part: PartId) -> None:
        with suppress(ObjectNotFound):
            await manifest_bytes(store, part)
            manifest_keys.setdefault(part.checkpoint, []).append(part.manifest_key)

    await for_each_limited(MAX_MANIFEST_READS, add, [part for part in parts if part.checkpoint not in manifest_keys])


async def _chunks(store: Store, run: str, going: Deletions) -> AsyncGenerator[ObjectInfo]:
    """Yield the chunks to delete, by one listing from the first of their prefixes to the last.

    Where more than `_PAGE` chunks of other checkpoints lie in between, a new listing skips them.
    """
    prefix, owners = chunks_prefix(run), {*going.to_delete, *going.orphans}
    todo = deque(sorted(group for owner in owners for group in chunk_groups(owner)))
    while todo:
        passed = 0
        async with aclosing(store.scan(prefix, todo[0])) as listing:
            async for info in listing:
                group = chunk_group(run, info.key)
                while todo and todo[0] < group:
                    todo.popleft()
                if not todo:
                    return
                passed = 0 if group == todo[0] else passed + 1
                if passed > _PAGE:
                    break
                owner = None if passed else group_owner(run, group)
                if owner and going.is_deleted(owner, key_digest(info.key[len(run) + 1 :])):
                    yield info
            else:
                return


def _owner_of(run: str, key: str) -> CheckpointId | None:
    """The checkpoint under whose name a chunk or a quarantined manifest is stored."""
    part = PartId.parse_key(key)
    return part.checkpoint if part else group_owner(run, chunk_group(run, key))


async def quarantine(
    store: Store, part: PartId, judged: bytes | None = None, *, within_s: float = _QUARANTINE_S
) -> bool:
    """Move a part's manifest to quarantine because its copy is proven corrupt. The chunks are kept for inspection.

    Invariant: another manifest than the one that was judged is not deleted, because another node may have repaired
    the copy since.

    Args:
        judged: the `manifest_bytes` of the copy that is proven corrupt; None for those that are read now.
        within_s: seconds from the first read until the deletion, at most. A process that was stopped in between knows
            nothing of what others did meanwhile.

    Returns:
        Whether this call moved the manifest. If not, there is none, or another one than the one that was judged.

    Raises:
        StoreUnavailable: the manifest was not moved within `within_s`.
    """
    timed_out = StoreUnavailable(f"{part}: it was not quarantined within {within_s:.0f} s")
    ends_s = time.monotonic() + within_s
    try:
        async with asyncio.timeout(within_s):
            data = await manifest_bytes(store, part)
            if judged is not None and data != judged:
                return False
            try:  # a readable quarantined manifest is kept, because it may be the only record of its attempt's origin
                await read_manifest(store, part, part.quarantine_key)
            except (ObjectNotFound, ManifestError, FormatTooNew):
                await put_manifest(store, part.quarantine_key, data)  # an empty object is a mark
            if await manifest_bytes(store, part) != data:
                return False
            if time.monotonic() > ends_s:  # the timeout acts only at the next wait, and that is in the deletion
                raise timed_out
            await store.delete([summary_key(part.checkpoint)])
            await store.delete([part.manifest_key])
    except ObjectNotFound:
        return False
    except TimeoutError as error:
        raise timed_out from error
    return True
