"""Every command's output on a terminal of 80 columns, and what it says where nothing is a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from rich.cells import cell_len
from support.doubles import Double
from support.waiting import wait_until
from support.world import Daemon, attempt, commit, corrupt, part

from tierd.cli import run
from tierd.cli.output import print_page
from tierd.core.config import from_urls
from tierd.core.errors import StoreUnavailable
from tierd.daemon.daemon_service import open_tiers
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool

RUN = "a-run-with-a-name-of-some-length"


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """A spool whose two checkpoints lie on a tier as well, at `tier` beside it."""
    spool = Spool(tmp_path / "spool")
    commit(spool, part(10, run=RUN), metrics={"loss": 1.25, "accuracy": 0.5})
    commit(spool, part(20, 2, run=RUN), origin=part(10, run=RUN).checkpoint, metrics={"loss": 0.75})

    async def work() -> None:
        async with AsyncExitStack() as stack:
            stores = await open_tiers(from_urls(str(spool.root), [str(tmp_path / "tier")]), stack)
            for one in spool.parts():
                await flush(spool, one, TierUploadContext(next(iter(stores.values()))))

    (tmp_path / "tier").mkdir()
    asyncio.run(work())
    return spool


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command as on a terminal of 80 columns; its lines."""

    def ran(*command: str, code: int = 0) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", "80")
            patch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
            assert run(list(command)) == code
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()

    return ran


def test_every_table_fits_into_80_columns(spool: Spool, tmp_path: Path, narrow) -> None:
    tier, local = str(tmp_path / "tier"), ["--spool", str(spool.root)]
    for command in (
        ["ls", tier, *local],
        ["runs", tier],
        ["show", RUN, "20", tier, *local],
        ["verify", tier, *local],
        ["du", tier, *local],
        ["prune", tier, "--keep-last", "1", "--dry-run"],
        ["rm", RUN, tier, *local, "--dry-run"],
        ["disown", RUN, attempt(2), tier, "--dry-run"],
    ):
        lines = narrow(*command)
        assert len(lines) > 1, command
        assert [line for line in lines if cell_len(line) > 80] == [], command
        assert RUN in "\n".join(lines) or command[0] == "disown", command


