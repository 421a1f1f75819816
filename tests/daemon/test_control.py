"""The socket: every answer is bounded and true, and nothing that a peer sends or leaves out disturbs the daemon."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.doubles import Double, contents, is_chunk, is_manifest
from support.timed import timed
from support.waiting import wait_until
from support.world import Daemon, commit, part

from tierd import cli
from tierd.core.errors import CheckpointNotFound, ConfigError, DaemonUnavailable, StoreRefused, StoreUnavailable
from tierd.daemon import client_connections
from tierd.daemon.tiers.tier_pauses import SaveCadence
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import MAX_REQUEST, Attach, Fetch, RemoveRun, ReportRequest, StatusRequest, Wait, encode_line
from tierd.spool.spool import Spool


def down() -> Double:
    store = Double()
    store.error = StoreUnavailable("down")
    return store


def raw(spool: Spool, data: bytes, *, half: bool = False) -> bytes:
    """What the daemon sends to a peer that sends `data` and, unless `half`, nothing more."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        peer.connect(str(spool.socket))
        try:
            peer.sendall(data)
            if half:
                return b""
            peer.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: peer.recv(1 << 16), b""))
        except (BrokenPipeError, ConnectionResetError):
            return b""


GARBAGE = {
    "nothing": b"",
    "empty line": b"\n",
    "noise": random.Random(1).randbytes(5000) + b"\n",
    "half a request": b'{"op":"stat',
    "no op": b"{}\n",
    "unknown op": b'{"op":"reboot"}\n',
    "wrong type": b'{"op":"candidates","run":7}\n',
    "escape in a run": b'{"op":"candidates","run":"../../etc"}\n',
    "escape in a part": json.dumps(
        {"op": "fetch", "part": {"checkpoint": {"run": "../..", "attempt": "x", "step": 1}, "rank": 0, "world": 1}}
    ).encode()
    + b"\n",
    "escape in a pin": b'{"op":"pin","checkpoint":{"run":"r","attempt":"../..","step":1},"pinned":true}\n',
    "deep": b"[" * 50_000 + b"\n",
    "oversized": b"x" * (MAX_REQUEST * 4) + b"\n",
    "oversized, no end": b"x" * (MAX_REQUEST * 4),
    "binary zeros": bytes(10_000) + b"\n",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_does_not_disturb_the_daemon(spool, kind):
    commit(spool, part(1))
    with Daemon(spool.root, {"tier": Double()}) as daemon, DaemonConnection(spool) as link:
        link.ask(Attach())
        for half in (False, True):
            answer = raw(spool, GARBAGE[kind], half=half)
            assert b'"ok":true' not in answer
        assert link.ask(StatusRequest())["status"]["trainers"] == 1
        assert not daemon.reconciler.requests.held_checkpoints
        link.ask(Wait(part=part(1), tier="tier", timeout_s=60))
        wait_until(lambda: len(daemon.control._connections) == 1)


@pytest.mark.parametrize("for_s", ["1e400", "-1e400", "-1", "0", "1e300", "NaN", "Infinity", '"inf"'])
def test_a_pause_of_no_length_is_refused_and_says_why(spool, for_s):
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        said = json.loads(raw(spool, b'{"op":"pause","for_s":%s}\n' % for_s.encode()))
        assert said["ok"] is False and said["error"] == "DaemonUnavailable" and "not valid" in said["message"]
        assert ("for_s" in said["message"]) == (for_s not in ("NaN", "Infinity"))  # those are no JSON
        assert not daemon.reconciler.pause.paused


def test_a_removal_is_logged_if_anything_was_removed(spool, caplog):
    commit(spool, part(1))
    with Daemon(spool.root, {"tier": Double()}), DaemonConnection(spool) as link:
        for run in ("nope", part(1).checkpoint.run):
            assert link.ask(RemoveRun(run=run), 60)["ok"]
            said = [record.getMessage() for record in caplog.records if "was deleted, as asked" in record.getMessage()]
            assert len(said) == (run != "nope")


@pytest.fixture
def opened(spool) -> Iterator[Callable[[], socket.socket]]:
    """Opens a connection that says nothing."""
    with contextlib.ExitStack() as stack:

        def opened() -> socket.socket:
            peer = stack.enter_context(socket.socket(socket.AF_UNIX))
            peer.settimeout(60)
            peer.connect(str(spool.socket))
            return peer

        yield opened


def test_a_crowd_is_refused_by_name_and_costs_no_descriptors(spool, opened, monkeypatch, caplog):
    """1,100 silent connections left a daemon under `ulimit -n 1024` no descriptor."""
    monkeypatch.setattr(client_connections, "MAX_CONTROL_CONNECTIONS", 20)
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        crowd = [opened() for _ in range(60)]
        refusals = [json.loads(peer.recv(1 << 16)) for peer in crowd[20:]]
        assert {(one["ok"], one["error"], "20 connections" in one["message"]) for one in refusals} == {
            (False, "DaemonUnavailable", True)
        }
        assert [peer.recv(1 << 16) for peer in crowd[20:]] == [b""] * 40
        assert len(daemon.control._connections) == 20
        for greet in (True, False):
            with DaemonConnection(spool, greet=greet) as link, pytest.raises(DaemonUnavailable, match="20 connections"):
                link.ask(StatusRequest())
        said = [record.getMessage() for record in caplog.records if "control: refused" in record.getMessage()]
        assert len(said) == 1  # a flood of them fills no log
        for peer in crowd:
            peer.close()
        wait_until(lambda: not daemon.control._connections)
        with DaemonConnection(spool) as link:
            assert link.ask(StatusRequest())["status"]


def test_a_client_reads_why_its_connection_was_closed_before_its_first_request(spool, monkeypatch):
    monkeypatch.setattr(client_connections, "MAX_CONTROL_CONNECTIONS", 0)
    with Daemon(spool.root, {"tier": Double()}):
        for greet in (True, False):
            with DaemonConnection(spool, greet=greet) as link, pytest.raises(DaemonUnavailable, match="0 connections"):
                wait_until(link.has_unread)
                time.sleep(0.1)  # the end follows the reason
                link.ask(StatusRequest())


def test_who_is_idle_gives_way_and_who_trains_or_waits_does_not(spool, opened, monkeypatch):
    monkeypatch.setattr(client_connections, "MAX_CONTROL_CONNECTIONS", 4)
    monkeypatch.setattr(client_connections, "CONTROL_IDLE_S", 0.0)
    commit(spool, part(1))
    with (
        Daemon(spool.root, {"tier": down()}) as daemon,
        DaemonConnection(spool) as trainer,
        DaemonConnection(spool) as restore,
    ):
        trainer.ask(Attach())
        restore.ask(Fetch(part=part(1)))
        waiting = opened()
        waiting.sendall(encode_line(Wait(part=part(1), tier="tier")))
        wait_until(lambda: any(line.working for line in daemon.control._connections))
        first = opened()
        wait_until(lambda: len(daemon.control._connections) == 4)
        second = opened()
        assert first.recv(1 << 16) == b""  # idle, so closed for the one that came
        wait_until(lambda: len(daemon.control._connections) == 4)
        with DaemonConnection(spool) as link:
            assert link.ask(StatusRequest())["status"]["trainers"] == 1
        assert second.recv(1 << 16) == b""
        assert trainer.is_alive() and restore.is_alive() and daemon.reconciler.requests.held_checkpoints
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):
            waiting.recv(1 << 16)


