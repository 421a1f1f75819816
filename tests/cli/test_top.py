"""`tierd top`: the page's facts on a terminal of 80x24, while the daemon works, ends, and comes back."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.cells import cell_len
from support.doubles import Double
from support.waiting import wait_until
from support.world import Daemon, commit, part

from tierd.cli import run
from tierd.cli.commands.top_command import DaemonView
from tierd.cli.commands.top_lines import top_lines
from tierd.core.errors import RequestUnknown, StoreUnavailable
from tierd.ipc import messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.spool import Spool

EVIL = "\u202e\x9b31m"


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "spool")
    for step in (10, 20, 30):
        commit(spool, part(step), metrics={"loss": 1 / step})
    commit(spool, part(20, launch=2), origin=part(10).checkpoint)
    commit(spool, part(7, launch=3, run="half", world=2))
    return spool


def lines(seen: DaemonView, width: int = 80) -> list[str]:
    seen.refresh()
    return [line.plain for line in top_lines(seen.status, seen.runs, width)]


# -- what it shows ----------------------------------------------------------------------------------------------------


def test_top_shows_the_same_rows_as_the_page(spool: Spool) -> None:
    with Daemon(spool.root, {"disk": Double()}) as daemon:
        daemon.settle()
        daemon.reconciler.journal.record("corrupt", "disk", part(10), f"of {EVIL}")
        seen = DaemonView(spool)
        shown = lines(seen)
        text = "\n".join(shown)
        for words in (
            "PROBLEMS", "TIERS", "RUNS", "EVENTS", "nothing is wrong", "disk", "idle", "█", "run: step 20 is on a tier",
            "half: on no tier", "rolled back by 20", "resumes next", "verified",
            "committed", "committed 1/2", "flushed", "durable",
        ):  # fmt: skip
            assert words in text, words
        assert "\\u202e" in text and EVIL not in text
        assert sum(line.startswith("20  ") for line in shown) == 2  # one line for each checkpoint
        assert all(word in "\n".join(lines(seen, 200)) for word in ("loss 0.05", "newest", "●──", "└──"))
        for width in (80, 40, 200):
            assert [line for line in lines(seen, width) if cell_len(line) > width] == []
        daemon.reconciler.repairs.hold(part(30))
        assert any("held by a restore" in line for line in lines(seen, 200))


def test_a_lane_reaches_to_where_a_later_launch_left_it(spool: Spool) -> None:
    """The next launch resumed from step 40 of this one, and retention has deleted that checkpoint since."""
    rest = {"run": "r", "created": None, "metrics": {}, "pinned": False, "resumes": False, "complete": True}
    checkpoints = [
        {**rest, "world_size": 1, "copies": [], "step": step, "attempt": name} for step, name in ((100, "b"), (10, "a"))
    ]
    launches = [
        {"run": "r", "attempt": name, "first_step": step, "last_step": step, "from_step": since, "from_attempt": by}
        | {"lost_steps": 0}
        for name, step, since, by in (("a", 10, None, None), ("b", 100, 40, "a"))
    ]
    runs = {"checkpoints": checkpoints, "launches": launches, "unreached": [], "held": [], "in_flight": []}
    text = [line.plain for line in top_lines({"at": "2026-01-01T00:00:00+00:00"}, runs, 80)]
    first, second = (next(line for line in text if line.startswith(f"launch {name}")) for name in "ab")
    assert "└──" in second and second.rstrip().endswith("○")
    assert len(first) == second.index("└") + 1, text  # no gap between the two


def test_a_lane_is_not_as_wide_as_a_file_without_a_width(spool: Spool) -> None:
    """Without a terminal a line may have any width, and a drawn launch took all of it: 22 MB for a hundred runs."""
    with Daemon(spool.root, {"disk": Double()}) as daemon:
        daemon.settle()
        found = lines(DaemonView(spool), 1_000_000)
    assert any("●──" in line for line in found) and max(map(len, found)) < 1000


def test_top_shows_problems_and_transfers_under_way(spool: Spool) -> None:
    store, puts = Double(), []

    def before(operation: str, key: str) -> None:
        if operation == "put" and "/chunks/" in key:
            puts.append(key)
            store.delay = 1000.0 if len(puts) > 1 else 0.0

    store.before = before
    with Daemon(spool.root, {"disk": store}) as daemon:
        for _ in range(3):
            daemon.reconciler.journal.record_failure(("lane", "disk"), "prune", "disk", "backlog", "503 Slow Down")
        seen = DaemonView(spool)
        wait_until(lambda: re.search(r"flush of rank 0 to disk \d+%", "\n".join(lines(seen, 200))), pause_s=0.05)
        assert "prune backlog failed 3 times in a row: 503 Slow Down" in lines(seen, 200)[1]


def test_top_leaves_out_members_that_a_daemon_of_another_version_lacks(spool: Spool) -> None:
    with Daemon(spool.root, {"disk": Double()}) as daemon:
        daemon.settle()
        seen = DaemonView(spool)
        seen.refresh()
        text = "\n".join(line.plain for line in top_lines({"events": seen.status["events"]}, None, 80))
        assert "of an older version" in text and "of another version: 'tiers'" in text and "not known" in text
        assert "flushed" in text


def test_a_daemon_that_does_not_know_the_request_shows_its_status(spool: Spool, monkeypatch) -> None:
    real = DaemonConnection.ask

    def ask(self: DaemonConnection, request: messages.Request, *more: object) -> dict:
        if isinstance(request, messages.RunsRequest):
            raise RequestUnknown("the daemon does not know 'runs'")
        return real(self, request, *more)

    monkeypatch.setattr(DaemonConnection, "ask", ask)
    with Daemon(spool.root, {"disk": Double()}) as daemon:
        daemon.settle()
        seen = DaemonView(spool)
        shown = lines(seen)
        assert seen.error is None and "not known" in shown and any("durable" in line for line in shown)


def test_a_tier_that_fails_has_its_error(spool: Spool) -> None:
    store = Double()
    store.error = StoreUnavailable("503 Slow Down")
    with Daemon(spool.root, {"disk": store}):
        seen = DaemonView(spool)
        wait_until(lambda: any("disk: 503 Slow Down" in line for line in lines(seen)), pause_s=0.05)


# -- without a terminal -----------------------------------------------------------------------------------------------


def test_in_a_pipe_it_prints_once(spool: Spool, capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon(spool.root, {"disk": Double()}) as daemon:
        daemon.settle()
        assert run(["top", "--spool", str(spool.root)]) == 0
        out = capsys.readouterr().out
        assert out.startswith("tierd ") and "run: step 20 is on a tier" in out and "\x1b" not in out
    assert run(["top", "--spool", str(spool.root)]) == 6
    assert "no daemon answers" in capsys.readouterr().err


# -- on a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """`tierd top` on a terminal of 80x24. `screen` is the text of the screen, by the little of ECMA-48 that is used."""

    def __init__(self, spool: Spool) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.before = termios.tcgetattr(theirs)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tierd", "top", "--spool", str(spool.root)],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env={**environment, "TERM": "xterm-256color"},
        )
        self._theirs, self._said = theirs, ""

    @property
    def screen(self) -> list[str]:
        while select.select([self.ours], [], [], 0)[0]:
            self._said += os.read(self.ours, 1 << 16).decode(errors="replace")
        last = self._said.rpartition("\x1b[H")[2]  # where each drawing begins
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in last.replace("\r", "").split("\n")]

    def wait(self, words: str) -> list[str]:
        wait_until(lambda: self.process.poll() is not None or words in "\n".join(self.screen), pause_s=0.05)
        assert words in "\n".join(self.screen), self.screen
        return self.screen

    def press(self, key: bytes) -> None:
        os.write(self.ours, key)

    def ended(self) -> int:
        code = self.process.wait(60)
        _ = self.screen
        assert termios.tcgetattr(self._theirs) == self.before  # the terminal is as it was
        assert self._said.rstrip().endswith(("\x1b[?1049l\x1b[?25h", "\x1b[?25h\x1b[?1049l", "\x1b[?25h"))
        os.close(self._theirs)
        os.close(self.ours)
        return code


@pytest.mark.timeout(400)
def test_it_lives_on_a_terminal_through_an_end_of_the_daemon(spool: Spool) -> None:
    with Daemon(spool.root, {"disk": Double()}) as daemon:
        daemon.settle()
        terminal = Terminal(spool)
        try:
            assert "run: step 20 is on a tier" in "\n".join(terminal.wait("more lines"))
            screen = terminal.screen
            assert len(screen) <= 24 and max(map(cell_len, screen)) <= 80
            terminal.press(b" ")
            terminal.wait("EVENTS")
            terminal.press(b"b")
            commit(spool, part(40, launch=2), origin=part(10).checkpoint)
            daemon.settle()
            terminal.wait("step 40 is on a tier")
            daemon.stop()
            terminal.wait("The daemon does not answer for")
            assert "step 40 is on a tier" in "\n".join(terminal.screen)
            with Daemon(spool.root, {"disk": Double()}) as another:
                another.settle()
                wait_until(lambda: "does not answer" not in "\n".join(terminal.screen), pause_s=0.05)
                terminal.wait("half: on no tier")
                terminal.press(b"q")
                assert terminal.ended() == 0
        finally:
            terminal.process.kill()
            terminal.process.wait()


@pytest.mark.timeout(400)
def test_ctrl_c_ends_top_and_top_without_a_daemon_waits_for_its_start(spool: Spool) -> None:
    terminal = Terminal(spool)
    try:
        terminal.wait("The daemon does not answer")
        with Daemon(spool.root, {"disk": Double()}) as daemon:
            daemon.settle()
            terminal.wait("is on a tier")
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.ended() == 130
    finally:
        terminal.process.kill()
        terminal.process.wait()
