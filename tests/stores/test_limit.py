"""A limited store keeps the contract; its chunks keep the limit, in order; and who sets no limit has none of it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from stores.conformance import Conformance
from support.doubles import Double
from support.seeds import seeds

from tierd.core.config import Config, TierConfig
from tierd.core.errors import ObjectNotFound, StoreUnavailable
from tierd.core.urls import parse_url
from tierd.stores.base import Store
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore
from tierd.stores.open import open_store, open_tiers
from tierd.stores.retry import RetryingStore
from tierd.stores.store_wrappers import LimitedStore
from tierd.threads import mark_foreground

RATE = 1000  # bytes/s of the clock below


class Clock:
    """Time that passes only when everybody who runs on it sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._count), woken))
        await woken

    async def run(self, work: asyncio.Future[object]) -> None:
        """Let time pass until `work` is done."""
        while not work.done():
            for _ in range(20):  # each one that can go on does
                await asyncio.sleep(0)
            if not work.done():
                at, _, woken = heapq.heappop(self._sleepers)
                self.now = max(self.now, at)
                if not woken.done():
                    woken.set_result(None)


class Line(Double):
    """Notes when each call began, and how many bytes it moved."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.can_digest = clock, True
        self.begun: list[tuple[float, str, int]] = []

    async def put(self, key, data):
        self.begun.append((self.clock.now, key, memoryview(data).nbytes))
        return await super().put(key, data)

    async def get(self, key, into=None):
        began = self.clock.now
        found = await super().get(key, into)
        self.begun.append((began, key, memoryview(found).nbytes))
        return found

    async def digest(self, key):
        return len(memoryview(await self.get(key))), "digest"


def key(number: int) -> str:
    return f"run/chunks/c/{number:05}"


def limited(work, *, up: int | None = RATE, down: int | None = RATE) -> list[tuple[float, str, int]]:
    """Run ``work(store, clock)`` with a limit; when each call on the store below began, since the start."""

    async def whole() -> list[tuple[float, str, int]]:
        clock = Clock()
        line = Line(clock)
        began = clock.now
        await_ = asyncio.ensure_future(work(LimitedStore(line, up, down, clock=clock, sleep=clock.sleep), clock))
        await clock.run(await_)
        await await_
        return [(at - began, name, size) for at, name, size in line.begun]

    return asyncio.run(whole())


class TestLimitedMemoryStore(Conformance):
    @pytest.fixture(params=[(1 << 40, 1 << 40), (1 << 40, None), (None, None)])
    def make(self, request: pytest.FixtureRequest) -> Callable[[], Store]:
        return lambda: LimitedStore(MemoryStore(), *request.param)


class TestLimitedFileStore(Conformance):
    many = operations = 60
    can_digest = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: LimitedStore(FileStore(tmp_path), 1 << 40, 1 << 40)


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_no_span_of_time_has_more_than_the_limit_and_one_seconds_worth_or_one_chunk(seed):
    noise = random.Random(seed)
    largest = noise.choice([50, 900, 5000])
    sizes = [noise.randrange(1, largest + 1) for _ in range(60)]

    async def work(store, clock):
        async def one(number):
            await clock.sleep(noise.random() * noise.choice([0, 30]))
            await store.put(key(number), bytes(sizes[number]))

        await asyncio.gather(*(one(number) for number in range(len(sizes))))

    begun = limited(work)
    assert len(begun) == len(sizes)
    for first, (start, *_) in enumerate(begun):
        moved = 0
        for at, _, size in begun[first:]:
            moved += size
            assert moved <= RATE * (at - start) + max(RATE, largest) + 1


def test_a_busy_line_moves_all_that_the_limit_allows():
    async def work(store, clock):
        await asyncio.gather(*(store.put(key(number), bytes(640)) for number in range(100)))

    begun = limited(work)
    assert begun[-1][0] == pytest.approx((640 * 100 - RATE) / RATE, rel=1e-6)


def test_requests_of_any_size_are_served_in_order():
    async def work(store, clock):
        async def one(number, size):
            await store.put(key(number), bytes(size))

        await asyncio.gather(*(one(number, size) for number, size in enumerate([5000, 1, 5000, 1, 1])))

    assert [name for _, name, _ in limited(work)] == [key(number) for number in range(5)]


def put(number: int, size: int):
    return lambda store, clock: store.put(key(number), bytes(size))


def get(number: int, room: int | None = None):
    return lambda store, clock: store.get(key(number), None if room is None else memoryview(bytearray(room)))


def digest(number: int):
    return lambda store, clock: store.digest(key(number))


def rest(seconds: float):
    return lambda store, clock: clock.sleep(seconds)


# Calls one after the other, and when each began.
CALLS = {
    "the first chunk waits for all but one second's worth": ([put(1, 6400)], {}, [5.4]),
    "an idle line saves up the bytes of a second": ([rest(3600), put(1, RATE), put(2, RATE)], {}, [3600, 3601]),
    "up alone": ([put(1, 3000), get(1), put(2, 3000)], {"down": None}, [2, 2, 5]),
    "a get without room is paid by the next": ([put(1, 3000), get(1), get(1), get(1)], {"up": None}, [0, 0, 2, 5]),
    "a digest is charged like a get": ([put(1, 3000), *[digest(1)] * 3], {"up": None}, [0, 0, 2, 5]),
    "a get with room pays ahead": ([put(1, 3000), *[get(1, 4000)] * 2], {"up": None}, [0, 3, 6]),
    "a refund is no more than an idle line saves up": (
        [put(1, 0), *[get(1, 900)] * 5, put(2, 5000), get(2, 5000)],
        {"up": None},
        [*[0] * 7, 4],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_begin_when_the_limit_allows_them(name):
    calls, limits, begin = CALLS[name]

    async def work(store, clock):
        for call in calls:
            await call(store, clock)

    assert [at for at, *_ in limited(work, **limits)] == pytest.approx(begin, abs=0.01)


def test_manifests_do_not_wait_and_are_charged():
    async def work(store, clock):
        chunk = asyncio.ensure_future(store.put(key(1), bytes(6000)))
        await clock.sleep(1)
        await store.put("run/manifests/m", bytes(2000))
        await store.get("run/manifests/m")
        await chunk

    assert limited(work) == [
        (1, "run/manifests/m", 2000),
        (1, "run/manifests/m", 2000),
        (pytest.approx(7), key(1), 6000),
    ]


def test_a_restore_is_not_limited():
    async def restore(store):
        mark_foreground()
        await asyncio.gather(*(asyncio.ensure_future(store.get(key(1))) for _ in range(2)))

    async def work(store, clock):
        await store.put(key(1), bytes(3000))
        await asyncio.ensure_future(restore(store))
        await store.get(key(1))

        await store.get(key(1))

    assert [at for at, *_ in limited(work, up=None)] == [0, 0, 0, 0, pytest.approx(2)]


def test_request_that_is_cancelled_while_it_waits_is_not_charged_and_the_next_continues():
    async def work(store, clock):
        first = asyncio.ensure_future(store.put(key(1), bytes(50_000)))
        second = asyncio.ensure_future(store.put(key(2), bytes(3000)))
        third = asyncio.ensure_future(store.put(key(3), bytes(2000)))
        await clock.sleep(1)
        first.cancel()
        third.cancel()
        await asyncio.wait([first, third])
        await second

    # The first second of waiting is not lost: the line was idle.
    assert limited(work) == [(pytest.approx(3), key(2), 3000)]


def test_a_failed_call_is_charged_and_raised_as_it_was():
    async def work(store, clock):
        store._inner.error = StoreUnavailable("down")
        with pytest.raises(StoreUnavailable, match="down"):
            await store.put(key(1), bytes(3000))
        store._inner.error = None
        with pytest.raises(ObjectNotFound):
            await store.get(key(7))
        await store.put(key(2), bytes(3000))

    assert [at for at, *_ in limited(work)] == [pytest.approx(2), pytest.approx(5)]


def test_who_sets_no_limit_gets_the_plain_store(tmp_path: Path):
    url = parse_url(str(tmp_path))
    assert type(open_store(url)) is RetryingStore  # whose deadlines run inside of a limit, not outside
    assert repr(open_store(url, up=1)) == f"LimitedStore({open_store(url)!r})"
    assert repr(open_store(url, down=1)) == f"LimitedStore({open_store(url)!r})"


async def test_a_tier_is_opened_with_its_limits(tmp_path: Path):
    tiers = (
        TierConfig(name="a", url=f"{tmp_path}/a"),
        TierConfig(name="b", url=f"{tmp_path}/b", limit_up="2kB/s", limit_down="3KiB/s"),
        TierConfig(name="c", url=f"{tmp_path}/c", limit_down="1MB/s"),
    )
    async with AsyncExitStack() as stack:
        a, b, c = (await open_tiers(Config(spool="/s", tier=tiers), stack)).values()
        assert isinstance(a, RetryingStore) and isinstance(b, LimitedStore) and isinstance(c, LimitedStore)
        assert (b._up._rate, b._down._rate, c._up, c._down._rate) == (2000, 3072, None, 1_000_000)
