"""More connections to the hand-off socket than a node has trainers: threads stay bounded, and saves go on."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from support.timed import timed_client
from support.training import restored, same, tensors
from support.waiting import wait_until

import tierd
from tierd.daemon import client_connections
from tierd.ipc.daemon_connection import connect_to_daemon
from tierd.spool.arena import Arena

CROWD = 300  # connections; each has two descriptors in this process, which is the daemon, too
pytestmark = pytest.mark.usefixtures("quick")


def threads() -> int:
    return sum(thread.name == "tierd-line" for thread in threading.enumerate())


def _leads_to_a_socket(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:  # the directory's own
        return False


@pytest.fixture(autouse=True)
def enough_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def crowd(spool, daemon) -> Iterator[list[socket.socket]]:
    """Connections that say nothing, more than the daemon takes."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(CROWD):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connect_to_daemon(peer, spool.handoff_socket)
            peer.settimeout(60)
            found.append(peer)
        yield found


def first_words(peers: list[socket.socket]) -> list[dict]:
    return [msgspec.json.decode(peer.recv(1 << 16)) for peer in peers]


def test_more_connections_than_the_cap_are_refused_by_name_and_cost_nothing(crowd, daemon, caplog):
    """The issue's row: 1,479 connections made 1,488 threads."""
    said = first_words(crowd)
    assert [one["ok"] for one in said] == [True] * client_connections.MAX_HANDOFF_CONNECTIONS + [False] * (
        CROWD - client_connections.MAX_HANDOFF_CONNECTIONS
    )
    assert {
        (one["error"], str(client_connections.MAX_HANDOFF_CONNECTIONS) in one["message"])
        for one in said
        if not one["ok"]
    } == {("DaemonUnavailable", True)}
    assert crowd[-1].recv(1 << 16) == b""  # and the connection ended
    assert threads() == client_connections.MAX_HANDOFF_CONNECTIONS == len(daemon.handoff.connections)
    sockets = [one for one in os.listdir("/proc/self/fd") if _leads_to_a_socket(one)]
    assert (
        len(sockets) < CROWD + client_connections.MAX_HANDOFF_CONNECTIONS + 50
    )  # the daemon keeps none of those that it refused
    logged = [*caplog.get_records("setup"), *caplog.records]
    refusals = [record for record in logged if "refused" in record.getMessage()]
    assert len(refusals) == 1  # a flood of them fills no log


def test_a_save_beside_a_crowd_is_written_by_the_trainer_and_then_handed_over_again(spool, crowd, monkeypatch, caplog):
    first_words(crowd)
    timed_client(monkeypatch, alone_s=0.0)
    with caplog.at_level(logging.WARNING, "tierd"), tierd.Checkpointer(spool.root, "run") as ckpt:
        ckpt.save(1, tensors(1)).wait(timeout=60)
        ckpt.save(2, tensors(2)).wait(timeout=60)
        assert ckpt.stats.handed_over == 0  # the daemon refused, and the trainer went on by itself
        assert threads() == client_connections.MAX_HANDOFF_CONNECTIONS
        said = [
            record.getMessage() for record in caplog.records if "writes its checkpoints itself" in record.getMessage()
        ]
        assert (
            len(said) == 1 and str(client_connections.MAX_HANDOFF_CONNECTIONS) in said[0] and str(spool.root) in said[0]
        )
        monkeypatch.setattr(client_connections, "HANDOFF_IDLE_S", 0.2)
        time.sleep(0.3)
        steps = itertools.count(3)

        def is_handed_over() -> bool:
            step = next(steps)
            ckpt.save(step, tensors(step)).wait(timeout=60)
            return ckpt.stats.handed_over > 0

        wait_until(is_handed_over)  # idle connections give way; a refusal may still be on its way
        wait_until(lambda: threads() <= client_connections.MAX_HANDOFF_CONNECTIONS)
        last, before = next(steps), ckpt.stats.handed_over
        ckpt.save(last, tensors(last)).wait(timeout=60)
        assert ckpt.stats.handed_over == before + 1
    assert same(restored(spool)[1], last)


def test_trainer_with_a_handed_over_snapshot_gives_way_last_and_loses_nothing(spool, daemon, monkeypatch):
    """A trainer between two saves is silent for long; it stays while others hold connections for nothing."""
    monkeypatch.setattr(client_connections, "MAX_HANDOFF_CONNECTIONS", 4)
    monkeypatch.setattr(client_connections, "HANDOFF_IDLE_S", 0.0)

    def newcomer() -> None:
        peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connect_to_daemon(peer, spool.handoff_socket)
        peer.settimeout(60)
        assert msgspec.json.decode(peer.recv(1 << 16))["ok"]

    with tierd.Checkpointer(spool.root, "run") as ckpt, contextlib.ExitStack() as stack:
        ckpt.save(1, tensors(1)).wait(timeout=60)
        assert ckpt.stats.handed_over == 1
        (first,) = [line for line in daemon.handoff.connections if line.writer]
        for _ in range(8):  # twice as many as there is room for
            newcomer()
        assert first in daemon.handoff.connections and not first.ending  # a trainer would come again, and nobody notice
        ckpt.save(2, tensors(2)).wait(timeout=60)
        assert ckpt.stats.handed_over == 2
        wait_until(lambda: not any(line.working for line in daemon.handoff.connections))
        with daemon.handoff._changed:
            (mine,) = [line for line in daemon.handoff.connections if line.writer]
            assert mine is first
            for line in daemon.handoff.connections:
                line.answered_at = time.monotonic() + (100 if line is not mine else 0)
                line.arenas.setdefault(63, Arena(4096))
        newcomer()  # all handed over a snapshot, and the trainer is the one that was silent for longest
        wait_until(lambda: mine not in daemon.handoff.connections)
        assert not daemon.handoff.orphans  # it lives: nobody may take its memory for a dead one's
        ckpt.save(3, tensors(3)).wait(timeout=60)
        assert ckpt.stats.handed_over == 3  # over a connection of its own, made anew
    assert same(restored(spool)[1], 3)


def test_handoff_without_a_thread_is_a_refusal_and_the_daemon_continues(spool, daemon, monkeypatch):
    """As under TasksMax= or ulimit -u."""
    real, refusing = threading.Thread.start, threading.Event()

    def start(self):
        if self.name == "tierd-line" and refusing.is_set():
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    refusing.set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        connect_to_daemon(peer, spool.handoff_socket)
        peer.settimeout(60)
        (said,) = first_words([peer])
        assert not said["ok"] and "thread" in said["message"]
    before = len(os.listdir("/proc/self/fd"))
    refusing.clear()
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        ckpt.save(1, tensors(1)).wait(timeout=60)
        assert ckpt.stats.handed_over == 1
    assert not [line for line in daemon.handoff.connections if line.thread is None]
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
