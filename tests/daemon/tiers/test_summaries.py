"""Summaries of checkpoints on a tier: what is taken from them, what makes them count as absent, and who races."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from support.divided import divided, divided_state, put_divided
from support.doubles import Counting, Double, Halting, Killed, contents, dying, flip, flipped, is_chunk
from support.timed import timed
from support.waiting import until
from support.world import RUN, commit, content, hurry, part, reconciler, running, settle

from tierd.core.errors import DeleteRefused, DivisionMismatch, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId, parse_summary, pruning_prefix, summaries_prefix, summary_key
from tierd.core.planning.place import Place
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.daemon.scrub.tier_repair import TierRepairer
from tierd.daemon.tiers.manifest_index import ManifestIndex
from tierd.daemon.tiers.run_removal import disown, list_launch_objects, remove_from_tier
from tierd.daemon.tiers.summaries import due_summaries, put_summaries, void_summary
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.tiers.tier_prune import prune, quarantine
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.memory_store import MemoryStore

ALL = DaemonTimings(summarised_ranks=1, summarised_manifests=0)  # each complete checkpoint gets a summary
RANKS = 3


async def filled(spool: Spool, store: Store, checkpoints: int, ranks: int = RANKS) -> None:
    """A tier with so many checkpoints, each of which shares a chunk with the one before; no summary yet."""
    for step in range(checkpoints):
        for rank in range(ranks):
            which = part(step, rank=rank, world=ranks)
            base = await read_manifest(store, part(step - 1, rank=rank, world=ranks)) if step else None
            if not spool.has(which):
                commit(spool, which, {**content(step, rank=rank), "frozen": bytes([rank]) * 900})
            await flush(spool, which, TierUploadContext(store), base=base)


async def summarise(store: Store, observer: TierObserver | None = None) -> None:
    observer = observer or TierObserver(store)
    place = await observer.observe({RUN})
    await put_summaries(store, observer.manifests, due_summaries(place, observer.manifests, RUN, ALL))


def summaries(store: MemoryStore) -> set[CheckpointId]:
    return {which for key in store.objects if (which := parse_summary(RUN, key))}


def known(place: Place) -> dict[CheckpointId, object]:
    """What a place shows of each checkpoint, but for sizes of borrowed chunks, which a summary does not say."""
    return {
        own: (copy.ranks, copy.defects, replace(copy.metadata_facts, borrowed_sizes={}))
        for own, copy in place.checkpoints.items()
    }


async def test_observation_takes_a_checkpoint_from_its_summary(spool):
    """LIST: the summaries, the names, what lies beside, and the chunks; GET: the summaries, and own manifests."""
    store = Counting()
    await filled(spool, store, 4)
    before = await TierObserver(store).observe({RUN})
    await summarise(store)
    assert summaries(store) == {part(step).checkpoint for step in range(4)}
    store.taken()
    observer = TierObserver(store)
    place = await observer.observe({RUN}, {RUN: {1}})
    chunks = sum(is_chunk(key) for key in store.objects)
    assert store.taken() == {"LIST": 3 + store.pages(chunks), "GET": 4 + 4}
    assert known(place) == known(before)
    assert place.bases == {part(0).checkpoint} and place.has(part(3, rank=2, world=RANKS))
    assert place.facts(part(2, rank=1, world=RANKS)) is not None
    assert await observer.observe({RUN}, {RUN: {1}}) == place
    assert store.taken() == {"LIST": 3}


async def test_summary_costs_a_reading_of_all_manifests_and_two_listings_of_them(spool):
    store = Counting(first=2, page=5)
    await filled(spool, store, 1, ranks=9)
    observer = TierObserver(store)
    place = await observer.observe({RUN})  # reads rank 0
    store.taken()
    await put_summaries(store, observer.manifests, due_summaries(place, observer.manifests, RUN, ALL))
    assert store.taken() == {"LIST": 2 * store.pages(9) + 2, "GET": 9, "PUT": 1}


async def test_observation_lists_the_checkpoint_without_a_summary(spool):
    store = Counting()
    await filled(spool, store, 3)
    await summarise(store)
    for rank in (0, 1):
        commit(spool, part(3, rank=rank, world=RANKS))
        await flush(spool, part(3, rank=rank, world=RANKS), TierUploadContext(store))
    store.taken()
    place = await TierObserver(store).observe({RUN}, chunks=False)
    assert store.taken() == {"LIST": 4, "GET": 3 + 1}
    assert place.checkpoints[part(3).checkpoint].ranks == {RANKS: frozenset({0, 1})}


async def test_checkpoint_whose_ranks_divided_differently_gets_no_summary_and_is_known_once_all_was_read(spool):
    """An observation reads rank 0's manifest alone, and counts the others by their names."""
    store = MemoryStore()
    states = [divided_state(rank) for rank in range(2)]
    other = [{**state, "model": {**state["model"], "new": torch.ones(9000)}} for state in states]
    await put_divided(spool, 1, divided(states), store)
    await put_divided(spool, 2, [divided(states)[0], divided(other)[1]], store)
    observer = TierObserver(store)
    copies = (await observer.observe({RUN})).checkpoints
    assert [copies[part(step).checkpoint].usable for step in (1, 2)] == [True, True]
    await summarise(store, observer)
    assert summaries(store) == {part(1).checkpoint}
    copies = (await observer.observe({RUN})).checkpoints
    assert [copies[part(step).checkpoint].usable for step in (1, 2)] == [True, False]
    assert isinstance(copies[part(2).checkpoint].defects[part(2, rank=1, world=2)], DivisionMismatch)
    fresh = TierObserver(store)
    decided_on = await fresh.observe({RUN})
    kept = await prune(store, {part(1).checkpoint}, manifest_index=fresh.manifests, decided_on=decided_on)
    assert not kept.deleted and kept.is_stale
    fresh = TierObserver(store).manifests
    assert [await fresh.are_usable(part(step).checkpoint) for step in (1, 2)] == [True, False]


