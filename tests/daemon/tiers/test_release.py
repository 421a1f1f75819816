"""A quarantined copy on a tier is verified once more before a prune deletes it, and is used again if it is right."""

from __future__ import annotations

import errno

import pytest
from support.bad_readers import BadNetwork
from support.doubles import Double, Killed, contents, dying, flip, is_chunk
from support.waiting import until
from support.world import RUN, commit, converge, part, reconciler, running, steps_on

from tierd.core.errors import FormatTooNew, StoreUnavailable
from tierd.daemon.tiers.tier_objects import read_manifest
from tierd.daemon.tiers.tier_probes import QuarantinedCopy
from tierd.daemon.tiers.tier_prune import prune, quarantine
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.memory_store import MemoryStore

KEEP = {"keep": 2, "every": 1, "keep_local": 1}  # a quarantined part is deleted, and a right one is kept


def events(daemon, what: str) -> list[tuple[str, str]]:
    return [(event.place, event.subject) for event in daemon.journal.events if event.what == what]


async def quarantined_on(store: Store) -> list[str]:
    return [info.key async for info in store.scan(f"{RUN}/quarantine/")]


@pytest.fixture
def store() -> Double:
    return Double()


async def fill(spool: Spool, *stores: Store, steps: int = 4) -> dict[str, bytes]:
    """Flush steps to the tiers, of which the spool keeps the newest; return a tier's content."""
    for step in range(1, steps + 1):
        commit(spool, part(step))
        await converge(spool, {f"tier{number}": store for number, store in enumerate(stores)}, **KEEP)
    return await contents(stores[0])


async def test_a_quarantined_copy_that_proves_right_is_used_again(spool, store):
    before = await fill(spool, store)
    for step in (1, 2):  # one prune deletes both
        assert await quarantine(store, part(step))
    daemon = await converge(spool, {"tier0": store}, **KEEP)
    assert events(daemon, "released") == [("tier0", str(part(1))), ("tier0", str(part(2)))]
    assert await contents(store) == before and not events(daemon, "pruned")
    assert not daemon.journal.quarantined


@pytest.mark.parametrize("victim", ["chunk", "manifest"])
async def test_a_quarantined_copy_that_is_wrong_is_deleted(spool, store, victim):
    before = await fill(spool, store)
    chunk = next(key for key in before if is_chunk(key) and f"/{part(1).checkpoint.name}/" in key)
    assert await quarantine(store, part(1)) and await quarantine(store, part(2))
    await flip(store, chunk if victim == "chunk" else part(1).quarantine_key)
    daemon = await converge(spool, {"tier0": store}, **KEEP)
    assert events(daemon, "released") == [("tier0", str(part(2)))]
    assert steps_on(await contents(store)) == [2, 3, 4] and not await quarantined_on(store)


@pytest.mark.parametrize(
    "error", [StoreUnavailable("no answer"), FormatTooNew("another key"), OSError(errno.EIO, "I/O error")]
)
async def test_a_quarantined_copy_that_cannot_be_read_is_kept(spool, store, error):
    await fill(spool, store)
    assert await quarantine(store, part(1)) and await quarantine(store, part(2))
    failed = []

    def before(operation: str, key: str) -> None:
        if operation == "get" and is_chunk(key) and f"/{part(1).checkpoint.name}/" in key:
            failed.append(key)
            raise error

    store.before = before
    async with running(reconciler(spool, {"tier0": store}, **KEEP)) as daemon:
        await until(lambda: len(failed) > 2 and events(daemon, "released"))  # the other one is not held up
        assert await quarantined_on(store) == [part(1).quarantine_key]
        store.before = None
        daemon.wake()
        await until(lambda: len(events(daemon, "released")) == 2)
    assert steps_on(await contents(store)) == [1, 2, 3, 4] and not await quarantined_on(store)


