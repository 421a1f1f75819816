"""Samples of the growth benchmark, how one is taken, the goals, and their verdicts.

Invariant: every raw sample is kept. Medians and verdicts are computed from the samples.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from tierd.bench.process_counters import Machine
from tierd.bench.report_page import is_met, median_or_none

T = TypeVar("T")
Figures = dict[str, float]  # of one sample, by figure: `wall_s`, `cpu_s`, and a part's own
Samples = dict[str, list[Figures]]  # by arm
Measure = Callable[[Path], Samples]  # takes an empty directory
Rows = list[tuple[str, Measure]]  # a part's rows, by name


class Clock:
    """Seconds of the clock, and CPU seconds of this process, its threads and its ended children."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_s()

    def read(self) -> Figures:
        return {"wall_s": time.perf_counter() - self._wall, "cpu_s": _cpu_s() - self._cpu}


def timed(call: Callable[[], T]) -> tuple[T, Figures]:
    """Call once. Returns the answer, and the seconds that it took."""
    gc.collect()
    clock = Clock()
    answer = call()
    return answer, clock.read()


def run_tierd(*arguments: str) -> bytes:
    """Run a command of tierd, and return its output.

    Compiled modules are kept, as an installation has them, also if this process keeps none: to compile them at each
    start takes half a second.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "tierd", *arguments]
    return subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True).stdout


def _cpu_s() -> float:
    used = os.times()
    return time.process_time() + used.children_user + used.children_system


class GrowthGoal(NamedTuple):
    """A limit for a median, or for its ratio to another median of the same run."""

    part: str  # the part whose rows are judged
    # for the page. arm, figure: what is judged. divisor, divisor_figure: what it is divided by; without `divisor`, the
    # median itself is judged.
    text: str
    relation: str
    limit: float
    arm: str = "tierd"
    figure: str = "cpu_s"
    divisor: str = ""
    divisor_figure: str = ""
    row: str = ""  # only rows whose names contain this
    divisor_row: str = ""  # the row of the divisor, if it is another one
    compares_last_to_first: bool = False  # divide the last row of the part by its first one
    inverse: bool = False  # divide the other one by this one
    ceiling: str = ""  # the arm whose same figure is the best that this machine allows; it takes the place of `arm`
    ceiling_figure: str = ""  # the ceiling's figure, if it is another one


GOALS = (
    GrowthGoal("values", "save / torch.save+fsync, wall", "<=", 0.5, "save", "wall_s", "torch.save+fsync"),
    GrowthGoal("values", "save / torch.save+fsync, CPU", "<=", 0.5, "save", "cpu_s", "torch.save+fsync"),
    GrowthGoal("values", "restore / torch.load, CPU", "<=", 1.5, "restore", "cpu_s", "torch.load"),
    GrowthGoal(
        "tensors", "save with one more tensor / with the same ones, CPU", "<=", 2.0, "added", "cpu_s", "fixed",
        ceiling="least",
    ),
    GrowthGoal(
        "restore", "restore: most checkpoints / one, CPU", "<=", 2.0, divisor="tierd", compares_last_to_first=True,
        ceiling="least",
    ),
    GrowthGoal(
        "steady", "flush: most checkpoints / fewest, CPU", "<=", 1.2, divisor="tierd", compares_last_to_first=True,
        ceiling="least",
    ),
    GrowthGoal(
        "flush", "two tiers / one, CPU", "<=", 1.5, divisor="tierd", row="two tiers", divisor_row="one tier",
    ),
    GrowthGoal(
        "flush", "two tiers / one, read from the spool", "<=", 1.1, "tierd", "read_bytes", "tierd",
        row="two tiers", divisor_row="one tier",
    ),
    GrowthGoal("flush", "noise: flush / raw, CPU", "<=", 1.2, divisor="raw", row="noise"),
    GrowthGoal("rows", "share of an embedding that is sent again", "<=", 0.15, "mean of those", "sent_share"),
    GrowthGoal(
        "training", "training lost, with a tier", "<=", 0.1, "tierd-overlapped+daemon", "lost_share", row="0.043"
    ),
    GrowthGoal(
        "attached", "call beside busy threads, seconds", "<=", 0.01, "call", "wall_s", row="threads", ceiling="least",
    ),
    GrowthGoal("attached", "wait of the step beside a list, seconds", "<=", 0.04, "step", "wall_s", row="list"),
    GrowthGoal("attached", "overlapped call, seconds", "<=", 0.001, "call", "wall_s", row="alone", ceiling="least"),
    GrowthGoal(
        "cold", "unverified / verified, wall", ">=", 1.2, "tierd", "wall_s", "unverified", row="S3", inverse=True,
        ceiling="least",
    ),
    GrowthGoal(
        "cold", "unverified / verified, wall", ">=", 1.0, "tierd", "wall_s", "unverified", row="file", inverse=True,
        ceiling="least",
    ),
    GrowthGoal(
        "cold", "unverified / verified, CPU", ">=", 1.0, "tierd", "cpu_s", "unverified", inverse=True,
        ceiling="least",
    ),
    GrowthGoal("decode", "decode, GB per CPU second", ">=", 2.5, "tierd", "decode_gb_per_cpu_s", ceiling="ceiling"),
    GrowthGoal(
        "training", "torch.save+fsync / durable", ">=", 2.5, "tierd", "quiet_durable_s", "torch.save+fsync",
        row="0.25", inverse=True, ceiling="ceiling", ceiling_figure="raw_overwrite_s",
    ),
    GrowthGoal(
        "training", "durable, of the raw overwrite", ">=", 0.9, "tierd", "quiet_durable_s", "ceiling",
        "raw_overwrite_s", "0.25", inverse=True,
    ),
    GrowthGoal("ls", "`tierd ls`, seconds", "<=", 5.0, figure="wall_s", ceiling="least"),
    GrowthGoal("status", "`status`, seconds", "<=", 0.3, figure="wall_s"),
)  # fmt: skip


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


def median_figure(samples: Samples, arm: str, figure: str) -> float | None:
    """Median of an arm's figure; None if it has none."""
    return median_or_none([figures[figure] for figures in samples.get(arm, ()) if figure in figures])


