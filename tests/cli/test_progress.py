"""Progress of long transfers: a bar on a terminal, a line now and then elsewhere, nothing for short ones."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.doubles import Double, is_chunk
from support.timed import timed_cli
from support.waiting import wait_until
from support.world import Daemon, commit, content, hurry, part

import tierd
from tierd.cli import run
from tierd.cli.progress import Meter, show_progress
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import BacklogRequest, Wait
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

GIB = 1 << 30


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_cli(monkeypatch, progress_delay_s=0.02, progress_log_s=0.02)


def test_progress_shows_nothing_for_an_operation_that_ends_soon(capsys) -> None:
    with show_progress("restoring") as meter:
        meter.update(GIB, 3 * GIB)
    assert capsys.readouterr() == ("", "")


def test_elsewhere_there_is_a_line_now_and_then(quick, capsys) -> None:
    with show_progress("restoring") as meter:
        meter.update(GIB, 3 * GIB)
        time.sleep(0.5)
        meter.update(2 * GIB, 3 * GIB, "restoring rank 1")
        time.sleep(0.5)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and 2 <= len(lines) <= 50
    assert lines[0].startswith("tierd: restoring: 1.0 GiB of 3.0 GiB")
    assert re.fullmatch(r"tierd: restoring rank 1: 2.0 GiB of 3.0 GiB, [\d.]+ [KMG]iB/s, [\d.]+ m?s left", lines[-1])


def test_the_rate_and_the_rest_are_those_of_the_transfer(monkeypatch) -> None:
    now = [0.0]
    meter = Meter("flushing")
    meter._bar.get_time = lambda: now[0]
    for number in range(11):
        now[0] = float(number)
        meter.update(number * GIB, 30 * GIB)
    assert meter.progress_line() == "flushing: 10.0 GiB of 30.0 GiB, 1.0 GiB/s, 20 s left"


def test_progress_bar_on_a_terminal_is_erased_at_the_end(quick, monkeypatch) -> None:
    ours, theirs = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        while True:
            try:
                said.append(os.read(ours, 4096))
            except OSError:
                return

    reads = threading.Thread(target=read)
    reads.start()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with show_progress("restoring") as meter:
            meter.update(GIB, 4 * GIB)
            wait_until(lambda: b"1.0/4.0 GiB" in b"".join(said))
    reads.join(60)
    os.close(ours)
    text = b"".join(said).decode()
    assert "restoring" in text and text.rstrip().endswith("\x1b[2K")  # the line is erased at the end


# -- flushes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Double:
    """A tier that takes a chunk in a tenth of a second."""
    hurry(monkeypatch)
    monkeypatch.setattr("tierd.ipc.messages.HEARTBEAT", 0.02)
    timed_cli(monkeypatch, poll_s=0.02)
    store = Double()

    def before(operation: str, key: str) -> None:
        store.delay = 0.1 if operation == "put" and is_chunk(key) else 0.0

    store.before = before
    return store


def test_daemon_reports_the_progress_of_a_flush(tmp_path: Path, slow: Double) -> None:
    spool = Spool(tmp_path / "spool")
    with Daemon(spool.root, {"disk": slow}) as daemon, DaemonConnection(spool) as link:
        daemon.settle()
        whole = sum(map(len, commit(spool, part(7), content(7, chunks=40)).values()))
        reported: list[dict] = []
        seen: list[int] = []

        def hear(line: dict) -> None:
            reported.append(line)
            seen.append(daemon.reconciler.backlog.summary().left_bytes)

        link.ask(Wait(part=part(7), tier="disk", timeout_s=60), on_progress=hear)
        sizes = [(line["done"], line["total"]) for line in reported if "total" in line]
        assert len({done for done, _ in sizes}) > 1 and sizes == sorted(sizes)
        assert {total for _, total in sizes} == {whole}
        assert len(set(seen)) > 1 and max(seen) <= whole
        assert link.ask(BacklogRequest())["backlog"].get("moved_bytes", {}) == {}  # nothing is under way any more


def test_drain_and_wait_report_their_progress_and_json_is_still_json(
    tmp_path: Path, slow: Double, quick, capsys
) -> None:
    spool = Spool(tmp_path / "spool")
    with Daemon(spool.root, {"disk": slow}):
        for number, command in enumerate((["wait", "run"], ["drain"])):
            commit(spool, part(number), content(number, chunks=40))
            assert run([*command, "--spool", str(spool.root), "--json"]) == 0
            out, err = capsys.readouterr()
            json.loads(out)
            assert re.search(r"tierd: flushing.*: .* of .*iB", err), err


def test_commands_that_move_bytes_say_how_far_they_are(tmp_path: Path, monkeypatch, capsys) -> None:
    seen: list[tuple[str, float, float | None]] = []

    def show(self: Meter, ended: threading.Event) -> None:
        ended.wait()
        task = self._bar.tasks[0]
        seen.append((task.description, task.completed, task.total))

    monkeypatch.setattr(Meter, "show", show)
    spool, tier = Spool(tmp_path / "spool"), tmp_path / "tier"
    tier.mkdir()
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        saved = checkpointer.save(3, {"model": {"weight": torch.zeros(1 << 16)}})
        saved.wait()

    async def work() -> None:
        store = FileStore(tier)
        await flush(spool, saved.part, TierUploadContext(store))
        await store.aclose()

    asyncio.run(work())
    for command in (
        ["restore", str(tier), "--run", "run", "--to", str(tmp_path / "restored")],
        ["export", str(tier), "--run", "run", "--to", str(tmp_path / "exported")],
        ["verify", str(tier)],
    ):
        assert run([*command, "--json"]) == 0
        json.loads(capsys.readouterr().out)
    whole, stored = spool.manifest(saved.part).size, seen[2][2]
    assert seen == [("restoring", whole, whole), ("exporting", 4 << 16, 4 << 16), ("verifying", stored, stored)]
