"""How many requests a look, a flush, a restore and a prune cost: the formulas of the page about scale, by a counter."""

from __future__ import annotations

import asyncio

import pytest
from daemon.transfer.test_relay import daemon as of_tiers
from support.chunk_keys import owner_name
from support.doubles import Counting, Double, contents, is_chunk
from support.waiting import until
from support.world import RUN, commit, config, content, converge, part, reconciler, running, settle, steps_on

from tierd.core.errors import ManifestError
from tierd.core.ids import IDENTITY_KEY, chunk_directory, retention_key
from tierd.core.retention.policy import RetentionPolicy, StoredRetention, encode_policy
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.tiers.manifest_index import ManifestIndex
from tierd.daemon.tiers.node_records import NodeIdentity
from tierd.daemon.tiers.tier_observer import TierObserver, list_chunk_owners
from tierd.daemon.tiers.tier_operations import TierOperations
from tierd.daemon.tiers.tier_pauses import TierPause
from tierd.daemon.tiers.tier_prune import prune
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.daemon.transfer.tier_flushes import TierFlushes
from tierd.spool.spool import Spool

C = 4  # chunks of a part, none of them like another


async def filled(spool: Spool, store: Counting, checkpoints: int, ranks: int) -> None:
    """A tier that holds so many checkpoints of so many ranks, none of which shares a chunk; counts begin at none."""
    for step in range(checkpoints):
        for rank in range(ranks):
            commit(spool, part(step, rank=rank, world=ranks), content(step, rank=rank))
            await flush(spool, part(step, rank=rank, world=ranks), TierUploadContext(store))
    store.taken()


@pytest.mark.parametrize(("checkpoints", "ranks", "mine"), [(4, 3, {0}), (3, 5, {2, 3}), (2, 2, set())])
async def test_a_look(spool, checkpoints, ranks, mine):
    """LIST: pages(N·W) + what lies behind, at first also the chunks; GET: what speaks, and what is of a local rank."""
    store = Counting(first=2, page=5)
    await filled(spool, store, checkpoints, ranks)
    eye = TierObserver(store)
    listing = store.pages(checkpoints * ranks) + 1
    place = await eye.observe({RUN}, {RUN: mine})
    chunks = store.pages(checkpoints * ranks * C)  # fewer than a page a checkpoint: one listing of all
    assert store.taken() == {"LIST": listing + chunks, "GET": checkpoints * len(mine | {0})}
    assert all(seen.usable for seen in place.checkpoints.values()) and len(place.checkpoints) == checkpoints
    assert await eye.observe({RUN}, {RUN: mine}) == place
    assert store.taken() == {"LIST": listing}


@pytest.mark.parametrize(("each", "expected"), [(1000, 2 + 1 + 16), (600, 18 + 1 + 16)])
async def test_listing_of_many_chunks_lists_the_names_of_their_prefixes_alone(each, expected):
    """LIST: the pages up to where there are many, `chunks/`, and each of its 16 prefixes; not 2 for each prefix."""
    store, owners = Counting(), [part(step).checkpoint for step in range(3)]
    for owner in owners:
        for home in range(16):
            directory = f"{RUN}/{chunk_directory(owner, home)}"
            store.objects |= {f"{directory}{number:032x}.raw": (b"", 1) for number in range(each)}
    store.objects[f"{RUN}/chunks/{part(9).checkpoint.name}/00000/{0:032x}.raw"] = b"", 1  # of an older format
    store.keys = sorted(store.objects)
    assert await list_chunk_owners(store, RUN) == {*owners, part(9).checkpoint}
    assert store.taken() == {"LIST": expected}


async def test_observation_reads_each_new_policy_twice_and_none_again(spool):
    store = Counting()
    await filled(spool, store, 1, 1)
    observer = TierObserver(store)
    await observer.observe({RUN})
    store.taken()
    for node in ("0000000a", "0000000b"):
        policy = StoredRetention(RUN, node, "configuration", retention=RetentionPolicy())
        await store.put(retention_key(RUN, node, "configuration"), encode_policy(policy))
    assert store.taken() == {"PUT": 2}
    assert len((await observer.observe({RUN})).policies[RUN]) == 2
    assert store.taken()["GET"] == 4
    await observer.observe({RUN})
    assert "GET" not in store.taken()


