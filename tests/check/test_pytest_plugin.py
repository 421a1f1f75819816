"""The fixture `tierd_resumes`, as a project uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LOOP = """
from pathlib import Path

import torch
import tierd

with Path(__file__).with_name("launches").open("a") as launches:
    launches.write("1")


def main(spool, forgets=()):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    for name in forgets:
        del state[name]
    ckpt = tierd.Checkpointer(spool, run="train", to=[])
    ckpt.restore(state)
    while state["step"] < 40:
        state["step"] += 1
        numbers = torch.arange(2.0) + state["step"]
        loss = model(numbers).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tierd.observe(state["step"], [state["step"]], loss)
        if state["step"] % 10 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()


def forgetful(spool):
    main(spool, ("optimizer",))
"""

TESTS = """
def test_resume(tierd_resumes): tierd_resumes("train:main", steps=40)

def test_momentum(tierd_resumes): tierd_resumes("train:forgetful", steps=40, kill_at=(25,))
"""


@pytest.mark.timeout(400)
def test_one_line_is_all_that_a_project_writes(tmp_path: Path):
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "test_train.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | {"PYTEST_ADDOPTS": "", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tierd.pytest_plugin", "-p", "no:cacheprovider", "--rootdir", "."],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "NOT EXACT: train:forgetful: 40 steps, 1 kill" in done.stdout
    assert "likely cause (not in the checkpoint): SGD of train.py:15" in done.stdout
    # A launch costs seconds. A loop that resumes exactly takes one more than its kills and an uninterrupted one; only
    # a loop that does not takes a second uninterrupted one.
    assert len((tmp_path / "launches").read_text()) == 3 + 4
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith("tierd-check")] == []


def test_the_plugin_loads_nothing_of_the_check():
    code = "import sys, tierd.pytest_plugin; assert not {'torch', 'tierd.check', 'msgspec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
