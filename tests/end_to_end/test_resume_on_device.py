"""A training that is killed again and again trains on with the bits of one that was not, on a GPU and without one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from support import device_trainer
from support.waiting import wait_until

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU on this machine: a resume on one is untested here"
)


def start(place, name, steps, device):
    (place / f"{name}-tier").mkdir(exist_ok=True)
    arguments = [place / f"{name}-spool", place / f"{name}-tier", place / name, steps, device]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch asks for it where a step must repeat
    return subprocess.Popen([sys.executable, "-m", device_trainer.__name__, *map(str, arguments)], env=environment)


def said(log):
    """Each line's words; none of a line that a kill cut off."""
    return [line.split() for line in log.read_text().split("\n")[:-1]] if log.exists() else []


def kill_after(lines, trainer, log):
    goal = len(said(log)) + lines
    wait_until(lambda: len(said(log)) >= goal or trainer.poll() is not None)
    trainer.kill()
    assert trainer.wait(60) == -signal.SIGKILL, "it ended before it was killed"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("device", "steps", "kills"), [("cpu", 30, 2), pytest.param("cuda", 150, 5, marks=gpu)])
def test_a_training_that_was_killed_trains_on_to_the_bit(tmp_path, device, steps, kills):
    seed = 11
    dice = random.Random(seed)
    assert start(tmp_path, "whole", steps, device).wait(120) == 0
    for _ in range(kills):
        kill_after(dice.randrange(5, steps // kills), start(tmp_path, "killed", steps, device), tmp_path / "killed")
    assert start(tmp_path, "killed", steps, device).wait(120) == 0
    whole, found = said(tmp_path / "whole"), said(tmp_path / "killed")
    starts = [int(step) for key, step in found if key == "resumed"]
    assert len(starts) == kills + 1 and starts == sorted(starts) and starts[-1] > 0
    expected = dict(whole)
    assert [one for one in found if one[0] != "resumed" and expected[one[0]] != one[1]] == [], f"seed {seed}"
    assert found[-1] == whole[-1]
