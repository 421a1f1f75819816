"""Which step a framework's loop has yet to save when it ends."""

from __future__ import annotations

import pytest

from tierd.adapters.step_metrics import LastSave


class Saves:
    """Stands in for a Checkpointer and for its save, which has failed with `failure`."""

    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure

    def save(self, step: int, state: object, metrics: object) -> Saves:
        return self

    def error(self) -> Exception | None:
        return self.failure


@pytest.mark.parametrize("failure", [None, OSError("the disk is full")], ids=["durable or running", "failed"])
def test_last_step_is_due_again_only_if_its_save_failed(failure: Exception | None) -> None:
    last = LastSave(10)
    assert [last.needs_save(step) for step in (9, 10, 11)] == [False, False, True]
    last.save(Saves(failure), 20, {}, None)  # type: ignore[arg-type]
    assert [last.needs_save(step) for step in (19, 20, 21)] == [False, failure is not None, True]
