"""Proofs that a copy is bad grow old: a copy that another node has repaired meanwhile is not quarantined."""

from __future__ import annotations

import time

import msgspec
import pytest
from daemon.transfer.test_relay import daemon as of_tiers
from support.doubles import Double, contents, flip, flipped, is_chunk, is_manifest
from support.waiting import until
from support.world import commit, converge, corrupt, part, read, reconciler, running, steps_in, steps_on

from tierd.core.errors import CorruptChunk, StoreUnavailable
from tierd.core.manifest_codec import decode, encode
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.tiers.tier_probes import is_part_held
from tierd.daemon.tiers.tier_prune import manifest_bytes, quarantine
from tierd.events.journal import Journal
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore

PART = part(1)
KEY = PART.manifest_key


async def flushed(spool: Spool, *names: str) -> dict[str, Double]:
    """Tiers that hold the part."""
    commit(spool, PART)
    stores = {name: Double() for name in names}
    await converge(spool, stores)
    return stores


def replaced(data: bytes) -> bytes:
    """A manifest of the same content that another tierd wrote."""
    return encode(msgspec.structs.replace(decode(data), writer="another"))


def put_there(store: Double, key: str, data: bytes) -> None:
    """Have an object appear as if another node had put it."""
    store.inner.objects[key] = data, 1_000_000


def of_another_node(spool: Spool, stores) -> tuple[Repairer, Journal]:
    """The repairer of a node that lacks the part."""
    journal = Journal()
    return Repairer(Spool(spool.root.parent / "other"), stores, journal, MemoryBudget()), journal


async def is_usable(store: Double, data: bytes) -> bool:
    objects = await contents(store.inner)
    return objects.get(KEY) == data and PART.quarantine_key not in objects


async def test_quarantine_spares_a_manifest_that_differs_from_the_judged_manifest(spool):
    tier = (await flushed(spool, "tier"))["tier"]
    good = await manifest_bytes(tier, PART)
    assert not await quarantine(tier, PART, flipped(good)) and await is_usable(tier, good)
    assert await quarantine(tier, PART, good) and not await is_usable(tier, good)
    assert not await quarantine(tier, PART)


async def test_a_manifest_that_was_replaced_while_it_was_quarantined_is_not_deleted(spool):
    tier = (await flushed(spool, "tier"))["tier"]
    good = await manifest_bytes(tier, PART)
    await flip(tier.inner, KEY)
    tier.before = lambda operation, key: put_there(tier, KEY, good) if operation == "put" else None
    assert not await quarantine(tier, PART)
    assert (await contents(tier.inner))[KEY] == good


def stop() -> None:
    """Stop the process for a moment: no task of it goes on."""
    time.sleep(0.1)


class Stopping(Double):
    """Stops the process at the last read before the deletion: before its answer is there, or after."""

    def __init__(self, inner: MemoryStore, at: str) -> None:
        super().__init__(inner)
        self.at = at

    async def get(self, key, into=None):
        last = key == KEY and ("get", KEY) in self.calls
        if last and self.at == "before":
            stop()
        data = await super().get(key, into)
        if last and self.at == "after":
            stop()
        return data


@pytest.mark.parametrize("at", ["before", "after"])
async def test_a_process_that_was_stopped_in_a_quarantine_deletes_nothing(spool, at):
    tier = (await flushed(spool, "tier"))["tier"]
    store = Stopping(tier.inner, at)
    with pytest.raises(StoreUnavailable, match="was not quarantined"):
        await quarantine(store, PART, within_s=0.05)
    assert KEY in await contents(tier.inner) and ("delete", KEY) not in store.calls


@pytest.mark.parametrize("what", ["chunk", "manifest", "nothing"])
async def test_a_copy_that_was_repaired_during_the_search_for_its_chunk_is_not_quarantined(spool, what):
    stores = await flushed(spool, "tier")
    tier, pristine = stores["tier"], await contents(stores["tier"].inner)
    good, manifest = pristine[KEY], decode(pristine[KEY], PART)
    victim = next(key for key in pristine if is_chunk(key))
    await flip(tier.inner, victim)
    put = {"chunk": (victim, pristine[victim]), "manifest": (KEY, replaced(good)), "nothing": ()}[what]
    listed = f"{PART.checkpoint.run}/chunks/"  # for the chunks of other checkpoints, the last place that is searched
    tier.before = lambda operation, key: put_there(tier, *put) if key == listed and put else None
    bad = [where for where, chunk in manifest.places() if victim.endswith(chunk.stored.key)]
    repairer, journal = of_another_node(spool, stores)
    work = await repairer.repair("tier", PART, manifest, bad)
    assert work.lost_reasons, "it was judged when it was bad, so it is read again"
    now = replaced(good) if what == "manifest" else good
    assert await is_usable(tier, now) == (what != "nothing")
    assert journal.counters["quarantined"] == (what == "nothing")


@pytest.mark.parametrize("has_part", [True, False], ids=["with_the_part", "without_it"])
async def test_a_manifest_that_was_replaced_before_its_repair_is_not_quarantined(spool, has_part):
    stores = await flushed(spool, "tier")
    good = await manifest_bytes(stores["tier"], PART)
    repairer, journal = of_another_node(spool, stores)
    if has_part:
        repairer = Repairer(spool, stores, journal, MemoryBudget())
    assert not await repairer.rebuild("tier", PART, "it was bad when it was read")
    assert await is_usable(stores["tier"], good) and not journal.events


