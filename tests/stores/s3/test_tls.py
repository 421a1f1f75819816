"""S3 over real TLS on loopback: handshakes that fail, certificates that are wrong, and what is left after it."""

from __future__ import annotations

import asyncio
import datetime
import os
import random
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from stores.s3.test_s3_store import credentials
from stores.s3.test_transport import Server
from support.s3stub import Bucket, serving
from support.tls import Authority, Front

from tierd.core.errors import StoreRefused, StoreUnavailable, TierdError
from tierd.core.urls import parse_url
from tierd.stores.retry import RetryingStore
from tierd.stores.s3.http1 import DEFAULT_LIMITS, S3Limits
from tierd.stores.s3.s3_store import S3Store
from tierd.stores.s3.transport import DirectSession

__all__ = ["credentials"]  # the fixture
_DAY = datetime.timedelta(days=1)
_BROKEN = r"ended the connection|handshake was cut off|connection broke|ended after|EndpointConnectionError"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with serving(Bucket()) as bucket:
        yield bucket


@pytest.fixture(autouse=True)
def trusted(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))


def use(
    port: int,
    call: Callable[[S3Store], Awaitable[None]],
    scheme: str = "https",
    host: str = "127.0.0.1",
    limits: S3Limits = DEFAULT_LIMITS,
) -> None:
    async def whole() -> None:
        url = f"s3://bucket/p?endpoint={scheme}://{host}:{port}&addressing=path&region=us-east-1"
        store = S3Store(parse_url(url), limits)
        store.probe.next_at = None  # no puts but the test's
        try:
            await call(store)
        finally:
            await store.aclose()

    asyncio.run(whole())


def session_of(store: S3Store) -> DirectSession:
    return store._client._endpoint.http_session


def check_nothing_is_left(session: DirectSession, slots: int) -> None:
    """Of calls that have ended: every slot is free, and every connection is closed or parked whole."""
    assert session.in_use == 0
    assert session._slots._value == slots
    assert not session._busy
    assert all(line.is_idle() for parked in session._parked.values() for line in parked)


def sockets() -> int:
    links = []
    for one in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(one))
        except OSError:
            continue
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.parametrize("seed", range(2))
def test_handshakes_that_are_reset_cost_no_slot(seed: int, authority: Authority, bucket: Bucket) -> None:
    """35 % of all handshakes fail, each call on a connection of its own: ten times more failures than there are slots,
    and the tier takes every put in the end."""
    rng, limits = random.Random(seed), S3Limits(connections=4, idle_s=0)
    harmed: list[str] = []

    def harm() -> str:
        found = rng.choice(("reset before", "reset within")) if rng.random() < 0.35 else ""
        harmed.extend([found] if found else [])
        return found

    async def no_sleep(_: float) -> None:
        await asyncio.sleep(0)

    async def call(store: S3Store) -> None:
        retrying = RetryingStore(store, attempts=30, sleep=no_sleep)
        before = None
        for number in range(30):
            await asyncio.gather(*(retrying.put(f"{number}-{one}", os.urandom(100)) for one in range(3)))
            check_nothing_is_left(session_of(store), limits.connections)
            if number == 5:
                before = sockets(), threading.active_count()
        assert before and sockets() <= before[0] + 12  # those of the server, too, which close a moment later

    with Front(bucket.port, authority.server("127.0.0.1"), harm).running() as front:
        use(front.port, call, limits=limits)
    assert len(bucket.objects) == 90
    assert len(harmed) > 34


def test_every_connection_verifies_the_certificate(authority: Authority, bucket: Bucket) -> None:
    """A TLS session that is resumed goes on with a certificate that has expired meanwhile; it saves next to nothing."""

    async def call(store: S3Store) -> None:
        for number in range(3):
            await RetryingStore(store).put(f"{number}", b"data")
            front.hang_up()
            await asyncio.sleep(0.05)
        front.context = authority.server("127.0.0.1", -3 * _DAY, -_DAY)
        with pytest.raises(StoreRefused, match="has expired"):
            await store.put("last", b"data")

    with Front(bucket.port, authority.server("127.0.0.1")).running() as front:
        use(front.port, call)
    assert front.connections >= 4
    assert front.resumed == 0


