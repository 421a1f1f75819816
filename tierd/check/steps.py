"""Find a launch that goes on with another step than the one after its checkpoint.

Invariant: pure.
"""

from __future__ import annotations

from tierd.check.finding import StateFinding
from tierd.check.history import RankHistory, Taken
from tierd.check.kinds import kind_of_path
from tierd.check.moments import capture_of


def wrong_next_step(
    whole: RankHistory, saved: Taken | None, loaded: Taken, launch: int, begun: int
) -> StateFinding | None:
    """Return a finding if a launch that begins with step `begun` leaves out steps, or trains a step twice."""
    if begun not in _next_steps(loaded.step, saved):
        reason = f"launch {launch} goes on with step {begun}: the step after the checkpoint's is the next"
        return StateFinding("steps", "step", f"the checkpoint is of step {loaded.step}, and {reason}")
    if saved is not None and _holds_step(whole, saved, begun):
        return StateFinding(
            "steps",
            "step",
            f"the checkpoint of step {loaded.step} was saved after step {begun} was observed, and holds its update; "
            f"launch {launch} trains step {begun} again: save the number of the next step, or add 1 after the restore",
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


def _holds_step(whole: RankHistory, saved: Taken, step: int) -> bool:
    """Return whether the weights at a save have the update of `step`, which was observed before it.

    A loop may observe a step before its update, and save in between: the weights at the save are older then.
    """
    done, earlier = capture_of(whole, "step", step), capture_of(whole, "step", step - 1)
    if saved.after is None or saved.after < step or done is None or earlier is None:
        return False
    weights = [path for path in saved.entries if kind_of_path(path, saved.kinds) == "weights"]

    def digests(taken: Taken) -> list[str | None]:
        return [leaf.digest if (leaf := taken.entries.get(path)) else None for path in weights]

    return digests(saved) == digests(done) != digests(earlier)
