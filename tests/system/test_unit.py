"""The systemd unit: systemd itself accepts every line of it, and a supervised daemon behaves as the unit says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

UNIT = Path(__file__).parent.parent.parent / "systemd" / "tierd.service"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    tierd = Path(sys.executable).with_name("tierd")
    copy = tmp_path / "tierd.service"
    copy.write_text(UNIT.read_text().replace("/opt/tierd/bin/tierd", str(tierd)))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_lets_the_daemon_lower_its_own_priority() -> None:
    """And does not do it for the whole process: a save waits for what persists it."""
    unit = UNIT.read_text()
    assert "Nice=" not in unit and "IOScheduling" not in unit
    [allowed] = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("SystemCallFilter=")]
    calls, asked = set[str](), [allowed]
    while asked:
        done = subprocess.run(
            ["systemd-analyze", "syscall-filter", asked.pop()], capture_output=True, text=True, timeout=60, check=True
        )
        names = {line.strip() for line in done.stdout.splitlines() if line.startswith("    ")}
        asked += [name for name in names - calls if name.startswith("@")]
        calls |= names
    assert {"setpriority", "ioprio_set"} <= calls


def test_the_unit_is_hardened() -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(UNIT)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout  # exposure at most 2.5 of 10
