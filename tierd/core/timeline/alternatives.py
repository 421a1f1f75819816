"""What exists instead of a run or a step that was asked for and does not, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_MOST_RUNS, _MOST_STEPS = 20, 8  # that a message names


def runs_there(run: str, run_names: Collection[str]) -> str:
    """List the runs that exist, those with a similar name first; `run` is the one that was asked for."""
    if not run_names:
        return "there is no run at all"
    near = difflib.get_close_matches(run, run_names, n=_MOST_RUNS, cutoff=0.6)
    ordered = [*near, *sorted(set(run_names) - set(near))]
    suffix = f" and {len(ordered) - _MOST_RUNS} more" if len(ordered) > _MOST_RUNS else ""
    return f"the runs there are: {', '.join(ordered[:_MOST_RUNS])}{suffix}"


def steps_there(step: int, existing: Collection[int]) -> str:
    """List the steps that exist, of many those nearest to `step`, which was asked for; empty if there are none."""
    if not existing:
        return ""
    steps = sorted(set(existing))
    near = sorted(sorted(steps, key=lambda candidate: abs(candidate - step))[:_MOST_STEPS])
    listing = ", ".join(map(str, near))
    if len(near) == len(steps):
        return f"the steps there are: {listing}"
    return f"the nearest of {len(steps)} steps there, {steps[0]} to {steps[-1]}, are: {listing}"
