"""The result of `tierd bench growth`, in the form of its JSON file, and the judgement of each goal.

Invariant: a verdict is computed from the samples of one run. A goal without samples has no verdict.
"""

from __future__ import annotations

from statistics import median

import msgspec

from tierd.bench.growth.goals import GOALS, GrowthGoal
from tierd.bench.growth.measured import Samples
from tierd.bench.procfs import Machine

FORMAT = 1


class GrowthResult(msgspec.Struct):
    """A run.

    Attributes:
        parts: by part and row, the samples of each arm; seconds, or what the figure's name says.
        measured: by part, the day on which it was measured.
    """

    format: int
    created: str
    machine: Machine
    parts: dict[str, dict[str, Samples]] = {}
    measured: dict[str, str] = {}


class GrowthVerdict(msgspec.Struct, frozen=True):
    """One goal, judged on one row.

    Attributes:
        goal: what is limited.
        row: the row of its part.
        relation: `<=` or `>=`.
        limit: the limit.
        measured: a median, or the ratio of two; None without samples.
        ceiling: the best that this machine allows by another sample of this run; None if nothing tells.
        met: whether the limit is kept; None without samples.
    """

    goal: str
    row: str
    relation: str
    limit: float
    measured: float | None = None
    ceiling: float | None = None
    met: bool | None = None


def middle(samples: Samples, arm: str, figure: str) -> float | None:
    """Median of an arm's figure; None if it has none."""
    values = [figures[figure] for figures in samples.get(arm, ()) if figure in figures]
    return median(values) if values else None


def verdicts(result: GrowthResult) -> list[GrowthVerdict]:
    """Judge every goal on every row to which it applies."""
    return [verdict for goal in GOALS for verdict in _judge_goal(goal, result.parts.get(goal.part, {}))]


def _judge_goal(goal: GrowthGoal, rows: dict[str, Samples]) -> list[GrowthVerdict]:
    if goal.last:
        names = list(rows)[-1:] if len(rows) > 1 else [goal.row]
    else:
        names = [name for name in rows if goal.row in name and goal.arm in rows[name]] or [goal.row]
    verdicts = []
    for name in names:
        base = rows.get(name, {})
        if goal.than_row:
            base = next((samples for row, samples in rows.items() if goal.than_row in row), {})
        elif goal.last:
            base = next(iter(rows.values()), {})
        arm_figure = middle(rows.get(name, {}), goal.arm, goal.figure)
        base_figure = middle(base, goal.than, goal.than_figure or goal.figure) if goal.than else 1.0
        measured = _ratio(goal, arm_figure, base_figure)
        ceiling_figure = (
            middle(rows.get(name, {}), goal.ceiling, goal.ceiling_figure or goal.figure) if goal.ceiling else None
        )
        best = _ratio(goal, ceiling_figure, base_figure)
        met = None
        if measured is not None:
            met = measured <= goal.limit if goal.relation == "<=" else measured >= goal.limit
        verdicts.append(GrowthVerdict(goal.text, name, goal.relation, goal.limit, measured, best, met))
    return verdicts


def _ratio(goal: GrowthGoal, arm_figure: float | None, base_figure: float | None) -> float | None:
    if not arm_figure or not base_figure:
        return None
    return base_figure / arm_figure if goal.inverse else arm_figure / base_figure
