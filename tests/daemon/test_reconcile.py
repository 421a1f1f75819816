"""The reconciler: newest first, each tier by itself, and nothing goes that policy or prudence would keep."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.chunk_keys import owner_name
from support.doubles import Double, contents, flip, is_chunk, is_manifest
from support.waiting import until
from support.world import Daemon, commit, content, converge, part, read, reconciler, running, settle, steps_in, steps_on

from tierd.core.errors import ManifestError, StoreUnavailable
from tierd.core.manifest import MANIFEST_NAME
from tierd.core.manifest_codec import encode
from tierd.core.planning.place import SPOOL
from tierd.daemon.tiers.tier_prune import quarantine
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore


def test_the_newest_is_flushed_first(spool):
    for step in (3, 1, 2):
        commit(spool, part(step))
    commit(spool, part(1, launch=2), origin=part(2).checkpoint)  # the latest attempt is newer than any step
    store = Double()
    asyncio.run(converge(spool, {"tier": store}))
    shown = [tuple(key.split("/")[2].split(".")) for key in store.puts(is_manifest)]
    assert [(int(step), attempt[-1]) for step, attempt in shown] == [(1, "2"), (3, "1"), (2, "1"), (1, "1")]


def test_unsent_part_is_not_lost_while_a_newer_checkpoint_is_complete_by_names_alone(spool, tmp_path):
    """Another rank's manifest of it is damaged, which nobody here has read: it is read before the only copy goes."""
    other, store = Spool(tmp_path / "other"), MemoryStore()
    for rank in (0, 1):
        commit(other, part(2, rank=rank, world=2))
    asyncio.run(converge(other, {"tier": store}, keep=1))
    asyncio.run(flip(store, part(2, rank=1, world=2).manifest_key))
    for step in (1, 2):
        commit(spool, part(step, world=2))
    asyncio.run(converge(spool, {"tier": store}, keep=1))
    left = part(1, world=2)
    assert left in spool.parts() or left.manifest_key in asyncio.run(contents(store))


def test_a_tier_that_is_down_delays_only_itself_and_drains_when_it_is_back(spool):
    async def work():
        up, down = Double(), Double()
        down.error = StoreUnavailable("no route")
        for step in range(5):
            commit(spool, part(step))
        async with running(reconciler(spool, {"down": down, "up": up})) as daemon:
            await until(lambda: all(daemon.tiers.observed.has(part(step), "up") for step in range(5)))
            assert not daemon.tiers.observed.has(part(0), "down") and daemon.backlog.parts() == {
                part(step) for step in range(5)
            }
            assert isinstance(daemon.workers["down"].last_error, StoreUnavailable)
            down.error = None
            await settle(daemon)
            assert daemon.workers["down"].last_error is None and not daemon.backlog.parts()
        return await contents(up.inner), await contents(down.inner)

    first, second = asyncio.run(work())
    assert first == second and steps_on(first) == [0, 1, 2, 3, 4]


async def test_a_tier_that_hangs_delays_only_itself(spool):
    """Even where it holds what the other tier lacks, and hangs after it was seen to."""
    hung, up = Double(), Double()
    for step in range(3):
        commit(spool, part(step))
    async with running(reconciler(spool, {"hung": hung})) as daemon:
        await settle(daemon)
    async with running(reconciler(spool, {"hung": hung, "up": up})) as daemon:
        up.error = StoreUnavailable("not yet")
        await until(lambda: daemon.tiers.observed.has(part(2), "hung") and daemon.workers["up"].failures)
        hung.delay, up.error = 3600.0, None
        await until(lambda: all(daemon.tiers.observed.has(part(step), "up") for step in range(3)))
    assert steps_on(await contents(up.inner)) == [0, 1, 2]


def test_lost_answers_and_flaky_calls_end_in_the_same_tier(spool):
    for step in range(4):
        commit(spool, part(step))
    calm = MemoryStore()
    asyncio.run(converge(spool, {"tier": calm}))
    for seed in range(4):
        noise, store = random.Random(seed), Double()

        def flaky(operation, key, noise=noise):
            if noise.random() < 0.05:
                raise StoreUnavailable("flaky")

        store.before, store.lose = flaky, 3
        asyncio.run(converge(spool, {"tier": store}))
        assert asyncio.run(contents(store.inner)) == asyncio.run(contents(calm)), f"seed {seed}"


async def test_a_foreign_error_ends_no_worker(spool):
    store = Double()
    store.error = ZeroDivisionError("a bug")
    commit(spool, part(1))
    async with running(reconciler(spool, {"tier": store})) as daemon:
        await until(lambda: daemon.workers["tier"].failures >= 2)
        store.error = None
        await until(lambda: daemon.tiers.observed.has(part(1), "tier"))


