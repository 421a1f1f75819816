"""Client and daemon of different versions: one minor apart they work; further apart, both say which to upgrade."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest
from support.doubles import Double
from support.peers import OtherDaemon
from support.timed import timed_client
from support.training import restored, same, tensors
from support.world import Daemon, commit, part
from wire.record import V1

import tierd
from tierd.cli import run as command
from tierd.core.errors import DaemonUnavailable, RequestUnknown, StoreUnavailable, VersionMismatch
from tierd.core.timeline.run_view import RunView
from tierd.ipc import message_codec, messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.message_codec import read_member
from tierd.ipc.protocol import PROTOCOL, Peer, Protocol
from tierd.spool.spool import Spool

LATER = f"{PROTOCOL.major}.{PROTOCOL.minor + 1}"
MUCH_LATER = f"{PROTOCOL.major}.{PROTOCOL.minor + 2}"
NEXT = f"{PROTOCOL.major + 1}.0"
V0 = V1.parent / "v0"
NEW = {"of_a_later_version": {"x": [1]}}  # members that nobody knows yet


@pytest.fixture
def spool(tmp_path) -> Spool:
    return Spool(tmp_path / "spool")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch) -> None:
    timed_client(monkeypatch, start_s=0.2)


def last(path: Any) -> dict[str, Any]:
    return json.loads(path.read_bytes().splitlines()[-1])


def widened(value: Any) -> Any:
    """The same with unknown members wherever there is an object with named members."""
    if isinstance(value, list):
        return [widened(one) for one in value]
    if not isinstance(value, dict):
        return value
    named = all(key.isidentifier() for key in value) and not {"tier", "loss"} & value.keys()
    return {key: widened(inner) for key, inner in value.items()} | (NEW if named else {})


class Caller:
    """A client of another version: it sends what it is told to."""

    def __init__(self, spool: Spool) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(spool.socket))
        self._file = self._socket.makefile("rb")

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer; empty where the connection has ended."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            while line := self._file.readline():
                reply = json.loads(line)
                if not reply.get("working"):
                    return reply
        except ConnectionError:
            pass
        return {}

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()


def hello(protocol: str) -> dict[str, Any]:
    return {"op": "hello", "protocol": protocol, "version": "9.9.9", **NEW}


# -- a later client, and today's daemon -------------------------------------------------------------------------------


def test_a_client_one_minor_version_later_is_answered(spool):
    """Its unknown members are ignored, and an unknown request is an error that the connection survives."""
    requests = [json.loads(path.read_bytes()) for path in sorted((V1 / "control").glob("*.request"))]
    requests = [one for one in requests if one["op"] not in ("hello", "of-a-later-version")]
    requests.sort(key=lambda one: one["op"] == "attach")  # last: nothing is removed while a trainer is attached
    with Daemon(spool.root, {"tier": Double()}) as daemon, Caller(spool) as client:
        for step in (1, 2):
            commit(spool, part(step), metrics={"loss": 0.5})
        daemon.settle()
        assert client.ask(hello(LATER))["ok"]
        for request in requests:
            assert client.ask({**widened(request), "wanted": None}).get("ok"), request
            unknown = client.ask({"op": "make-coffee", "sugar": 2})
            assert (unknown["ok"], unknown["error"]) == (False, "RequestUnknown")
            assert "make-coffee" in unknown["message"] and "upgrade the daemon" in unknown["message"]


@pytest.mark.parametrize("protocol", [MUCH_LATER, NEXT])
def test_client_that_is_too_new_is_refused_with_the_advice_to_upgrade_the_daemon(spool, caplog, protocol):
    with Daemon(spool.root, {"tier": Double()}):
        for _ in range(3):
            with Caller(spool) as client:
                reply = client.ask(hello(protocol))
                assert (reply["ok"], reply["error"], reply["protocol"]) == (False, "VersionMismatch", str(PROTOCOL))
                assert "upgrade the daemon" in reply["message"] and protocol in reply["message"]
                assert client.ask({"op": "status"}) == {}, "the connection has ended"
    said = [record.message for record in caplog.records if "upgrade the daemon" in record.message]
    assert len(said) == 1, "once for each client"


def test_a_client_without_numbers_is_answered_and_named_in_the_log_once(spool, caplog):
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        commit(spool, part(1), metrics={"loss": 0.5})
        daemon.settle()
        for path in sorted((V0 / "control").glob("*.request")):
            request = json.loads(path.read_bytes())
            with Caller(spool) as client:
                if request["op"] not in ("wait", "fetch", "pin"):
                    assert client.ask(request)["ok"], path
    assert len([one for one in caplog.records if "upgrade the client" in one.message]) == 1


# -- today's client, and a later daemon -------------------------------------------------------------------------------


def recorded(of: Any = V1, greeting: dict[str, Any] | None = None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers as they were recorded, with members that nobody knows; and no request of later than that."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "hello":
            return greeting or {"ok": True, "protocol": LATER, "version": "9.9.9", **NEW}
        path = of / "control" / f"{request['op']}.reply"
        return widened(last(path if path.exists() else V1 / "control" / "unknown.reply"))

    return answer


@pytest.mark.parametrize("op", sorted(message_codec.REQUESTS.keys() - {"hello"}))
def test_a_daemon_one_minor_version_later_is_understood(spool, op):
    request = message_codec.decode_request((V1 / "control" / f"{op}.request").read_bytes())
    with OtherDaemon(spool, recorded()) as daemon, DaemonConnection(spool) as link:
        assert link.ask(request)["ok"]
        assert [one["op"] for one in daemon.asked] == ["hello", op]
        if op == "candidates":
            assert len(read_member(link.ask(request), "sight", RunView).whole) == 1


@pytest.mark.parametrize("line", ["status", "status --json", "ls --run run", "pause", "resume"])
def test_commands_work_with_a_daemon_one_minor_version_later(spool, line, capsys):
    with OtherDaemon(spool, recorded()):
        assert command([*line.split(), "--spool", str(spool.root)]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_request_that_an_earlier_daemon_does_not_know_leaves_the_line_usable(spool):
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return recorded()(request if request["op"] != "pause" else {"op": "of-a-later-version"})

    with OtherDaemon(spool, answer), DaemonConnection(spool) as link:
        with pytest.raises(RequestUnknown, match="upgrade the daemon"):
            link.ask(messages.Pause())
        assert link.ask(messages.StatusRequest())["ok"]


@pytest.mark.parametrize(
    ("protocol", "upgrade"),
    [(MUCH_LATER, "upgrade the client"), (NEXT, "upgrade the client"), ("1.1", "upgrade the daemon")],
)
def test_a_daemon_that_is_too_far_is_not_asked(spool, protocol, upgrade):
    with (
        OtherDaemon(spool, recorded(greeting={"ok": True, "protocol": protocol, "version": "9.9.9"})) as daemon,
        DaemonConnection(spool) as link,
        pytest.raises(VersionMismatch, match=upgrade) as raised,
    ):
        link.ask(messages.Attach())
    assert str(spool.root) in str(raised.value) and protocol in str(raised.value)
    assert [one["op"] for one in daemon.asked] == ["hello"]


# -- a daemon that is older than the numbers --------------------------------------------------------------------------


def of_old(request: dict[str, Any]) -> dict[str, Any] | None:
    """Closes the connection at a request that it does not know, as that version did."""
    return None if request["op"] == "hello" else last(V0 / "control" / f"{request['op']}.reply")


def without_tell(request: dict[str, Any]) -> dict[str, Any] | None:
    """And older still: of before `notify`, `alerts`, `scrub` and a tier's `compression`."""
    reply = of_old(request)
    if reply and "status" in reply:
        for member in ("tell", "alerts", "scrub"):
            del reply["status"][member]
        for tier in reply["status"]["tiers"]:
            del tier["effort"], tier["pending_bytes"]
    return reply


