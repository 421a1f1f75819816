"""A launch that saves the step that it resumed from once more is warned, because `keep_last` counts both."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import tierd


def launch(spool: Path, *steps: int, restore: bool = True) -> str:
    """Begin a launch, resume, save these steps, and return its attempt."""
    with tierd.Checkpointer(spool, "run", to=[]) as checkpointer:
        state = {"w": torch.ones(3)}
        if restore:
            checkpointer.restore(state)
        for step in steps:
            checkpointer.save(step, state)
        return checkpointer.attempt


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "keep_last counts" in record.getMessage()]


def test_save_of_the_resumed_step_warns_once_with_attempt_and_way_out(tmp_path, caplog):
    first = launch(tmp_path, 1, 2)
    with caplog.at_level(logging.WARNING):
        launch(tmp_path, 2, 3, 4)
    (warning,) = warnings(caplog)
    assert "step 2 of attempt " + first in warning and "if step > restored.step" in warning


def test_stage_of_the_resumed_step_warns(tmp_path, caplog):
    launch(tmp_path, 1)
    with tierd.Checkpointer(tmp_path, "run", to=[]) as checkpointer, caplog.at_level(logging.WARNING):
        checkpointer.restore({"w": torch.ones(3)})
        with checkpointer.stage(1) as directory:
            (directory / "file").write_bytes(b"x")
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(("steps", "restore"), [((3, 4), True), ((3, 2), True), ((2,), False)])
def test_save_of_another_step_or_without_restore_does_not_warn(tmp_path, caplog, steps, restore):
    launch(tmp_path, 1, 2)
    with caplog.at_level(logging.WARNING):
        launch(tmp_path, *steps, restore=restore)
    assert warnings(caplog) == []
