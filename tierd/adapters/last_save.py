"""The newest save of a training loop, because frameworks ask more than once to save the same step."""

from __future__ import annotations

from tierd.client.saving.save import Save


class LastSave:
    """The step that was saved or restored last, and whether its save was lost.

    Invariant: a step is saved once, and again only after its save was skipped or has failed.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._save: Save | None = None

    def made(self, save: Save) -> None:
        self.step, self._save = save.step, save

    def holds(self, step: int) -> bool:
        """Return whether the last save is of this step, and running or durable."""
        return step == self.step and (self._save is None or self._save.error() is None)

    def is_due(self, step: int) -> bool:
        """Return whether a loop that never goes back has yet to save this step."""
        return step >= self.step and not self.holds(step)
