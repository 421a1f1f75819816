"""How many requests a place is asked at once, once it has refused some."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from email.utils import formatdate
from itertools import pairwise
from pathlib import Path

import pytest
from stores.s3.test_s3_store import credentials
from support.s3stub import Bucket, serving
from support.world import reconciler

from tierd.cli.commands.status_lines import activity_text
from tierd.core.errors import StoreUnavailable
from tierd.core.urls import parse_url
from tierd.daemon.daemon_status import make_status
from tierd.ipc.message_codec import error_reply
from tierd.spool.spool import Spool
from tierd.stores.base import Buffer, ObjectInfo
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.memory_store import MemoryStore
from tierd.stores.retry import CongestionWindow, RetryingStore, StoreThrottled
from tierd.stores.s3.s3_store import S3Store
from tierd.stores.s3.server_errors import response_error
from tierd.stores.store_wrappers import CountedStore, DeletionGuard, LimitedStore

__all__ = ["credentials"]  # the fixture


class Busy(MemoryStore):
    """Takes `room` requests at once and refuses every other one."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.here = room, 0
        self.refused: list[bool] = []  # by request

    async def put(self, key: str, data: Buffer) -> str:
        is_refused = self.here >= self.room
        self.refused.append(is_refused)
        self.here += not is_refused
        await asyncio.sleep(0.002)
        self.here -= not is_refused
        if is_refused:
            raise StoreThrottled("put: SlowDown 503")
        return await super().put(key, data)


async def asked(store: RetryingStore, at_once: int, times: int) -> None:
    async def some(number: int) -> None:
        for turn in range(times):
            await store.put(f"{number}/{turn}", b"x")

    await asyncio.gather(*(some(number) for number in range(at_once)))


