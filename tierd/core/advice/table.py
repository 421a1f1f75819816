"""A table of intervals and tiers that compares saves with tierd to synchronous saves, with and without failures.

The figures with failures are those of `core/advice/save_interval.py`. Without a failure rate the table has only the
time that saves take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Job:
    """The size of the state, the costs of saves and the rate of failures.

    Attributes:
        state_bytes: the size of one node's state.
        blocked_s, durable_s: the times of a save with tierd, as in `Costs`.
        sync_s: the time of a synchronous save, in seconds; None: as long as the tier takes to write the state.
        restart_s: the time from a failure until training resumes, in seconds.
        mtbf_s: the mean time between failures, in seconds; None: no failure rate was given.
        node_loss: the share of failures that lose the spool, which only a tier survives.
    """

    state_bytes: int
    blocked_s: float
    durable_s: float
    sync_s: float | None
    restart_s: float
    mtbf_s: float | None
    node_loss: float


def lines(job: Job, intervals: Sequence[tuple[float, int | None]], tiers: Mapping[str, float | None]) -> list[TableRow]:
    """The rows of the table.

    Args:
        job: the job.
        intervals: the training between saves in seconds, each with its number of steps.
        tiers: by name, the bytes per second of one node; None is the spool, whose speed follows from `durable_s`.
    """
    return [
        TableRow(interval, steps, name, *_ways(job, interval, bandwidth))
        for interval, steps in intervals
        for name, bandwidth in tiers.items()
    ]


def _ways(job: Job, interval: float, bandwidth: float | None) -> tuple[SaveMode, SaveMode]:
    write = job.durable_s - job.blocked_s if bandwidth is None else job.state_bytes / bandwidth
    sync = write if job.sync_s is None else job.sync_s
    flush = 0.0 if bandwidth is None else write
    return (
        _save_mode(job, interval, max(sync, 1e-9), max(sync, 1e-9), 0.0),
        _save_mode(job, interval, job.blocked_s, job.durable_s, flush),
    )


def _save_mode(job: Job, interval: float, blocked: float, durable: float, flush: float) -> SaveMode:
    period = max(interval + blocked, durable)
    goodput = None
    if job.mtbf_s is not None:
        share = job.node_loss if flush else 0.0
        goodput = choice(interval, Costs(blocked, durable, job.restart_s, job.mtbf_s, flush, share)).goodput
    return SaveMode(period - interval, interval / period, goodput)