def goal_verdicts(result: GrowthResult) -> list[GrowthVerdict]:
    """Judge every goal on every row to which it applies."""
    return [verdict for goal in GOALS for verdict in _judge_goal(goal, result.parts.get(goal.part, {}))]


def _judge_goal(goal: GrowthGoal, rows: dict[str, Samples]) -> list[GrowthVerdict]:
    if goal.compares_last_to_first:
        names = list(rows)[-1:] if len(rows) > 1 else [goal.row]
    else:
        names = [name for name in rows if goal.row in name and goal.arm in rows[name]] or [goal.row]
    verdicts = []
    for name in names:
        base = rows.get(name, {})
        if goal.divisor_row:
            base = next((samples for row, samples in rows.items() if goal.divisor_row in row), {})
        elif goal.compares_last_to_first:
            base = next(iter(rows.values()), {})
        arm_figure = median_figure(rows.get(name, {}), goal.arm, goal.figure)
        base_figure = median_figure(base, goal.divisor, goal.divisor_figure or goal.figure) if goal.divisor else 1.0
        measured = _ratio(goal, arm_figure, base_figure)
        ceiling = median_figure(rows.get(name, {}), goal.ceiling, goal.ceiling_figure or goal.figure)
        best = _ratio(goal, ceiling, base_figure)
        met = is_met(goal.relation, measured, goal.limit)
        verdicts.append(GrowthVerdict(goal.text, name, goal.relation, goal.limit, measured, best, met))
    return verdicts


def _ratio(goal: GrowthGoal, arm_figure: float | None, base_figure: float | None) -> float | None:
    if not arm_figure or not base_figure:
        return None
    return base_figure / arm_figure if goal.inverse else arm_figure / base_figure
