"""One pass for all tiers: what flushes of one part share, and that none of them waits for another's tier."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from support.doubles import Double, contents, damage, is_chunk, is_manifest
from support.seeds import seeds
from support.world import CHUNK, commit, part

from tierd.core.errors import CorruptChunk, StoreUnavailable, TierdError
from tierd.core.manifest_codec import decode
from tierd.daemon import concurrency
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.shared_encoding import SharedEncoder, Throughput
from tierd.spool.spool import Spool
from tierd.stores.base import Buffer
from tierd.stores.memory_store import MemoryStore

PART = part(7)
CHUNKS = 24


class Counted(MemoryBudget):
    """Notes the most that was out at a time."""

    most = 0

    async def _wait_for(self, size: int) -> None:
        await super()._wait_for(size)
        self.most = max(self.most, self._total - self._free)

    def try_take(self, size: int):
        hold = super().try_take(size)
        self.most = max(self.most, self._total - self._free)
        return hold


class Gated(Double):
    """Chunks are put only as far as somebody opens the gate."""

    def __init__(self, open_for: int = 0) -> None:
        super().__init__()
        self.gate, self.waiting = asyncio.Semaphore(open_for), 0

    async def put(self, key: str, data: Buffer) -> str:
        if is_chunk(key):
            self.waiting += 1
            await self.gate.acquire()
            self.waiting -= 1
        return await super().put(key, data)

    def open(self) -> None:
        for _ in range(1000):
            self.gate.release()


class Slow(Double):
    """A chunk takes its time."""

    async def put(self, key: str, data: Buffer) -> str:
        await asyncio.sleep(0.01 * is_chunk(key))
        return await super().put(key, data)


@pytest.fixture
def work(monkeypatch) -> Counter[str]:
    """How often chunks were read and encoded."""
    from tierd.daemon.transfer import chunk_source, shared_encoding

    count: Counter[str] = Counter()

    def counted(what: str, call):
        def work(*args, **options):
            count[what] += 1
            return call(*args, **options)

        return work

    monkeypatch.setattr(chunk_source, "read_recent_chunk", counted("read", chunk_source.read_recent_chunk))
    monkeypatch.setattr(shared_encoding, "encode", counted("encoded", shared_encoding.encode))
    return count


def saved(spool: Spool, chunks: int = CHUNKS) -> dict[str, bytes]:
    return commit(spool, PART, {"w": random.Random(1).randbytes(CHUNK * chunks)})


def encoding(total: int = 1 << 20) -> SharedEncoder:
    return SharedEncoder(Throughput(), Counted(total))


def way(store, shared: SharedEncoder, name: str = "", total: int = 1 << 20) -> TierUploadContext:
    return TierUploadContext(store, name, budget=Counted(total), encoding=shared)


def at_rest(shared: SharedEncoder, *ways: TierUploadContext) -> bool:
    """Whether nothing is kept, and every byte was given back; and no more was ever out than there is."""
    budgets = [shared._budget, *(way.budget for way in ways)]
    assert [(budget._free, budget.most <= budget._total) for budget in budgets] == [
        (budget._total, True) for budget in budgets
    ]
    return not shared._passes and not shared._window


async def chunks(store) -> dict[str, bytes]:
    return {key: data for key, data in (await contents(store)).items() if is_chunk(key)}


async def test_memory_is_used_again_once_no_flush_sends_its_bytes(spool, monkeypatch):
    """Two tiers that take their time with each chunk: nobody else writes to its memory meanwhile."""
    saved(spool)
    made, real = [], concurrency.memory_for
    monkeypatch.setattr(concurrency, "memory_for", lambda size: made.append(size) or real(size))
    shared, stores = encoding(), [Slow(), Slow()]
    ways = [way(store, shared) for store in stores]
    await asyncio.gather(*(flush(spool, PART, one) for one in ways))
    assert at_rest(shared, *ways) and not shared.buffers._idle and not shared.buffers._used
    one, other = [await chunks(store) for store in stores]
    assert one == other and len(one) == CHUNKS
    assert len(made) < 3 * CHUNKS  # each chunk is read once, and read back twice


async def test_two_tiers_cost_one_read_one_verification_and_one_encoding(spool, work):
    saved(spool)
    shared, stores = encoding(), [Gated(), Gated()]
    ways = [way(store, shared) for store in stores]
    begun = [asyncio.ensure_future(flush(spool, PART, one)) for one in ways]
    while not all(store.waiting for store in stores):  # one that begins late does by itself what it has missed
        await asyncio.sleep(0.001)
    for store in stores:
        store.open()
    await asyncio.gather(*begun)
    assert work == {"read": CHUNKS, "encoded": CHUNKS}
    assert len(await chunks(stores[0])) == CHUNKS and await contents(stores[0]) == await contents(stores[1])
    assert at_rest(shared, *ways)


async def test_tier_that_joins_later_shares_the_current_chunks_and_reads_the_missed_chunks(spool, work):
    saved(spool)
    shared, first, late = encoding(), Gated(open_for=10), Double()
    ways = [way(first, shared), way(late, shared)]
    begun = asyncio.ensure_future(flush(spool, PART, ways[0]))
    while len(first.puts(is_chunk)) < 10 or work["encoded"] < 18:  # 10 are there, and 8 wait at the gate
        await asyncio.sleep(0.001)
    await flush(spool, PART, ways[1])
    first.open()
    await begun
    assert work == {"read": CHUNKS + 10, "encoded": CHUNKS + 10}  # the first read none that the late one had read
    assert await contents(first) == await contents(late)
    assert at_rest(shared, *ways)


async def test_a_tier_that_is_behind_joins_at_once_where_hardly_anything_can_be_kept(spool, work):
    saved(spool)
    shared, stores = encoding(CHUNK), [Gated(open_for=10), Gated()]
    ways = [way(store, shared, total=CHUNK) for store in stores]
    flushes = []

    async def waiting(step: int) -> None:
        while any(not store.waiting and len(store.puts(is_chunk)) < step for store in stores[: len(flushes)]):
            await asyncio.sleep(0.001)

    for one in ways:
        flushes.append(asyncio.ensure_future(flush(spool, PART, one)))
        await waiting(CHUNKS)
    for _ in range(CHUNKS - 10):
        for store in stores:
            store.gate.release()
        await asyncio.sleep(0.005)
        await waiting(CHUNKS)
    stores[1].open()
    await asyncio.gather(*flushes)
    assert work["read"] <= CHUNKS + 12  # it missed ten
    assert await contents(stores[0]) == await contents(stores[1])
    assert at_rest(shared, *ways)


@pytest.mark.parametrize("window", [CHUNK, 4 * CHUNK, 1 << 20])
async def test_tier_that_stands_still_holds_up_neither_another_tier_nor_memory(spool, work, window):
    saved(spool)
    shared, fast, stopped = encoding(window), Double(), Gated()
    ways = [way(fast, shared, total=CHUNK), way(stopped, shared, total=3 * CHUNK)]
    waiting = asyncio.ensure_future(flush(spool, PART, ways[1]))
    while not ways[1].budget.has_waiters:  # it has all that it may have
        await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        await flush(spool, PART, ways[0])
    assert not stopped.puts(is_chunk) and len(fast.puts(is_chunk)) == CHUNKS
    stopped.open()
    await waiting
    assert await contents(fast) == await contents(stopped)
    assert work["read"] <= 2 * CHUNKS
    assert at_rest(shared, *ways)


async def test_slow_tier_takes_from_the_window_the_chunks_that_fit_there(spool, work):
    """It reads nothing anew where all that it lags behind is kept."""
    saved(spool)
    shared, fast, slow = encoding(), Gated(), Slow()
    ways = [way(slow, shared, total=2 * CHUNK), way(fast, shared)]
    begun = [asyncio.ensure_future(flush(spool, PART, one)) for one in ways]
    while not (fast.waiting and slow.puts(is_chunk)):  # one that begins late does by itself what it has missed
        await asyncio.sleep(0.001)
    fast.open()
    await asyncio.gather(*begun)
    assert work == {"read": CHUNKS, "encoded": CHUNKS}
    assert await contents(fast) == await contents(slow)
    assert at_rest(shared, *ways)


async def test_failure_of_a_tier_does_not_reach_another(spool):
    saved(spool)
    shared, sound, broken = encoding(), Double(), Double()

    def fail(operation: str, key: str) -> None:
        if operation == "put" and len(broken.puts(is_chunk)) == 5:
            raise StoreUnavailable("the network went away")

    broken.before = fail
    ways = [way(broken, shared), way(sound, shared)]
    found = await asyncio.gather(*(flush(spool, PART, one) for one in ways), return_exceptions=True)
    assert isinstance(found[0], StoreUnavailable) and not isinstance(found[1], BaseException)
    assert len(await chunks(sound)) == CHUNKS
    assert at_rest(shared, *ways)


async def test_chunk_that_is_corrupt_in_the_spool_is_shown_on_no_tier(spool):
    saved(spool)
    damage(spool.path(PART) / "w", "flip")
    shared, stores = encoding(), [Double(), Double()]
    ways = [way(store, shared) for store in stores]
    found = await asyncio.gather(*(flush(spool, PART, one) for one in ways), return_exceptions=True)
    assert all(isinstance(one, CorruptChunk) for one in found)
    assert not any(store.puts(is_manifest) for store in stores)
    assert at_rest(shared, *ways)


async def test_whether_a_chunk_is_compressed_is_decided_once_for_all_flushes_of_the_time(spool):
    """The decision changes while the second tier lags behind, and reads all of it anew."""
    commit(spool, PART, {"w": b"".join(bytes([n]) * CHUNK for n in range(CHUNKS))})

    class Moody(Throughput):
        answers = 0

        def should_compress(self) -> bool:
            self.answers += 1
            return self.answers % 2 == 0

    shared, stores = SharedEncoder(Moody(), Counted(1)), [Double(), Gated()]
    ways = [way(store, shared, total=CHUNK) for store in stores]
    late = asyncio.ensure_future(flush(spool, PART, ways[1]))
    await flush(spool, PART, ways[0])
    stores[1].open()
    await late
    assert await contents(stores[0]) == await contents(stores[1])
    assert {key.rpartition(".")[2] for key in await chunks(stores[0])} == {"raw", "zst"}


class Fickle(MemoryStore):
    """Takes its time, and fails now and then."""

    def __init__(self, rng: random.Random, failures: float) -> None:
        super().__init__()
        self._rng, self._failures = rng, failures
        self._most = rng.choice([0.0, 0.001, 0.01])

    async def put(self, key: str, data: Buffer) -> str:
        before = bytes(data)
        await asyncio.sleep(self._rng.random() * self._most)
        if self._rng.random() < self._failures:
            raise StoreUnavailable("not now")
        assert bytes(data) == before  # nobody writes to what is being put
        return await super().put(key, data)


@pytest.mark.parametrize("seed", seeds(weight=3))
async def test_tiers_of_any_kind_have_the_same_chunks_in_the_end(spool, seed):
    """Of any speed, with failures and cuts, with room for much or hardly anything."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, CHUNK // 2, CHUNK]) for _ in range(rng.randrange(1, 20))]
    commit(spool, PART, {f"{number:02}": rng.randbytes(size) * rng.choice([1, 3]) for number, size in enumerate(sizes)})
    shared = encoding(rng.choice([1, CHUNK, 5 * CHUNK, 1 << 20]))
    stores = [Fickle(rng, rng.choice([0.0, 0.1])) for _ in range(rng.randrange(1, 4))]
    ways = [way(store, shared, str(n), rng.choice([CHUNK, 4 * CHUNK, 1 << 20])) for n, store in enumerate(stores)]

    async def flushed(one: TierUploadContext) -> None:
        await asyncio.sleep(rng.random() * rng.choice([0, 0.02]))
        while True:
            try:
                async with asyncio.timeout(rng.choice([0.02, 5, 5, 5])):
                    await flush(spool, PART, one)
                    return
            except (TierdError, TimeoutError):
                continue

    async with asyncio.timeout(60):
        await asyncio.gather(*(flushed(one) for one in ways))
    assert at_rest(shared, *ways)
    for store in stores:
        found = await contents(store)
        manifest = decode(found[PART.manifest_key], PART)
        named = {f"{PART.checkpoint.run}/{chunk.stored.key}" for chunk in manifest.chunks()}
        assert named == set(await chunks(store))
        assert await chunks(store) == await chunks(stores[0])
