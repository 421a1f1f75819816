"""`tierd drain` and `tierd wait`: what they wait for, what they say is left, and their exit codes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.doubles import Double
from support.timed import timed_cli
from support.waiting import wait_until
from support.world import Daemon, commit, hurry, part

from tierd.cli import run
from tierd.core.errors import StoreRefused, StoreUnavailable
from tierd.daemon.tiers.tier_pauses import TierPause
from tierd.spool.spool import Spool


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    timed_cli(monkeypatch, listing_s=0.05, poll_s=0.02)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


def failing(error: Exception) -> Double:
    store = Double()
    store.error = error
    return store


def recovers(store: Double, after: float = 0.3) -> None:
    threading.Timer(after, lambda: setattr(store, "error", None)).start()


# -- drain ------------------------------------------------------------------------------------------------------------


def test_drain_ends_with_0_when_every_tier_has_every_checkpoint_and_the_daemon_continues(spool, capsys) -> None:
    slow = failing(StoreUnavailable("503"))
    for step in range(3):
        commit(spool, part(step))
    with Daemon(spool.root, {"nfs": Double(), "s3": slow}) as daemon:
        recovers(slow)
        assert run(["drain", "--spool", str(spool.root), "--deadline", "60s"]) == 0
        assert capsys.readouterr().out == "everything is on every tier that wants it\n"
        assert not daemon.reconciler.backlog.parts()
        commit(spool, part(9))
        assert run(["drain", "--spool", str(spool.root), "--deadline", "60s", "--json"]) == 0  # it still flushes
        assert json.loads(capsys.readouterr().out) == {"left": [], "paused": None, "left_to_nodes": []}
        assert daemon.reconciler.tiers.observed.has(part(9), "s3")


def test_drain_ends_with_9_and_lists_each_checkpoint_that_lacks_a_tier(spool, capsys) -> None:
    commit(spool, part(1))
    with Daemon(spool.root, {"nfs": Double(), "s3": failing(StoreUnavailable("503 Slow Down"))}) as daemon:
        wait_until(lambda: daemon.reconciler.tiers.observed.has(part(1), "nfs"))
        assert run(["drain", "--spool", str(spool.root), "--deadline", "0.5s"]) == 9
        said = capsys.readouterr().out
        assert "IS NOT ON" in said and "nfs" in said and "s3: 503 Slow Down" in said
        assert run(["drain", "--spool", str(spool.root), "--deadline", "0.5s", "--json"]) == 9
        [left] = json.loads(capsys.readouterr().out)["left"]
        assert (left["run"], left["step"], left["rank"], left["on"], left["lacks"]) == ("run", 1, 0, ["nfs"], ["s3"])
        assert left["size"] > 0


def test_drain_ends_at_once_while_the_daemon_is_paused(spool, capsys) -> None:
    asyncio.run(TierPause(spool).begin(None))
    commit(spool, part(1))
    with Daemon(spool.root, {"nfs": Double()}):
        assert run(["drain", "--spool", str(spool.root), "--deadline", "1d"]) == 9
        assert "tierd resume" in capsys.readouterr().out


def test_without_a_daemon_drain_explains_how_to_flush(spool, capsys) -> None:
    assert run(["drain", "--spool", str(spool.root)]) == 6
    said = capsys.readouterr().err
    assert f"to flush once and end: tierd run --spool {spool.root} --to URL --until-idle" in said
    file = spool.root.parent / "tierd.toml"
    file.write_text(f'spool = "{spool.root}"\n[[tier]]\nname = "a"\nurl = "/mnt/a"\n')
    assert run(["drain", "--config", str(file)]) == 6
    assert f"tierd run --config {file} --until-idle" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "text"), [("--deadline", "soon"), ("--deadline", "-1s"), ("--deadline", "8d")])
def test_a_time_that_is_none_is_refused(spool, capsys, option: str, text: str) -> None:
    assert run(["drain", "--spool", str(spool.root), option, text]) == 3
    assert option in capsys.readouterr().err


# -- wait -------------------------------------------------------------------------------------------------------------


def test_wait_ends_with_0_when_every_tier_has_the_newest(spool, capsys) -> None:
    slow = failing(StoreUnavailable("503"))
    for step in (1, 2):
        commit(spool, part(step))
    with Daemon(spool.root, {"nfs": Double(), "s3": slow}) as daemon:
        recovers(slow)
        assert run(["wait", "run", "--spool", str(spool.root), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer == {
            "run": "run",
            "step": 2,
            "attempt": part(2).checkpoint.attempt,
            "tiers": ["nfs", "s3"],
        }
        assert daemon.reconciler.tiers.observed.has(part(2), "s3")


def test_wait_for_one_tier_does_not_wait_for_another(spool, capsys) -> None:
    commit(spool, part(1))
    with Daemon(spool.root, {"nfs": Double(), "s3": failing(StoreUnavailable("503"))}):
        assert run(["wait", "run", "1", "--spool", str(spool.root), "--tier", "nfs"]) == 0
        assert "is verified on nfs" in capsys.readouterr().out


def test_wait_ends_with_6_when_the_time_is_over_or_a_tier_refuses(spool, capsys) -> None:
    commit(spool, part(1))
    store = failing(StoreUnavailable("503 Slow Down"))
    with Daemon(spool.root, {"s3": store}):
        assert run(["wait", "run", "1", "--spool", str(spool.root), "--timeout", "0.5s"]) == 6
        said = capsys.readouterr().err
        assert "the time is over (--timeout 0.5s)" in said and "503 Slow Down" in said
        assert not re.search(r"after [\d.e-]+ s", said)  # that of a part is what the others have left of it
        store.error = StoreRefused("403 Forbidden")
        assert run(["wait", "run", "1", "--spool", str(spool.root), "--timeout", "1d"]) == 6
        assert "the tier refuses: 403 Forbidden" in capsys.readouterr().err


def test_wait_ends_with_6_while_another_nodes_part_is_missing(spool, capsys) -> None:
    commit(spool, part(1, rank=0, world=2))
    with Daemon(spool.root, {"s3": Double()}) as daemon:
        daemon.settle()
        assert run(["wait", "run", "1", "--spool", str(spool.root), "--timeout", "0.5s"]) == 6
        assert "lacks 1 ranks' parts, which other nodes have to send" in capsys.readouterr().err
        commit(spool, part(1, rank=1, world=2))
        assert run(["wait", "run", "1", "--spool", str(spool.root), "--timeout", "60s"]) == 0
        assert daemon.reconciler.tiers.observed.has(part(1, rank=1, world=2), "s3")


def test_wait_ends_with_4_for_a_retired_checkpoint(spool, capsys) -> None:
    store = failing(StoreUnavailable("503"))
    for step in range(3):
        commit(spool, part(step))
    with Daemon(spool.root, {"s3": store}, keep=1, keep_local=100):
        store.error = None
        assert run(["wait", "run", "2", "--spool", str(spool.root)]) == 0
        assert run(["wait", "run", "0", "--spool", str(spool.root), "--timeout", "60s"]) == 4
        said = capsys.readouterr().err
        assert "will not come" in said or "retired" in said


def test_wait_names_the_tiers_that_there_are(spool, capsys) -> None:
    with Daemon(spool.root, {"nfs": Double(), "s3": Double()}):
        assert run(["wait", "run", "--spool", str(spool.root), "--tier", "gcs"]) == 3
        assert "it has nfs, s3" in capsys.readouterr().err


# -- `tierd run`, as a process ----------------------------------------------------------------------------------------


def started(tmp_path: Path, tier: Path, *options: str) -> subprocess.Popen[str]:
    (tmp_path / "tierd.toml").write_text(
        f'spool = "{tmp_path}/spool"\ndrain = "1s"\n[[tier]]\nname = "nfs"\nurl = "file://{tier}"\n'
    )
    command = [sys.executable, "-m", "tierd", "run", "--config", str(tmp_path / "tierd.toml"), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_sigterm_with_parts_left_ends_with_9(tmp_path: Path, spool: Spool) -> None:
    commit(spool, part(1))
    daemon = started(tmp_path, tmp_path / "typo")
    try:
        wait_until(spool.socket.exists)
        daemon.send_signal(signal.SIGTERM)
        said = daemon.communicate(timeout=60)[1]
    finally:
        daemon.kill()
    assert daemon.returncode == 9
    assert f"1 part is on no tier that answers: {part(1)}" in said and "does not exist" in said


def test_until_idle_with_nothing_to_do_ends_at_once(tmp_path: Path, spool: Spool) -> None:
    (tmp_path / "tier").mkdir()
    assert started(tmp_path, tmp_path / "tier", "--until-idle").wait(timeout=60) == 0