def test_old_daemon_is_named_as_the_side_to_upgrade(spool):
    with OtherDaemon(spool, of_old), DaemonConnection(spool) as link:
        with pytest.raises(VersionMismatch, match=r"upgrade the daemon.*systemctl restart tierd") as raised:
            link.ask(messages.CandidatesRequest(run="run"))
        assert str(spool.root) in str(raised.value)


def test_a_daemon_that_only_ends_is_not_called_old(spool):
    with OtherDaemon(spool, lambda request: None), DaemonConnection(spool) as link:
        with pytest.raises(DaemonUnavailable, match="closed the connection") as raised:
            link.ask(messages.CandidatesRequest(run="run"))
        assert type(raised.value) is DaemonUnavailable  # a caller, and a reader of its log, meets no private name


def test_status_of_an_old_daemon_shows_the_members_of_its_answer(spool, capsys):
    with OtherDaemon(spool, without_tell):
        assert command(["status", "--spool", str(spool.root)]) == 0
        out, err = capsys.readouterr()
        assert "1 part," in out and "version unknown" in out and "1 trainer attached" in out
        assert "file:///tier" in out and "unknown" in out
        assert "not shown, because the daemon is of another version of tierd: scrub, notify" in out
        assert "upgrade the daemon" in err
        assert command(["status", "--json", "--spool", str(spool.root)]) == 0
        assert json.loads(capsys.readouterr().out)["spool_parts"] == 1


@pytest.mark.parametrize("line", ["pin run 1", "unpin run 1", "pause", "resume"])
def test_commands_name_an_old_daemon_at_once(spool, line, capsys):
    with OtherDaemon(spool, of_old):
        assert command([*line.split(), "--spool", str(spool.root)]) == 6
    assert "upgrade the daemon" in capsys.readouterr().err


