"""Scrubbing: every kind of damage in every place is found, repaired from a right copy, quarantined only when
nobody has, and never imagined."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import time

import msgspec
import pytest
from support.chunk_keys import owner_name
from support.doubles import Double, contents, damage, flip, flipped, is_chunk, is_manifest
from support.timed import timed
from support.waiting import until
from support.world import commit, content, converge, corrupt, part, read, reconciler, running, settle

from benchmarks.scrub import run
from tierd.codec import chunk_codec
from tierd.core.errors import StoreRefused, StoreUnavailable
from tierd.core.manifest import MANIFEST_NAME
from tierd.core.manifest_codec import decode, encode
from tierd.core.planning.background_schedule import ScrubbedCopy, scrub_agenda
from tierd.core.planning.place import SPOOL
from tierd.daemon.daemon_status import make_status
from tierd.daemon.tiers.tier_objects import verify_part
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore

HARMS = ("flip", "truncate", "missing", "lengthen", "swap")


async def observed(daemon):
    """The same daemon, after it has looked at every place."""
    for name in daemon.workers:
        await daemon.observe(name)
    return daemon


async def scrub(daemon, *places: str, parts=None):
    """Look everywhere and read every copy in these places (all, if none is named) again, as if each were due."""
    world = (await observed(daemon)).inventory()
    held = {SPOOL: world.spool, **world.tiers}
    for name in places or held:
        for one in sorted(held[name].parts()):
            if parts is None or one in parts:
                await daemon.scrubber.scrub(ScrubbedCopy(name, one))
    return daemon


def scrubber(spool, stores, **options):
    return reconciler(spool, stores, **{"scrub": "30d", **options})


async def harm(store, key: str, how: str) -> None:
    data = bytes(await store.get(key))
    match how:
        case "flip":
            await store.put(key, flipped(data))
        case "truncate":
            await store.put(key, data[: len(data) // 2])
        case "lengthen":
            await store.put(key, data + b"more than there was")
        case "missing":
            await store.delete([key])
        case "swap":
            other = next(
                k for k in await contents(store) if k.rpartition("/")[0] == key.rpartition("/")[0] and k != key
            )
            await store.put(key, bytes(await store.get(other)))
            await store.put(other, data)


async def is_right(store, which, held: dict[str, bytes]) -> bool:
    """Whether a tier's copy is whole and holds these files, whatever form an encoder that goes by speed gave it."""
    manifest, wrong = await verify_part(store, which, lambda size: None)
    described = {file.path: [(chunk.size, chunk.xxh3_128) for chunk in file.chunks] for file in manifest.files}
    return not wrong and described.keys() == held.keys() and sum(map(len, held.values())) == manifest.size


def counted(daemon, *names: str) -> list[int]:
    return [daemon.journal.counters[name] for name in names]


def chunk_keys(objects, which=None) -> list[str]:
    return sorted(
        key for key in objects if is_chunk(key) and (which is None or owner_name(key) == which.checkpoint.name)
    )


@pytest.fixture
def tiers():
    return {"first": MemoryStore(), "second": MemoryStore()}


