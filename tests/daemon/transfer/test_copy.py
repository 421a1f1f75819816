"""A copy of a run: only what the target lacks is sent, all of it verified, and a kill at any point costs nothing.

TIERD_COPY_KILLS=1 kills at every request, and not at one in a few; TIERD_COPY_TRIALS=200 has more random histories.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress

import pytest
from support.chunk_keys import owner_name
from support.doubles import Double, Killed, contents, dying, flip, is_chunk, is_manifest
from support.world import RUN, attempt, commit, content, converge, part, steps_on

from tierd.core.errors import CheckpointNotFound, ConfigError, StoreRefused
from tierd.core.ids import CheckpointId, PartId, pin_key, retention_key
from tierd.core.manifest_codec import decode
from tierd.core.retention.policy import RetentionPolicy, StoredRetention, encode_policy
from tierd.core.timeline.launch_chain import merge_heads
from tierd.daemon.tiers.tier_objects import verify_part
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.replicas import Replicas
from tierd.daemon.transfer.run_copy import CopiedRun, copy_run
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.memory_store import MemoryStore

STRIDE = int(os.environ.get("TIERD_COPY_KILLS", "9"))
NEW = "new"


async def source(spool: Spool, steps=(1, 2), world: int = 1, frozen: bool = False) -> MemoryStore:
    """A tier with these checkpoints; `frozen`: half of the bytes of each are the same."""
    store = MemoryStore()
    for step in steps:
        for rank in range(world):
            which = part(step, rank=rank, world=world)
            files = content(step, rank=rank) | ({"frozen": b"f" * 1000} if frozen else {})
            commit(spool, which, files, metrics={"loss": 1.0 / step})
            await flush(spool, which, TierUploadContext(store))
    return store


@pytest.mark.parametrize("encrypted", [True, False], ids=["a key is left out", "a key is too much"])
async def test_a_tier_does_not_become_half_encrypted(spool, encrypted):
    store, inner, key = await source(spool), MemoryStore(), EncryptionKey(b"k" * 32)
    with_key = EncryptedStore(inner, key)
    right, wrong = (with_key, inner) if encrypted else (inner, with_key)
    await copy(store, right)
    before = dict(inner.objects)
    with pytest.raises(StoreRefused, match="a tier has one key or none, and run run there"):
        await copy(store, wrong, NEW)
    assert inner.objects == before
    await copy(store, right, NEW)
    await check(right, NEW)


def copy(store: Store, target: Store, to_run: str = RUN, step: int | None = None, attempt: str | None = None):
    return copy_run(store, target, RUN, to_run, step, attempt, Progress())


async def files_of(store: Store, which: PartId) -> dict[str, bytes]:
    """A part's files as a tier has them, every byte verified."""
    copies = Replicas(which, {"it": store})
    await copies.read_manifests()
    (manifest,) = copies.contents()
    copies.trust(manifest)
    return {
        file.path: b"".join([bytes(await copies.chunk(at, index, file.path)) for index in range(len(file.chunks))])
        for at, file in enumerate(manifest.files)
    }


async def check(store: Store, run: str = RUN, steps=(1, 2), world: int = 1) -> None:
    """Exactly these checkpoints are whole on a tier, and right."""
    place = await TierObserver(store).observe({run}, spare_reads=1000)
    assert [one.step for one in place.run(run).usable] == list(steps)
    for step in steps:
        for rank in range(world):
            which = part(step, rank=rank, world=world, run=run)
            _, wrong = await verify_part(store, which, lambda size: None)
            assert not wrong
            assert (await files_of(store, which)).items() >= content(step, rank=rank).items()


@pytest.mark.parametrize("to_run", [RUN, NEW])
async def test_copy_is_complete_and_the_next_copy_sends_only_new_chunks(spool, to_run):
    store, target = await source(spool, world=2), Double()
    first = await copy(store, target, to_run)
    await check(target, to_run, world=2)
    assert [(one.step, one.was_there) for one in first.checkpoints] == [(1, False), (2, False)]
    assert sum(one.sent for one in first.checkpoints) > 0
    before, target.calls = await contents(target.inner, policies=True), []
    again = await copy(store, target, to_run)
    assert target.puts() == [] and await contents(target.inner, policies=True) == before
    assert [(one.step, one.sent, one.was_there) for one in again.checkpoints] == [(1, 0, True), (2, 0, True)]
    for rank in range(2):
        commit(spool, part(3, rank=rank, world=2))
        await flush(spool, part(3, rank=rank, world=2), TierUploadContext(store))
    third = await copy(store, target, to_run)
    assert [one.was_there for one in third.checkpoints] == [True, True, False]
    assert {owner_name(key)[:12] for key in target.puts(is_chunk)} == {f"{3:012}"}
    await check(target, to_run, (1, 2, 3), world=2)