async def test_one_unreadable_manifest_in_the_spool_stops_nothing_else(spool, monkeypatch):
    """EIO on one manifest: the others are flushed, and the one is neither quarantined nor forgotten."""
    for step in range(3):
        commit(spool, part(step))
    bad = spool.path(part(1)) / MANIFEST_NAME
    real = os.open

    def failing(path, *rest, **options):
        if isinstance(path, str | Path) and Path(path) == bad:
            raise OSError(5, os.strerror(5))
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", failing)
    store = MemoryStore()
    async with running(reconciler(spool, {"tier": store})) as daemon:
        await until(lambda: daemon.tiers.observed.has(part(0), "tier") and daemon.tiers.observed.has(part(2), "tier"))
        await asyncio.sleep(0.2)
        assert spool.path(part(1)).is_dir() and not spool.quarantined()
        monkeypatch.setattr(os, "open", real)
        await until(lambda: daemon.wake() or daemon.tiers.observed.has(part(1), "tier"))


def test_drain_flushes_a_part_that_was_committed_a_moment_before(spool):
    async def work():
        store = MemoryStore()
        async with running(reconciler(spool, {"tier": store}, rescan="1h")) as daemon:
            await settle(daemon)
            commit(spool, part(1))
            await daemon.drain(10)
            return steps_on(await contents(store))

    assert asyncio.run(work()) == [1]


async def test_a_drain_ends_in_time_when_a_tier_is_down(spool):
    store = Double()
    store.error = StoreUnavailable("down")
    commit(spool, part(1))
    async with running(reconciler(spool, {"tier": store})) as daemon:
        async with asyncio.timeout(60):
            await daemon.drain(0.3)
        assert daemon.backlog.parts() == {part(1)}


def test_part_that_no_tier_can_describe_holds_up_no_other_and_is_no_corruption(spool, monkeypatch):
    def picky(manifest):
        if manifest.step == 2:
            raise ManifestError("too large")
        return encode(manifest)

    async def work():
        for step in range(3):
            commit(spool, part(step))
        async with running(reconciler(spool, {"tier": MemoryStore()})) as daemon:
            await until(
                lambda: daemon.tiers.observed.has(part(0), "tier") and daemon.tiers.observed.has(part(1), "tier")
            )
            assert daemon.journal.counters["errors"] and not daemon.journal.counters["corruptions"]

    monkeypatch.setattr("tierd.daemon.transfer.flush.encode_manifest", picky)
    asyncio.run(work())


# -- retention --------------------------------------------------------------------------------------------------------


def test_each_place_keeps_the_checkpoints_of_its_own_policy(spool):
    for step in range(8):
        commit(spool, part(step))
    store = MemoryStore()
    asyncio.run(converge(spool, {"tier": store}))
    assert steps_on(asyncio.run(contents(store))) == list(range(8))
    asyncio.run(converge(spool, {"tier": store}, keep=4, keep_local=2))
    left = asyncio.run(contents(store))
    assert steps_on(left) == [4, 5, 6, 7]
    assert {owner_name(key) for key in left if is_chunk(key)} == {part(step).checkpoint.name for step in range(4, 8)}
    assert steps_in(spool) == [6, 7]
    assert not list((spool.control / "trash").iterdir())


async def test_no_local_copy_is_deleted_while_no_tier_has_verified_it(spool):
    store = Double()
    store.error = StoreUnavailable("down")
    for step in range(6):
        commit(spool, part(step))
    async with running(reconciler(spool, {"tier": store}, keep=1)) as daemon:
        await until(lambda: daemon.workers["tier"].failures > 5)
        daemon.wake()
        await asyncio.sleep(0.2)
        assert steps_in(spool) == list(range(6))
        store.error = None
        await settle(daemon)
    assert steps_in(spool) == [5] and steps_on(await contents(store.inner)) == [5]


@pytest.mark.parametrize("harm", ["remove", "truncate"])
async def test_local_copy_is_kept_when_its_copy_on_the_tier_has_lost_a_chunk(spool, harm):
    """The tier is looked at once more before anything goes; what is gone from it is flushed again."""
    store = Double()
    for step in range(3):
        commit(spool, part(step))
    async with running(reconciler(spool, {"tier": store})) as daemon:
        await settle(daemon)
    victims = [key for key in await contents(store.inner) if is_chunk(key) and part(0).checkpoint.name in key]
    if harm == "remove":
        await store.inner.delete(victims[:1])
    else:
        await store.inner.put(victims[0], b"short")
    store.calls = []
    async with running(reconciler(spool, {"tier": store}, keep=100, keep_local=1)) as daemon:
        await settle(daemon)
        assert store.puts(is_chunk) == victims[:1]
        assert daemon.tiers.observed.has(part(0), "tier")
    assert steps_in(spool) == [2]
    for step in (0, 1):
        async with running(reconciler(spool, {"tier": store})) as daemon:
            await daemon.repairs.fetch(part(step))
        assert read(spool, part(step)) == content(step)


