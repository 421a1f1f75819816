"""A daemon that is stopped when a launch begins: it is waited for once, for seconds, and the spool read without it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.ranks import Group
from support.stopped import running
from support.timed import timed_client
from support.training import restored, tensors
from support.waiting import wait_until

import tierd
from tierd.client import daemon_attachment
from tierd.client.checkpointer import internals
from tierd.client.restoring import part_source
from tierd.core.errors import DaemonSilent, DaemonUnavailable, StoreUnavailable, TierdError
from tierd.ipc import daemon_start
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest

HELLO_S = 1.0  # that a greeting is waited for here; five seconds otherwise
MOST_S = 12.0  # about five seconds are promised, once, and the machine may be busy; it was thirty, again and again


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    timed_client(monkeypatch, hello_s=HELLO_S)


@pytest.fixture
def stopped(spool, tmp_path) -> Iterator:
    """A daemon with a tier, which has all of step 1, and is stopped."""
    with running(spool, tmp_path / "tier") as process:
        save(spool, 1)
        wait_until(lambda: list((tmp_path / "tier").glob("run/manifests/*/*.json")))
        process.send_signal(signal.SIGSTOP)
        yield process


def save(spool, step: int) -> None:
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        ckpt.save(step, tensors(step)).wait(timeout=60)


def status(spool) -> dict:
    """As the daemon says; empty where none answers."""
    try:
        with DaemonConnection(spool) as asked:
            return asked.ask(StatusRequest(), 60)["status"]
    except DaemonUnavailable:
        return {}


@contextmanager
def within(seconds: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


def names_it(error: object, pid: int) -> bool:
    """Whether a message tells which process is silent, and the way out."""
    return all(one in str(error) for one in (f"pid {pid}", f"kill -CONT {pid}", f"kill -KILL {pid}"))


@pytest.mark.parametrize("given", [True, False])
def test_restore_of_the_spool_needs_no_silent_daemon_and_attaches_to_it_when_it_wakes(
    spool, tmp_path, stopped, caplog, given
):
    """With `to=[url]`, making a Checkpointer failed after 30 s; with `to=None`, restoring did."""
    state = tensors(0)
    with within(MOST_S):
        ckpt = tierd.Checkpointer(spool.root, "run", to=[f"file://{tmp_path / 'tier'}"] if given else None)
        found = ckpt.restore(state)
    assert found is not None and found.step == 1 and found.tier == "local"
    assert found.unreached[0].startswith(f"node {socket.gethostname()}: ")
    assert len(found.unreached) == 1 and names_it(found.unreached[0], stopped.pid)
    assert sum(names_it(one.message, stopped.pid) for one in caplog.records if one.levelname == "WARNING") == 2
    for step in (2, 3):
        ckpt.save(step, state).wait(timeout=60)
    stopped.send_signal(signal.SIGCONT)
    wait_until(internals(ckpt).daemon._link.has_unread)  # it is awake
    ckpt.save(4, state).wait(timeout=60)
    wait_until(lambda: status(spool).get("trainers") == 1)
    wait_until(lambda: len(list((tmp_path / "tier").glob("run/manifests/*/*.json"))) == 4)
    ckpt.close()


def test_next_daemon_is_started_once_the_stopped_daemon_was_ended(spool, tmp_path, stopped):
    with tierd.Checkpointer(spool.root, "run", to=[f"file://{tmp_path / 'tier'}"]) as ckpt:
        stopped.kill()
        stopped.wait()
        ckpt.save(2, tensors(2)).wait(timeout=60)
        wait_until(lambda: status(spool).get("trainers") == 1)
        pid = status(spool)["pid"]
        assert pid != stopped.pid
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not spool.socket.exists())


@pytest.mark.parametrize("left", [[], [1]])
def test_incomplete_checkpoint_in_the_spool_is_soon_an_error_that_names_the_stopped_process(spool, stopped, left):
    """Of which the spool knows that there was a newer one: its newest copy is gone."""
    stopped.send_signal(signal.SIGCONT)
    save(spool, 2)
    stopped.send_signal(signal.SIGSTOP)
    for part in spool.parts():
        if part.checkpoint.step not in left:
            shutil.rmtree(spool.path(part))  # not by tierd, which would forget it
    with (
        within(MOST_S),
        tierd.Checkpointer(spool.root, "run") as ckpt,
        pytest.raises((DaemonUnavailable, StoreUnavailable)) as raised,
    ):
        ckpt.restore(tensors(0))
    assert names_it(raised.value, stopped.pid)


@pytest.mark.parametrize("asks", [daemon_attachment, part_source])
def test_restore_does_without_a_daemon_that_is_stopped_between_two_requests(spool, stopped, monkeypatch, asks):
    stopped.send_signal(signal.SIGCONT)

    class Stopping(DaemonConnection):
        def greet(self) -> None:
            super().greet()
            self._silence_s = 1.0
            stopped.send_signal(signal.SIGSTOP)

    monkeypatch.setattr(asks, "DaemonConnection", Stopping)
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        found = ckpt.restore(tensors(0))
    assert found is not None and found.step == 1 and names_it(found.unreached[0], stopped.pid)


def test_daemon_that_accepts_no_more_callers_is_not_started_a_second_time(
    spool, tmp_path, stopped, monkeypatch, caplog
):
    """A client of a stopped daemon waits in a queue, which is full after a hundred."""
    monkeypatch.setattr(daemon_start.subprocess, "Popen", lambda *_, **__: pytest.fail("its spool is held"))
    callers = []
    with pytest.raises(BlockingIOError):
        for _ in range(10_000):
            callers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            callers[-1].connect(str(spool.socket))
    with within(MOST_S):
        ckpt = tierd.Checkpointer(spool.root, "run", to=[f"file://{tmp_path / 'tier'}"])
        found = ckpt.restore(tensors(0))
    assert found is not None and found.step == 1 and names_it(found.unreached[0], stopped.pid)
    for one in callers:
        one.close()
    ckpt.close()


def test_restore_does_without_a_daemon_that_was_stopped_before_it_listened(spool, tmp_path, monkeypatch):
    """It holds the spool, so another one could not start for a minute, and each launch failed."""
    held = f"with Spool({str(spool.root)!r}).lock(): os.kill(os.getpid(), 19)"
    script = f"import os; from tierd.spool.spool import Spool\n{held}"
    (tmp_path / "tier").mkdir()
    with subprocess.Popen([sys.executable, "-c", script]) as holder:
        try:
            assert os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT) is not None
            with within(4 * MOST_S):  # a daemon is started, and ends
                ckpt = tierd.Checkpointer(spool.root, "run", to=[f"file://{tmp_path / 'tier'}"])
            assert names_it(internals(ckpt).daemon.silence_reason, holder.pid)
            ckpt.save(1, tensors(1)).wait(timeout=60)
        finally:
            holder.kill()

    def refuse(*_: object) -> None:
        raise DaemonUnavailable("none is started any more")

    monkeypatch.setattr(daemon_attachment, "start_daemon", refuse)
    ckpt.close()
    assert restored(spool)[0].step == 1


def test_every_rank_continues_where_one_nodes_daemon_is_stopped(spool, stopped, monkeypatch):
    """Two ranks of one node: both do without it, at the same time."""
    group = Group(2)
    group.install(monkeypatch)

    def launch(rank: int) -> int | None:
        with tierd.Checkpointer(spool.root, "pair", to=[]) as ckpt:
            ckpt.save(1, tensors(rank)).wait(timeout=60)
        with tierd.Checkpointer(spool.root, "pair") as ckpt:
            found = ckpt.restore(tensors(0))
            return found.step if found else None

    with within(2 * MOST_S):
        assert group.run(launch) == [1, 1]


def test_closing_waits_for_it_for_seconds(spool, tmp_path, stopped, caplog):
    ckpt = tierd.Checkpointer(spool.root, "run", to=[f"file://{tmp_path / 'tier'}"])
    ckpt.save(2, tensors(2)).wait(timeout=60)
    with within(MOST_S):
        ckpt.close()
    assert re.search(r"closed: 1 save \(step 2\) is in the spool, and on no tier that is known of", caplog.text)
    assert restored(spool)[0].step == 2


def test_a_question_to_it_names_it_after_seconds(spool, stopped):
    with within(MOST_S), pytest.raises(DaemonSilent) as raised, DaemonConnection(spool, greeting_s=HELLO_S) as asked:
        asked.ask(StatusRequest())
    assert names_it(raised.value, stopped.pid)
    assert isinstance(raised.value, TierdError)
