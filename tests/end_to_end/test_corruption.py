"""Seeded corruptions of a spool and its tiers, as `python -m faults corruption` plays them: few of them in `make test`,
because each kind of answer has a defect that shows in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_corruption_is_noticed_and_answered_with_the_right_checkpoint() -> None:
    command = [sys.executable, "-m", "faults", "corruption", "--trials", "150"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(["tests", "."])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
