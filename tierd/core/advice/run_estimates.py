"""What `tierd advise` says beside the interval: a run's measured history, saves with tierd compared with synchronous
saves, and whether a state is saved in time after a notice.

Invariant: nothing is guessed. Checkpoints that retention deleted do not count, and an error names a value that the
remaining ones do not show. A state fits into a notice only if it does in the worst case of each part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

from tierd.core.advice.save_interval import Costs, evaluate_interval
from tierd.core.errors import CheckpointNotFound, ConfigError
from tierd.core.ids import launch_ms
from tierd.core.planning.copies import complete_world_sizes
from tierd.core.planning.inventory import Inventory


@dataclass(frozen=True, slots=True)
class RunHistory:
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


def run_history(inventory: Inventory, run: str) -> RunHistory:
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
        max(0.0, launch_ms(attempt) / 1000 - newest_s[before] - every_steps * step_s / 2)
        for attempt, before in resumed.items()
        if before in newest_s
    ]
    return RunHistory(
        run,
        span_s=max(newest_s.values()) - launch_ms(min([*created_s, *origins])) / 1000,
        failures=len(resumed),
        every_steps=every_steps,
        step_s=step_s,
        state_bytes=state_bytes,
        away_s=mean(away_s) if away_s else math.nan,
    )


@dataclass(frozen=True, slots=True)
class SaveMode:
    """The cost of saving, either with tierd or synchronously.

    Attributes:
        blocked_s: the time for which a save blocks training, including its wait for the save before, in seconds.
        efficiency: the share of time spent on training if nothing fails.
        goodput: the share of time that ends up as training kept if failures happen; None: no failure rate was given.
    """

    blocked_s: float
    efficiency: float
    goodput: float | None


@dataclass(frozen=True, slots=True)
class TableRow:
    """One interval and one tier.

    Attributes:
        interval_s: training between two saves, in seconds.
        steps: the interval in steps; None: the step time is not known.
        tier: the tier, or the spool.
        sync: synchronous saves, for which training waits until the tier has them.
        tierd: saves with tierd.
    """

    interval_s: float
    steps: int | None
    tier: str
    sync: SaveMode
    tierd: SaveMode


def table_rows(
    costs: Costs,
    state_bytes: int,
    sync_s: float | None,
    intervals: Sequence[tuple[float, int | None]],
    tiers: Mapping[str, float | None],
) -> list[TableRow]:
    """The rows of the table.

    Args:
        costs: the costs with tierd; an infinite `mtbf_s` if no failure rate was given. `flush_s` is not used.
        sync_s: the time of a synchronous save, in seconds; None: as long as the tier takes to write the state.
        tiers: by name, the bytes per second of one node; None is the spool, whose speed follows from `durable_s`.
    """
    rows = []
    for interval, steps in intervals:
        for name, bandwidth in tiers.items():
            one_level = replace(costs, flush_s=0.0, node_loss=0.0)
            if bandwidth is None:
                write_s, tierd = costs.durable_s - costs.blocked_s, one_level
            else:
                write_s = state_bytes / bandwidth
                tierd = replace(costs, flush_s=write_s)
            wait_s = max(1e-9, write_s if sync_s is None else sync_s)
            sync = replace(one_level, blocked_s=wait_s, durable_s=wait_s)
            rows.append(TableRow(interval, steps, name, _save_mode(interval, sync), _save_mode(interval, tierd)))
    return rows


def _save_mode(interval: float, costs: Costs) -> SaveMode:
    period = costs.period_s(interval)
    goodput = evaluate_interval(interval, costs).goodput if math.isfinite(costs.mtbf_s) else None
    return SaveMode(period - interval, interval / period, goodput)


KNOWN_S = 8.0  # a read of the metadata server, a read of the notes, and their exchange


@dataclass(frozen=True, slots=True)
class SaveFit:
    """The times of a last save, in seconds after the notice.

    Attributes:
        notice_s: how long before its end the node says so.
        due_s: when the checkpoint is due at the latest.
        durable_s: when it is durable in the spool.
        on_tier_s: when a tier has verified it; None if no tier's bandwidth is known.
        left_s: what is left of the notice when the state is as safe as it gets; negative if it does not fit.
        fits: whether the state is on a tier before the end, or in the spool if no tier is known.
        why: what does not fit, and what would; empty if it fits.
    """

    notice_s: float
    due_s: float
    durable_s: float
    on_tier_s: float | None
    left_s: float
    fits: bool
    why: str = ""


def fit_save(
    notice_s: float,
    state_bytes: float,
    blocked_s: float,
    durable_s: float,
    tier_rate: float | None = None,
    step_s: float = 0.0,
    drain_s: float | None = None,
) -> SaveFit:
    """Compute whether the state of one node fits into the time of a notice."""
    due_s = min(KNOWN_S, notice_s) + 2 * step_s
    spooled_s = due_s + max(blocked_s, durable_s)
    if tier_rate is None:
        on_tier_s, safe_s, end_s = None, spooled_s, notice_s
    else:
        on_tier_s = safe_s = spooled_s + state_bytes / tier_rate
        end_s = notice_s if drain_s is None else min(notice_s, drain_s)
    why = ""
    if spooled_s > notice_s:
        why = (
            f"the state is not even durable in the spool when the node ends, {spooled_s - notice_s:.3g} s too late: "
            "the checkpoint before it is the newest that is left"
        )
    elif safe_s > notice_s:
        sending_s = notice_s - spooled_s
        faster = f"{state_bytes / sending_s / 1e9:.3g} GB/s to the tier, or " if sending_s else ""
        why = (
            f"no tier has the state when the node ends, {safe_s - notice_s:.3g} s too late: {faster}a "
            f"notice of {safe_s:.0f} s would do; else the last one on a tier is the newest that is left"
        )
    elif safe_s > end_s:
        why = f"the daemon ends after drain = {drain_s:.3g} s: set drain to at least {safe_s:.0f} s"
    return SaveFit(notice_s, due_s, spooled_s, on_tier_s, end_s - safe_s, not why, why)