async def test_summary_on_an_encrypted_tier_is_for_those_who_have_its_key(spool):
    inner = MemoryStore()
    store = EncryptedStore(inner, EncryptionKey(b"k" * 32))
    await filled(spool, store, 2)
    await summarise(store)
    assert len(summaries(inner)) == 2
    double = Double(inner)
    place = await TierObserver(EncryptedStore(double, EncryptionKey(b"k" * 32))).observe({RUN}, chunks=False)
    assert all(copy.usable for copy in place.checkpoints.values()) and len(place.checkpoints) == 2
    assert {key for operation, key in double.calls if operation == "get"} == {*map(summary_key, summaries(inner))}
    for other in (EncryptedStore(inner, EncryptionKey(b"o" * 32)), inner):
        place = await TierObserver(other).observe({RUN}, chunks=False)
        assert len(list(place.defects())) == 2 * RANKS and not any(copy.usable for copy in place.checkpoints.values())


async def test_small_run_gets_no_summary(spool):
    store = MemoryStore()
    await filled(spool, store, 2)
    observer = TierObserver(store)
    place = await observer.observe({RUN})
    assert due_summaries(place, observer.manifests, RUN, USUAL) == []


@pytest.mark.parametrize("harm", ["flip", "empty", "other", "newer", "large"])
async def test_summary_that_cannot_be_used_counts_as_absent_and_is_made_again(spool, harm):
    store = MemoryStore()
    await filled(spool, store, 2)
    await summarise(store)
    key, good = summary_key(part(1).checkpoint), bytes(await store.get(summary_key(part(1).checkpoint)))
    bad = {
        "flip": flipped(good),
        "empty": b"",
        "other": bytes(await store.get(summary_key(part(0).checkpoint))),
        "newer": b'{"version":9,"digest":"' + b"0" * 32 + b'"}\n',
        "large": good + b" " * (9 << 20),
    }[harm]
    await store.put(key, bad)
    before = await TierObserver(MemoryStore()).observe({RUN})
    assert not before.checkpoints
    place = await TierObserver(store).observe({RUN})
    assert place.checkpoints[part(1).checkpoint].complete
    await summarise(store)
    assert bytes(await store.get(key)) == good


async def test_summary_that_was_misread_is_read_again(spool):
    store = MemoryStore()
    await filled(spool, store, 2)
    await summarise(store)
    double, misread = Double(store), []
    real = double.get

    async def get(key, into=None):
        data = await real(key, into)
        if parse_summary(RUN, key) and key not in misread:
            misread.append(key)
            return flipped(bytes(data))
        return data

    double.get = get
    place = await TierObserver(double).observe({RUN}, chunks=False)
    assert len(place.checkpoints) == 2 and len(misread) == 2
    assert not [call for call in double.calls if call[0] == "scan" and call[1].endswith(part(1).checkpoint.name + "/")]