async def test_a_copy_that_is_quarantined_on_one_of_two_tiers_is_used_again(spool):
    one, other = MemoryStore(), MemoryStore()
    before = await fill(spool, one, other)
    assert await quarantine(one, part(1))
    assert await quarantine(one, part(2)) and await quarantine(other, part(2))
    daemon = await converge(spool, {"tier0": one, "tier1": other}, **KEEP)
    # The tier that is first may send the other one its copy, which takes the place of the quarantined one.
    assert str(part(2)) in {subject for _, subject in events(daemon, "released")}
    assert steps_on(await contents(one)) == steps_on(await contents(other)) == [1, 2, 3, 4]
    assert not await quarantined_on(one) and not await quarantined_on(other)
    assert {key for key in before if is_chunk(key)} <= (await contents(one)).keys()


async def test_a_release_that_ends_anywhere_loses_nothing(spool):
    origin = MemoryStore()
    before = await fill(spool, origin)
    at, ended = 0, False
    while not ended:
        at += 1
        for after in (False, True):
            store = MemoryStore()
            for key, data in before.items():
                await store.put(key, data)
            assert await quarantine(store, part(1))
            try:
                ended = await QuarantinedCopy(dying(store, at, after), part(1)).release() is True
            except Killed:
                pass
            objects = await contents(store)
            assert before.keys() - {part(1).manifest_key} <= objects.keys()
            daemon = await converge(spool, {"tier0": store}, **KEEP)
            assert steps_on(await contents(store)) == [1, 2, 3, 4]
            assert await read_manifest(store, part(1)) and not daemon.journal.counters["errors"]
    assert at > 8


async def test_quarantined_copy_that_is_misread_once_is_used_again(spool, store):
    before = await fill(spool, store)
    assert await quarantine(store, part(1))
    assert await QuarantinedCopy(BadNetwork(store, is_chunk, 1), part(1)).release() is True
    assert await contents(store) == before


async def test_release_reads_a_chunk_again_that_the_tier_did_not_give(spool, store):
    before = await fill(spool, store)
    assert await quarantine(store, part(1))
    wrong = next(key for key in before if is_chunk(key) and f"/{part(1).checkpoint.name}/" in key)
    await flip(store, wrong)

    def refuse(operation: str, key: str) -> None:
        if operation == "get" and key == wrong:
            raise StoreUnavailable("no answer")

    copy, store.before = QuarantinedCopy(store, part(1)), refuse
    with pytest.raises(StoreUnavailable):
        await copy.release()
    store.before = None
    assert await copy.release() is False and await quarantined_on(store)


async def test_release_continues_where_it_stopped(spool, store):
    before = await fill(spool, store)
    assert await quarantine(store, part(1))
    copy = QuarantinedCopy(store, part(1))
    store.calls.clear()
    assert await copy.release(ends_s=0.0) is None and not [key for _, key in store.calls if is_chunk(key)]
    assert await copy.release() is True
    assert await contents(store) == before


async def test_a_part_that_was_sent_again_is_not_replaced_by_its_quarantined_copy(spool, store):
    before = await fill(spool, store)
    assert await quarantine(store, part(1))
    await store.put(part(1).manifest_key, b"sent again")
    assert await QuarantinedCopy(store, part(1)).release() is False
    assert (await contents(store))[part(1).manifest_key] == b"sent again"
    assert (await contents(store))[part(1).quarantine_key] == before[part(1).manifest_key]


async def test_a_quarantined_copy_that_lacks_a_chunk_is_deleted(spool, store):
    await fill(spool, store)
    assert await quarantine(store, part(1))
    gone = [key for key in await contents(store) if is_chunk(key) and f"/{part(1).checkpoint.name}/" in key]
    await store.delete(gone[:1])
    daemon = await converge(spool, {"tier0": store}, **KEEP)
    assert not events(daemon, "released") and steps_on(await contents(store)) == [2, 3, 4]


async def test_prune_deletes_a_copy_and_its_quarantined_manifest_together(spool, store):
    """A daemon that ended before it cleared the quarantined manifest leaves both; a prune deletes both."""
    await fill(spool, store)
    manifest = await store.get(part(1).manifest_key)
    await store.put(part(1).quarantine_key, manifest)
    await prune(store, [part(1).checkpoint])
    assert not [key for key in await contents(store) if part(1).checkpoint.name in key]
