"""A store may list late: that proves nothing corrupt, no manifest outlives its chunks, each deletion is reported."""

from __future__ import annotations

import pytest
from support.doubles import Double, is_chunk
from support.world import RUN, commit, converge, part, reconciler

from tierd.core.errors import StoreUnavailable
from tierd.core.ids import CheckpointId
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.tiers.tier_probes import is_part_held
from tierd.daemon.tiers.tier_prune import prune
from tierd.stores.base import ObjectInfo


class Late(Double):
    """Its listings do not show the `hidden` keys."""

    hidden: frozenset[str] = frozenset()

    async def scan(self, prefix, after=""):
        async for info in super().scan(prefix, after):
            if info.key not in self.hidden:
                yield info


@pytest.mark.parametrize("gone", [False, True], ids=["there", "gone"])
async def test_tier_holds_a_part_that_it_does_not_list_yet(spool, gone):
    store = Late()
    commit(spool, part(1))
    await converge(spool, {"tier": store})
    store.hidden = frozenset(filter(is_chunk, store.inner.objects))
    assert store.hidden
    if gone:
        await store.inner.delete([max(store.hidden)])
    assert (await is_part_held(store, part(1), spool.manifest(part(1))) is True) is not gone


async def test_a_prune_leaves_no_manifest_that_was_not_listed(spool):
    both = [part(1, rank=rank, world=2) for rank in (0, 1)]
    store = Late()
    for rank in (0, 1):
        commit(spool, part(1, rank=rank, world=2))
        commit(spool, part(2, rank=rank, world=2))
    await converge(spool, {"tier": store})
    daemon = reconciler(spool, {"tier": store})
    daemon.requests.requested_runs.add(both[0].checkpoint.run)
    await daemon.observe("tier")
    seen = daemon.inventory().tiers["tier"]
    store.hidden = frozenset({both[1].manifest_key})
    await prune(store, {both[0].checkpoint}, decided_on=seen)
    assert not [key for key in store.inner.objects if both[0].checkpoint.name in key]
    assert [key for key in store.inner.objects if part(2, world=2).checkpoint.name in key]


@pytest.mark.parametrize("gone", [False, True], ids=["deleted here", "deleted by another process"])
async def test_a_prune_reports_a_checkpoint_that_no_listing_shows_if_it_deleted_it(spool, gone):
    reported: list[CheckpointId] = []
    store = Late()
    for step in (1, 2, 3):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    daemon = reconciler(spool, {"tier": store})
    daemon.requests.requested_runs.add(part(1).checkpoint.run)
    await daemon.observe("tier")
    seen = daemon.inventory().tiers["tier"]
    store.hidden = frozenset(key for key in store.inner.objects if part(1).checkpoint.name in key)
    if gone:
        await store.inner.delete(sorted(store.hidden))
    both = {part(1).checkpoint, part(2).checkpoint}
    pruned = await prune(store, both, decided_on=seen, deleted=reported.extend)
    assert part(1).manifest_key not in store.inner.objects
    assert sorted(reported) == sorted(pruned.deleted) == sorted(both)[gone:]


async def test_a_deleted_manifest_that_a_listing_still_shows_is_looked_for_once(spool):
    class Ghost(Late):
        async def scan(self, prefix, after=""):
            infos = [info async for info in super().scan(prefix, after)]
            if ghost.startswith(prefix) and ghost > after:
                infos.append(ObjectInfo(ghost, 100, "old"))
            for info in sorted(infos, key=lambda info: info.key):
                yield info

    ghost = part(2).manifest_key
    store = Ghost()
    commit(spool, part(1))
    await converge(spool, {"tier": store.inner})
    eye = TierObserver(store)
    for listings in (2, 1, 1):
        store.calls.clear()
        assert set((await eye.observe({RUN})).checkpoints) == {part(1).checkpoint}
        assert store.calls.count(("scan", f"{RUN}/manifests/")) == listings


@pytest.mark.parametrize("prunes", [False, True], ids=["reader", "daemon"])
async def test_part_that_vanishes_from_each_listing_fails_a_readers_observation_alone(spool, prunes):
    store = Late()
    for step in range(1, 12):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    left = [part(step).manifest_key for step in range(2, 12)]
    store.hidden = frozenset(left[1:])

    def before(operation: str, key: str) -> None:
        if operation == "get" and key in left:  # is pruned right before its read, and the next one is flushed
            store.inner.keys.remove(key), store.inner.objects.pop(key)
            store.hidden = frozenset(left[left.index(key) + 2 :])

    store.before = before
    eye = TierObserver(store, prunes=prunes)
    if prunes:
        assert part(1).checkpoint in (await eye.observe({RUN})).checkpoints
    else:
        with pytest.raises(StoreUnavailable, match="pruned while they were listed, 5 times; try again"):
            await eye.observe({RUN})
