"""What wakes the daemon, what it tells its supervisor, and when it ends by itself."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.doubles import Double
from support.timed import timed
from support.waiting import until, wait_until
from support.world import RUN, commit, config, part, reconciler, running, settle
from watchdog.observers.api import BaseObserver

from tierd.core.config import Config, from_urls
from tierd.core.errors import StoreUnavailable
from tierd.daemon import daemon_service
from tierd.daemon.host_events import notify, watch_stages, watchdog_interval
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Attach
from tierd.spool.spool import Spool


@pytest.fixture
def reported(tmp_path, monkeypatch):
    """A supervisor's socket; a function that gives what it has received."""
    supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    supervisor.bind(str(tmp_path / "notify"))
    supervisor.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    seen: list[str] = []

    def receive() -> list[str]:
        try:
            while True:
                seen.append(supervisor.recv(1000).decode())
        except BlockingIOError:
            return seen

    yield receive
    supervisor.close()


async def test_a_commit_wakes_the_daemon_without_a_rescan(spool):
    async with running(reconciler(spool, {"tier": Double()}, rescan="1h")) as daemon:
        with watch_stages(spool, daemon.wake):
            await settle(daemon)
            for step in range(3):
                await asyncio.sleep(0.1)
                commit(spool, part(step))
                await until(lambda step=step: daemon.tiers.observed.has(part(step), "tier"))


async def test_rescan_finds_a_part_without_an_event(spool):
    async with running(reconciler(spool, {"tier": Double()}, rescan="0.3s")) as daemon:
        await settle(daemon)
        commit(spool, part(1))
        await until(lambda: daemon.tiers.observed.has(part(1), "tier"))


async def test_part_without_any_event_or_rescan_is_not_flushed(spool):
    """So that the two tests above can fail."""
    async with running(reconciler(spool, {"tier": Double()}, rescan="1h")) as daemon:
        await settle(daemon)
        commit(spool, part(1))
        await asyncio.sleep(1.0)
        assert not daemon.tiers.observed.has(part(1), "tier")


def test_system_without_watches_is_logged_and_the_daemon_continues(spool, monkeypatch, caplog):
    from watchdog.observers import Observer

    def exhausted(self):
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr(Observer, "start", exhausted)

    async def work():
        with watch_stages(spool, lambda: None):
            return True

    assert asyncio.run(work())
    assert "inotify watch limit reached" in caplog.text


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [("2000000", None, 1.0), ("0", None, None), ("x", None, None), ("", None, None), ("2000000", "1", None)],
)
def test_the_watchdog_is_fed_twice_as_often_as_it_bites(monkeypatch, usec, pid, expected):
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", pid or str(os.getpid()))
    assert watchdog_interval() == expected


def test_without_a_supervisor_nothing_is_said(monkeypatch):
    sent = []

    class Watched(socket.socket):
        def sendto(self, data, *address):
            sent.append(address)
            return super().sendto(data, *address)

    monkeypatch.setattr(socket, "socket", Watched)
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    assert not sent
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    notify("READY=1")
    assert sent == [("/nowhere/at/all",)]  # in vain, and nobody notices


@pytest.mark.timeout(20)
def test_a_supervisor_that_does_not_read_does_not_hold_the_daemon(reported):
    for _ in range(2000):  # more than any system's net.unix.max_dgram_qlen
        notify("WATCHDOG=1")
    assert 0 < len(reported()) < 2000


def test_ready_waits_for_a_supervisor_that_is_busy(reported):
    for _ in range(2000):
        notify("WATCHDOG=1")
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(notify, "READY=1")
        time.sleep(0.05)
        wait_until(lambda: reported()[-1] == "READY=1")
        sent.result()


def test_an_abstract_socket_is_understood(monkeypatch):
    name = f"tierd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind("\0" + name)
        supervisor.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        notify("READY=1")
        assert supervisor.recv(100) == b"READY=1"


# -- the service, whole -----------------------------------------------------------------------------------------------


def served(spool: Spool, tmp_path) -> Config:
    (tmp_path / "tier").mkdir(exist_ok=True)
    return from_urls(str(spool.root), [f"file://{tmp_path / 'tier'}"])


async def test_it_says_ready_alive_and_stopping_in_this_order(spool, tmp_path, reported, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    daemon = asyncio.ensure_future(daemon_service.serve(served(spool, tmp_path)))
    await until(lambda: reported().count("WATCHDOG=1") >= 3)
    commit(spool, part(1))
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: reported() and daemon.done())  # a supervisor reads, too, or its queue is full
    await daemon
    seen = reported()
    states = [one for one in seen if not one.startswith(("WATCHDOG=", "STATUS="))]
    assert states == ["READY=1", "STOPPING=1"]  # alive also while it drains
    assert seen[-1].startswith("STATUS=drained: nothing is left")
    assert "READY=1" in seen[:2]
    assert (tmp_path / "tier" / RUN / "manifests").is_dir(), "what was committed before SIGTERM was drained"


async def test_an_idle_daemon_ends_when_the_last_trainer_has_gone_and_all_is_flushed(spool, tmp_path, monkeypatch):
    timed(monkeypatch, grace_s=0.4)
    daemon = asyncio.ensure_future(daemon_service.serve(served(spool, tmp_path), until_idle=True, await_trainer=True))
    await until(spool.socket.exists)
    await asyncio.sleep(1.0)
    assert not daemon.done(), "it waits for its first trainer"
    link = DaemonConnection(spool)
    await asyncio.to_thread(link.ask, Attach())
    await asyncio.sleep(1.0)
    assert not daemon.done(), "a trainer is there"
    commit(spool, part(1))
    link.close()
    async with asyncio.timeout(60):
        await daemon
    assert (tmp_path / "tier" / RUN / "manifests").is_dir()
    with spool.lock():
        pass  # and let go of the spool


async def test_idle_daemon_runs_while_a_part_is_left_to_flush(spool, monkeypatch):
    store = Double()
    store.error = StoreUnavailable("down")

    async def opened(config, stack, *, trial):
        return {"tier": store}

    monkeypatch.setattr(daemon_service, "open_tiers", opened)
    timed(monkeypatch, grace_s=0.3, backoff_s=0.05)
    commit(spool, part(1))

    daemon = asyncio.ensure_future(daemon_service.serve(config(spool, "tier"), until_idle=True))
    await until(spool.socket.exists)
    link = DaemonConnection(spool)
    await asyncio.to_thread(link.ask, Attach())
    link.close()
    await asyncio.sleep(1.5)
    assert not daemon.done()
    store.error = None
    async with asyncio.timeout(60):
        await daemon


async def test_errors_of_the_observers_own_end_are_not_logged(tmp_path, monkeypatch, caplog) -> None:
    """Its thread logs an error where it is stopped between two events, and people asked what was wrong."""
    spool = Spool(tmp_path / "spool")
    stop = BaseObserver.stop

    def stopped(observer: BaseObserver) -> None:
        logging.getLogger("watchdog.observers.inotify").error("called when the thread is inactive")
        stop(observer)

    monkeypatch.setattr(BaseObserver, "stop", stopped)
    with watch_stages(spool, lambda: None):
        pass
    assert not caplog.records
    logging.getLogger("watchdog.observers.inotify").error("another one's")
    assert [one.message for one in caplog.records] == ["another one's"]
