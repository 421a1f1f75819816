"""A run's history from its checkpoints: how often it saved and failed, and how long it did not train after failures.

Invariant: nothing is guessed. Checkpoints that retention deleted do not count, and an error names a value that the
remaining ones do not show.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from tierd.core.errors import CheckpointNotFound, ConfigError
from tierd.core.planning.copies import complete_world_sizes
from tierd.core.planning.inventory import Inventory


@dataclass(frozen=True, slots=True)
class Past:
    """A run's history, from its manifests and heads.

    Attributes:
        run: the run's name.
        span_s: the time from its first launch to its newest checkpoint, in seconds.
        failures: the number of launches that resumed from a checkpoint of an earlier launch.
        every_steps: the smallest distance in steps between two remaining checkpoints of one launch.
        step_s: the median time of one step between such checkpoints, saves included, in seconds.
        state_bytes: the size of one checkpoint, all ranks together.
        away_s: the mean time from a failure until training continued, in seconds. A failure is assumed half an interval
            after the last checkpoint. NaN (null in JSON) if no failure is known.
    """

    run: str
    span_s: float
    failures: int
    every_steps: int
    step_s: float
    state_bytes: int
    away_s: float


def past(inventory: Inventory, run: str) -> Past:
    """The history of `run`, as far as places show it.

    Raises:
        CheckpointNotFound: the run has no checkpoint with a readable manifest.
        ConfigError: too few checkpoints are left to determine how often the run saved.
    """
    created_s = defaultdict[str, dict[int, float]](dict)  # by launch and step
    state_bytes = 0
    for checkpoint, copies in inventory.copies(run).items():
        for copy in copies.values():
            facts, world_sizes = list(copy.facts.values()), complete_world_sizes(copy.ranks)
            if facts and world_sizes:
                created_s[checkpoint.attempt][checkpoint.step] = facts[0].created.timestamp()
                state_bytes = max(state_bytes, round(mean(part.size for part in facts) * max(world_sizes)))
    if not created_s:
        raise CheckpointNotFound(f"run {run}: no checkpoint whose manifest can be read")
    gaps = [
        (following - step, times[following] - times[step])
        for times in created_s.values()
        for step, following in pairwise(sorted(times))
        if times[following] > times[step]
    ]
    if not gaps:
        raise ConfigError(f"run {run}: no launch has two checkpoints left, so nothing tells how often it saved")
    every_steps = min(steps for steps, _ in gaps)
    step_s = median(gap_s / steps for steps, gap_s in gaps)
    newest_s = {attempt: max(times.values()) for attempt, times in created_s.items()}
    origins = inventory.origins(run)
    resumed = {attempt: origin.attempt for attempt, origin in origins.items() if origin is not None}
    away_s = [
        max(0.0, _begun_s(attempt) - newest_s[before] - every_steps * step_s / 2)
        for attempt, before in resumed.items()
        if before in newest_s
    ]
    return Past(
        run,
        span_s=max(newest_s.values()) - _begun_s(min([*created_s, *origins])),
        failures=len(resumed),
        every_steps=every_steps,
        step_s=step_s,
        state_bytes=state_bytes,
        away_s=mean(away_s) if away_s else math.nan,
    )


def _begun_s(attempt: str) -> float:
    return int(attempt[:12], 16) / 1000  # an attempt's name begins with its time in milliseconds
