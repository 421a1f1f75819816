"""After each update of live weights they are the trainer's, bit for bit, or the follower keeps its own and says why."""

from __future__ import annotations

from collections import Counter

import pytest
from support.live_history import play
from support.seeds import seeds
from support.world import hurry


@pytest.mark.parametrize("seed", seeds(1000))
def test_follower_has_weights_of_the_checkpoint_that_it_names(seed, tmp_path, monkeypatch):
    hurry(monkeypatch)
    play(seed, tmp_path, Counter(), monkeypatch)