async def test_summary_that_cannot_be_read_for_now_is_passed_over(spool):
    store = MemoryStore()
    await filled(spool, store, 2)
    await summarise(store)
    double = Double(store)

    def refuse(operation: str, key: str) -> None:
        if operation == "get" and parse_summary(RUN, key):
            raise StoreUnavailable("not now")

    double.before = refuse
    place = await TierObserver(double).observe({RUN})
    assert all(copy.complete for copy in place.checkpoints.values()) and len(place.checkpoints) == 2


async def test_manifest_that_a_person_deleted_is_missed_by_its_own_node_at_once(spool):
    store = MemoryStore()
    await filled(spool, store, 3)
    await summarise(store)
    await store.delete([part(1, rank=2, world=RANKS).manifest_key])
    observer = TierObserver(store)
    place = await observer.observe({RUN}, {RUN: {2}})
    assert place.checkpoints[part(1).checkpoint].ranks == {RANKS: frozenset({0, 1})}
    other = TierObserver(store)
    assert (await other.observe({RUN}, {RUN: {0}})).checkpoints[part(1).checkpoint].complete
    other.list_all()
    assert not (await other.observe({RUN}, {RUN: {0}})).checkpoints[part(1).checkpoint].complete


async def test_checkpoint_whose_manifests_a_lifecycle_rule_deleted_is_missed_at_once(spool):
    """A daemon that knows no summaries deletes so, too."""
    store = MemoryStore()
    await filled(spool, store, 3)
    await summarise(store)
    await store.delete([part(0, rank=rank, world=RANKS).manifest_key for rank in range(RANKS)])
    place = await TierObserver(store).observe({RUN})
    assert part(0).checkpoint not in place.checkpoints and len(place.checkpoints) == 2


async def test_older_daemon_that_quarantines_is_noticed_at_once(spool):
    store, which = MemoryStore(), part(1, rank=1, world=RANKS)
    await filled(spool, store, 3)
    await summarise(store)
    await store.put(which.quarantine_key, bytes(await store.get(which.manifest_key)))
    await store.delete([which.manifest_key])
    place = await TierObserver(store).observe({RUN})
    assert place.checkpoints[which.checkpoint].ranks == {RANKS: frozenset({0, 2})}
    assert which in place.quarantined


async def test_older_daemon_that_was_cut_off_in_a_prune_is_noticed_at_once(spool):
    store, which = MemoryStore(), part(0, rank=1, world=RANKS)
    await filled(spool, store, 3)
    await summarise(store)
    await store.put(f"{pruning_prefix(RUN)}{which.checkpoint.name}.{USUAL.now_ms():012x}-0000000b", b"")
    await store.delete([which.manifest_key])
    place = await TierObserver(store).observe({RUN})
    assert not place.checkpoints[which.checkpoint].complete


async def test_prune_reads_the_summaries_and_no_manifest_that_they_stand_for(spool):
    store = Counting()
    await filled(spool, store, 4)
    kept = await contents(store)
    await summarise(store)
    observer = TierObserver(store)
    place = await observer.observe({RUN}, chunks=False)
    store.taken()
    gone = [part(step).checkpoint for step in (0, 1)]
    assert (await prune(store, gone, manifest_index=observer.manifests, decided_on=place)).deleted == set(gone)
    taken = store.taken()
    assert "GET" not in taken and taken["DELETE"] == 4
    assert summaries(store) == {part(step).checkpoint for step in (2, 3)}
    shared = {key for key in await contents(store) if is_chunk(key) and part(0).checkpoint.name in key}
    assert shared and shared <= kept.keys()  # what later checkpoints name
    assert len((await TierObserver(store).observe({RUN})).checkpoints) == 2