async def test_a_manifest_that_was_replaced_while_its_repair_asked_the_tiers_is_not_quarantined(spool):
    stores = await flushed(spool, "tier") | {"second": Double()}
    tier, good = stores["tier"], await manifest_bytes(stores["tier"], PART)
    await flip(tier.inner, KEY)
    stores["second"].before = lambda operation, key: put_there(tier, KEY, good)
    repairer, journal = of_another_node(spool, stores)
    assert not await repairer.rebuild("tier", PART, "damaged")
    assert await is_usable(tier, good) and not journal.events


@pytest.mark.parametrize("bad", [is_manifest, is_chunk], ids=["manifest", "chunk"])
async def test_a_tiers_copy_that_was_replaced_during_a_fetch_is_not_quarantined(spool, bad):
    stores = await flushed(spool, "first", "second")
    first, good = stores["first"], await manifest_bytes(stores["first"], PART)
    for key in await contents(first.inner):
        if bad(key):
            await flip(first.inner, key)

    def replace(operation: str, key: str) -> None:
        if is_chunk(key):
            put_there(first, KEY, replaced(good))

    stores["second"].before = replace
    corrupt(spool.path(PART) / "weights.bin")
    daemon = reconciler(spool, stores)
    assert (await daemon.repairs.fetch(PART)).tiers == ("second",)
    assert await is_usable(first, replaced(good)) and read(spool, PART)


async def test_a_copy_that_is_pruned_during_a_fetch_is_not_called_corrupt(spool):
    """Seed 20970 of corruption: its chunks were missing, because retention deleted it there meanwhile."""
    stores = await flushed(spool, "first", "second")
    first = stores["first"]

    def prune(operation: str, key: str) -> None:
        if operation == "get" and is_chunk(key):  # the manifest was read
            first.inner.objects.clear()
            first.inner.keys.clear()

    first.before = prune
    repairer, journal = of_another_node(spool, stores)
    assert "second" in (await repairer.repair_spool(PART)).tiers
    assert not first.inner.objects and not journal.counters["corruptions"]
    assert not [event for event in journal.events if event.what in ("corrupt", "quarantined")]


async def test_a_manifest_that_was_replaced_while_its_tier_was_asked_for_it_proves_nothing(spool):
    tier = (await flushed(spool, "tier"))["tier"]
    good = await manifest_bytes(tier, PART)
    await flip(tier.inner, KEY)
    assert await is_part_held(tier, PART, None) == await manifest_bytes(tier, PART), "it is the proof's own"

    def replace(operation: str, key: str) -> None:
        if tier.calls.count(("get", KEY)) == 3:  # the first two find the same damage
            put_there(tier, KEY, good)

    tier.calls.clear()
    tier.before = replace
    assert await is_part_held(tier, PART, None) is False
    assert await is_part_held(tier, PART, None) is True


@pytest.mark.parametrize("ask", ["find_corrupt_parts", "find_missing_parts"])
async def test_a_copy_that_was_repaired_after_a_prune_elsewhere_asked_for_it_is_not_quarantined(
    spool, monkeypatch, ask
):
    """A prune on another tier asks whether the tier holds a part, and one in the spool what it lacks."""
    rich, last = RetentionPolicy(keep_last=100), RetentionPolicy(keep_last=1)
    near, far = Double(), Double()
    stores, policies = (
        ({"near": near, "far": far}, (last, rich)) if ask == "find_corrupt_parts" else ({"far": far}, (rich,))
    )
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, stores)
    pristine, node, answers = await contents(far.inner), of_tiers(spool, stores, policies, keep_local=1), []
    chunk = next(key for key in pristine if is_chunk(key) and PART.checkpoint.name in key)
    original = getattr(node.tiers, ask)

    async def asked(*about):
        if answers:
            return await original(*about)
        await (flip(far.inner, KEY) if ask == "find_corrupt_parts" else far.inner.delete([chunk]))
        answers.append(await original(*about))
        put_there(far, chunk, pristine[chunk])
        put_there(far, KEY, replaced(pristine[KEY]))
        far.inner.keys = sorted(far.inner.objects)
        return answers[0]

    monkeypatch.setattr(node.tiers, ask, asked)
    async with running(node):
        await until(lambda: node.wake() or steps_in(spool) == [2])
        await until(lambda: node.wake() or ask == "find_missing_parts" or steps_on(near.inner.objects) == [2])
    assert answers[0], "it found the damage"
    assert await is_usable(far, replaced(pristine[KEY])) and ("put", PART.quarantine_key) not in far.calls
    assert not [event for event in node.journal.events if event.what == "corrupt"]


@pytest.mark.parametrize("bad", [is_manifest, is_chunk], ids=["manifest", "chunk"])
async def test_quarantine_spares_a_tiers_copy_that_was_replaced_after_a_fetch_without_a_right_copy(spool, bad):
    tier = (await flushed(spool, "tier"))["tier"]
    good = await manifest_bytes(tier, PART)
    for key in await contents(tier.inner):
        if bad(key):
            await flip(tier.inner, key)
    reads = 2 if bad is is_manifest else 1  # of the fetch

    def replace(operation: str, key: str) -> None:
        if tier.calls.count(("get", KEY)) > reads:
            put_there(tier, KEY, replaced(good))

    tier.calls.clear()
    tier.before = replace
    repairer, journal = of_another_node(spool, {"tier": tier})
    with pytest.raises(CorruptChunk):
        await repairer.repair_spool(PART)
    assert await is_usable(tier, replaced(good)) and not journal.quarantined["tier"]