async def test_fetched_chunks_make_no_daemon_list_the_tier(spool, tmp_path):
    """A restore fetches several times, on every node of a job."""
    store = Double()
    commit(spool, part(1))
    async with running(reconciler(spool, {"tier": store})) as daemon:
        await settle(daemon)
    fresh = reconciler(Spool(tmp_path / "fresh"), {"tier": store})
    await fresh.repairs.fetch(part(1), chunk_runs={"weights.bin": ((0, 1),)})
    assert fresh.workers[SPOOL].wake.is_set() and not fresh.workers["tier"].wake.is_set()


async def test_only_the_part_that_has_lost_a_chunk_is_quarantined_of_its_checkpoint(spool):
    """The other ranks' copies are right, and maybe the last ones by tomorrow (simulation, seed 1012)."""
    store = Double()
    for step in range(2):
        for rank in range(2):
            commit(spool, part(step, rank=rank, world=2))
    async with running(reconciler(spool, {"tier": store})) as daemon:
        await settle(daemon)
    old = part(0).checkpoint.name
    victim = next(key for key in await contents(store.inner) if is_chunk(key) and f"{old}/00001/" in key)
    await store.inner.delete([victim])
    store.calls = []
    async with running(reconciler(spool, {"tier": store}, keep=100, keep_local=1)) as daemon:
        await settle(daemon)
    assert store.puts(lambda key: "/quarantine/" in key) == [part(0, rank=1, world=2).quarantine_key]
    assert store.puts(is_chunk) == [victim] and steps_in(spool) == [1, 1]


async def test_part_that_is_being_restored_is_not_evicted(spool):
    store = MemoryStore()
    for step in range(4):
        commit(spool, part(step))
    daemon = reconciler(spool, {"tier": store}, keep=1)
    daemon.requests.held_checkpoints[part(0).checkpoint] += 1
    async with running(daemon):
        await settle(daemon)
        assert steps_in(spool) == [0, 3]
        daemon.requests.held_checkpoints.clear()
        await settle(daemon)
        assert steps_in(spool) == [3]


async def test_a_pin_keeps_every_copy(spool):
    store = MemoryStore()
    for step in range(5):
        commit(spool, part(step))
    spool.pin(part(1).checkpoint, pinned=True)
    async with running(reconciler(spool, {"tier": store}, keep=1)) as daemon:
        await settle(daemon)
        assert steps_in(spool) == [1, 4] and steps_on(await contents(store)) == [1, 4]
        spool.pin(part(1).checkpoint, pinned=False)
        await settle(daemon)
        assert steps_in(spool) == [4] and steps_on(await contents(store)) == [4]


async def test_leftovers_of_dead_writers_are_deleted_and_those_of_live_writers_kept(spool):
    live = spool.stage(part(1))
    dead = spool.control / "stage" / "dead"
    dead.mkdir()
    (dead / "half").write_bytes(b"half")
    (spool.control / "trash" / "half").mkdir()
    async with running(reconciler(spool, {"tier": MemoryStore()})) as daemon:
        await until(lambda: daemon.wake() or not dead.exists())
        await settle(daemon)
    assert live.path.is_dir() and not list((spool.control / "trash").iterdir())
    live.abandon()


async def test_manifest_that_cannot_be_repaired_yet_keeps_no_flush_waiting(spool):
    """Nothing is pruned while it is not known what it names; that is no failure of the tier."""
    one, other = Double(), Double()
    for step in range(4):
        commit(spool, part(step))
    async with running(reconciler(spool, {"one": one, "other": other})) as daemon:
        await settle(daemon)
    shutil.rmtree(spool.path(part(2)))
    await one.inner.put(part(2).manifest_key, b"garbage")
    other.error = StoreUnavailable("down")
    async with running(reconciler(spool, {"one": one, "other": other}, keep=1)) as daemon:
        await until(lambda: daemon.tiers.observed.places["one"])
        for step in range(4, 8):
            commit(spool, part(step))
            await until(lambda step=step: daemon.wake() or daemon.tiers.observed.has(part(step), "one"))
            assert daemon.workers["one"].last_error is None


