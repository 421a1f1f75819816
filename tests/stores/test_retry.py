"""RetryingStore: the contract holds over a store that fails at random; calls end; only what may pass is retried."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import pytest
from stores.conformance import Conformance, keys

from tierd.core.errors import ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.stores.base import Buffer, ObjectInfo, Store, StoreWrapper, check_key
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore
from tierd.stores.retry import RetryingStore


class FlakyStore(StoreWrapper):
    """Fails at random: before the call, after it (the work is done, but the caller can't know), or by hanging."""

    def __init__(self, inner: Store, seed: int, rate: float = 0.3, hangs: float = 0.0) -> None:
        super().__init__(inner)
        self.inner, self.rng, self.rate, self.hangs = inner, random.Random(seed), rate, hangs
        self.failures = 0

    async def maybe(self) -> None:
        if self.rng.random() < self.rate:
            self.failures += 1
            raise StoreUnavailable("injected")
        if self.rng.random() < self.hangs:
            self.failures += 1
            await asyncio.sleep(3600)

    async def put(self, key: str, data: Buffer) -> str:
        await self.maybe()
        checksum = await self.inner.put(key, data)
        await self.maybe()
        return checksum

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        await self.maybe()
        data = await self.inner.get(key, into)
        await self.maybe()
        return data

    async def digest(self, key: str) -> tuple[int, str]:
        await self.maybe()
        found = await self.inner.digest(key)
        await self.maybe()
        return found

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        await self.maybe()
        async for info in self.inner.scan(prefix, after):
            yield info
            await self.maybe()

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        await self.maybe()
        await self.inner.delete(keys[: len(keys) // 2])
        await self.maybe()
        await self.inner.delete(keys)
        await self.maybe()

    async def aclose(self) -> None:
        await self.inner.aclose()


async def no_sleep(_: float) -> None:
    await asyncio.sleep(0)


class TestOverAFlakyMemoryStore(Conformance):
    has_condition = False  # `FlakyStore` changes `put` alone

    @pytest.fixture(params=range(5))
    def make(self, request: pytest.FixtureRequest) -> Callable[[], Store]:
        return lambda: RetryingStore(FlakyStore(MemoryStore(), request.param), attempts=40, sleep=no_sleep)


class TestOverAHangingMemoryStore(Conformance):
    has_condition = False
    many, operations, size = 60, 60, 10_000

    @pytest.fixture
    def make(self) -> Callable[[], Store]:
        flaky = lambda: FlakyStore(MemoryStore(), 7, rate=0.05, hangs=0.02)  # noqa: E731
        return lambda: RetryingStore(flaky(), attempts=40, deadline_s=0.02, sleep=no_sleep)

    # A get's deadline includes the time that its largest object could take: too long to wait for here.
    @pytest.fixture(autouse=True)
    def fast_gets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tierd.stores.retry.LARGEST", 0)


class TestOverAFlakyFileStore(Conformance):
    many = 300
    can_digest, has_condition = True, False

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: RetryingStore(FlakyStore(FileStore(tmp_path), 9), attempts=40, sleep=no_sleep)


class TestOverASoundStore(Conformance):
    @pytest.fixture
    def make(self) -> Callable[[], Store]:
        return lambda: RetryingStore(MemoryStore())


class Failing(MemoryStore):
    """Every call raises the next of `errors`; without one it works."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors, self.calls = list(errors), 0

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return await super().get(key, into)


def get_through(inner: Store, **options: object) -> bytes:
    return bytes(asyncio.run(RetryingStore(inner, **options).get("k")))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [StoreRefused("no"), ObjectNotFound("k"), ValueError("a bug")])
def test_only_unavailable_is_tried_again(error: Exception) -> None:
    store = Failing(error)
    with pytest.raises(type(error)):
        get_through(store)
    assert store.calls == 1


def test_the_last_error_is_raised_with_the_count() -> None:
    store = Failing(*(StoreUnavailable(f"number {number}") for number in range(9)))
    with pytest.raises(StoreUnavailable, match="number 3") as caught:
        get_through(store, attempts=4, sleep=no_sleep)
    assert store.calls == 4
    assert caught.value.__notes__ == ["get k: attempt 4 of 4, the last"]


def test_delays_double_up_to_a_bound_and_are_jittered_in_full() -> None:
    waited: list[float] = []

    async def sleep(delay: float) -> None:
        waited.append(delay)

    for part in (1.0, 0.5, 0.0):
        with pytest.raises(StoreUnavailable):
            get_through(Failing(*[StoreUnavailable("x")] * 10), attempts=10, rng=lambda part=part: part, sleep=sleep)
    full = [0.25, 0.5, 1, 2, 4, 8, 16, 20, 20]
    assert waited == full + [delay / 2 for delay in full] + [0] * 9


def test_each_retry_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = Failing(StoreUnavailable("first cause"), StoreUnavailable("second cause"))
    asyncio.run(store.put("k", b"1"))
    with caplog.at_level(logging.INFO, logger="tierd"):
        assert get_through(store, sleep=no_sleep, rng=lambda: 1.0) == b"1"
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "get k: attempt 1 of 5 failed, again in 0.25 s: first cause"),
        ("INFO", "get k: attempt 2 of 5 failed, again in 0.50 s: second cause"),
    ]


class Hanging(MemoryStore):
    async def hang(self) -> None:
        await asyncio.sleep(3600)

    async def put(self, key: str, data: Buffer) -> str:
        await self.hang()
        return ""

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        if not after:
            yield ObjectInfo("a", 1, "")
        await self.hang()

    async def delete(self, keys: Sequence[str]) -> None:
        await self.hang()

    async def aclose(self) -> None:
        await self.hang()


async def test_every_call_ends() -> None:
    store = RetryingStore(Hanging(), attempts=2, deadline_s=0.02, sleep=no_sleep)
    for call in (store.put("k", b""), store.delete(["k"]), keys(store)):
        with pytest.raises(StoreUnavailable, match="no answer within"):
            await asyncio.wait_for(call, 60)
    await asyncio.wait_for(store.aclose(), 60)


def test_deadlines_grow_with_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []
    timeout = asyncio.timeout

    def spy(delay: float) -> asyncio.Timeout:
        deadlines.append(delay)
        return timeout(delay)

    monkeypatch.setattr(asyncio, "timeout", spy)

    async def whole() -> None:
        store = RetryingStore(MemoryStore())
        await store.put("k", bytes(8_000_000))
        await store.get("k")
        await store.get("k", memoryview(bytearray(9_000_000)))
        await store.delete(["k"] * 1000)
        await keys(store)

    asyncio.run(whole())
    put, get, get_into, delete, *scan = deadlines
    assert (put, get_into, delete, scan) == (68, 69, 110, [60])
    assert get > 60 + 256


async def test_cancelling_is_not_retried() -> None:
    task = asyncio.create_task(RetryingStore(Hanging()).put("k", b""))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancelled_scan_ends_the_listing_below_it() -> None:
    ended: list[str] = []

    class Tidy(MemoryStore):
        async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
            yield ObjectInfo("a", 1, "")
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(0)  # as a store that gives its connection back
                ended.append("cancelled")
                raise

    async def whole() -> None:
        task = asyncio.ensure_future(keys(RetryingStore(Tidy())))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(whole())
    assert ended == ["cancelled"]


def test_scan_continues_with_the_answer_that_the_listing_awaited() -> None:
    class Answering(MemoryStore):
        async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
            for key in "abc":
                answer = asyncio.get_running_loop().create_future()
                asyncio.get_running_loop().call_soon(answer.set_result, key)
                await asyncio.sleep(0)
                yield ObjectInfo(await answer, 1, "")

    assert asyncio.run(keys(RetryingStore(Answering()))) == list("abc")


class Stuttering(MemoryStore):
    """A scan that breaks off after each object."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        self.asked.append(after)
        async for info in super().scan(prefix, after):
            yield info
            raise StoreUnavailable("broke off")


async def test_scan_continues_behind_its_last_key_and_progress_earns_new_attempts() -> None:
    inner = Stuttering()
    for key in "abcdef":
        await inner.put(key, b"")
    assert await keys(RetryingStore(inner, attempts=2, sleep=no_sleep)) == list("abcdef")
    assert inner.asked == ["", *"abcdef"]


def test_a_put_whose_outcome_is_unknown_is_repeated() -> None:
    class Ambiguous(MemoryStore):
        puts = 0

        async def put(self, key: str, data: Buffer) -> str:
            await super().put(key, data)
            self.puts += 1
            if self.puts < 3:
                raise StoreUnavailable("the answer was lost")
            return "crc32c"

    inner = Ambiguous()
    assert asyncio.run(RetryingStore(inner, sleep=no_sleep).put("k", b"1")) == "crc32c"
    assert inner.puts == 3
    assert asyncio.run(inner.get("k")) == b"1"


def test_put_if_absent_may_meet_the_object_of_its_own_lost_answer() -> None:
    class Ambiguous(StoreWrapper):
        answers = 0

        async def put_if_absent(self, key: str, data: Buffer) -> str | None:
            checksum = await self._inner.put_if_absent(key, data)
            self.answers += 1
            if self.answers == 1:
                raise StoreUnavailable("the answer was lost")
            return checksum

    inner = MemoryStore()
    assert asyncio.run(RetryingStore(Ambiguous(inner), sleep=no_sleep).put_if_absent("k", b"1")) is None
    assert asyncio.run(inner.get("k")) == b"1"


def test_store_that_gives_up_stalled_transfers_names_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow link a chunk may take long: it is not cut off above, where nobody sees whether bytes flow."""
    deadlines: list[float] = []
    timeout = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda delay: (deadlines.append(delay), timeout(delay))[1])

    class Patient(MemoryStore):
        slowest_rate = 10_000

    asyncio.run(RetryingStore(Patient()).put("k", bytes(8_000_000)))
    assert deadlines == [60 + 800]
