"""A flush is spread over the time until the next save, and hurries where anybody waits for it."""

from __future__ import annotations

import asyncio

import pytest
from support.doubles import Double, is_chunk
from support.waiting import until
from support.world import CHUNK, commit, content, part, reconciler, running, settle

from tierd.daemon.tiers import tier_pauses
from tierd.daemon.tiers.tier_pauses import FlushSpread, SaveCadence
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush


class Time:
    """A clock that only sleeping moves, and what was slept."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        real = asyncio.sleep

        async def sleep(seconds: float) -> None:
            self.now += seconds
            await real(0)

        monkeypatch.setattr(tier_pauses.asyncio, "sleep", sleep)

    def __call__(self) -> float:
        return self.now


async def test_chunks_of_a_spread_flush_begin_in_order_however_many_wait(monkeypatch):
    clock, begun = Time(monkeypatch), list[float]()
    pauses = FlushSpread(10.0, lambda: False, clock)

    async def hand() -> None:
        while len(begun) < 13:
            await pauses.pause(20)
            begun.append(clock.now)

    await asyncio.gather(*(hand() for _ in range(8)))
    assert begun == [100 + 0.5 * number for number in range(20)]


def test_the_last_chunk_of_a_flush_begins_before_its_time_is_over(spool, monkeypatch):
    clock, begun = Time(monkeypatch), list[float]()
    commit(spool, part(7), content(7, chunks=20))
    store = Double()
    store.before = lambda operation, key: begun.append(clock.now) if operation == "put" and is_chunk(key) else None
    asyncio.run(flush(spool, part(7), TierUploadContext(store), spread=FlushSpread(10.0, lambda: False, clock)))
    assert len(begun) == 21 and 109 < max(begun) <= 110


def test_it_hurries_as_soon_as_it_is_waited_for(spool, monkeypatch):
    clock = Time(monkeypatch)
    commit(spool, part(7), content(7, chunks=20))
    asyncio.run(
        flush(spool, part(7), TierUploadContext(Double()), spread=FlushSpread(1000.0, lambda: clock.now > 150, clock))
    )
    assert 150 < clock.now < 151


def test_saves_are_counted_by_run_and_launch_and_once_for_all_ranks():
    now = [0.0]
    cadence = SaveCadence(lambda: now[0])
    for step in range(1, 6):
        now[0] = 10.0 * step
        cadence.note_saves([part(step, rank=rank, world=2) for rank in (0, 1)])
        cadence.note_saves([part(step, rank=1, world=2)])  # once more
    assert cadence.spread_s("run") == 5
    assert cadence.spread_s("other") == 0
    cadence.note_saves([part(6, launch=2)])
    assert cadence.spread_s("run") == 0
    cadence.keep_only(["other"])
    cadence.note_saves([part(7, launch=2)])
    assert cadence.spread_s("run") == 0


@pytest.fixture
def saved_often(spool):
    """A daemon that has seen saves an hour apart, and the newest of them, which no tier has."""
    commit(spool, part(9))

    def made(**options):
        daemon = reconciler(spool, {"tier": Double()}, **options)
        now = [0.0]
        daemon._live.cadence = SaveCadence(lambda: now[0])
        for step in range(4, 9):
            now[0] += 3600.0
            daemon._live.cadence.note_saves([part(step)])
        return daemon

    return made


def hurry(daemon, how: str) -> None:
    match how:
        case "a newer save":
            commit(daemon.spool, part(10))
            daemon.wake()
        case "somebody who waits":
            daemon.requests.awaited_parts[part(9)] += 1
        case "a restore elsewhere":
            daemon.requests.needed_checkpoints[part(9).checkpoint] += 1
        case "the trainer has left":
            daemon.requests.attended = lambda: False
        case "asked to go on":
            daemon.retry_now()


@pytest.mark.parametrize(
    "how", ["a newer save", "somebody who waits", "a restore elsewhere", "the trainer has left", "asked to go on"]
)
async def test_a_daemon_spreads_the_newest_until_somebody_waits(saved_often, how):
    daemon = saved_often()
    store = daemon.stores["tier"]
    async with running(daemon):
        await until(lambda: store.puts(is_chunk))
        await asyncio.sleep(0.1)
        assert not daemon.tiers.observed.has(part(9), "tier")
        hurry(daemon, how)
        await until(lambda: daemon.tiers.observed.has(part(9), "tier"))


async def test_a_backlog_is_sent_at_once(spool, saved_often):
    commit(spool, part(8))
    daemon = saved_often()
    async with running(daemon):
        await until(lambda: daemon.tiers.observed.has(part(9), "tier"))
        daemon.requests.attended = lambda: False
        await settle(daemon)


async def test_two_tiers_of_different_speed_share_one_pass_where_it_is_spread(spool, monkeypatch):
    """The fast one begins each chunk when the slow one does."""
    commit(spool, part(7), content(7, chunks=20))
    reads = []
    real = spread_source().read_recent_chunk
    monkeypatch.setattr(spread_source(), "read_recent_chunk", lambda *args: reads.append(1) or real(*args))

    class Slow(Double):
        async def put(self, key, data):
            await asyncio.sleep(0.01 * is_chunk(key))
            return await super().put(key, data)

    from tierd.daemon.concurrency import MemoryBudget
    from tierd.daemon.transfer.shared_encoding import SharedEncoder

    shared = SharedEncoder(budget=MemoryBudget(CHUNK))  # hardly anything can be kept
    ways = [
        TierUploadContext(Double(), encoding=shared),
        TierUploadContext(Slow(), budget=MemoryBudget(2 * CHUNK), encoding=shared),
    ]
    pauses = [FlushSpread(1.0, lambda: False) for _ in ways]
    await asyncio.gather(*(flush(spool, part(7), way, spread=one) for way, one in zip(ways, pauses, strict=True)))
    assert len(reads) <= 31  # of 21 chunks; apart from each other 42, and on a busy machine a few are read again


def spread_source():
    from tierd.daemon.transfer import chunk_source

    return chunk_source