async def test_quarantined_part_is_flushed_again_without_its_bad_shared_chunk(spool):
    """The chunk that was proven bad may be one that another checkpoint names, too."""
    same = bytes(range(250)) * 4
    store = MemoryStore()
    commit(spool, part(0), {"w": same})
    async with running(reconciler(spool, {"tier": store})) as daemon:
        await settle(daemon)
        commit(spool, part(1), {"w": same + b"n" * 1000})
        await settle(daemon)
        (shared,) = [key for key in await contents(store) if is_chunk(key) and part(0).checkpoint.name in key]
        right = bytes(await store.get(shared))
        await flip(store, shared)
        await quarantine(store, part(0))
        await settle(daemon)
        assert daemon.tiers.observed.has(part(0), "tier") and bytes(await store.get(shared)) == right


@pytest.mark.parametrize("leaves", [True, False])
async def test_blocks_are_not_kept_for_a_writer_that_left_while_they_were_freed(spool, monkeypatch, leaves):
    """Its end had looked for them too early, and nobody looked again. Seed 501 of `python -m faults kills`."""
    large = {"weights.bin": bytes(1 << 20)}
    for step in range(2):
        commit(spool, part(step), large)
    daemon = reconciler(spool, {"tier": MemoryStore()}, keep=1)
    writers = {part(0).writer}
    daemon.requests.writers = lambda: frozenset(writers)
    remove = spool.remove

    def left_meanwhile(parts, reuse):
        if leaves:
            writers.clear()
            spool.drop_recycled(daemon.requests.writers())  # as its line's end does
        remove(parts, reuse)

    monkeypatch.setattr(spool, "remove", left_meanwhile)
    async with running(daemon):
        await settle(daemon)
    assert steps_in(spool) == [1]
    assert (spool.recycled(part(2)) is None) == leaves


async def test_half_a_look_at_the_spool_is_no_look(tmp_path):
    """Its file system goes away while it is looked at: nobody is told that what lay there is gone."""
    spool = Spool(tmp_path / "spool")
    commit(spool, part(1))
    daemon = reconciler(spool, {"tier": MemoryStore()})
    await daemon.observe("local")
    away = spool.root.rename(tmp_path / "away")
    with pytest.raises(OSError):
        await daemon.observe("local")
    assert daemon.inventory().spool.lists(part(1)) and not daemon.backlog.is_retired(part(1), "tier")
    away.rename(spool.root)


def test_a_daemon_ends_in_order_where_its_sockets_cannot_be_removed(tmp_path, monkeypatch):
    """As on a spool that has turned read-only: seed 34 of the disk faults."""
    spool = Spool(tmp_path / "spool")
    ended, shutdown = [], ThreadPoolExecutor.shutdown
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", lambda self, **how: (ended.append(self), shutdown(self, **how)))
    with Daemon(spool.root, {"tier": MemoryStore()}) as daemon:
        pool = daemon.handoff._pool

        def refuse(path, missing_ok=False):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.undo()
    assert pool in ended and daemon._failure is None
    held = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    assert str(spool.control) not in [os.readlink(fd) for fd in held if fd.is_symlink()]


async def test_part_that_a_rank_commits_while_other_parts_are_freed_is_still_listed(spool, monkeypatch):
    """A waiter for that part would otherwise hear that it will not come, until the spool is looked at again."""
    freed, late = part(1, rank=0, world=2), part(1, rank=1, world=2)
    commit(spool, freed)
    daemon = reconciler(spool, {"tier": Double()})
    await daemon.observe(SPOOL)

    async def lacking(parts):
        if freed in parts:
            commit(spool, late)
            await daemon.observe(SPOOL)

    monkeypatch.setattr(daemon.tiers, "find_missing_parts", lacking)
    monkeypatch.setattr(daemon.tiers.observed, "has", lambda part, tier: True)
    assert await daemon._pruner.release(freed.checkpoint, ())
    place = daemon.inventory().spool
    assert place.lists(late) and not place.lists(freed) and not spool.has(freed)
    assert await daemon._pruner.release(late.checkpoint, ())
    assert not daemon.inventory().spool.checkpoints


def test_a_spool_that_can_remember_nothing_more_is_flushed_all_the_same(spool, monkeypatch, caplog):
    def full(control, head):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tierd.daemon.reconciling.flusher.record_head", full)
    commit(spool, part(1))
    commit(spool, part(2))
    daemon = asyncio.run(converge(spool, {"tier": MemoryStore()}))
    assert all(daemon.tiers.observed.has(part(step), "tier") for step in (1, 2))
    assert "not remembered yet" in caplog.text
