"""What exists instead of a run or a step that was asked for and does not, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_MOST_RUNS, _MOST_STEPS = 20, 8  # that a message names


def runs_there(run: str, there: Collection[str]) -> str:
    """List the runs that exist, those with a similar name first; `run` is the one that was asked for."""
    if not there:
        return "there is no run at all"
    near = difflib.get_close_matches(run, there, n=_MOST_RUNS, cutoff=0.6)
    named = [*near, *sorted(set(there) - set(near))]
    more = f" and {len(named) - _MOST_RUNS} more" if len(named) > _MOST_RUNS else ""
    return f"the runs there are: {', '.join(named[:_MOST_RUNS])}{more}"


def steps_there(step: int, there: Collection[int]) -> str:
    """List the steps that exist, of many those nearest to `step`, which was asked for; empty if there are none."""
    if not there:
        return ""
    steps = sorted(set(there))
    near = sorted(sorted(steps, key=lambda one: abs(one - step))[:_MOST_STEPS])
    named = ", ".join(map(str, near))
    if len(near) == len(steps):
        return f"the steps there are: {named}"
    return f"the nearest of {len(steps)} steps there, {steps[0]} to {steps[-1]}, are: {named}"