def test_ls_shows_the_spool_and_says_why_no_more(spool, capsys):
    commit(spool, part(7))
    with OtherDaemon(spool, of_old):
        assert command(["ls", "--spool", str(spool.root)]) == 0
    out, err = capsys.readouterr()
    assert "local" in out and "upgrade the daemon" in err and "only the spool is shown" in err


# -- training ---------------------------------------------------------------------------------------------------------


GREETINGS = {
    "older than the numbers": {"ok": True},
    "much later": {"ok": True, "protocol": MUCH_LATER, "version": "9.9.9"},
}


def mismatched(which: str) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    return of_old if which == "older than the numbers" else recorded(greeting=GREETINGS[which])


@pytest.mark.parametrize("which", GREETINGS)
@pytest.mark.parametrize("to", [None, ["file:///tmp"]], ids=["to=None", "to=[url]"])
def test_training_saves_and_restores_beside_a_daemon_that_is_too_far(spool, caplog, which, to):
    with OtherDaemon(spool, mismatched(which), GREETINGS[which]) as daemon:
        with tierd.Checkpointer(spool.root, "run", to=to) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, tensors(step)).wait(timeout=60)
            assert (checkpointer.stats.failed, checkpointer.stats.handed_over) == (0, 0)
        found, state = restored(spool, 3)
        assert found.step == 3 and same(state, 3)
        assert {"op": "hello", "protocol": str(PROTOCOL), "version": tierd.__version__} in daemon.asked
        assert "persist" not in {one["op"] for one in daemon.asked}
    said = [one for one in caplog.records if "Meanwhile training writes" in one.message]
    assert [one.levelno for one in said] == [logging.WARNING], "once"
    assert "upgrade" in said[0].message


def test_the_best_is_not_guessed_beside_a_daemon_that_is_too_old(spool):
    with OtherDaemon(spool, of_old, {"ok": True}), tierd.Checkpointer(spool.root, "run") as checkpointer:
        checkpointer.save(1, tensors(1), metrics={"loss": 0.1}).wait(timeout=60)
        with pytest.raises(StoreUnavailable, match=r"tiers cannot be asked.*upgrade the daemon"):
            checkpointer.restore(tensors(0), best="loss")


def test_nothing_in_the_spool_and_a_daemon_that_is_too_old_is_no_new_beginning(spool):
    with (
        OtherDaemon(spool, of_old, {"ok": True}),
        tierd.Checkpointer(spool.root, "run") as checkpointer,
        pytest.raises(DaemonUnavailable, match="upgrade the daemon"),
    ):
        checkpointer.restore(tensors(0))


def test_a_daemon_one_minor_version_later_takes_snapshots(spool, monkeypatch):
    later = Peer(Protocol(PROTOCOL.major, PROTOCOL.minor + 1), "9.9.9")
    monkeypatch.setattr("tierd.daemon.handoff_socket.DAEMON_PEER", later)
    monkeypatch.setattr("tierd.daemon.client_connections.DAEMON_PEER", later)
    monkeypatch.setattr(message_codec, "PROTOCOL", later.protocol)
    with (
        Daemon(spool.root, {"tier": Double()}),
        tierd.Checkpointer(spool.root, "run") as checkpointer,
    ):
        checkpointer.save(1, tensors(1)).wait("tier", timeout=60)
        assert checkpointer.stats.handed_over == 1
        assert checkpointer.restore(tensors(0)).step == 1


def test_a_later_client_hands_over_and_an_unknown_message_leaves_the_line_usable(spool):
    with Daemon(spool.root, {"tier": Double()}), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(60)
        client.connect(str(spool.handoff_socket))
        assert json.loads(client.recv(1 << 16))["protocol"] == str(PROTOCOL)
        client.send(json.dumps(hello(LATER)).encode())
        for _ in range(2):
            client.send(b'{"op":"lend-a-hand","x":1}')
            assert json.loads(client.recv(1 << 16))["error"] == "RequestUnknown"
        client.send(json.dumps({"op": "recall", "part": json.loads(messages.encode_line(part(1))), **NEW}).encode())
        assert json.loads(client.recv(1 << 16))["error"] == "ObjectNotFound"


def test_a_client_that_is_too_late_hands_nothing_over(spool, caplog):
    with Daemon(spool.root, {"tier": Double()}):
        for _ in range(2):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.settimeout(60)
                client.connect(str(spool.handoff_socket))
                client.recv(1 << 16)
                client.send(json.dumps(hello(NEXT)).encode())
                assert client.recv(1 << 16) == b""
    assert len([one for one in caplog.records if "upgrade the daemon" in one.message]) == 1
