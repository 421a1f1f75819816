"""The example of live weights: samples come from another process, which follows the policy that learns from them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from examples.live_policy import MAX_LAG, train


def test_policy_learns_from_samples_of_a_process_that_follows_its_weights(tmp_path, capfd):
    rewards = train(tmp_path, steps=60)
    lines = [line for line in capfd.readouterr().out.splitlines() if "with weights of step" in line]
    drawn_at = [int(line.rpartition(" ")[2]) for line in lines]
    assert drawn_at == sorted(drawn_at) and drawn_at[-1] >= 60 - MAX_LAG
    assert sum(rewards[-20:]) > 2 * sum(rewards[:20])