@pytest.mark.parametrize("page", [1, 1000])
async def test_a_flush(spool, page):
    """C + 2 PUT; GET: 1 for the base, and C + 1 where the server does not verify; LIST: 5 and the chunks twice."""
    store = Counting(page, page)
    about = store.pages(2)  # the listing of the README and the tier's identity
    await filled(spool, store, 2, 2)
    tiers = TierOperations(config(spool, "tier"), {"tier": store}, NodeIdentity(spool.root))
    flushes = TierFlushes(config(spool, "tier"), spool, tiers, TierPause(spool))
    await tiers.observed.observe("tier", {RUN}, {RUN: {0}})
    store.taken()
    commit(spool, part(2, rank=0, world=2))
    await flushes.flush(part(2, rank=0, world=2), "tier")
    assert store.taken() == {"PUT": C + 2, "GET": C + 2, "LIST": 4 + about + 2 * store.pages(C), "DELETE": 2}
    await flush(spool, part(2, rank=0, world=2), TierUploadContext(store))  # again: what lies there is compared
    assert store.taken() == {"PUT": 2, "GET": C + 1, "LIST": 2 + about + 2 * store.pages(C), "DELETE": 2}
    await store.delete([key for key in await contents(store) if part(2).checkpoint.name in key])
    store.taken()
    await flush(spool, part(2, rank=0, world=2), TierUploadContext(store))
    assert store.taken() == {"PUT": C + 2, "GET": C + 1, "LIST": 3 + about + store.pages(C), "DELETE": 2}


async def test_flush_lists_each_home_before_and_after(spool):
    """2 LIST more for one home; what another rank has put costs a GET, to compare it, and no PUT."""
    store, shared = Counting(), b"".join(bytes([number]) * 1000 for number in range(C))
    for rank in (0, 1):
        commit(
            spool,
            part(1, rank=rank, world=2),
            {"own": bytes([100 + rank]) * 999, "shared": shared},
            homes={"shared": 0},
        )
    await flush(spool, part(1, rank=0, world=2), TierUploadContext(store))
    first = store.taken()
    await flush(spool, part(1, rank=1, world=2), TierUploadContext(store))
    second = store.taken()
    assert (first["PUT"] - second["PUT"]) >= C and second["PUT"] == 1 + 2
    assert first["GET"] - second["GET"] in (0, 1)  # and the tier's identity once
    lists = {name: taken["LIST"] for name, taken in (("first", first), ("second", second))}
    assert lists["second"] == lists["first"] + 2


async def test_a_restore_of_one_rank(spool, tmp_path):
    """GET: the manifest and every chunk; LIST: none."""
    store = Counting()
    await filled(spool, store, 3, 2)
    fresh = Spool(tmp_path / "fresh")
    await fetch(fresh, part(2, rank=1, world=2), {"tier": store}, MemoryBudget(), Progress())
    assert store.taken() == {"GET": 1 + C}


@pytest.mark.parametrize(("checkpoints", "ranks"), [(4, 3), (3, 6)])
async def test_prune_reads_each_survivor_once_and_the_next_prune_reads_none_of_them(spool, checkpoints, ranks):
    store = Counting(first=2, page=5)
    await filled(spool, store, checkpoints, ranks)
    known = ManifestIndex(store)
    for left in range(checkpoints - 1, 0, -1):
        step = checkpoints - 1 - left
        assert (await prune(store, [part(step).checkpoint], manifest_index=known)).deleted
        pages = store.pages
        listed, found = pages((left + 1) * ranks), store.taken()
        chunks = pages((left + 1) * ranks * C)  # under each prefix, up to a page of other checkpoints is passed
        assert found.pop("GET", 0) == (checkpoints * ranks if step == 0 else 0)
        assert found.pop("LIST") == 3 + listed * (2 if step == 0 else 1) + chunks
        assert found == {"PUT": 1, "DELETE": 3}