def test_each_row_is_one_line_of_80_columns(
    spool: Spool, tmp_path: Path, narrow, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = pytest.importorskip("support.layouts")
    layouts.trainer(tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    tier, outputs = "./tier", "outputs"
    into = ["--run", "imported", "--to", tier]
    for command, count in (
        (["watch", outputs, "--explain"], 2),
        (["inspect", outputs], 1),
        (["import", outputs, *into], 1),
        (["prune", tier, "--run", RUN, "--keep-last", "1", "--dry-run"], 3),
        (["rm", RUN, tier, "--dry-run"], 1),
        (["runs", tier], 2),
    ):
        lines = narrow(*command)
        assert [line for line in lines if cell_len(line) > 80] == [] and not any(line.startswith(" ") for line in lines)
        assert count < len(lines) < count + 4, lines


def test_page_in_markdown_has_tables_of_80_columns(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    page = "# Title\n\n![picture](x.png)\n\n| arm | p95 |\n| --- | --- |\n| none |  |\n| " + "a" * 90 + " | **met** |\n"
    print_page(page)
    assert capsys.readouterr().out == page + "\n"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_page(page)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# Title" and max(map(len, lines)) <= 80 and lines[3].split() == ["arm", "p95"]
    assert lines[4] == "none" and lines[5].endswith("  met")


def test_empty_place_is_said_in_words(tmp_path: Path, narrow, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for command in ("ls", "runs", "du"):
        assert run([command, "./empty"]) == 0
        assert "is there" in capsys.readouterr().err
        assert narrow(command, "./empty") == []
    assert run(["ls", "empty"]) == 3
    assert "the directory empty is ./empty" in capsys.readouterr().err


def test_ls_names_each_run_and_each_checkpoint_once_and_gives_a_line_to_each_copy(
    spool: Spool, tmp_path: Path, narrow
) -> None:
    tier = str(tmp_path / "tier")
    title, head, *lines = narrow("ls", tier, "--spool", str(spool.root))
    assert title == RUN and head.split() == ["STEP", "ATTEMPT", "AGE", "WHERE", "STATE", "SIZE", "METRICS"]
    cells = [line.split() for line in lines]
    assert [row[:2] for row in cells] == [
        ["20→", "00000002"],
        ["file", "verified"],
        ["10", "00000001"],
        ["file", "verified"],
    ]
    assert [line.count("loss") for line in lines] == [1, 0, 1, 0] and "loss 1.25, accuracy 0.5" in lines[2]
    assert narrow("ls", tier)[1].split()[:2] == ["STEP", "ATTEMPT"]
    (spool.root / RUN / f"{20:012}.{attempt(2)}").rename(tmp_path / "away")
    assert narrow("ls", "--spool", str(spool.root))[1].split()[:2] == ["STEP", "AGE"]  # it has a single attempt


def test_show_prints_each_path_once_for_all_ranks(spool: Spool, tmp_path: Path, narrow) -> None:
    for rank in range(4):
        commit(spool, part(30, 2, rank, 4, run=RUN), origin=part(10, run=RUN).checkpoint, metrics={"loss": 0.5})
    lines = narrow("show", RUN, "30", "--spool", str(spool.root))
    assert lines[0] == f"run {RUN}, step 30" and lines[1].startswith(f"attempt {attempt(2)}, 2026-01-01 00:30:00 UTC")
    assert lines[2:4] == [f"resumed from: step 10 of attempt {attempt(1)}", "metrics: loss 0.5"]
    assert [line.split()[:2] for line in lines if line.startswith("weights")] == [["weights.bin", "0-3"]]
    assert "resumed from: nothing" in narrow("show", RUN, "10", str(tmp_path / "tier"))


def test_verify_merges_ranks_with_one_outcome_and_says_damage_in_full(spool: Spool, narrow) -> None:
    for rank in range(4):
        commit(spool, part(30, 2, rank, 4, run=RUN))
    corrupt(spool.path(part(30, 2, 2, 4, run=RUN)) / "weights.bin")
    lines = narrow("verify", "--spool", str(spool.root), "--step", "30", code=5)
    assert lines[:2] == [RUN, "STEP  WHERE  RANKS   BYTES    BYTES ARE"]
    assert [line.split()[2:4] for line in lines[2:4]] == [["0-1,", "3"], ["2", "2.5"]] and lines[3].endswith("corrupt")
    said = "".join(lines[4:])
    assert said.startswith(f"local, run {RUN}, step 30, rank 2: /") and said.endswith("differ from their digest")


def test_the_status_of_a_daemon_in_trouble_fits(tmp_path: Path, narrow) -> None:
    spool, store = Spool(tmp_path / "spool"), Double()
    store.error = StoreUnavailable("https://a.bucket.somewhere.example: 503 Slow Down, please reduce your request rate")
    commit(spool, part(1, run=RUN))
    with Daemon(spool.root, {"disk": store}) as daemon:
        wait_until(lambda: daemon.reconciler.workers["disk"].last_error)
        daemon.reconciler.journal.record("flushed", "disk", part(1, run=RUN), "verified, 44143 bytes as 33591 " * 4)
        lines = narrow("status", "--spool", str(spool.root))
        assert [line for line in lines if cell_len(line) > 80 and not line.startswith("  $ tierd ")] == []
        assert lines[0].startswith("WARNING disk: ") and "request rate" in "".join(lines[:3])  # first, and whole
        (tiers,) = [at for at, line in enumerate(lines) if line.startswith("TIER ")]
        assert lines[tiers + 1].startswith("disk  no") and not lines[tiers + 2]
        (head,) = [at for at, line in enumerate(lines) if line.startswith("AGE ")]
        events = json.loads("\n".join(narrow("status", "--json", "--spool", str(spool.root))))["events"]
        assert len(lines[head + 1 :]) == min(10, len(events))  # one line each
        lines = narrow("drain", "--spool", str(spool.root), "--deadline", "10s", code=9)
        assert [line for line in lines if cell_len(line) > 80] == [] and "IS NOT ON" in "\n".join(lines)


def test_a_pipe_has_one_line_for_each_copy(spool: Spool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", str(tmp_path / "tier"), "--spool", str(spool.root)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.startswith(RUN) for line in lines)
    assert head.index("KEPT BECAUSE") > 80


def test_on_a_real_terminal(spool: Spool, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, "-m", "tierd", "ls", str(tmp_path / "tier"), "--spool", str(spool.root)]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            said += data
        assert process.wait(60) == 0
    os.close(ours)
    lines = said.decode().replace("\r", "").splitlines()
    assert lines[0] == RUN and lines[1].startswith("STEP")
    assert max(map(len, lines)) <= 80
