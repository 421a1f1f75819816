"""A tier that gives no sign of life: a hung server, a dead mount, a slow transfer, a stopped daemon.

docs/explanation/daemon.md: the wait shows in `status`, then it is a problem, then an alert, which ends with an answer.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.doubles import Double
from support.s3stub import Bucket, serving
from support.timed import QUICK, timed
from support.waiting import until
from support.world import commit, part, reconciler, running, settle

from tierd.core.urls import parse_url
from tierd.daemon.daemon_status import TierStatus, make_status
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.tiers.tier_pauses import SilenceMonitor
from tierd.events.journal import Journal, utc_timestamp
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.memory_store import MemoryStore
from tierd.stores.open import open_store
from tierd.stores.retry import RetryingStore
from tierd.stores.store_wrappers import LimitedStore

_SHORT = {
    "listen_s": 0.02,
    "unanswered_shown_s": 0.1,
    "unanswered_problem_s": 0.3,
    "unanswered_alert_s": 0.6,
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    timed(monkeypatch, **_SHORT)


def tier_of(daemon: Reconciler) -> TierStatus:
    return make_status(daemon, 0, 0).tiers[0]


def problems(daemon: Reconciler) -> list[tuple[str, str]]:
    return [(one.severity, one.why) for one in make_status(daemon, 0, 0).problems if one.place == "tier"]


def events(daemon: Reconciler) -> list[str]:
    return [one.what for one in daemon.journal.events if one.subject == "answer"]


@contextmanager
def hanging() -> Iterator[str]:
    """The URL of a bucket whose server accepts connections and then never reads or answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        yield f"s3://bucket/p?endpoint=http://127.0.0.1:{port}&addressing=path&region=us-east-1"


class Hung(MemoryStore):
    """A store whose calls never return while it hangs, as those of a mount whose server is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = True

    async def _pass(self) -> None:
        while self.hangs:
            await asyncio.sleep(0.01)

    async def put(self, key, data):
        await self._pass()
        return await super().put(key, data)

    async def get(self, key, into=None):
        await self._pass()
        return await super().get(key, into)

    async def scan(self, prefix, after=""):
        await self._pass()
        async for info in super().scan(prefix, after):
            yield info


def test_hung_server_is_shown_then_a_problem_then_an_alert(spool: Spool) -> None:
    commit(spool, part(1))
    let_go = threading.Event()

    async def work(bucket: Bucket) -> None:
        daemon = reconciler(spool, {"tier": open_store(parse_url(bucket.url()))})
        async with running(daemon):
            await settle(daemon)
            assert tier_of(daemon).waiting_since is None
            bucket.refuse = lambda headers: let_go.wait() and None
            commit(spool, part(2), created=utc_timestamp())  # so that it does not wait for long
            daemon.wake()
            await until(lambda: tier_of(daemon).waiting_since)
            await until(lambda: any(severity == "warning" for severity, _ in problems(daemon)))
            assert "no answer for" in problems(daemon)[0][1] and "failed" not in problems(daemon)[0][1]
            await until(lambda: events(daemon) == ["failing"])
            assert [severity for severity, _ in problems(daemon)] == ["alert"]
            assert "no answer for" in problems(daemon)[0][1]
            let_go.set()
            await until(lambda: events(daemon) == ["failing", "works again"])
            await settle(daemon)
            assert tier_of(daemon).waiting_since is None and problems(daemon) == []

    with serving(Bucket()) as bucket:
        try:
            asyncio.run(work(bucket))
        finally:
            let_go.set()


@pytest.mark.parametrize("wrapped", ["alone", "limited", "encrypted"])
async def test_calls_that_never_return_are_an_alert(spool: Spool, tmp_path: Path, wrapped: str) -> None:
    commit(spool, part(1))
    hung = Hung()
    store: Store = RetryingStore(hung)
    if wrapped == "limited":
        store = LimitedStore(store, 1 << 30, None)
    if wrapped == "encrypted":
        store = EncryptedStore(store, EncryptionKey(bytes(32)))
    daemon = reconciler(spool, {"tier": store})
    async with running(daemon):
        await until(lambda: tier_of(daemon).waiting_since)
        await until(lambda: events(daemon) == ["failing"])
        hung.hangs = False
        await until(lambda: events(daemon) == ["failing", "works again"])
        await settle(daemon)
        assert problems(daemon) == []


async def test_slow_tier_that_answers_is_no_problem(spool: Spool) -> None:
    for step in range(4):
        commit(spool, part(step))

    slow = Double()
    slow.delay = 0.05
    daemon = reconciler(spool, {"tier": RetryingStore(slow)})
    async with running(daemon):
        await settle(daemon)
        assert events(daemon) == [] and problems(daemon) == []


def test_bytes_that_arrive_are_a_sign_of_life() -> None:
    """A body of 40 pieces takes longer than the alert; each piece ends the silence."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 40\r\n\r\n')
                for _ in range(40):
                    time.sleep(0.05)
                    connection.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        store = open_store(
            parse_url(f"s3://bucket/p?endpoint=http://127.0.0.1:{port}&addressing=path&region=us-east-1")
        )
        journal = Journal()

        async def work() -> None:
            checking = asyncio.ensure_future(SilenceMonitor({"tier": store}, journal, replace(QUICK, **_SHORT)).run())
            assert len(await store.get("run/x", memoryview(bytearray(40)))) == 40
            checking.cancel()
            await store.aclose()

        asyncio.run(work())
        thread.join()
    assert not journal.events


def test_bytes_in_the_buffers_of_a_hung_server_are_no_sign_of_life() -> None:
    with hanging() as url:
        store = open_store(parse_url(url))

        async def work() -> None:
            putting = asyncio.ensure_future(store.put("run/x", bytes(8 << 20)))
            await until(lambda: store.is_waiting)
            await asyncio.sleep(0.5)
            assert store.signs_of_life == 0
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)
            assert not store.is_waiting
            await store.aclose()

        asyncio.run(work())


async def test_time_in_which_the_daemon_was_stopped_does_not_count() -> None:
    store = RetryingStore(Hung())
    journal = Journal()
    silence = SilenceMonitor({"tier": store}, journal, replace(QUICK, **_SHORT))
    checking = asyncio.ensure_future(silence.run())
    asking = asyncio.ensure_future(store.get("run/x"))
    await asyncio.sleep(0.05)
    time.sleep(2.0)  # noqa: ASYNC251  # as SIGSTOP: the loop does not run
    await asyncio.sleep(0.05)
    assert not journal.events and not silence.is_problem("tier")
    for task in (checking, asking):
        task.cancel()
    await asyncio.gather(checking, asking, return_exceptions=True)
