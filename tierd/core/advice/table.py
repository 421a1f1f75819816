"""A table of intervals and tiers that compares saves with tierd to synchronous saves, with and without failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tierd.core.advice.save_interval import Costs, choice


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


def lines(
    costs: Costs,
    state_bytes: int,
    sync_s: float | None,
    intervals: Sequence[tuple[float, int | None]],
    tiers: Mapping[str, float | None],
) -> list[TableRow]:
    """The rows of the table.

    Args:
        costs: the costs with tierd; an infinite `mtbf_s` if no failure rate was given. `flush_s` is not used.
        state_bytes: the size of one node's state.
        sync_s: the time of a synchronous save, in seconds; None: as long as the tier takes to write the state.
        intervals: the training between saves in seconds, each with its number of steps.
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
    goodput = choice(interval, costs).goodput if math.isfinite(costs.mtbf_s) else None
    return SaveMode(period - interval, interval / period, goodput)