@pytest.mark.parametrize("source", ["second", SPOOL])
@pytest.mark.parametrize("how", HARMS)
async def test_a_tiers_chunk_is_put_right_where_it_lay(spool, tiers, how, source):
    commit(spool, part(1))
    await converge(spool, tiers if source == "second" else {"first": tiers["first"]})
    commit(spool, part(2))  # so that the rank is still this spool's
    if source == "second":
        spool.remove([part(1)])
    pristine = await contents(tiers["first"])
    victim = chunk_keys(pristine, part(1))[0]
    await harm(tiers["first"], victim, how)
    wrong = 2 if how == "swap" else 1
    stores = tiers if source == "second" else {"first": tiers["first"]}
    daemon = await scrub(scrubber(spool, stores), "first", parts={part(1)})
    assert await contents(tiers["first"]) == pristine
    assert counted(daemon, "scrub_findings", "repaired_chunks", "corruptions", "quarantined", "scrubbed") == [
        wrong,
        wrong,
        1,
        0,
        1,
    ]
    reported = [(event.what, event.place) for event in daemon.journal.events]
    assert reported == [("corrupt", "first"), ("repaired", "first")]
    assert source in daemon.journal.events[-1].why


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "lengthen", "remove", "directory", "symlink", "fifo"])
@pytest.mark.parametrize("victim", ["weights.bin", "deep/er/state.json", MANIFEST_NAME])
async def test_the_spools_copy_is_put_right_from_a_tier(spool, how, victim):
    store = MemoryStore()
    commit(spool, part(1))
    await converge(spool, {"tier": store})
    daemon = scrubber(spool, {"tier": store})
    await daemon.observe(SPOOL)  # before the damage: what was seen once is not read again by looking
    damage(spool.path(part(1)) / victim, how)
    await daemon.scrubber.scrub(ScrubbedCopy(SPOOL, part(1)))
    assert read(spool, part(1)) == content(1) and not spool.quarantined()
    assert counted(daemon, "corruptions", "quarantined") == [1, 0] and daemon.journal.counters["scrub_findings"] >= 1
    await scrub(daemon)
    assert counted(daemon, "corruptions", "quarantined") == [1, 0]


@pytest.mark.parametrize("how", ["flip", "truncate", "other", "content"])
@pytest.mark.parametrize("source", ["second", SPOOL])
async def test_a_tiers_wrong_manifest_is_put_right(spool, tiers, how, source):
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, tiers if source == "second" else {"first": tiers["first"]})
    if source == "second":
        spool.remove([part(1)])
    pristine = await contents(tiers["first"])
    stores = tiers if source == "second" else {"first": tiers["first"]}
    async with running(scrubber(spool, stores)) as daemon:
        await settle(daemon)
        key = part(1).manifest_key
        match how:
            case "other":
                wrong = pristine[part(2).manifest_key]
            case "content":
                if source == "second":
                    return  # two sealed manifests that differ: nobody can tell which is right
                manifest = decode(pristine[key])
                wrong = encode(msgspec.structs.replace(manifest, files=manifest.files[:1]))
            case _:
                wrong = flipped(pristine[key]) if how == "flip" else pristine[key][:100]
        await tiers["first"].put(key, wrong)
        await daemon.scrubber.scrub(ScrubbedCopy("first", part(1)))
        await settle(daemon)
        assert await is_right(tiers["first"], part(1), content(1))
        assert not daemon.journal.counters["quarantined"]


async def test_scrub_repairs_a_manifest_that_a_listing_shows_damaged_from_the_other_tier(spool, tiers):
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, tiers)
    pristine = await contents(tiers["first"])
    spool.remove([part(1)])
    await flip(tiers["first"], part(1).manifest_key)
    await harm(tiers["first"], chunk_keys(pristine, part(1))[0], "flip")
    daemon = await converge(spool, tiers)
    assert await contents(tiers["first"]) == pristine and not daemon.journal.counters["quarantined"]


async def test_part_that_is_right_nowhere_is_quarantined_everywhere_and_other_parts_are_kept(spool, tiers):
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, tiers)
    manifest = spool.manifest(part(1))
    digest = next(file for file in manifest.files if file.path == "weights.bin").chunks[1].xxh3_128
    corrupt(spool.path(part(1)) / "weights.bin")
    for store in tiers.values():
        await flip(store, next(key for key in await contents(store) if digest in key))
    daemon = await scrub(scrubber(spool, tiers), "first", "second", SPOOL)
    assert set(spool.quarantined()) == {part(1)}
    for store in tiers.values():
        objects = await contents(store)
        assert [key for key in objects if is_manifest(key)] == [part(2).manifest_key]
        assert part(1).quarantine_key in objects
    quarantined = [(event.place, event.subject) for event in daemon.journal.events if event.what == "quarantined"]
    assert sorted(quarantined) == sorted((place, str(part(1))) for place in (SPOOL, "first", "second"))
    assert daemon.journal.counters["scrub_findings"] == 3