async def test_shared_chunks_are_sent_once_and_a_new_name_is_remembered(spool):
    store, target = await source(spool, (1, 2, 3), frozen=True), Double()
    progress = Progress()
    done = await copy_run(store, target, RUN, NEW, None, None, progress)
    assert progress.done == progress.total == sum(one.size for one in done.checkpoints)
    theirs = [key for key in await contents(store) if is_chunk(key)]
    assert len(target.puts(is_chunk)) == len(theirs) - 2  # the frozen bytes once, and not for each of three
    for key, data in (await contents(target.inner)).items():
        assert key.startswith(f"{NEW}/") or key == "README.md"
        if is_manifest(key):
            assert decode(data).copied_from == (RUN,) and decode(data).metrics
    again = MemoryStore()
    await copy_run(target, again, NEW, "newer", None, None, Progress())
    assert {decode(data).copied_from for key, data in (await contents(again)).items() if is_manifest(key)} == {
        (RUN, NEW)
    }
    assert b"copied_from" not in b"".join((await contents(store)).values())


async def test_a_copy_that_is_killed_shows_no_half_and_continues(spool):
    store, whole = await source(spool, world=2, frozen=True), Double()
    await _given(store)
    await copy(store, whole, NEW)
    requests, wanted = len(whole.calls), await contents(whole.inner)
    for at in range(1, requests, STRIDE):  # after the last one, nothing is left to be killed
        target = MemoryStore()
        with pytest.raises(Killed):
            await copy(store, dying(target, at, after=bool(at % 2)), NEW)
        place = await TierObserver(target).observe({NEW}, spare_reads=1000)
        done = [one.step for one in place.run(NEW).usable]
        await check(target, NEW, done, world=2)
        if steps_on(await contents(target)):
            assert place.policies[NEW], f"request {at}: a checkpoint, and nothing that keeps it"
        await copy(store, target, NEW)
        await check(target, NEW, world=2)
        left = {key: data for key, data in (await contents(target)).items() if "/flushing/" not in key}
        assert left == wanted, f"request {at}"


TRIALS = int(os.environ.get("TIERD_COPY_TRIALS", "4"))


@pytest.mark.parametrize("seed", range(TRIALS))
async def test_copy_ends_with_every_right_checkpoint_and_nothing_incomplete_in_any_history(seed, tmp_path):
    """Saves, prunes, flipped bits and killed copies in any order; then one copy that is left alone."""
    chance = random.Random(seed)
    world, spool, to_run = chance.choice((1, 2, 3)), Spool(tmp_path / "spool"), chance.choice((RUN, NEW))
    store, target, left, bad = MemoryStore(), MemoryStore(), {}, set()
    for step in range(1, 9):
        for rank in range(world):
            which = part(step, rank=rank, world=world)
            commit(spool, which, content(step, rank=rank) | {"frozen": b"f" * 1000})
            await flush(spool, which, TierUploadContext(store))
        left[step] = True
        if chance.random() < 0.3:
            gone = chance.choice(sorted(left))
            left.pop(gone)
            keys = [key for key in await contents(store) if f"{gone:012}" in key]
            await store.delete(sorted(keys, key=is_chunk))
        if left and chance.random() < 0.2:
            hurt = chance.choice(sorted(left))
            chunks = [key for key in await contents(store) if is_chunk(key) and f"{hurt:012}" in key]
            await flip(store, chance.choice(chunks))
            bad.add(hurt)
        if chance.random() < 0.6:
            with suppress(Killed, CheckpointNotFound):
                await copy(store, dying(target, chance.randrange(1, 60), chance.random() < 0.5), to_run)
        place = await TierObserver(target).observe({to_run}, spare_reads=1000)
        await check(target, to_run, [one.step for one in place.run(to_run).usable], world)
    if not left:
        return
    done = await copy(store, target, to_run)
    place = await TierObserver(target).observe({to_run}, spare_reads=1000)
    whole = {one.step for one in place.run(to_run).usable}
    assert left.keys() - bad <= whole and {one.step for one in done.checkpoints} <= whole
    assert {int(one.split()[1]) for one in done.failed} <= bad and not done.vanished
    await check(target, to_run, sorted(whole), world)