async def test_prune_reads_the_manifests_of_a_summary_that_describes_others(spool):
    """An older daemon sent rank 1 of checkpoint 2 again, with chunks of checkpoint 0, and left the summary."""
    store, which = MemoryStore(), part(2, rank=1, world=RANKS)
    await filled(spool, store, 2)
    for rank in range(RANKS):
        commit(spool, part(2, rank=rank, world=RANKS), {**content(2, rank=rank), "frozen": bytes([rank]) * 900})
        await flush(spool, part(2, rank=rank, world=RANKS), TierUploadContext(store))
    await summarise(store)
    base = await read_manifest(store, part(0, rank=1, world=RANKS))
    await store.delete([key for key in await contents(store) if which.checkpoint.name in key and "/00001" in key])
    await flush(spool, which, TierUploadContext(store), base=base)
    observer = TierObserver(store)
    place = await observer.observe({RUN}, chunks=False)
    gone = [part(step).checkpoint for step in (0, 1)]
    await prune(store, gone, manifest_index=observer.manifests, decided_on=place)
    manifest = await read_manifest(store, which)
    assert {f"{RUN}/{stored.key}" for stored in manifest.objects()} <= (await contents(store)).keys()


async def copied(store: MemoryStore) -> MemoryStore:
    """The same objects with the same tokens."""
    twin = MemoryStore()
    twin.objects, twin.keys, twin.sequence = dict(store.objects), list(store.keys), store.sequence
    return twin


async def check_honest(store: MemoryStore) -> None:
    """An observation of a fresh daemon shows no checkpoint as complete that is not."""
    place = await TierObserver(store).observe({RUN})
    for checkpoint, copy in place.checkpoints.items():
        ranks = {
            which.rank
            for key in store.objects
            if (which := PartId.parse_key(key)) and "/manifests/" in key and which.checkpoint == checkpoint
        }
        assert copy.ranks == {RANKS: frozenset(ranks)}, (checkpoint, ranks)


async def deletion(store: Store, way: str) -> None:
    if way == "prune":
        await prune(store, [part(0).checkpoint], "0000000b")
    elif way == "quarantine":
        await quarantine(store, part(0, rank=1, world=RANKS))
    elif way == "disown":
        holdings = await list_launch_objects(store, RUN, part(0).checkpoint.attempt)
        await disown(store, holdings.keys)
    else:
        await remove_from_tier(store, RUN)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("way", ["prune", "quarantine", "remove", "disown"])
async def test_deletion_that_is_cut_off_leaves_no_summary_of_deleted_manifests(spool, way, after):
    whole = MemoryStore()
    await filled(spool, whole, 2)
    await summarise(whole)
    for at in range(1, 200):
        store = await copied(whole)
        double = dying(store, at, after)
        try:
            await deletion(double, way)
        except Killed:
            await check_honest(store)
        else:
            await check_honest(store)
            assert part(0).checkpoint not in summaries(store)
            break
    else:
        pytest.fail("the deletion never ended")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("way", ["prune", "quarantine"])
async def test_put_of_a_summary_that_is_cut_off_or_late_races_with_a_deletion(spool, way, after):
    """One node is killed, or waits, before each of its requests; another deletes meanwhile."""
    whole = MemoryStore()
    await filled(spool, whole, 2)
    for at in range(1, 200):
        store = await copied(whole)
        double, ended = dying(store, at, after), True
        try:
            await summarise(double)
        except Killed:
            ended = False
        await deletion(store, way)
        await check_honest(store)
        paused = await copied(whole)
        waiting = Halting(paused, at)
        making = asyncio.ensure_future(summarise(waiting))
        await until(lambda: making.done() or len(waiting.calls) >= at)  # noqa: B023
        await deletion(paused, way)
        waiting.go.set()
        await making
        await check_honest(paused)
        if ended:
            break


@pytest.mark.parametrize("way", ["prune", "quarantine"])
async def test_deletion_that_waits_races_with_the_put_of_a_summary(spool, way):
    whole = MemoryStore()
    await filled(spool, whole, 2)
    for at in range(1, 200):
        store = await copied(whole)
        waiting = Halting(store, at)
        deleting = asyncio.ensure_future(deletion(waiting, way))
        await until(lambda: deleting.done() or len(waiting.calls) >= at)  # noqa: B023
        ended = deleting.done()
        await summarise(store)
        waiting.go.set()
        await deleting
        await check_honest(store)
        if ended:
            break