async def test_a_copy_that_was_just_quarantined_holds_up_no_prune(spool):
    """Corruption kit, seed 10749: the plan did not know of the quarantine yet, and asked whether the copy is right. The
    copy that was gone was suspected, and prunes waited for its next read, an hour later."""
    for step in (1, 2):
        commit(spool, part(step))
    daemon = await observed(scrubber(spool, {}))
    corrupt(spool.path(part(1)) / "weights.bin")
    await daemon.scrubber.scrub(ScrubbedCopy(SPOOL, part(1)))
    assert set(spool.quarantined()) == {part(1)}
    assert not await daemon.scrubber.is_right(part(1))
    assert daemon.scrubber.postponed_s(part(1)) == 0


@pytest.mark.parametrize("error", [StoreUnavailable("timeout"), StoreRefused("403")], ids=["unavailable", "refused"])
async def test_nothing_is_quarantined_while_a_place_cannot_be_asked_and_the_finding_is_reported_once(spool, error):
    bad, down = MemoryStore(), Double()
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, {"bad": bad, "down": down})
    spool.remove([part(1)])
    pristine = await contents(bad)
    await flip(bad, chunk_keys(pristine, part(1))[0])
    daemon = await observed(scrubber(spool, {"bad": bad, "down": down}))
    down.error = error
    for _ in range(3):
        with pytest.raises((StoreUnavailable, StoreRefused)):
            await daemon.scrubber.scrub(ScrubbedCopy("bad", part(1)))
    assert counted(daemon, "scrub_findings", "corruptions", "quarantined", "scrubbed") == [1, 1, 0, 0]
    assert part(1).manifest_key in await contents(bad)
    down.error = None
    await daemon.scrubber.scrub(ScrubbedCopy("bad", part(1)))
    assert await contents(bad) == pristine and daemon.journal.counters["repaired_chunks"] == 1
    await flip(bad, chunk_keys(pristine, part(1))[0])  # again: that is news
    await daemon.scrubber.scrub(ScrubbedCopy("bad", part(1)))
    assert counted(daemon, "scrub_findings", "repaired_chunks") == [2, 2]


async def test_errors_of_the_place_itself_are_no_findings(spool):
    store = Double()
    commit(spool, part(1))
    await converge(spool, {"tier": store})
    daemon = await observed(scrubber(spool, {"tier": store}))
    store.error = StoreUnavailable("503")
    with pytest.raises(StoreUnavailable):
        await daemon.scrubber.scrub(ScrubbedCopy("tier", part(1)))
    store.error, asked = None, []

    def fail(operation, key):
        asked.append(key)
        if operation == "get" and is_chunk(key) and len(asked) >= 4:
            raise StoreRefused("EACCES")

    store.before = fail
    with pytest.raises(StoreRefused):
        await daemon.scrubber.scrub(ScrubbedCopy("tier", part(1)))
    store.before = None
    await daemon.scrubber.scrub(ScrubbedCopy("tier", part(1)))
    assert counted(daemon, "scrubbed", "scrub_findings", "corruptions") == [1, 0, 0] and not daemon.journal.events