async def _given(store: Store, run: str = RUN, keep: int = 10, by: str = "0a0b0c0d", given: str = "trainer") -> None:
    one = StoredRetention(run, by, given, "node", "2026-01-01", RetentionPolicy(keep_last=keep), tiers=("s3",))
    await store.put(retention_key(run, by, given), encode_policy(one))


async def test_checkpoint_that_is_corrupt_at_the_source_is_named_and_never_copied(spool):
    store, target = await source(spool, (1, 2, 3)), Double()
    for key in await contents(store):
        if is_chunk(key) and f"{2:012}" in key:
            await flip(store, key)
    done = await copy(store, target)
    assert [one.step for one in done.checkpoints] == [1, 3] and len(done.failed) == 1
    assert done.failed[0].startswith("step 2 ") and not done.vanished
    await check(target, steps=(1, 3))
    await store.delete([part(1).manifest_key])  # as a prune begins
    for key in await contents(store):
        if is_chunk(key) and f"{1:012}" in key:
            await store.delete([key])
    assert [one.step for one in (await copy(store, Double())).checkpoints] == [3]


async def test_a_corrupt_manifest_at_the_source_is_named_too(spool):
    store, target = await source(spool, (1, 2)), Double()
    commit(spool, part(3, rank=0, world=2))
    await flush(spool, part(3, rank=0, world=2), TierUploadContext(store))  # its other part was never sent
    await flip(store, part(2).manifest_key)
    done = await copy(store, target)
    assert [one.step for one in done.checkpoints] == [1] and done.incomplete == 1
    assert len(done.failed) == 1 and done.failed[0].startswith("step 2 ")
    with pytest.raises(CheckpointNotFound):
        await copy(store, target, step=3)


async def test_checkpoint_that_is_pruned_during_a_copy_is_no_corruption(spool):
    store, pruned = Double(await source(spool)), MemoryStore()
    for key, data in (await contents(store)).items():
        if f"{2:012}" not in key:
            await pruned.put(key, data)

    def before(operation: str, key: str) -> None:
        if operation == "get" and is_chunk(key) and f"{2:012}" in key:
            store.inner = pruned

    store.before = before
    done = await copy(store, Double())
    assert (done.vanished, done.failed, [one.step for one in done.checkpoints]) == ((2,), (), [1])


async def test_policies_and_pins_are_copied_first_and_the_targets_own_policy_holds(spool):
    store = await source(spool, (1, 2, 3))
    await _given(store)
    await store.put(pin_key(part(2).checkpoint), b"")
    target = Double()
    done = await copy(store, target, NEW)
    assert (done.policies, done.pinned) == (1, (2,))
    puts = target.puts()
    assert puts.index(retention_key(NEW, "0a0b0c0d", "trainer")) < puts.index(next(filter(is_chunk, puts)))
    pin = puts.index(pin_key(CheckpointId(NEW, attempt(1), 2)))
    assert pin < min(at for at, key in enumerate(puts) if f"{2:012}" in key and not key.startswith(f"{NEW}/pins"))
    (found,) = (await TierObserver(target).observe({NEW})).policies[NEW]
    assert found.retention == RetentionPolicy(keep_last=10) and found.tiers == ()

    own = Double()
    await _given(own, keep=2, by="11111111")
    done = await copy(store, own)
    assert done.policies == 0 and len((await TierObserver(own).observe({RUN})).policies[RUN]) == 1


async def test_a_copy_that_was_killed_between_two_policies_puts_the_other(spool):
    store, target = await source(spool), Double()
    await _given(store, keep=7)
    await _given(store, keep=9, given="configuration")
    await _given(target, NEW, keep=7)
    assert (await copy(store, target, NEW)).policies == 1
    assert {one.given for one in (await TierObserver(target).observe({NEW})).policies[NEW]} == {
        *("trainer", "configuration")
    }


