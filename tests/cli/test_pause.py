"""`tierd pause` and `tierd resume`: with a daemon, without one, and with one that is neither here nor there."""

from __future__ import annotations

import json
import threading
import time
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.doubles import Double
from support.timed import timed_cli
from support.world import Daemon

from tierd.cli import run
from tierd.daemon.handoff_socket import HandoffServer
from tierd.daemon.tiers.tier_pauses import TierPause
from tierd.spool.spool import Spool


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_pause_without_a_daemon_pauses_its_next_start(spool: Spool, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(spool.root)
    assert answer(capsys, "pause", "--spool", root) == {"spool": root, "paused": "until resumed"}
    with Daemon(spool.root, {"tier": Double()}):
        assert answer(capsys, "status", "--spool", root)["paused"] == "until resumed"
    assert answer(capsys, "resume", "--spool", root) == {"spool": root, "paused": None}
    assert not TierPause(spool).paused
    with spool.lock():
        pass  # and nobody keeps the spool


def test_pause_reaches_a_running_daemon(spool: Spool, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(spool.root)
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        ends = answer(capsys, "pause", "--spool", root, "--for", "2h")["paused"]
        assert abs(datetime.fromisoformat(ends) - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=5)
        assert daemon.reconciler.pause.until == ends
        assert run(["status", "--spool", root]) == 0
        shown = capsys.readouterr().out
        assert f"paused until {ends[:19].replace('T', ' ')} UTC" in shown and "  $ tierd resume --spool " in shown
        assert run(["pause", "--spool", root]) == 0
        assert capsys.readouterr().out == "paused until resumed\n"
        for _ in range(2):
            assert run(["resume", "--spool", root]) == 0
            assert capsys.readouterr().out.startswith("no pause: ")
        assert not daemon.reconciler.pause.paused
        assert run(["status", "--spool", root]) == 0
        assert "paused" not in capsys.readouterr().out


def test_the_spool_may_be_named_by_a_configuration(spool: Spool, capsys: pytest.CaptureFixture[str]) -> None:
    file = spool.root.parent / "tierd.toml"
    file.write_text(f'spool = "{spool.root}"\n[[tier]]\nname = "a"\nurl = "/mnt/a"\n')
    assert answer(capsys, "pause", "--config", str(file))["paused"] == "until resumed"
    file.write_text('spool = "/does/not/exist"\n[[tier]]\nname = "a"\nurl = "/mnt/a"\n')
    assert run(["pause", "--config", str(file)]) == 3
    assert "no daemon has run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--for", "soon"], 3, "--for: 'soon' is no duration: write 90s"),
        (["--for", "0s"], 3, "--for 0s: more than nothing"),
        (["--for", "367d"], 3, "until `tierd resume`"),
        (["--for", "-1h"], 3, "--for: '-1h' is no duration"),
        (["--for"], 3, "requires an argument"),
    ],
)
def test_a_time_that_is_none_is_refused(
    spool: Spool, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run(["pause", "--spool", str(spool.root), *arguments]) == code
    assert message in capsys.readouterr().err
    assert not TierPause(spool).paused


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_pause_refuses_a_directory_that_is_no_spool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run([command]) == 3
    assert "nothing to look at" in capsys.readouterr().err
    assert run([command, "--spool", str(tmp_path)]) == 3
    assert "not a spool" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_daemon_that_is_about_to_listen_is_waited_for(
    spool: Spool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the spool's state, so that to write the file would be too late, and there is no socket yet."""
    real, held = HandoffServer.listening, threading.Event()

    def slow(handoff: HandoffServer, drain: float) -> AbstractContextManager[None]:
        held.set()
        time.sleep(0.5)
        return real(handoff, drain)

    monkeypatch.setattr(HandoffServer, "listening", slow)
    daemon = Daemon(spool.root, {"tier": Double()})
    starting = threading.Thread(target=daemon.__enter__)
    starting.start()
    assert held.wait(60)
    assert answer(capsys, "pause", "--spool", str(spool.root))["paused"] == "until resumed"
    starting.join()
    assert daemon.reconciler.pause.paused
    daemon.stop()


def test_a_daemon_that_does_not_answer_is_an_error(
    spool: Spool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_cli(monkeypatch, listen_timeout_s=0.2)
    with spool.lock():
        assert run(["pause", "--spool", str(spool.root)]) == 6
    assert "no daemon answers" in capsys.readouterr().err
    assert not TierPause(spool).paused
