"""Two seeds of `python -m faults followers`, whose judge is in support/killed_followers.py."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.following import arrive, follow_forever, put
from support.killed_followers import LIMIT_S, PERIOD_S, STEPS, delivered, play
from support.nursery import context as nursery


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return put(tmp_path_factory.mktemp("full"), STEPS)


def test_a_killed_follower_delivers_each_exactly_once(full, tmp_path):
    assert "killed alone" in play(0, False, full, tmp_path)


def test_a_command_that_is_killed_with_its_follower_is_run_again(full, tmp_path):
    assert "killed with its command" in play(1, True, full, tmp_path)


def has_open(pid: int, directory: Path, suffix: str) -> bool:
    """Whether a process has a file of this directory open whose name ends so."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            link = os.readlink(descriptor)
            if link.startswith(str(directory)) and link.endswith(suffix):
                return True
    return False


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_next_follower_waits_for_a_command_that_outlived_its_own(interrupted, full, tmp_path):
    """Ctrl-C in a terminal reaches the follower, the keeper and the command; this command goes on."""
    tier, home, log = tmp_path / "tier", tmp_path / "home", tmp_path / "log"
    tier.mkdir()
    arrive(full, tier, 1)
    script = f"trap '' INT; echo begin >> {log}; while ! test -e {tmp_path}/go; do sleep 0.02; done; echo end >> {log}"
    words = ["sh", "-c", script]
    first, second = (
        nursery.Process(target=follow_forever, args=(str(tier), str(home), words, PERIOD_S)) for _ in range(2)
    )
    first.start()
    until = time.monotonic() + LIMIT_S
    try:
        while not log.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        if interrupted:
            os.killpg(first.pid, signal.SIGINT)
        else:
            first.kill()
        first.join()
        second.start()
        while not has_open(second.pid, home, ".lock"):
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.5)
        assert log.read_text().split() == ["begin"] and delivered(home) == []
        (tmp_path / "go").touch()
        while delivered(home) != [1]:
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.1)
    finally:  # pytest would wait for the followers, and the commands wait for the file
        (tmp_path / "go").touch()
        for one in (first, second):
            if one.pid is not None:
                one.kill()
                one.join()
    assert log.read_text().split() == ["begin", "end"]
