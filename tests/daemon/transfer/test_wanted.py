"""Some chunks of a part: they come alone, are found again, and neither commit the part nor stand in the way of it."""

from __future__ import annotations

import asyncio

import pytest
from support.doubles import Double, flip, flipped, is_chunk
from support.waiting import wait_until
from support.world import CHUNK, Daemon, commit, content, part, read

from tierd.core.errors import ConfigError, CorruptChunk
from tierd.core.manifest import DRAFT_NAME
from tierd.core.manifest_codec import decode
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Fetch
from tierd.spool.spool import Spool
from tierd.stores.base import Store

PART = part(7)
FILES = content(7, chunks=6)
WEIGHTS = "weights.bin"


@pytest.fixture
def store(spool):
    commit(spool, PART, FILES)
    made = Double()
    asyncio.run(flush(spool, PART, TierUploadContext(made)))
    made.calls.clear()
    return made


@pytest.fixture
def fresh(tmp_path):
    return Spool(tmp_path / "fresh")


def chunks_got(store: Double) -> int:
    return len([key for operation, key in store.calls if operation == "get" and is_chunk(key)])


def bring(spool: Spool, store: Store, wanted: dict | None):
    return asyncio.run(fetch(spool, PART, {"tier": store}, chunk_runs=wanted))


def test_no_chunk_at_all_brings_the_manifest(spool, store, fresh):
    assert bring(fresh, store, {}).chunks == 0
    place = fresh.fetch_directory(PART)
    assert [path.name for path in place.iterdir()] == [DRAFT_NAME]
    assert decode((place / DRAFT_NAME).read_bytes(), PART).same_content(spool.manifest(PART))
    assert fresh.parts() == [] and chunks_got(store) == 0


def test_wanted_chunks_are_fetched_and_nothing_else(store, fresh):
    assert bring(fresh, store, {WEIGHTS: [(1, 2), (4, 5)]}).chunks == 2
    found = (fresh.fetch_directory(PART) / WEIGHTS).read_bytes()
    for number in range(6):
        here = slice(number * CHUNK, (number + 1) * CHUNK)
        assert (found[here] == FILES[WEIGHTS][here]) == (number in (1, 4))
    assert len(found) == len(FILES[WEIGHTS]) and chunks_got(store) == 2 and fresh.parts() == []


def test_chunks_that_a_reader_fetched_are_used_by_the_next_reader_and_a_whole_fetch(store, fresh):
    bring(fresh, store, {WEIGHTS: [(0, 3)]})
    assert bring(fresh, store, {WEIGHTS: [(2, 4)]}).chunks == 1
    assert bring(fresh, store, None).chunks == 7 - 4  # and the other file
    assert chunks_got(store) == 7 and read(fresh, PART) == FILES
    assert not list((fresh.control / "fetch").iterdir())


def test_repair_of_a_committed_part_replaces_only_the_wanted_chunks(spool, store):
    path = spool.path(PART) / WEIGHTS
    path.write_bytes(flipped(flipped(path.read_bytes(), 5), 3 * CHUNK + 5))
    assert bring(spool, store, {WEIGHTS: [(3, 4)]}).chunks == 1
    assert path.read_bytes() == flipped(FILES[WEIGHTS], 5)
    assert bring(spool, store, {WEIGHTS: [(0, 1)]}).chunks == 1
    assert read(spool, PART) == FILES


def test_committed_part_whose_manifest_is_bad_is_repaired_whole(spool, store):
    path = spool.path(PART) / WEIGHTS
    path.write_bytes(flipped(path.read_bytes(), 5))
    (spool.path(PART) / "manifest.json").write_bytes(b"{}")
    bring(spool, store, {WEIGHTS: [(3, 4)]})
    assert read(spool, PART) == FILES


@pytest.mark.parametrize("wanted", [{"other": [(0, 1)]}, {WEIGHTS: [(5, 7)]}, {"../" + WEIGHTS: [(0, 1)]}])
@pytest.mark.parametrize("committed", [True, False])
def test_a_chunk_that_there_is_not_is_a_bad_request(spool, store, fresh, wanted, committed):
    with pytest.raises(ConfigError, match="no such chunk"):
        bring(spool if committed else fresh, store, wanted)
    assert chunks_got(store) == 0


def test_a_lost_chunk_matters_only_to_who_wants_it(spool, store, fresh):
    [lost] = [chunk for chunk in spool.manifest(PART).files if chunk.path == WEIGHTS]
    [found] = [key for key in asyncio.run(_keys(store)) if f"/{lost.chunks[2].xxh3_128}." in key]
    asyncio.run(flip(store, found))
    assert bring(fresh, store, {WEIGHTS: [(0, 2)]}).chunks == 2
    with pytest.raises(CorruptChunk, match=r"chunk 2 of weights\.bin"):
        bring(fresh, store, {WEIGHTS: [(2, 3)]})


async def _keys(store: Store) -> list[str]:
    return [info.key async for info in store.scan("")]


def test_readers_of_a_part_share_its_fetched_chunks_and_the_last_reader_removes_them(store, fresh):
    with Daemon(fresh.root, {"tier": store}) as daemon:
        place = fresh.fetch_directory(PART)
        first, second = DaemonConnection(fresh), DaemonConnection(fresh)
        first.ask(Fetch(part=PART, wanted={WEIGHTS: ((0, 2),)}))
        second.ask(Fetch(part=PART, wanted={WEIGHTS: ((1, 3),)}))
        assert chunks_got(store) == 3
        first.close()
        wait_until(lambda: daemon.reconciler.requests.held_checkpoints[PART.checkpoint] == 1)
        assert fresh.leftovers() == []
        daemon.settle()
        assert (place / WEIGHTS).read_bytes()[: 3 * CHUNK] == FILES[WEIGHTS][: 3 * CHUNK]
        second.close()

        def gone() -> bool:
            daemon.loop.call_soon_threadsafe(daemon.reconciler.wake)
            return not place.exists()

        wait_until(gone)
        with DaemonConnection(fresh) as third:  # and all over again
            third.ask(Fetch(part=PART, wanted={WEIGHTS: ((0, 1),)}))
            assert chunks_got(store) == 4
            third.ask(Fetch(part=PART))  # the whole part, beside its own partial
            assert read(fresh, PART) == FILES
            assert third.ask(Fetch(part=PART, wanted={WEIGHTS: ((0, 1),)}))["tiers"] == []
