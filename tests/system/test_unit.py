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


def test_the_unit_is_hardened() -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(UNIT)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout  # exposure at most 2.5 of 10