def changing(step: int) -> dict[str, bytes]:
    """Files of which one never changes and others change ever more seldom: chunks of many older checkpoints."""
    rows = {f"row{number}": bytes([number, step // (number + 1)]) * 400 for number in range(5)}
    return {"frozen": b"f" * 900, **rows}


def counted(daemon: Reconciler, store: Counting) -> list[tuple[int, dict[str, int]]]:
    """What each pass of prunes deletes and costs from now on, in requests."""
    passes, real = [], daemon.tiers.prune

    async def prune(checkpoints, tier, confirm, deleted):
        before = store.count.copy()
        gone = await real(checkpoints, tier, confirm, deleted)
        passes.append((len(gone), dict(store.count - before)))
        return gone

    daemon.tiers.prune = prune
    return passes


async def test_a_prune_behind_each_save_costs_the_same_beside_many_as_beside_few(spool):
    most = []
    for keep in (3, 12):
        store, home = Counting(), Spool(spool.root.parent / f"{keep}")
        daemon = reconciler(home, {"tier": store}, keep=keep, keep_local=100)
        passes = counted(daemon, store)
        async with running(daemon):
            for step in range(keep + 5):
                commit(home, part(step), changing(step))
                daemon.wake()
                await settle(daemon)
        assert sum(gone for gone, _ in passes) == 5
        most.append(max(cost.get("GET", 0) for _, cost in passes))
        assert all(cost["LIST"] <= 8 for _, cost in passes), passes
    assert most[0] == most[1] <= 3, f"GETs of a prune: {most}"


async def test_a_prune_deletes_nothing_past_a_manifest_that_cannot_be_read_and_makes_it_known(spool):
    """Of another rank, so that no look of this daemon reads it: by its name the newer checkpoint counts as complete."""
    store = Counting()
    await filled(spool, store, 2, 3)
    bad = part(1, rank=2, world=3)
    await store.put(bad.manifest_key, b"garbage")
    before, eye = await contents(store), TierObserver(store)
    place = await eye.observe({RUN}, {RUN: {0}})
    assert place.has(bad) and place.checkpoints[bad.checkpoint].usable
    with pytest.raises(ManifestError):
        await prune(store, [part(0).checkpoint], manifest_index=eye.manifests)
    assert await contents(store) == before
    place = await eye.observe({RUN}, {RUN: {0}})
    assert place.lists(bad) and not place.has(bad) and not place.checkpoints[bad.checkpoint].usable
    assert not await eye.manifests.are_usable(bad.checkpoint)
    assert await eye.manifests.are_usable(part(0).checkpoint)


async def test_chunks_that_another_ranks_manifest_names_are_not_pruned_again_and_again(spool, tmp_path):
    """The base checkpoint is gone; that rank 1's manifest names its chunks, no look of rank 0's daemon has read."""
    same, other = {"w": b"s" * 900}, Spool(tmp_path / "other")
    store = Counting()
    for step in range(2):
        commit(spool, part(step, rank=0, world=2))
        commit(other, part(step, rank=1, world=2), same)
    options = {"keep": 100, "rescan": "60s"}
    for where, rank in ((spool, 0), (other, 1)):
        await flush(where, part(0, rank=rank, world=2), TierUploadContext(store))
    await converge(other, {"tier": store}, **options)
    await converge(spool, {"tier": store}, **options)
    async with running(reconciler(spool, {"tier": store}, keep=1)) as daemon:
        await settle(daemon)
        names = {owner_name(key) for key in await contents(store) if is_chunk(key)}
        assert names == {part(step).checkpoint.name for step in range(2)}  # one is kept, and what it borrows
        pruned = daemon.journal.counters["pruned"]
        daemon.tiers._observers["tier"]._listed.clear()  # as after ten minutes
        await settle(daemon)
        place = daemon.tiers.observed.places["tier"]
        assert part(0).checkpoint in place.owners & place.bases
        assert daemon.journal.counters["pruned"] == pruned


async def test_checkpoint_whose_lowest_manifest_is_corrupt_still_names_the_origin_of_its_attempt(spool):
    store = Counting()
    for rank in (0, 1):
        commit(spool, part(9, 2, rank, 2), origin=part(3).checkpoint)
        await flush(spool, part(9, 2, rank, 2), TierUploadContext(store))
    await store.put(part(9, 2, 0, 2).manifest_key, b"garbage")
    seen = (await TierObserver(store).observe({RUN})).checkpoints[part(9, 2).checkpoint]
    assert list(seen.defects) == [part(9, 2, 0, 2)]
    assert [facts.origin for facts in seen.facts.values()] == [part(3).checkpoint]


async def test_those_who_ask_while_a_look_is_under_way_share_the_next(spool):
    """Eight ranks of a node ask for candidates at once: two looks, the second begun after all of them had asked."""
    store = Counting()
    await filled(spool, store, 1, 1)
    tiers = TierOperations(config(spool, "tier"), {"tier": store}, NodeIdentity(spool.root))
    asked = [asyncio.ensure_future(tiers.observed.observe("tier", {RUN}, {})) for _ in range(8)]
    await asyncio.gather(*asked)
    first = store.taken()["LIST"]
    await asyncio.gather(*(tiers.observed.observe("tier", {RUN}, {}) for _ in range(8)))
    assert first == 3 and store.taken() == {"LIST": 2}

    begun = asyncio.ensure_future(tiers.observed.observe("tier", {RUN}, {}))
    for _ in range(100):
        await asyncio.sleep(0)
        if tiers.observed._observing["tier"]:
            break
    late = [asyncio.ensure_future(tiers.observed.observe("tier", {RUN}, {})) for _ in range(8)]
    await asyncio.gather(begun, *late)
    assert store.taken() == {"LIST": 4}


@pytest.mark.parametrize(("world", "between"), [(1, 0), (2, 1)])
async def test_a_daemon_looks_between_two_flushes_only_where_other_nodes_may_send(spool, world, between):
    """Until `rescan`, what a daemon did to a tier is all that can have changed of what it alone sends."""
    store, parts = Counting(), 5
    for step in range(parts):
        commit(spool, part(step, rank=0, world=world))
    daemon = reconciler(spool, {"tier": store})
    observations, real = [], daemon.tiers.observed.observe

    async def observe(*arguments):
        observations.append(daemon.journal.counters["flushed"])
        await real(*arguments)

    daemon.tiers.observed.observe = observe
    async with running(daemon):
        await until(lambda: daemon.journal.counters["flushed"] == parts)
    assert [observations.count(number) for number in range(1, parts)] == [between] * (parts - 1)


@pytest.mark.parametrize("covered", [True, False])
async def test_a_look_that_takes_long_is_good_enough_to_send_by_but_not_to_delete_by(spool, covered):
    """Also while the spool's copy of what is pruned cannot go yet: that is the spool's tier worker's concern alone."""
    store = Counting()
    for step in range(4):
        commit(spool, part(step))
    daemon = reconciler(spool, {"tier": store}, keep=2)
    if not covered:
        daemon.tiers.find_missing_parts = lambda parts: asyncio.sleep(0, ())
    took = []

    def observation_took_long(*_):
        took.append(1)
        daemon.tiers.observed._took["tier"] = 3600.0

    real = daemon.tiers.observed.observe

    async def observe(*arguments):
        await real(*arguments)
        observation_took_long()

    daemon.tiers.observed.observe = observe
    async with running(daemon):
        await until(lambda: daemon.tiers.observed.has(part(3), "tier") and daemon.tiers.observed.has(part(2), "tier"))
        assert len(took) == 1
        commit(spool, part(4))
        daemon.wake()  # an event is heeded at once
        await until(lambda: daemon.tiers.observed.has(part(4), "tier"))
        await until(lambda: not daemon.tiers.observed.has(part(2), "tier"))  # pruned
        assert len(took) == 2  # what was done to a tier is known without a look


def test_another_tier_that_wants_a_checkpoint_is_asked_for_each_part_once(spool):
    async def work():
        near, far = Double(), Double()
        policies = RetentionPolicy(keep_last=2), RetentionPolicy(keep_last=100)
        # The spool keeps all, because it asks tiers of its own before it frees a copy.
        node = of_tiers(spool, {"near": near, "far": far}, policies, keep_local=100)
        async with running(node):
            for step in (1, 2, 3):
                if step == 3:
                    far.calls.clear()
                for rank in (0, 1):
                    commit(spool, part(step, rank=rank, world=2))
                await settle(node)
        assert sorted(set(steps_on(near.inner.objects))) == [2, 3]
        return [(operation, key) for operation, key in far.calls if part(1).checkpoint.name in key]

    asked = asyncio.run(work())
    manifests = [("get", part(1, rank=rank, world=2).manifest_key) for rank in (0, 1)]
    chunks = [("scan", f"{RUN}/{chunk_directory(part(1).checkpoint, rank)}") for rank in (0, 1)]
    assert sorted(asked) == sorted([*manifests, *chunks])


def test_a_pass_of_prunes_compares_the_tiers_once(spool):
    """GET: 6 on each tier, however many checkpoints go."""

    async def work():
        near, far = Double(), Double()
        for step in range(6):
            commit(spool, part(step), changing(step))
        await converge(spool, {"near": near, "far": far})
        near.calls.clear(), far.calls.clear()
        policies = RetentionPolicy(keep_last=1), RetentionPolicy(keep_last=100)
        async with running(of_tiers(spool, {"near": near, "far": far}, policies, keep_local=100)) as node:
            await settle(node)
            assert node.journal.counters["pruned"] == 5
        return [store.calls.count(("get", IDENTITY_KEY)) for store in (near, far)]

    assert asyncio.run(work()) == [6, 6]