async def test_a_place_that_takes_few_is_soon_asked_few_at_once() -> None:
    busy = Busy(4)
    store = RetryingStore(busy, attempts=200, rng=lambda: 0.001, sleep=lambda _: asyncio.sleep(0.001))
    await asked(store, 32, 20)
    assert len(busy.objects) == 640
    late = busy.refused[len(busy.refused) // 2 :]
    assert sum(late) < len(late) / 4, "it goes on asking more than the place takes"
    assert busy.refused[:32].count(True) >= 20, "it did not ask as many as it may while nothing was refused"


async def test_and_many_again_when_it_takes_many() -> None:
    busy = Busy(2)
    store = RetryingStore(busy, attempts=200, rng=lambda: 0.001, sleep=lambda _: asyncio.sleep(0.001))
    await asked(store, 16, 5)
    assert store._window._most < 8
    busy.room = 1000
    await asked(store, 16, 40)
    assert store._window._most >= 16


async def test_requests_that_were_under_way_together_count_as_one_refusal() -> None:
    now = 0.0
    window = CongestionWindow(clock=lambda: now)

    async def refused() -> None:
        with pytest.raises(StoreThrottled):
            async with window.request():
                await asyncio.sleep(0.01)
                raise StoreThrottled("SlowDown")

    now = 1.0
    waiting = [asyncio.ensure_future(refused()) for _ in range(16)]
    await asyncio.sleep(0.005)
    now = 2.0
    await asyncio.gather(*waiting)
    assert window._most == 8


async def test_nothing_begins_before_the_place_wants_to_be_asked_again() -> None:
    now, begun = 0.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        await asyncio.sleep(0)

    window = CongestionWindow(clock=lambda: now, sleep=sleep)
    with pytest.raises(StoreThrottled):
        async with window.request():
            raise StoreThrottled("SlowDown", 7.0)
    async with window.request():
        begun.append(now)
    assert begun == [7.0]


async def test_later_refusal_without_a_time_ends_no_wait_that_the_place_asked_for() -> None:
    window = CongestionWindow(clock=lambda: 0.0, rng=lambda: 0.0)

    async def refused(wait_s: float, after: asyncio.Event | None) -> None:
        with pytest.raises(StoreThrottled):
            async with window.request():
                await (after.wait() if after else asyncio.sleep(0))
                raise StoreThrottled("SlowDown", wait_s)

    later = asyncio.Event()
    waiting = asyncio.ensure_future(refused(0.0, later))
    await refused(7.0, None)
    later.set()
    await waiting
    assert window.closed_s == 7.0


async def narrow() -> CongestionWindow:
    """A window that lets one request in, because the server has refused another."""
    now = 0.0
    window = CongestionWindow(clock=lambda: now, rng=lambda: 0.0)
    with contextlib.suppress(StoreThrottled):
        async with window.request():
            raise StoreThrottled("SlowDown")
    now = 1000.0
    return window


async def test_cancelled_request_and_cancelled_waiter_leave_their_room() -> None:
    window = await narrow()
    holder = asyncio.Event()

    async def held() -> None:
        async with window.request():
            await holder.wait()

    first, second, third = (asyncio.ensure_future(held()) for _ in range(3))
    await asyncio.sleep(0.01)
    second.cancel()
    first.cancel()
    await asyncio.sleep(0.01)
    holder.set()
    await asyncio.wait_for(third, 60)
    assert window._under_way == 0


@pytest.mark.parametrize(
    ("code", "status", "after", "wait_s"),
    [
        ("SlowDown", 503, "", 0.0),
        ("SlowDown", 503, "3", 3.0),
        ("429", 429, "100000", 60.0),
        ("ThrottlingException", 400, "2", 2.0),
        ("KMS.ThrottlingException", 400, "", 0.0),
        ("SlowDown", 503, "9" * 400, 60.0),
        ("SlowDown", 503, "Wed, 21 Oct 2026 07:28:00 GMT", 7.0),
        ("SlowDown", 503, "Wednesday, 21-Oct-26 07:28:00 GMT", 7.0),
        ("SlowDown", 503, "Wed Oct 21 07:28:00 2026", 7.0),
        ("SlowDown", 503, "Thu, 22 Oct 2026 07:28:00 GMT", 60.0),
        ("SlowDown", 503, "Tue, 20 Oct 2026 07:28:00 GMT", 0.0),
        ("SlowDown", 503, "soon", 0.0),
        ("SlowDown", 503, "-1", 0.0),
    ],
)
def test_throttled_answer_gives_the_time_to_wait(code: str, status: int, after: str, wait_s: float) -> None:
    error = response_error("s3://b", "put k", code, status, "", after, "Wed, 21 Oct 2026 07:27:53 GMT")
    assert isinstance(error, StoreThrottled)
    assert error.wait_s == wait_s


def test_a_date_without_the_servers_own_counts_by_this_nodes_clock() -> None:
    for ahead, wait_s in ((30, 30.0), (-30, 0.0), (1e6, 60.0)):
        error = response_error("s3://b", "put k", "SlowDown", 503, "", formatdate(time.time() + ahead, usegmt=True))
        assert isinstance(error, StoreThrottled)
        assert abs(error.wait_s - wait_s) <= 5.0


class Listed(MemoryStore):
    """Refuses every request, and counts the listings that it is asked for."""

    listings = 0

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        raise StoreThrottled("SlowDown", 40.0)

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        self.listings += 1
        raise StoreThrottled("SlowDown", 40.0)
        yield


@pytest.mark.timeout(30)
async def test_a_listing_is_a_request_and_waits_too() -> None:
    """A daemon that is refused lists its tier again first, so that its listings were the storm."""

    inner, held_up = Listed(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        held_up.set()
        await asyncio.sleep(3600)

    store = RetryingStore(inner, attempts=1, sleep=sleep)
    with pytest.raises(StoreThrottled):
        await store.get("k")
    listing = asyncio.ensure_future(anext(store.scan("")))
    await held_up.wait()
    assert not inner.listings, "the store asked for no request"
    listing.cancel()
    await asyncio.gather(listing, return_exceptions=True)


async def test_a_refused_listing_closes_the_store_for_other_requests() -> None:
    store = RetryingStore(Listed(), attempts=1)
    with pytest.raises(StoreThrottled):
        await anext(store.scan(""))
    assert 30.0 < store.retry_after_s <= 40.0
    assert store._window._under_way == 0


async def test_how_long_a_store_is_left_alone_is_known_through_all_its_wrappers() -> None:
    class Asking(MemoryStore):
        async def get(self, key: str, into: memoryview | None = None) -> Buffer:
            raise StoreThrottled("SlowDown", 40.0)

    inner = RetryingStore(Asking(), attempts=1)
    store = CountedStore(DeletionGuard(EncryptedStore(LimitedStore(inner, 1 << 20, None), EncryptionKey(b"k" * 32))))
    assert store.retry_after_s == 0.0
    with pytest.raises(StoreThrottled):
        await inner.get("k")
    assert 30.0 < store.retry_after_s <= 40.0


def test_status_says_until_when_a_tier_is_left_alone(tmp_path: Path) -> None:
    class Paused(MemoryStore):
        retry_after_s = 3600.0

    store = Paused()
    daemon = reconciler(Spool(tmp_path), {"tier": store})
    [tier] = make_status(daemon, 0, 0).tiers
    assert tier.asked_until is not None
    left = datetime.fromisoformat(tier.asked_until) - datetime.now(UTC)
    assert 3500 < left.total_seconds() <= 3600
    shown = activity_text({"doing": "flushing", "retry_in_s": None, "asked_until": tier.asked_until})
    assert shown == f"flushing; waits until {tier.asked_until[11:19]} UTC, as the server asked"
    assert activity_text({"doing": None, "retry_in_s": None}) == "idle", "a daemon of an older version"


def test_throttling_is_reported_to_a_client_as_a_condition_that_every_version_knows() -> None:
    assert error_reply(StoreThrottled("SlowDown", 3.0))["error"] == "StoreUnavailable"


def test_a_server_s_fault_narrows_nothing() -> None:
    error = response_error("s3://b", "put k", "InternalError", 500, "")
    assert isinstance(error, StoreUnavailable)
    assert not isinstance(error, StoreThrottled)


def test_header_retry_after_is_obeyed(credentials: None) -> None:
    with serving(Bucket()) as bucket:
        bucket.deny("GetObject", status=503, code="SlowDown")
        bucket.headers["Retry-After"] = "1"

        async def work() -> list[float]:
            store = RetryingStore(S3Store(parse_url(bucket.url())), attempts=3, rng=lambda: 0.0)
            with pytest.raises(StoreThrottled):
                await store.get("k")
            await store.aclose()
            return bucket.times["GetObject"]

        times = asyncio.run(work())
    assert len(times) == 3
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(times))
