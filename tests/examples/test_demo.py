"""The demo, small: it succeeds, and it fails when something is left out of the resume or the daemon dies."""

from __future__ import annotations

import argparse
import copy
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")

from examples.demo import compare, damage, train  # noqa: E402

ROOT = Path(__file__).parents[2]
SIZES = {"steps": 60, "every": 5, "epoch-steps": 10, "kill-at": 17, "width": 64, "depth": 2, "patience": 200}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]


def demo(tmp_path, *more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "examples.demo", *SMALL, *more]
    with (tmp_path / "out").open("wb") as out:
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT)


def ended(process, tmp_path, timeout=250):
    try:
        code = process.wait(timeout)
    finally:
        process.terminate()
        process.wait(60)
    return code, (tmp_path / "out").read_text()


def flat(text):
    return " ".join(text.split())


def test_demo(tmp_path):
    code, out = ended(demo(tmp_path), tmp_path)
    assert code == 0, out
    said = flat(out)
    skipped = re.search(r"skipped step (\d+) \(attempt (\S+)\): local: .*differ from their digest.*disk:", said)
    resumed = re.search(r"resumed from step (\d+) \(attempt (\S+)\), every byte verified", said)
    assert skipped and resumed, out
    assert int(resumed[1]) == int(skipped[1]) - 5
    assert resumed[2] == skipped[2]
    assert "equal, bit for bit: 60 losses" in said
    assert (
        "quarantined" in said
        and "committed: newest" in said
        and "verified: newest" in said
        and "saved, then pruned" in said
    )
    rows = [line for line in out.splitlines() if re.match(r" +\d+ +[0-9a-f]{4} ", line)]
    assert len(rows) == int(skipped[1]) // 5 + (60 - int(resumed[1])) // 5  # every checkpoint that was made
    assert re.search(r"\d+\.\d\d s +\d+\.\d, \d+\.\d", out)  # the daemon's events still tell when and how much
    assert "ended with 0" in said


def test_demo_fails_when_the_resume_forgets(tmp_path):
    code, out = ended(demo(tmp_path, "--forget", "data"), tmp_path)
    assert code == 1, out
    said = flat(out)
    resumed = int(re.search(r"resumed from step (\d+)", said)[1])
    failure = re.search(r"demo failed: .* first at step (\d+), .*: (\w+) ", said)
    assert failure, out
    assert int(failure[1]) == resumed + 1
    assert failure[2] in ("epoch", "loss", "samples")
    assert "equal, bit for bit" not in said


def test_demo_fails_when_the_daemon_dies(tmp_path):
    process = demo(tmp_path)
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"daemon: process (\d+)", (tmp_path / "out").read_text())):
            assert time.monotonic() < end and process.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.05)
        os.kill(int(found[1]), signal.SIGKILL)
    finally:
        code, out = ended(process, tmp_path)
    assert code == 1
    assert "demo failed: the daemon ended with exit code -9" in flat(out)


def test_loader_resumes_as_its_docstring_says():
    """`make_loader`'s docstring: exact at every step, across epochs, and without a draw from the global generator."""
    options = argparse.Namespace(batch=4, epoch_steps=3, context=16)

    def batches(loader, count):
        found = []
        while len(found) < count:
            for numbers, *_ in loader:
                found.append((numbers.tolist(), torch.rand(1).item()))
                if len(found) == count:
                    break
        return found

    torch.manual_seed(1)
    whole = batches(train.make_loader(options), 9)
    torch.manual_seed(1)
    loader, states = train.make_loader(options), []
    for _ in range(3):
        for _ in loader:
            torch.rand(1)
            states.append((copy.deepcopy(loader.state_dict()), torch.get_rng_state()))
    assert len({tuple(numbers) for numbers, _ in whole}) == 9  # each epoch has an order of its own
    for step, (state, rng) in enumerate(states[:-1], start=1):
        resumed = train.make_loader(options)
        resumed.load_state_dict(state)
        torch.set_rng_state(rng)
        assert batches(resumed, 9 - step) == whole[step:], f"resumed after step {step}"


def launch(name="a launch", **changed):
    made = compare.Launch(name, steps={n: {"loss": float(n).hex(), "samples": [n]} for n in (1, 2, 3)}, final="f")
    for key, value in changed.items():
        setattr(made, key, value)
    return made


def test_difference_between_launches_is_detected_and_named():
    reference = launch("reference")
    first = launch(steps={1: reference.steps[1]}, final=None)
    assert compare.difference(reference, [first, launch()]) is None
    assert compare.difference(reference, [first]) == "step 2 was never made"
    assert "final" in compare.difference(reference, [first, launch(final="g")])
    assert "final" in compare.difference(launch(final=None), [launch(final=None)])
    bit = {**reference.steps, 2: {"loss": "0x1.0000000000001p+1", "samples": [2]}}
    assert compare.difference(reference, [first, launch(steps=bit)]).startswith("step 2,")
    # A step that was made twice has to be equal both times.
    assert compare.difference(reference, [launch(steps=bit, final=None), launch()]).startswith("step 2,")
    more = {**reference.steps, 4: reference.steps[3]}
    assert compare.difference(reference, [launch(steps=more)]) == "step 4 is not in the reference"


def test_a_log_cut_short_is_read_up_to_its_last_whole_line(tmp_path):
    log = tmp_path / "log"
    train.write(log, step=1, loss=(0.1).hex(), samples=[1])
    with log.open("a") as file:
        file.write('{"step": 2, "lo')
    assert compare.read("x", log).steps == {1: {"loss": (0.1).hex(), "samples": [1]}}
    assert compare.read("x", tmp_path / "none").last == 0


def test_one_bit_is_flipped(tmp_path):
    file = tmp_path / "file"
    before = bytes(range(256))
    file.write_bytes(before)
    assert f"byte 128 of {file}: 0x80 -> 0x90" in damage.flip_bit(file)
    after = file.read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True)) == 1
