"""Signals at any moment of a daemon's life: it ends with a line and a documented exit code, or goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# A daemon in a process of its own that sends itself signals at the first import of a module.
_EARLY = """
import os, signal, sys
# Whoever runs these tests may ignore them: nohup, or a shell in the background.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
moment, numbers = os.environ["MOMENT"], os.environ["SIGNALS"].split()
class Early:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            for number in numbers:
                os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Early())
from tierd.__main__ import main
code = main()
if moment == "end":
    for number in numbers:
        os.kill(os.getpid(), int(number))
sys.exit(code)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    file = tmp_path / "tierd.toml"
    file.write_text(f'spool = "{tmp_path / "spool"}"\n[[tier]]\nname = "nfs"\nurl = "{tmp_path / "tier"}"\n')
    return file


def ended(
    arguments: list[str],
    moment: str = "never",
    signals: tuple[int, ...] = (),
    on_line: Callable[[subprocess.Popen[str], str], None] = lambda daemon, line: None,
) -> tuple[int, str]:
    """Run a daemon to its end, and return its exit code and log."""
    variables = {"MOMENT": moment, "SIGNALS": " ".join(str(int(number)) for number in signals)}
    command = [sys.executable, "-c", _EARLY, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | variables) as daemon:
        lines = []
        for line in daemon.stderr or ():
            lines.append(line)
            on_line(daemon, line)
    return daemon.returncode, "".join(lines)


@pytest.mark.parametrize("moment", ["tierd.cli", "tierd.daemon.daemon_service", "tierd.daemon.host_events"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_daemon_that_is_ended_during_its_start_ends_with_a_line(
    moment: str, number: signal.Signals, config: Path
) -> None:
    code, log = ended(["run", "--config", str(config)], moment, (number,))
    assert code == 0 and "stopping" in log and "ended" in log and "Traceback" not in log


def test_watch_that_is_ended_during_its_start_ends_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "tier").mkdir()
    arguments = ["watch", str(tmp_path / "out"), "--run", "r", "--to", str(tmp_path / "tier")]
    code, log = ended(arguments, "tierd.cli", (signal.SIGTERM,))
    assert code == 0 and "ended" in log and "Traceback" not in log


def test_hangup_without_a_configuration_ends_the_daemon_as_sigterm_does(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    arguments = ["run", "--spool", str(tmp_path / "spool"), "--to", str(tmp_path / "tier")]
    code, log = ended(arguments, "tierd.cli", (signal.SIGHUP,))
    assert code == 0 and "stopping" in log and "ended" in log


def test_hangups_in_quick_succession_reload_and_end_nothing(config: Path) -> None:
    def act(daemon: subprocess.Popen[str], line: str) -> None:
        if " to nfs " in line:
            for _ in range(3):
                daemon.send_signal(signal.SIGHUP)
        elif "the configuration is reloaded" in line:
            daemon.send_signal(signal.SIGHUP)
            daemon.send_signal(signal.SIGTERM)

    code, log = ended(["run", "--config", str(config)], on_line=act)
    assert code == 0 and "the configuration is reloaded: nfs" in log and "ended" in log


def test_hangup_while_the_daemon_ends_changes_nothing(config: Path) -> None:
    def act(daemon: subprocess.Popen[str], line: str) -> None:
        if " to nfs " in line:
            daemon.terminate()
        elif "stopping" in line or "ended" in line:
            daemon.send_signal(signal.SIGHUP)

    code, log = ended(["run", "--config", str(config)], on_line=act)
    assert code == 0 and "ended" in log


def test_hangup_after_the_last_line_keeps_the_exit_code(config: Path) -> None:
    def act(daemon: subprocess.Popen[str], line: str) -> None:
        if " to nfs " in line:
            daemon.terminate()

    code, log = ended(["run", "--config", str(config)], "end", (signal.SIGHUP,), act)
    assert code == 0 and "ended" in log