class Glitch(Double):
    """Every chunk is flipped on the way the first time that it is got."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.seen: set[str] = set()

    async def get(self, key, into=None):
        data = bytes(await super().get(key))
        if is_chunk(key) and key not in self.seen:
            self.seen.add(key)
            return flipped(data)
        return data


async def test_bit_that_flips_once_on_the_way_is_no_corruption(spool):
    store = MemoryStore()
    commit(spool, part(1))
    await converge(spool, {"tier": store})
    pristine, glitch = await contents(store), Glitch(store)
    daemon = await scrub(scrubber(spool, {"tier": glitch}))
    assert len(glitch.seen) == len(chunk_keys(pristine)) and not glitch.puts()
    assert not daemon.journal.events and counted(daemon, "scrubbed", "scrub_findings") == [2, 0]


async def test_unreadable_sector_is_repaired_and_other_disk_errors_are_not_taken_for_rot(spool, monkeypatch):
    store, failing = MemoryStore(), [errno.EACCES]
    commit(spool, part(1))
    await converge(spool, {"tier": store})
    inode = (spool.path(part(1)) / "weights.bin").stat().st_ino
    preadv = os.preadv

    def fails(fd, buffers, offset, *flags):
        if failing and os.fstat(fd).st_ino == inode:
            raise OSError(failing[0], os.strerror(failing[0]))
        return preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", fails)
    daemon = scrubber(spool, {"tier": store})
    await daemon.observe(SPOOL)
    with pytest.raises(OSError, match="denied"):
        await daemon.scrubber.scrub(ScrubbedCopy(SPOOL, part(1)))
    assert not daemon.journal.events
    failing[0] = errno.EIO
    await daemon.scrubber.scrub(ScrubbedCopy(SPOOL, part(1)))
    assert [event.what for event in daemon.journal.events] == ["repaired"]
    failing.clear()
    assert read(spool, part(1)) == content(1)


async def test_a_part_that_is_pruned_meanwhile_is_no_finding(spool):
    store = Double()
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    daemon = await observed(scrubber(spool, {"tier": store}))
    inner, gone = store.inner, []

    def prune(operation, key):
        if operation == "get" and is_chunk(key) and not gone:
            gone.append(key)
            for key in [*inner.keys]:
                if part(1).checkpoint.name in key:
                    inner.keys.remove(key)
                    del inner.objects[key]

    store.before = prune
    await daemon.scrubber.scrub(ScrubbedCopy("tier", part(1)))
    spool.remove([part(1)])
    await daemon.scrubber.scrub(ScrubbedCopy(SPOOL, part(1)))
    assert not daemon.journal.events and counted(daemon, "scrubbed", "scrub_findings") == [0, 0]
    assert not [key for key in await contents(inner) if part(1).checkpoint.name in key]


async def test_where_the_encoder_has_changed_a_chunk_is_stored_anew_and_the_manifest_says_so(spool, monkeypatch):
    store = MemoryStore()
    for step in (1, 2):
        commit(spool, part(step), {"weights.bin": bytes([step]) * 5000})
    await converge(spool, {"tier": store})
    victim = chunk_keys(await contents(store), part(1))[0]
    assert victim.endswith(".zst")
    await flip(store, victim)
    real, changed = chunk_codec.zstandard.ZstdCompressor, {"level": 19, "write_checksum": True}
    monkeypatch.setattr(chunk_codec.zstandard, "ZstdCompressor", lambda **o: real(**{**o, **changed}))
    daemon = await scrub(scrubber(spool, {"tier": store}), "tier", parts={part(1)})
    objects = await contents(store)
    manifest = decode(objects[part(1).manifest_key], part(1))
    assert {chunk.stored.codec for chunk in manifest.chunks()} == {"raw"}
    assert manifest.same_content(spool.manifest(part(1)))
    assert not [key for key in objects if "/flushing/" in key or "/pruning/" in key]
    spool.remove([part(1)])
    await daemon.repairs.fetch(part(1))
    assert read(spool, part(1)) == {"weights.bin": bytes([1]) * 5000}
    await scrub(daemon)
    assert counted(daemon, "scrub_findings", "quarantined", "repaired_chunks") == [1, 0, 1]


async def test_a_rebuilt_manifest_names_a_chunk_where_it_had_to_move(spool, monkeypatch):
    """It was shown as it should be, and then once more as it was before: naming what is not there, or bad."""
    stores = {"first": MemoryStore(), "second": MemoryStore()}
    commit(spool, part(1))
    await converge(spool, stores)
    pristine = await contents(stores["first"])
    packed = next(key for key in chunk_keys(pristine) if key.endswith(".zst"))
    for store in stores.values():
        await flip(store, packed)
    await flip(stores["first"], part(1).manifest_key)
    corrupt(spool.path(part(1)) / MANIFEST_NAME)  # what it described is right
    real = chunk_codec.zstandard.ZstdCompressor
    monkeypatch.setattr(chunk_codec.zstandard, "ZstdCompressor", lambda **o: real(**{**o, "write_checksum": True}))
    await scrub(scrubber(spool, stores), "first")
    assert await is_right(stores["first"], part(1), content(1))


async def test_corrupt_shared_chunk_is_reported_once_and_its_sharers_are_read_again_at_once(spool):
    store, same = MemoryStore(), {"frozen.bin": random.Random(1).randbytes(900)}
    for step in (1, 2, 3):
        commit(spool, part(step), {**same, "step": b"%d" % step})
        await converge(spool, {"tier": store})
    digest = spool.manifest(part(1)).files[0].chunks[0].xxh3_128
    shared = [key for key in await contents(store) if digest in key]
    assert len(shared) == 1, "equal chunks are stored once"
    await flip(store, shared[0])
    for step in (1, 2, 3):
        corrupt(spool.path(part(step)) / "frozen.bin")
    daemon = await observed(scrubber(spool, {"tier": store}))
    for step in (1, 2, 3):
        daemon.scrubber.note_verified("tier", part(step))
    assert await daemon.scrubber.next("tier") is None
    await daemon.scrubber.scrub(ScrubbedCopy("tier", part(1)))
    await daemon.observe("tier")
    for _ in (2, 3):
        copy = await daemon.scrubber.next("tier")
        assert copy in {ScrubbedCopy("tier", part(2)), ScrubbedCopy("tier", part(3))}
        await daemon.scrubber.scrub(copy)
        await daemon.observe("tier")
    assert counted(daemon, "scrub_findings", "corruptions", "quarantined") == [1, 1, 3]


async def test_daemon_scrubs_due_copies_by_itself_and_the_next_daemon_remembers(spool, monkeypatch):
    timed(monkeypatch, scrub_rest_s=0.02)
    store = MemoryStore()
    for step in range(5):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    pristine = await contents(store)
    await flip(store, chunk_keys(pristine, part(3))[0])
    corrupt(spool.path(part(2)) / "weights.bin")
    async with running(scrubber(spool, {"tier": store})) as daemon:  # what it holds is of long ago
        await until(lambda: daemon.journal.counters["scrubbed"] >= 10 and not daemon.scrubber.status().due)
        reported = make_status(daemon, 0, 0).scrub
        assert reported.oldest.startswith("20") and reported.due == 0
    assert await contents(store) == pristine and read(spool, part(2)) == content(2)
    assert counted(daemon, "scrubbed", "scrub_findings") == [10, 2]
    again = scrubber(spool, {"tier": store})
    async with running(again):
        await until(
            lambda: None not in again.inventory().tiers.values() and len(again.inventory().spool.checkpoints) == 5
        )
        await until(lambda: again.scrubber.status().due == 0)  # once it has taken up what the other remembered
        assert not again.journal.counters["scrubbed"]
    (spool.control / "scrubbed.json").write_bytes(b'{"local": {"run/x": 1e999, "../..": [')
    async with running(scrubber(spool, {"tier": store})) as third:
        await until(lambda: third.journal.counters["scrubbed"] >= 10)
    assert not third.journal.counters["scrub_findings"]


async def test_schedule_is_computed_beside_the_loop_and_once_for_each_inventory(spool, monkeypatch):
    """There may be half a million: that takes seconds, before every copy that is read."""
    built = []

    def noted(*args):
        built.append(threading.current_thread())
        return scrub_agenda(*args)

    monkeypatch.setattr("tierd.daemon.scrub.scrubber.scrub_agenda", noted)
    store = MemoryStore()
    for step in range(5):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    daemon = scrubber(spool, {"tier": store})
    found = []
    while len(found) < 5:
        await daemon.observe("tier")  # which sees the same each time
        found.append(await daemon.scrubber.next("tier"))
        await daemon.scrubber.scrub(found[-1])
        daemon.scrubber.status()
    assert await daemon.scrubber.next("tier") is None
    assert sorted(found) == [ScrubbedCopy("tier", part(step)) for step in range(5)]
    assert len(built) == 1 and built[0] is not threading.main_thread()
    commit(spool, part(5))
    await daemon.observe("tier")
    assert await daemon.scrubber.next("tier") is None and len(built) == 2


async def test_flushed_copy_is_not_read_again_at_once(spool):
    store = MemoryStore()
    commit(spool, part(1))
    async with running(scrubber(spool, {"tier": store}, scrub_rate="1kB/s")) as daemon:
        await settle(daemon)
        assert await daemon.scrubber.next("tier") is None


async def test_nothing_is_read_while_the_daemon_is_paused_or_drains_or_the_part_is_busy(spool):
    store = MemoryStore()
    commit(spool, part(1))
    await converge(spool, {"tier": store})
    daemon = await observed(scrubber(spool, {"tier": store}))
    due = ScrubbedCopy(SPOOL, part(1))
    assert await daemon.scrubber.next(SPOOL) == due
    await daemon.pause.begin(None)
    assert await daemon.scrubber.next(SPOOL) is None
    await daemon.pause.end()
    daemon._live.busy[part(1)] += 1
    assert await daemon.scrubber.next(SPOOL) is None
    daemon._live.busy.clear()
    assert await daemon.scrubber.next(SPOOL) == due
    await daemon.drain(0.1)
    assert await daemon.scrubber.next(SPOOL) is None


async def test_zero_period_scrubs_only_copies_in_doubt(spool):
    """Corruption, seeds 1321 and 4772: what a prune or a relay had found rotten was found again for ever."""
    for step in (1, 2):
        commit(spool, part(step))
    daemon = reconciler(spool, {"tier": MemoryStore()}, scrub="0s")
    async with running(daemon):
        await settle(daemon)
        corrupt(spool.path(part(1)) / "weights.bin")
        assert await daemon.scrubber.next(SPOOL) is None
        assert daemon.scrubber.status().due == 0 and daemon.scrubber.status().oldest is None
        assert not daemon.journal.counters["scrubbed"]
        daemon.scrubber.suspect(SPOOL, part(1))
        await until(lambda: not daemon.scrubber._suspected)
        assert daemon.journal.counters["scrubbed"] == 1, "one was in doubt"
    assert (spool.path(part(1)) / "weights.bin").read_bytes() == content(1)["weights.bin"]


async def test_failed_scrub_waits_so_that_other_copies_are_read(spool):
    store = Double()
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    daemon = await observed(scrubber(spool, {"tier": store}))
    first = await daemon.scrubber.next("tier")
    store.error = StoreUnavailable("503")
    with pytest.raises(StoreUnavailable):
        await daemon.scrubber.scrub(first)
    store.error = None
    second = await daemon.scrubber.next("tier")
    assert second not in (None, first)
    await daemon.scrubber.scrub(second)
    assert await daemon.scrubber.next("tier") is None


def test_a_seeded_tenth_of_the_benchmark(tmp_path):
    found = asyncio.run(run(tmp_path, parts=10, count=100, seed=2))
    assert (found["damaged"], found["found"], found["counted"], found["false_alarms"]) == (100, 100, 100, 0)
    assert found["repaired"] == found["repairable"] == 88 and found["good"] > 1000
    assert not found["good_that_changed"] and not found["found_by_a_second_pass"]
    assert found["set_aside_exactly_those"] and found["flipped_on_the_way"]


@pytest.mark.parametrize("data", [b'{"local":{"run/\xff":1.0}}', b'{"\xed\xa0\x80":{}}', b"\xff", b"[" * 9999])
async def test_damaged_scrub_record_is_not_used_and_stops_nothing(spool, data, monkeypatch):
    timed(monkeypatch, scrub_rest_s=0.02)
    path = spool.control / "scrubbed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    commit(spool, part(1))
    async with running(scrubber(spool, {"tier": MemoryStore()})) as daemon:
        await settle(daemon)
        await until(lambda: daemon.journal.counters["scrubbed"] >= 1)


async def test_a_shared_chunk_that_had_to_move_makes_its_sharers_be_read_again_and_then_no_more(spool, monkeypatch):
    store, same, count = MemoryStore(), {"frozen.bin": b"text " * 180}, 8
    for step in range(count):
        commit(spool, part(step), {**same, "step": b"%d" % step})
        await converge(spool, {"tier": store})
    digest = spool.manifest(part(1)).files[0].chunks[0].xxh3_128
    (shared,) = (key for key in await contents(store) if digest in key)
    await flip(store, shared)
    real = chunk_codec.zstandard.ZstdCompressor
    monkeypatch.setattr(chunk_codec.zstandard, "ZstdCompressor", lambda **o: real(**{**o, "write_checksum": True}))
    daemon = scrubber(spool, {"tier": store})
    await daemon.observe(SPOOL)
    await daemon.observe("tier")
    for step in range(count):
        daemon.scrubber.note_verified("tier", part(step))
    await daemon.scrubber.scrub(ScrubbedCopy("tier", part(0)))
    await daemon.observe("tier")
    while copy := await daemon.scrubber.next("tier"):
        await daemon.scrubber.scrub(copy)
        await daemon.observe("tier")
    assert counted(daemon, "scrub_findings", "repaired_chunks", "quarantined") == [1, count, 0]
    assert daemon.journal.counters["scrubbed"] <= 2 * count  # the one under whose name it lay more than once
    for step in range(count):
        assert not (await verify_part(store, part(step), lambda size: None))[1]


@pytest.mark.parametrize("how", ["flip", "truncate", "lengthen", "remove"])
async def test_the_rate_is_kept_where_a_file_is_damaged_too(spool, how, monkeypatch):
    store = MemoryStore()
    commit(spool, part(1), {"weights.bin": random.Random(3).randbytes(40_000)})
    await converge(spool, {"tier": store})
    daemon = scrubber(spool, {"tier": store}, scrub_rate="200kB/s")
    await daemon.observe(SPOOL)
    damage(spool.path(part(1)) / "weights.bin", how)
    daemon._repairer.repair_spool = lambda *rest, **more: asyncio.sleep(0)  # whose reading is its own affair
    reads, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: reads.append(given) or real(*given))
    begun = time.monotonic()
    await daemon.scrubber.scrub(ScrubbedCopy(SPOOL, part(1)))
    paid = daemon.journal.counters["scrubbed_bytes"]
    found = {"flip": 1, "truncate": 20, "lengthen": 1, "remove": 40}
    assert daemon.journal.counters["scrub_findings"] == found[how]
    assert paid >= 1000 * len(reads) and time.monotonic() - begun >= 0.9 * paid / 200_000


async def test_pause_holds_up_repairs(spool):
    store = Double()
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    pristine = await contents(store)
    for key in chunk_keys(pristine, part(1)):
        await flip(store.inner, key)
    daemon = await observed(scrubber(spool, {"tier": store}))
    store.calls.clear()
    store.delay = 0.05
    begun = []

    def pausing(operation, key):
        if operation == "put" and is_chunk(key) and not begun:
            begun.append(asyncio.ensure_future(daemon.pause.begin(None)))

    store.before = pausing
    work = asyncio.create_task(daemon.scrubber.scrub(ScrubbedCopy("tier", part(1))))
    await until(lambda: daemon.pause.paused)
    store.before = None
    await asyncio.sleep(0.5)
    put = len(store.puts(is_chunk))
    await asyncio.sleep(0.5)
    assert not work.done() and len(store.puts(is_chunk)) == put < len(chunk_keys(pristine, part(1)))
    await daemon.pause.end()
    await work
    assert await contents(store) == pristine


async def test_tiers_manifest_is_not_quarantined_while_the_spools_disk_does_not_answer(spool, monkeypatch):
    store = MemoryStore()
    for step in (1, 2):
        commit(spool, part(step))
    await converge(spool, {"tier": store})
    daemon = await observed(scrubber(spool, {"tier": store}))
    await flip(store, part(1).manifest_key)
    before, real = await contents(store), Spool.manifest

    def fails(self, which):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(Spool, "manifest", fails)
    with pytest.raises((StoreUnavailable, OSError)):
        await daemon.scrubber.scrub(ScrubbedCopy("tier", part(1)))
    assert await contents(store) == before and not daemon.journal.counters["quarantined"]
    monkeypatch.setattr(Spool, "manifest", real)


async def test_repair_takes_the_object_size_of_the_manifest_from_the_memory_budget(spool, monkeypatch):
    store, taken = MemoryStore(), []
    for step in (1, 2):
        commit(spool, part(step), {"weights.bin": b"w" * 900})
    await converge(spool, {"tier": store})
    manifest = decode(bytes(await store.get(part(1).manifest_key)), part(1))
    (file,) = manifest.files
    (chunk,) = file.chunks
    long = msgspec.structs.replace(chunk.stored, size=1 << 20)
    chunk = msgspec.structs.replace(chunk, stored=long)
    manifest = msgspec.structs.replace(manifest, files=(msgspec.structs.replace(file, chunks=(chunk,)),))
    await store.put(part(1).manifest_key, encode(manifest))
    daemon = await observed(scrubber(spool, {"tier": store}))
    real = daemon._repairer.budget.take
    monkeypatch.setattr(daemon._repairer.budget, "take", lambda size: taken.append(size) or real(size))
    await daemon.scrubber.scrub(ScrubbedCopy("tier", part(1)))
    assert len(taken) == 2 and min(taken) >= 1 << 20
    assert not (await verify_part(store, part(1), lambda size: None))[1]


@pytest.mark.parametrize("spooled", [True, False], ids=["spool", "other tier"])
async def test_a_manifest_that_names_a_wrong_codec_gets_no_object_that_cannot_be_decoded(spool, spooled):
    """Corruption, seeds 3511 and 10451: under the wrong codec's key was put what the other tier has under the right."""
    stores = {"first": MemoryStore(), "second": MemoryStore()}
    commit(spool, part(1), {"weights.bin": b"w" * 900})
    await converge(spool, stores)
    manifest = decode(bytes(await stores["first"].get(part(1).manifest_key)), part(1))
    ((where, chunk),) = manifest.places()
    right = chunk.stored
    other = "raw" if right.codec == "zst" else "zst"
    wrong = msgspec.structs.replace(right, codec=other, key=f"{right.key.rpartition('.')[0]}.{other}")
    forged = manifest.with_chunks({where: msgspec.structs.replace(chunk, stored=wrong)})
    await stores["first"].put(part(1).manifest_key, encode(forged))
    if not spooled:
        spool.remove([part(1)])
    await scrub(scrubber(spool, stores), "first", parts={part(1)})
    ((_, now),) = decode(bytes(await stores["first"].get(part(1).manifest_key)), part(1)).places()
    data = bytes(await stores["first"].get(f"{part(1).checkpoint.run}/{now.stored.key}"))
    assert bytes(chunk_codec.decode(now, data, "first")) == b"w" * 900