async def test_repair_deletes_the_summary_before_it_replaces_a_manifest(spool, tmp_path):
    store, other, which = MemoryStore(), MemoryStore(), part(1, rank=1, world=RANKS)
    for target in (store, other):
        await filled(spool, target, 2)
    await summarise(store)
    await flip(store, which.manifest_key)
    double = Double(store)
    repairer = TierRepairer(spool, {"tier": double, "other": other}, "tier", which, MemoryBudget())
    await repairer.rebuild()
    changes = [call for call in double.calls if call[0] in ("put", "delete")]
    voided = changes.index(("delete", summary_key(which.checkpoint)))
    assert voided < changes.index(("put", which.manifest_key))
    assert summaries(store) == {part(0).checkpoint}
    await check_honest(store)


@pytest.mark.parametrize("summarised", [True, False])
async def test_summary_that_cannot_be_deleted_is_replaced_by_nothing(spool, summarised):
    store, own = MemoryStore(), part(1).checkpoint
    await filled(spool, store, 2)
    if summarised:
        await summarise(store)
    double = Double(store)

    def refuse(operation: str, key: str) -> None:
        if operation == "delete":
            raise DeleteRefused(key)

    double.before = refuse
    await void_summary(double, own)
    assert (await contents(store)).get(summary_key(own)) == (b"" if summarised else None)
    await check_honest(store)


async def test_summary_is_deleted_whose_checkpoint_is_gone(spool, monkeypatch):
    timed(monkeypatch, summarised_ranks=1, summarised_manifests=0)
    store = MemoryStore()
    for step in range(2):
        commit(spool, part(step))
    async with running(reconciler(spool, {"tier": store}, keep=10)) as daemon:
        await settle(daemon)
        await until(lambda: len(summaries(store)) == 2)
        await store.put(summary_key(part(7).checkpoint), b"of nobody")
        daemon.wake()
        await until(lambda: part(7).checkpoint not in summaries(store))


async def test_janitor_makes_summaries_which_another_node_uses_and_a_prune_deletes(spool, tmp_path, monkeypatch):
    hurry(monkeypatch)
    timed(monkeypatch, summarised_ranks=1, summarised_manifests=0)
    store, other = Counting(), Spool(tmp_path / "other")
    for step in range(3):
        commit(spool, part(step, rank=0, world=2))
        commit(other, part(step, rank=1, world=2))
    options = {"keep": 2, "rescan": "1s"}
    first, second = reconciler(spool, {"tier": store}, **options), reconciler(other, {"tier": store}, **options)
    async with running(first), running(second):
        await until(lambda: summaries(store) == {part(step).checkpoint for step in (1, 2)})
        await until(
            lambda: all(
                (place := daemon.tiers.observed.places["tier"]) and {own.step for own in place.checkpoints} == {1, 2}
                for daemon in (first, second)
            )
        )
        await settle(first)
        await settle(second)
    await check_complete(store, {1, 2})


async def check_complete(store: MemoryStore, steps: set[int]) -> None:
    place = await TierObserver(store).observe({RUN})
    assert {own.step for own, copy in place.checkpoints.items() if copy.usable} == steps


async def test_reader_that_misses_a_manifest_lists_all_names_again(spool):
    store = MemoryStore()
    await filled(spool, store, 2)
    await summarise(store)
    index = ManifestIndex(store)
    assert len(await index.observe(RUN, ())) == 2
    await store.delete([part(1, rank=1, world=RANKS).manifest_key])
    index.list_all(RUN)
    copies = await index.observe(RUN, ())
    assert not copies[part(1).checkpoint].complete and copies[part(0).checkpoint].complete
    assert len([key for key in store.objects if key.startswith(summaries_prefix(RUN))]) == 2
    copies = await index.observe(RUN, ())  # the wrong one is not used again
    assert not copies[part(1).checkpoint].complete


@pytest.mark.parametrize(
    "stray",
    ["0000000000007.0699e991a7ff-00000000", "README", f"{part(1).checkpoint.name}/0/x", "zzz/00000-of-00001.json"],
)
async def test_object_that_is_no_manifest_hides_no_checkpoint(spool, stray):
    """Found by the hostile kit, seed 28."""
    store = MemoryStore()
    for step in (1, 2):
        commit(spool, part(step))
        await flush(spool, part(step), TierUploadContext(store))
    before = await TierObserver(store).observe({RUN})
    await store.put(f"{RUN}/manifests/{stray}", b"a note")
    place = await TierObserver(store).observe({RUN})
    assert place.checkpoints.keys() == before.checkpoints.keys() == {part(1).checkpoint, part(2).checkpoint}
