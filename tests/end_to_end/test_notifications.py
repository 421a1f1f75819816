"""Telling, as it is run: a daemon with a configuration, both sorts of receivers, and nothing of a secret anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.receiver import receiving
from support.waiting import wait_until
from support.world import commit, part

import tierd
from tierd.cli import run
from tierd.core.errors import DaemonUnavailable
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.spool import Spool

SECRET = "c4nary-0f-a-hook"
LOUD = "import logging, sys; logging.basicConfig(level=1); from tierd.cli import run; sys.exit(run())"


def answers(spool: Spool) -> bool:
    try:
        DaemonConnection(spool).close()
        return True
    except DaemonUnavailable:
        return False


def test_daemon_notifies_shows_its_alerts_and_prints_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, tier, heard = Spool(tmp_path / "spool"), tmp_path / "mnt" / "tier", tmp_path / "heard"
    tier.mkdir(parents=True)
    (tmp_path / "tell.sh").write_text(f"#!/bin/sh\ncat >> {heard}; echo >> {heard}\n")
    (tmp_path / "tell.sh").chmod(0o755)
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with receiving() as receiver, (tmp_path / "log").open("wb") as log:
        env = own | {
            "PYTHONPATH": str(Path(tierd.__file__).parent.parent),
            "PYTHONASYNCIODEBUG": "1",
            "HOOK": receiver.url(f"/{SECRET}"),
            "TOKEN": SECRET,
        }
        config = tmp_path / "tierd.toml"
        config.write_text(
            f'spool = "{spool.root}"\nrescan = "1s"\n[[tier]]\nname = "nfs"\nurl = "file://{tier}"\n'
            '[[notify]]\nurl = "env:HOOK"\nheaders = { Authorization = "env:TOKEN" }\n'
            f'[[notify]]\ncommand = ["{tmp_path}/tell.sh", "{SECRET}"]\nevents = ["failing"]\n'
        )

        def command(*arguments: str) -> str:
            assert run(list(arguments)) == 0
            said = capsys.readouterr()
            assert SECRET not in said.out + said.err
            return said.out

        line = [sys.executable, "-c", LOUD, "run", "--config", str(config), "--json"]
        commit(spool, part(0))  # what is there at the daemon's first look is no news; that it comes to a tier is
        daemon = subprocess.Popen(line, env=env, stdout=log, stderr=log, cwd=tmp_path)
        try:
            wait_until(lambda: receiver.what() == ["durable"] or daemon.poll() is not None)
            commit(spool, part(1))
            wait_until(lambda: receiver.what() == ["durable", "persisted", "durable"])
            tier.rename(tmp_path / "away")
            commit(spool, part(2))
            wait_until(lambda: "failing" in receiver.what() and heard.exists())
            assert receiver.asked[0][0] == f"/{SECRET}" and receiver.asked[0][1]["Authorization"] == SECRET
            said = command("status", "--spool", str(spool.root))
            assert "ALERT nfs, for " in said
            status = json.loads(command("status", "--json", "--spool", str(spool.root)))
            assert [one["place"] for one in status["alerts"]] == ["nfs"] and status["counters"]["alerts"] == 1
            wait_until(lambda: heard.read_bytes().endswith(b"\n"))
            assert json.loads(heard.read_text().splitlines()[0])["what"] == "failing"
            for name in ("HOOK", "TOKEN"):
                monkeypatch.setenv(name, env[name])
            command("config", "check", str(config), "--json")
            command("config", "check", str(config))
            (tmp_path / "away").rename(tier)
            receiver.answer = "hang"
            commit(spool, part(3))
            daemon.send_signal(signal.SIGTERM)  # drains, and does not wait for a receiver that hangs
            assert daemon.wait(100) == 0
        finally:
            daemon.kill()
            daemon.wait(60)
    assert SECRET.encode() not in (tmp_path / "log").read_bytes()
    for path in spool.root.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
