"""The overhead table of the blog post that this project started from, and the same table from measured figures.

Invariant: the post's rows are as printed there. tierd's rows are computed by one formula, and each names its scaling.
"""

from __future__ import annotations

import msgspec

from tierd.bench.result import SizeResult
from tierd.bench.targets import BLOCKING, OVERLAPPED

STEP_S, STEPS = 0.05, 100_000
STATE_GB = 1.4  # a writer's share that makes the post's printed rows: 1.4 s a save at its 1 GB/s, 14 s at its 0.1 GB/s
PRINTED = {  # save every -> local and network: overhead in seconds, efficiency
    100: ((1406.4, 0.780), (14064.0, 0.262)),
    500: ((284.8, 0.946), (2812.8, 0.640)),
    1000: ((145.6, 0.972), (1406.4, 0.780)),
    5000: ((30.7, 0.994), (281.3, 0.947)),
}


class Row(msgspec.Struct, frozen=True):
    """One line: seconds that all saves add to 100,000 steps of 50 ms, and training's share."""

    every: int
    what: str
    overhead_s: float
    efficiency: float


class Cost(msgspec.Struct, frozen=True):
    """The cost of one save at the post's size.

    Attributes:
        added_s: seconds taken from training.
        busy_s: seconds until the next save may begin.
        flushed_s: seconds until a tier has it verified, which no save waits for; None without a tier.
    """

    what: str
    added_s: float
    busy_s: float
    flushed_s: float | None = None


def costs(size: SizeResult) -> list[Cost]:
    """Scale the measured figures of one size by its seconds per gigabyte."""
    scale = STATE_GB / (size.state_bytes / 1e9)
    measured_costs = []
    for label, name, added, busy in (
        ("torch.save+fsync, local", "torch.save+fsync", "added_s", "blocked_s"),
        ("tierd, local", BLOCKING, "added_s", "durable_s"),
        ("tierd overlapped, local", OVERLAPPED, "added_s", "durable_s"),
        ("tierd, flushed to a tier behind", f"{BLOCKING}+daemon", "flush_added_s", "durable_s"),
        ("tierd overlapped, flushed to a tier behind", f"{OVERLAPPED}+daemon", "flush_added_s", "durable_s"),
    ):
        arm = size.measured.get(name)
        if arm is None or (seconds := arm.cost_s(added)) is None or (until := arm.median(busy)) is None:
            continue
        flushed = arm.median("flush_s") if added == "flush_added_s" else None
        measured_costs.append(Cost(label, seconds * scale, until * scale, flushed and flushed * scale))
    return measured_costs


def rows(measured: list[Cost]) -> list[Row]:
    """Return the post's rows, each followed by the measured ones.

    If a save is still busy when the next one is due, the next one waits, and the wait is added. Overhead and efficiency
    are computed as in the post: saves x cost, and training's time divided by the whole time.
    """
    table_rows = []
    for steps_per_save, (local, network) in PRINTED.items():
        table_rows.append(Row(steps_per_save, "the post, local", *local))
        table_rows.append(Row(steps_per_save, "the post, network", *network))
        interval = steps_per_save * STEP_S
        for cost in measured:
            overhead = (cost.added_s + max(0.0, cost.busy_s - interval - cost.added_s)) * (STEPS // steps_per_save)
            table_rows.append(Row(steps_per_save, cost.what, overhead, STEPS * STEP_S / (STEPS * STEP_S + overhead)))
    return table_rows
