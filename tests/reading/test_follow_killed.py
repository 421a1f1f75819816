"""A follower that is killed at any point delivers each checkpoint exactly once, unless its command was killed, too.

TIERD_FOLLOW_TRIALS=200 runs the long version.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from support.following import arrive, follow_forever, put

TRIALS = int(os.environ.get("TIERD_FOLLOW_TRIALS", "3"))
STEPS = range(1, 6)
LIMIT_S = 60.0
# $1: the step, $2: the log, $3: seconds, $4: the directory
SCRIPT = (
    'echo begin $1 >> $2; sleep $3; cat "$4"/00000-of-00001/deep/er/state.json >> $2; echo >> $2; echo end $1 >> $2'
)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return put(tmp_path_factory.mktemp("full"), STEPS)


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.following", "tierd.reading"])
    return context


def delivered(home: Path) -> list[int]:
    path = home / "delivered.json"
    found = json.loads(path.read_text())["delivered"].values() if path.exists() else ()
    return [step for steps in found for step in steps]


def trial(seed: int, group: bool, full: Path, tmp_path: Path, processes) -> list[str]:
    """Kill a follower at random moments while checkpoints arrive; the lines that its commands wrote."""
    random_ = random.Random(seed)
    tier, home, log = tmp_path / "tier", tmp_path / "home", tmp_path / "log"
    tier.mkdir()
    steps = random_.sample(STEPS, len(STEPS))
    words = ["sh", "-c", SCRIPT, "sh", "{step}", str(log), f"{random_.choice((0, 0.02, 0.1))}", "{directory}"]
    kills, end = random_.randrange(2, 7), time.monotonic() + LIMIT_S
    while True:
        follower = processes.Process(target=follow_forever, args=(str(tier), str(home), words, 0.02))
        follower.start()
        until = time.monotonic() + random_.expovariate(3) if kills else end
        while time.monotonic() < until and len(delivered(home)) < len(STEPS):
            if steps and random_.random() < 0.2:
                arrive(full, tier, steps.pop())
            time.sleep(0.01)
            assert follower.is_alive() and time.monotonic() < end, f"seed {seed}: {delivered(home)}"
        if group:
            with suppress(ProcessLookupError):  # it has no group yet
                os.killpg(follower.pid, signal.SIGKILL)
        follower.kill()
        follower.join()
        kills -= 1
        if not steps and len(delivered(home)) == len(STEPS):
            return log.read_text().splitlines()
        if kills <= 0:
            while steps:
                arrive(full, tier, steps.pop())
            kills = 0


@pytest.mark.parametrize("seed", range(TRIALS))
def test_a_killed_follower_delivers_each_exactly_once(seed, full, tmp_path, processes):
    lines = trial(seed, False, full, tmp_path, processes)
    assert Counter(lines) == Counter(
        line for step in STEPS for line in (f"begin {step}", json.dumps({"step": step}), f"end {step}")
    )
    assert sorted(delivered(tmp_path / "home")) == list(STEPS)


@pytest.mark.parametrize("seed", range(TRIALS))
def test_a_command_that_is_killed_with_its_follower_is_run_again(seed, full, tmp_path, processes):
    lines = Counter(trial(seed + 10_000, True, full, tmp_path, processes))
    for step in STEPS:
        assert lines[f"begin {step}"] >= lines[f"end {step}"] >= 1
    assert sorted(delivered(tmp_path / "home")) == list(STEPS)


def test_the_next_follower_waits_for_a_command_that_outlived_its_own(full, tmp_path, processes):
    tier, home, log = tmp_path / "tier", tmp_path / "home", tmp_path / "log"
    tier.mkdir()
    arrive(full, tier, 1)
    words = ["sh", "-c", f"echo begin >> {log}; while ! test -e {tmp_path}/go; do sleep 0.02; done; echo end >> {log}"]
    first, second = (
        processes.Process(target=follow_forever, args=(str(tier), str(home), words, 0.02)) for _ in range(2)
    )
    first.start()
    until = time.monotonic() + LIMIT_S
    while not log.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    first.kill()
    first.join()
    second.start()
    time.sleep(0.3)
    assert log.read_text().split() == ["begin"] and delivered(home) == []
    (tmp_path / "go").touch()
    while delivered(home) != [1]:
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.1)
    second.kill()
    second.join()
    assert log.read_text().split() == ["begin", "end"]