def test_a_daemon_ends_at_once_and_not_when_the_hand_off_looks_again(spool, monkeypatch):
    timed(monkeypatch, tick_s=1000.0)
    with Daemon(spool.root, {"tier": Double()}):
        assert spool.socket.exists()
    assert not spool.socket.exists()  # `stop` has waited for 20 s at most


def test_the_socket_is_its_owners_alone(spool):
    with Daemon(spool.root, {"tier": Double()}):
        mode = spool.socket.stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
    assert not spool.socket.exists()


def test_a_socket_left_by_a_killed_daemon_is_replaced(spool):
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(spool.socket))
    with pytest.raises(DaemonUnavailable, match="none is running"):
        DaemonConnection(spool)
    with Daemon(spool.root, {"tier": Double()}), DaemonConnection(spool) as link:
        assert link.ask(StatusRequest())["status"]["spool"] == str(spool.root)


def test_a_spool_whose_path_is_longer_than_a_sockets_may_be(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    spool = Spool(deep)
    assert len(str(spool.socket)) > 200
    with Daemon(deep, {"tier": Double()}), DaemonConnection(spool) as link:
        assert link.ask(Attach())["tiers"] == {"tier": "file:///tier"}


def test_link_without_a_daemon_says_how_to_start_it(spool):
    with pytest.raises(DaemonUnavailable, match="tierd run --spool"):
        DaemonConnection(spool)


# -- wait -------------------------------------------------------------------------------------------------------------


def test_wait_answers_when_the_tier_has_verified_it(spool):
    store = Double()
    commit(spool, part(1))
    with Daemon(spool.root, {"tier": store}) as daemon, DaemonConnection(spool) as link:
        assert link.ask(Wait(part=part(1), tier="tier", timeout_s=60))["ok"]
        assert part(1).manifest_key in daemon.call(contents(store.inner))


def test_a_flush_that_is_waited_for_is_not_spread(spool):
    store = Double()
    with Daemon(spool.root, {"tier": store}) as daemon, DaemonConnection(spool) as link:
        daemon.reconciler.requests.attended = lambda: True
        now = [0.0]
        daemon.reconciler._live.cadence = SaveCadence(lambda: now[0])
        for step in range(4):
            now[0] += 3600.0
            daemon.reconciler._live.cadence.note_saves([part(step)])
        commit(spool, part(9))
        daemon.loop.call_soon_threadsafe(daemon.reconciler.wake)
        wait_until(lambda: store.puts(is_chunk))
        assert not store.puts(is_manifest)
        assert link.ask(Wait(part=part(9), tier="tier", timeout_s=60))["ok"]
        assert not daemon.reconciler.requests.awaited_parts


def test_wait_for_a_checkpoint_that_will_never_be_on_the_tier_ends(spool):
    """Older than what the tier keeps, or nowhere at all: there is nothing to wait for."""
    store = Double()
    store.error = StoreUnavailable("down")
    for step in range(3):
        commit(spool, part(step))
    with Daemon(spool.root, {"tier": store}, keep=1), DaemonConnection(spool) as link:
        with pytest.raises(TimeoutError, match="down"):
            link.ask(Wait(part=part(0), tier="tier", timeout_s=0.3))
        threading.Timer(0.3, lambda: setattr(store, "error", None)).start()
        with pytest.raises(CheckpointNotFound, match="will not come"):
            link.ask(Wait(part=part(0), tier="tier"), 60)
        link.ask(Wait(part=part(2), tier="tier"), 60)
        with pytest.raises(CheckpointNotFound, match="will not come"):
            link.ask(Wait(part=part(9), tier="tier"), 60)


def test_wait_outlasts_a_tier_that_is_down_and_says_why_when_it_does_not(spool):
    store = Double()
    store.error = StoreUnavailable("no route to host")
    commit(spool, part(1))
    with Daemon(spool.root, {"tier": store}), DaemonConnection(spool) as link:
        with pytest.raises(TimeoutError, match="no route to host"):
            link.ask(Wait(part=part(1), tier="tier", timeout_s=0.3))
        threading.Timer(0.3, lambda: setattr(store, "error", None)).start()
        assert link.ask(Wait(part=part(1), tier="tier", timeout_s=60))["ok"]


def test_wait_raises_at_once_where_the_tier_refuses(spool):
    store = Double()
    store.error = StoreRefused("403 Forbidden")
    commit(spool, part(1))
    with Daemon(spool.root, {"tier": store}), DaemonConnection(spool) as link, pytest.raises(StoreRefused, match="403"):
        link.ask(Wait(part=part(1), tier="tier"), 60)


def test_wait_for_a_tier_that_is_not_there_names_those_that_are(spool):
    with (
        Daemon(spool.root, {"tier": Double()}),
        DaemonConnection(spool) as link,
        pytest.raises(ConfigError, match="local, tier"),
    ):
        link.ask(Wait(part=part(1), tier="s3"), 60)


def test_a_daemon_that_works_for_long_shows_so(spool, monkeypatch):
    monkeypatch.setattr("tierd.ipc.messages.HEARTBEAT", 0.05)
    commit(spool, part(1))
    with Daemon(spool.root, {"tier": down()}), DaemonConnection(spool, silence_s=1.5) as link:
        with pytest.raises(TimeoutError):  # and not DaemonUnavailable, after twice its silence
            link.ask(Wait(part=part(1), tier="tier", timeout_s=3.0))
        assert link.ask(StatusRequest())["ok"]  # the connection goes on


def test_a_silent_daemon_costs_a_bounded_wait(spool):
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(spool.socket))
        mute.listen()
        with DaemonConnection(spool, silence_s=0.3) as link, pytest.raises(DaemonUnavailable, match="silent"):
            link.ask(StatusRequest())


