"""Find a launch that goes on with another step than the one after its checkpoint.

Invariant: pure.
"""

from __future__ import annotations

from tierd.check.finding import StateFinding
from tierd.check.history import RankHistory, Taken
from tierd.check.kinds import kind_of_path
from tierd.check.moments import capture_of


def wrong_next_step(
    uninterrupted: RankHistory, saved: Taken | None, loaded: Taken, launch: int, first_step: int
) -> StateFinding | None:
    """Return a finding if a launch that begins with step `first_step` leaves out steps, or trains a step twice."""
    if first_step not in _next_steps(loaded.step, saved):
        reason = f"launch {launch} goes on with step {first_step}: the step after the checkpoint's is the next"
        return StateFinding("steps", "step", f"the checkpoint is of step {loaded.step}, and {reason}")
    if saved is not None and _holds_step(uninterrupted, saved, first_step):
        return StateFinding(
            "steps",
            "step",
            f"the checkpoint of step {loaded.step} was saved after step {first_step} was observed, and holds its "
            f"update; launch {launch} trains step {first_step} again: save the number of the next step, or add 1 after "
            "the restore",
        )
    return None


def _next_steps(step: int, saved: Taken | None) -> set[int]:
    """Return the steps with which a launch may go on after the checkpoint of `step`.

    A framework counts the finished steps, and a loop may count the observed ones from 0. Then the save shows which
    step was observed before it; the step after that one may have been finished as well, and not observed yet.
    """
    if saved is None or saved.after is None or saved.after == step:
        return {step + 1}
    return {step + 1, saved.after + 1, saved.after + 2}


def _holds_step(uninterrupted: RankHistory, saved: Taken, step: int) -> bool:
    """Return whether the weights at a save have the update of `step`, which was observed before it.

    A loop may observe a step before its update, and save in between: the weights at the save are older then.
    """
    after_step, earlier = capture_of(uninterrupted, "step", step), capture_of(uninterrupted, "step", step - 1)
    if saved.after is None or saved.after < step or after_step is None or earlier is None:
        return False
    weights = [path for path in saved.entries if kind_of_path(path, saved.kinds) == "weights"]

    def digests(capture: Taken) -> list[str | None]:
        return [leaf.digest if (leaf := capture.entries.get(path)) else None for path in weights]

    return digests(saved) == digests(after_step) != digests(earlier)
