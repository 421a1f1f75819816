"""The launchers of Accelerate, Lightning and Ray Train, as tests/end_to_end tries the others."""

from __future__ import annotations

import importlib.util
import os

import pytest
from support.launchers import LIBRARIES, SEEDS, cycle


@pytest.mark.loaders
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("launcher", LIBRARIES, ids=str)
def test_a_killed_rank_and_a_restart_leave_no_trace(launcher, seed, tmp_path):
    if importlib.util.find_spec(launcher.name) is None:
        reason = f"{launcher} is not installed: make loaders"
        pytest.fail(reason) if os.environ.get("TIERD_LOADERS") == "all" else pytest.skip(reason)
    cycle(launcher, seed, tmp_path)