@pytest.mark.parametrize("harm", ["reset before", "reset within", "half", "cut"])
@pytest.mark.parametrize("tls", [True, False])
def test_a_call_that_breaks_leaves_nothing_and_says_why(
    harm: str, tls: bool, authority: Authority, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [harm]
    bucket.objects["p/k"] = bytes(1000)

    async def call(store: S3Store) -> None:
        for doing in (lambda: store.get("k"), lambda: store.put("k", b"1"), lambda: anext(store.scan(""))):
            now[0] = harm
            session = store._client and session_of(store)
            for parked in session._parked.values() if session else ():  # so that each is on a new connection
                for line in parked:
                    line.connection.close()
            with pytest.raises(StoreUnavailable, match=_BROKEN):
                await doing()
            check_nothing_is_left(session_of(store), DEFAULT_LIMITS.connections)
            now[0] = ""
            await store.put("k", bytes(1000))
            check_nothing_is_left(session_of(store), DEFAULT_LIMITS.connections)

    context = authority.server("127.0.0.1") if tls else None
    with Front(bucket.port, context, lambda: now[0]).running() as front:
        use(front.port, call, "https" if tls else "http")


@pytest.mark.parametrize(
    ("host", "begins", "ends", "says"),
    [
        ("127.0.0.1", -3 * _DAY, -_DAY, "the certificate of 127.0.0.1 has expired: renew it"),
        ("127.0.0.1", _DAY, 3 * _DAY, "not valid yet: set this node's clock"),
        ("elsewhere.example", -_DAY, _DAY, "is not for 127.0.0.1: write an endpoint with a name"),
    ],
    ids=["expired", "not yet valid", "wrong host"],
)
def test_a_wrong_certificate_is_named_with_the_way_out(
    host: str, begins: datetime.timedelta, ends: datetime.timedelta, says: str, authority: Authority, bucket: Bucket
) -> None:
    async def call(store: S3Store) -> None:
        for _ in range(3):
            with pytest.raises(StoreRefused) as caught:
                await store.get("k")
            assert says in str(caught.value)
            check_nothing_is_left(session_of(store), DEFAULT_LIMITS.connections)

    with Front(bucket.port, authority.server(host, begins, ends)).running() as front:
        use(front.port, call)


def test_a_certificate_of_nobody_that_is_trusted_is_named(
    authority: Authority, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE")

    async def call(store: S3Store) -> None:
        with pytest.raises(StoreRefused, match=r"of 127\.0\.0\.1 is not trusted .* in AWS_CA_BUNDLE"):
            await store.get("k")
        check_nothing_is_left(session_of(store), DEFAULT_LIMITS.connections)

    with Front(bucket.port, authority.server("127.0.0.1")).running() as front:
        use(front.port, call)


def test_tls_on_the_server_alone_is_named() -> None:
    async def alert(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x15\x03\x01\x00\x02\x02\x46")

    async def call(store: S3Store) -> None:
        with pytest.raises(StoreRefused, match=r"speaks TLS on this port; write endpoint=https"):
            await store.get("k")
        check_nothing_is_left(session_of(store), DEFAULT_LIMITS.connections)

    Server(alert).use(call)


def test_tls_on_the_client_alone_leaves_nothing(bucket: Bucket) -> None:
    async def call(store: S3Store) -> None:
        with pytest.raises(TierdError):
            await store.get("k")
        check_nothing_is_left(session_of(store), DEFAULT_LIMITS.connections)

    use(bucket.port, call)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_connection_is_used_again_where_sessions_can_be_resumed(
    version: ssl.TLSVersion, authority: Authority, bucket: Bucket
) -> None:
    """TLS 1.3 sends tickets whenever it likes: they are no end of a connection."""
    context = authority.server("127.0.0.1")
    context.maximum_version = context.minimum_version = version
    context.num_tickets = 5

    async def call(store: S3Store) -> None:
        data = os.urandom(3 << 20)
        for number in range(5):
            await store.put(f"{number}", data)
            assert await store.get(f"{number}") == data
            await asyncio.sleep(0.02)
        check_nothing_is_left(session_of(store), DEFAULT_LIMITS.connections)

    with Front(bucket.port, context).running() as front:
        use(front.port, call)
    assert front.connections == 1


def test_a_handshake_that_stalls_is_given_up_and_named(bucket: Bucket) -> None:
    async def call(store: S3Store) -> None:
        with pytest.raises(StoreUnavailable, match=r"stalled: no byte for 0\.3 s in the TLS handshake"):
            await store.get("k")
        check_nothing_is_left(session_of(store), DEFAULT_LIMITS.connections)

    with Front(bucket.port, None, lambda: "mute").running() as front:
        use(front.port, call, limits=S3Limits(connect_s=0.3))


def test_a_cancelled_handshake_leaves_nothing(authority: Authority, bucket: Bucket) -> None:
    async def call(store: S3Store) -> None:
        await store.get_client()  # making the client may take longer on a busy machine than all that follows
        for _ in range(40):  # more than there are slots
            task = asyncio.create_task(store.get("k"))
            await asyncio.sleep(0.01)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=60)
            assert done
        session = session_of(store)
        assert session.in_use == 0

    with Front(bucket.port, None, lambda: "mute").running() as front:  # it takes the connection, and says nothing
        use(front.port, call)