async def test_shared_chunk_is_read_again_though_each_checkpoint_that_names_it_is_young(spool, monkeypatch):
    """Frozen weights are put once and named by every later checkpoint; none of those lives for a period."""
    day, store, same = [0], MemoryStore(), {"frozen.bin": random.Random(1).randbytes(900)}
    made, read_at = 1_767_225_600.0, []  # of `created`, in support.world
    timed(monkeypatch, wall_ns=lambda: int((made + day[0] * 86_400.0) * 1e9))
    for step in range(30):  # one a day, and one is kept; a daemon of its own for each
        day[0] = step
        commit(spool, part(step), {**same, "step": b"%d" % step})
        daemon = scrubber(spool, {"tier": store}, keep=1, scrub="10d")
        daemon.scrubber._remembered.load()
        # By a worker that is faster; the counts below would not know of it.
        daemon.scrubber.run = asyncio.Event().wait
        async with running(daemon):
            await settle(daemon)
            copies = []
            while copy := await daemon.scrubber.next("tier"):
                await daemon.scrubber.scrub(copy)
                copies.append(copy)
            assert len(copies) <= 1
            read_at += [step] * len(copies)
        await daemon.scrubber._remembered.save(daemon.inventory())
    gaps = [after - before for before, after in zip([0, *read_at], [*read_at, 29], strict=True)]
    assert max(gaps) <= 10 and len(read_at) <= 9, read_at
