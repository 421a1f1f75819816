"""The newest save of a training loop, because frameworks ask more than once to save the same step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tierd.client.checkpointer import Checkpointer
from tierd.client.saving.save import Save
from tierd.core.errors import StepRefused

log = logging.getLogger("tierd")


class LastSave:
    """The step that was saved or restored last, and whether its save was lost.

    Invariant: a step is saved once, and again only after its save was skipped or has failed.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._save: Save | None = None

    def save(
        self, checkpointer: Checkpointer, step: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None
    ) -> None:
        """Save the state of a step. Raises as `Checkpointer.save`, but not if a save that failed had committed it."""
        try:
            save = checkpointer.save(step, state, metrics=metrics)
        except StepRefused as error:
            if self._save is None or step != self.step:
                raise
            log.warning("%s; its save had failed after that", error)
            self._save = None
        else:
            self.step, self._save = step, save

    def holds(self, step: int) -> bool:
        """Return whether the last save is of this step, and running or durable."""
        return step == self.step and (self._save is None or self._save.error() is None)

    def is_due(self, step: int) -> bool:
        """Return whether a loop that never goes back has yet to save this step."""
        return step >= self.step and not self.holds(step)
