"""A run's history from its checkpoints: how often it saved and failed, and how long it did not train after failures.

Invariant: nothing is guessed. Checkpoints that retention deleted do not count, and an error names a value that the
remaining ones do not show.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True, slots=True)
class _Saved:
    attempt: str
    step: int
    created_s: float
    size: int


def past(inventory: Inventory, run: str) -> Past:
    """The history of `run`, as far as places show it.

    Raises:
        CheckpointNotFound: the run has no checkpoint with a readable manifest.
        ConfigError: too few checkpoints are left to determine how often the run saved.
    """
    saved = _saved(inventory, run)
    if not saved:
        raise CheckpointNotFound(f"run {run}: no checkpoint whose manifest can be read")
    pairs = [(a, b) for a, b in pairwise(saved) if a.attempt == b.attempt and b.created_s > a.created_s]
    if not pairs:
        raise ConfigError(f"run {run}: no launch has two checkpoints left, so nothing tells how often it saved")
    every_steps = min(b.step - a.step for a, b in pairs)
    step_s = median((b.created_s - a.created_s) / (b.step - a.step) for a, b in pairs)
    origins = inventory.origins(run)
    newest_s = {save.attempt: save.created_s for save in saved}
    resumed = {attempt: origin.attempt for attempt, origin in origins.items() if origin is not None}
    away_s = [
        max(0.0, _begun_s(attempt) - newest_s[before] - every_steps * step_s / 2)
        for attempt, before in resumed.items()
        if before in newest_s
    ]
    return Past(
        run,
        span_s=max(newest_s.values()) - min(map(_begun_s, {saved[0].attempt, *origins})),
        failures=len(resumed),
        every_steps=every_steps,
        step_s=step_s,
        state_bytes=max(save.size for save in saved),
        away_s=mean(away_s) if away_s else math.nan,
    )


def _saved(inventory: Inventory, run: str) -> list[_Saved]:
    """The checkpoints of which some place shows all parts and a manifest, by launch and step."""
    saved = {}
    for checkpoint, copies in inventory.copies(run).items():
        for copy in copies.values():
            facts, worlds = list(copy.facts.values()), complete_world_sizes(copy.ranks)
            if facts and worlds:
                size = round(mean(part.size for part in facts) * max(worlds))
                created_s = facts[0].created.timestamp()
                saved[checkpoint.attempt, checkpoint.step] = _Saved(
                    checkpoint.attempt, checkpoint.step, created_s, size
                )
    return [saved[key] for key in sorted(saved)]


def _begun_s(attempt: str) -> float:
    return int(attempt[:12], 16) / 1000  # an attempt's name begins with its time in milliseconds
