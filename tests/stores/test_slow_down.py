"""A thousand nodes over one bucket that answers 503 Slow Down, on a simulated clock: all is written, without storms."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tierd.core.errors import StoreUnavailable
from tierd.stores.base import Buffer
from tierd.stores.memory_store import MemoryStore
from tierd.stores.retry import RetryingStore, StoreThrottled

WRITERS, AT_ONCE, OBJECTS = 1000, 8, 5


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop without files, whose clock jumps to the next timer. It is its own selector."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = self

    def time(self) -> float:
        return self.now

    def select(self, timeout: float | None) -> list[object]:
        assert timeout is not None, "a hang: everybody waits, and nothing will ever happen"
        self.now += timeout
        return []

    def _process_events(self, events: list[object]) -> None: ...

    def _write_to_self(self) -> None: ...


class Bucket(MemoryStore):
    """Takes `rate` puts a second, and refuses all others, as a partition of S3 does."""

    def __init__(self, rate: int, rng: random.Random) -> None:
        super().__init__()
        self.rate, self.rng = rate, rng
        self.room, self.at = float(rate), 0.0
        self.asked: Counter[int] = Counter()  # by second

    async def put(self, key: str, data: Buffer) -> str:
        now = asyncio.get_running_loop().time()
        self.room, self.at = min(self.rate, self.room + (now - self.at) * self.rate), now
        self.asked[int(now)] += 1
        if self.room < 1:
            await asyncio.sleep(0.01 * self.rng.uniform(0.5, 1.5))
            raise StoreThrottled("put: 503 SlowDown")
        self.room -= 1
        await asyncio.sleep(0.04 * self.rng.uniform(0.5, 1.5))
        return await super().put(key, data)


async def write(number: int, bucket: Bucket, rng: random.Random) -> None:
    """Put all objects of one node, as a tier worker does: after a call has failed for good, it begins again later."""
    loop = asyncio.get_running_loop()
    store = RetryingStore(bucket, rng=rng.random, clock=loop.time)
    left, failures = {f"{number}/{one}" for one in range(OBJECTS)}, 0

    async def lane(todo: list[str]) -> None:
        while todo:
            await store.put(key := todo.pop(), b"")
            left.discard(key)

    while left:
        before, todo = len(left), sorted(left)
        found = await asyncio.gather(*(lane(todo) for _ in range(AT_ONCE)), return_exceptions=True)
        failed = [one for one in found if one is not None]
        assert all(isinstance(one, StoreUnavailable) for one in failed), failed
        if failed:
            failures = 1 if len(left) < before else failures + 1
            await asyncio.sleep(min(2.0**failures, 15.0) * rng.uniform(0.5, 1.0))


@pytest.mark.parametrize("rate", [100, 1000])
def test_thousand_writers_share_the_rate_of_a_bucket(rate: int, caplog: pytest.LogCaptureFixture) -> None:
    """Before a refusal closed the window for a while, the first bucket was asked 23 times for each object, and up to
    10,800 times a second, again and again."""
    caplog.set_level("CRITICAL", logger="tierd.stores.retry")
    loop, rng = SimulatedLoop(), random.Random(1)
    bucket = Bucket(rate, rng)

    async def work() -> None:
        await asyncio.gather(*(write(number, bucket, rng) for number in range(WRITERS)))

    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
    assert len(bucket.objects) == WRITERS * OBJECTS
    assert bucket.asked.total() < 6 * WRITERS * OBJECTS
    settled = [asked for second, asked in bucket.asked.items() if second >= 5]
    assert max(settled, default=0) < 6 * rate, "it is stormed again and again"
