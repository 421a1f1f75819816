"""One damaged chunk costs few checkpoints: small ones are never shared, large ones by a bounded number."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
from support.doubles import Double, contents, is_chunk, is_manifest
from support.world import CHUNK, commit, converge, part, read

from tierd.core.errors import CorruptChunk
from tierd.core.manifest_codec import decode
from tierd.core.planning import flush_order
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.spool.file_io import digest

SAME = bytes(range(251)) + b"twelve bytes"  # 263 of them, equal in every checkpoint
TRUE_SMALLEST = flush_order.SMALLEST_SHARED_BYTES


async def test_an_emptied_small_chunk_costs_no_other_checkpoint(spool, monkeypatch):
    """The only tier has lost the bytes of one small chunk, and the spool is gone: the other checkpoints restore."""
    monkeypatch.setattr(flush_order, "SMALLEST_SHARED_BYTES", TRUE_SMALLEST)
    files = {step: {"state.json": SAME, "news": bytes([step]) * CHUNK} for step in (1, 2, 3)}
    store = Double()
    for step in files:
        commit(spool, part(step), files[step])
        await converge(spool, {"tier": store})
    first = min(key for key in await contents(store) if is_chunk(key) and digest(SAME) in key)
    await store.inner.put(first, b"")
    for step in files:
        shutil.rmtree(spool.path(part(step)))
    restored = []
    for step in files:
        try:
            await fetch(spool, part(step), {"tier": store}, MemoryBudget())
        except CorruptChunk:
            continue
        assert read(spool, part(step)) == files[step]
        restored.append(step)
    assert restored == [1, 2, 3], "a small chunk is shared"  # the first takes it from another's name


@pytest.mark.parametrize(("keep", "saves"), [(3, 8), (100, flush_order.MOST_SHARERS + 8)])
async def test_no_chunk_is_named_by_more_checkpoints_than_the_bound(spool, keep, saves):
    store, most = Double(), 0
    for step in range(saves):
        commit(spool, part(step), {"frozen": b"f" * CHUNK, "news": bytes([step]) * CHUNK})
        await converge(spool, {"tier": store}, keep=keep)
        manifests = [decode(data) for key, data in (await contents(store)).items() if is_manifest(key)]
        named = Counter(chunk.stored.key for one in manifests for chunk in one.chunks() if chunk.stored)
        most = max(most, *named.values())
    assert most == min(keep, flush_order.MOST_SHARERS), f"a chunk is named by {most} checkpoints"