def test_a_fault_of_the_daemon_is_an_answer(spool, monkeypatch, caplog):
    def fail(*_):
        raise OverflowError("65536 out of bounds")

    monkeypatch.setattr("tierd.daemon.request_handler.make_report", fail)
    with Daemon(spool.root, {"tier": down()}), DaemonConnection(spool) as link:
        with pytest.raises(DaemonUnavailable, match="the daemon failed: OverflowError: 65536 out of bounds"):
            link.ask(ReportRequest(run="r"))
        assert link.ask(StatusRequest())["status"]
    assert "the request ReportRequest failed" in caplog.text and "Traceback" in caplog.text


def test_daemon_that_stops_during_a_request_is_unavailable(spool):
    commit(spool, part(1))
    with Daemon(spool.root, {"tier": down()}) as daemon, DaemonConnection(spool) as link:
        threading.Timer(0.2, daemon.stop).start()
        with pytest.raises(DaemonUnavailable):
            link.ask(Wait(part=part(1), tier="tier"), 60)
        assert not link.is_alive()


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "JSON"])
def test_ls_shows_the_spool_and_says_that_the_daemon_did_not_answer(spool, monkeypatch, capsys, options):
    """Stopped, it knows of tiers that `ls` then does not show."""
    for module in ("missing_runs", "commands.checkpoint_commands"):
        monkeypatch.setattr(f"tierd.cli.{module}.DaemonConnection", functools.partial(DaemonConnection, silence_s=0.3))
    commit(spool, part(1))
    command = ["ls", "--spool", str(spool.root), *options]
    assert cli.run(command) == 0  # none runs: the spool is all there is
    shown = capsys.readouterr()
    assert not shown.err
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(spool.socket))
        assert cli.run(command) == 0  # one was killed
        assert capsys.readouterr() == shown
        mute.listen()
        assert cli.run(command) == 6
    found = capsys.readouterr()
    assert found.out == shown.out
    assert f"pid {os.getpid()}, was silent for 0.3 s" in found.err and f"kill -CONT {os.getpid()}" in found.err
    assert "only the spool is shown" in found.err
