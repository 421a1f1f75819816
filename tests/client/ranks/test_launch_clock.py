"""The clock by which a launch dates its checkpoints: set forward and back while the launch runs."""

from __future__ import annotations

import logging
import random
import time
from itertools import pairwise

import pytest
from support.training import tensors
from support.waiting import wait_until

import tierd
from tierd.client.ranks.attempts import LaunchClock

YEAR = 365 * 86400.0
SEEDS = 20


class Wall:
    """The node's wall clock, and the time that has passed."""

    def __init__(self, monkeypatch) -> None:
        self.ahead_s = self.passed_s = 0.0
        wall, boot = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
        monkeypatch.setattr(time, "time", lambda: wall + self.passed_s + self.ahead_s)
        monkeypatch.setattr(time, "clock_gettime", lambda _: boot + self.passed_s)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_clock_that_is_set_makes_no_earlier_checkpoint_older(monkeypatch, seed):
    """docs/explanation/deletion.md: at most a minute older for each time that the clock is set, however far."""
    rng, node = random.Random(seed), Wall(monkeypatch)
    node.ahead_s = rng.choice((0.0, YEAR, -YEAR))
    clock, sets = LaunchClock(), 0
    checkpoints: list[
        tuple[float, float, int]
    ] = []  # when dated, the time that has passed, how often the clock was set
    for _ in range(rng.randint(2, 30)):
        node.passed_s += rng.choice((1.0, 60.0, 3600.0, 86400.0))
        if rng.random() < 0.4:
            node.ahead_s += rng.choice((-YEAR, YEAR, -3600.0, 3600.0, 30.0, -30.0))
            sets += 1
        checkpoints.append((clock.now().timestamp(), node.passed_s, sets))
    for (before, begun, few), (after, ended, more) in pairwise(checkpoints):
        assert after - before <= ended - begun + 60.0 * (more - few) + 0.001


def test_clock_that_is_right_is_followed(monkeypatch):
    node = Wall(monkeypatch)
    clock = LaunchClock()
    for _ in range(5):
        node.passed_s += 3600.0
        node.ahead_s -= 0.5
        assert clock.now().timestamp() == pytest.approx(time.time(), abs=0.001)


def test_clock_set_year_forward_empties_no_rule_of_its_launch(spool, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "tierd")
    (tmp_path / "tier").mkdir()
    now, ahead_s = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: now() + ahead_s)
    rule = tierd.Retention(keep_last=1, keep_within="6h")

    def manifests() -> set[str]:
        return {path.parent.name[:12] for path in (tmp_path / "tier").glob("run/manifests/*/*")}

    with tierd.Checkpointer(spool.root, "run", to=[f"file://{tmp_path}/tier"], retention=rule) as ckpt:
        for step in range(1, 7):
            ahead_s = YEAR if step in (3, 4) else 0.0
            ckpt.save(step, tensors(step)).wait("file", timeout=60)
        wait_until(lambda: len(manifests()) == 6)
    assert "set 31536000 s forward" in caplog.text
    time.sleep(2)  # in which a daemon that took them for old would prune them
    assert len(manifests()) == 6