async def test_a_single_checkpoint_is_pinned_and_brings_no_policy_and_no_head(spool):
    store, target = await source(spool, (1, 2, 3)), Double()
    await _given(store)
    done = await copy(store, target, NEW, step=2)
    assert (done.pinned, done.policies, [one.step for one in done.checkpoints]) == ((2,), 0, [2])
    place = await TierObserver(target).observe({NEW})
    assert place.pins == {CheckpointId(NEW, attempt(1), 2)} and not place.policies and not place.heads
    with pytest.raises(CheckpointNotFound):
        await copy(store, target, NEW, step=7)
    with pytest.raises(CheckpointNotFound):
        await copy(store, target, NEW, attempt=attempt(9))


async def test_a_policy_that_cannot_be_read_stops_the_copy_of_a_run(spool):
    store, target = await source(spool), Double()
    await store.put(retention_key(RUN, "0a0b0c0d", "trainer"), b"{")
    with pytest.raises(StoreRefused, match="--step"):
        await copy(store, target)
    assert target.puts() == []
    assert (await copy(store, target, step=2)).pinned == (2,)


async def test_two_histories_do_not_mix_under_one_name(spool):
    store, target = await source(spool), Double()
    await copy(store, target, NEW)
    fresh = part(5, launch=2, run=NEW)
    commit(spool, fresh, origin=CheckpointId(NEW, attempt(1), 2))
    await flush(spool, fresh, TierUploadContext(target))
    target.calls = []
    with pytest.raises(ConfigError, match="another run of that name"):
        await copy(store, target, NEW)
    assert target.puts() == []
    other = Double()
    commit(spool, part(1, run="b"), {"other": b"content"})
    await flush(spool, part(1, run="b"), TierUploadContext(other))
    with pytest.raises(StoreRefused, match="other content"):
        await copy_run(store, await _renamed(other), RUN, RUN, None, None, Progress())


async def _renamed(store: Store) -> Store:
    """Run `b` of a tier as run `run`: the same names, other content."""
    found = MemoryStore()
    await copy_run(store, found, "b", RUN, None, None, Progress())
    return found


def test_a_launch_of_which_nothing_is_left_still_links_the_copy(spool):
    """Launch 2 resumed from launch 1 and left nothing; launch 3 resumed from launch 2. Only the head knows the link."""

    async def work() -> CopiedRun:
        store = MemoryStore()
        one, two = part(1).checkpoint, part(2, launch=2).checkpoint
        commit(spool, part(1))
        commit(spool, part(2, launch=2), origin=one)
        commit(spool, part(3, launch=3), origin=two)
        await converge(spool, {"tier": store})
        await store.delete([key for key in await contents(store) if two.name in key])
        target = MemoryStore()
        done = await copy(store, target, NEW)
        place = await TierObserver(target).observe({NEW}, spare_reads=1000)
        known = merge_heads(place.heads[NEW])
        assert [known[attempt(at)].newest for at in (1, 2, 3)] == [1, None, 3]
        assert known[attempt(2)].resumed_from.attempt == attempt(1)
        return done

    assert [one.step for one in asyncio.run(work()).checkpoints] == [1, 3]


async def test_daemon_that_saves_the_run_under_its_new_name_obeys_the_copied_policy(tmp_path):
    """Nobody configured anything there, and the default keeps three."""
    store = await source(Spool(tmp_path / "first"), range(1, 7))
    await _given(store, keep=5)
    target, here = MemoryStore(), Spool(tmp_path / "second")
    await copy(store, target, NEW)
    commit(here, part(9, run="others"))
    await converge(here, {"tier": target}, keep=1)  # never saved the run: it prunes nothing, whatever it is told
    await check(target, NEW, range(1, 7))
    commit(here, part(7, launch=2, run=NEW), origin=CheckpointId(NEW, attempt(1), 6))
    await converge(here, {"tier": target}, keep=None)
    place = await TierObserver(target).observe({NEW}, spare_reads=1000)
    assert [one.step for one in place.run(NEW).usable] == [3, 4, 5, 6, 7]
