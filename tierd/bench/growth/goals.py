"""What must not grow, and how far: the goals of `tierd bench growth`."""

from __future__ import annotations

from typing import NamedTuple


class GrowthGoal(NamedTuple):
    """A limit for a median, or for its ratio to another median of the same run.

    Attributes:
        part: the part whose rows are judged.
        text: for the page.
        arm, figure: what is judged.
        than, than_figure: what it is divided by; without `than`, the median itself is judged.
        row: only rows whose names contain this.
        than_row: the row of the divisor, if it is another one.
        last: divide the last row of the part by its first one.
        inverse: divide the other one by this one.
        ceiling: the arm whose same figure is the best that this machine allows; it takes the place of `arm`.
        ceiling_figure: the ceiling's figure, if it is another one.
    """

    part: str
    text: str
    relation: str
    limit: float
    arm: str = "tierd"
    figure: str = "cpu_s"
    than: str = ""
    than_figure: str = ""
    row: str = ""
    than_row: str = ""
    last: bool = False
    inverse: bool = False
    ceiling: str = ""
    ceiling_figure: str = ""


GOALS = (
    GrowthGoal("values", "save / torch.save+fsync, wall", "<=", 0.5, "save", "wall_s", "torch.save+fsync"),
    GrowthGoal("values", "save / torch.save+fsync, CPU", "<=", 0.5, "save", "cpu_s", "torch.save+fsync"),
    GrowthGoal("values", "restore / torch.load, CPU", "<=", 1.5, "restore", "cpu_s", "torch.load"),
    GrowthGoal(
        "tensors", "save with one more tensor / with the same ones, CPU", "<=", 2.0, "added", "cpu_s", "fixed",
        ceiling="least",
    ),
    GrowthGoal("restore", "restore: most checkpoints / one, CPU", "<=", 2.0, than="tierd", last=True, ceiling="least"),
    GrowthGoal("steady", "flush: most checkpoints / fewest, CPU", "<=", 1.2, than="tierd", last=True, ceiling="least"),
    GrowthGoal("flush", "two tiers / one, CPU", "<=", 1.5, than="tierd", row="two tiers", than_row="one tier"),
    GrowthGoal(
        "flush", "two tiers / one, read from the spool", "<=", 1.1, "tierd", "read_bytes", "tierd",
        row="two tiers", than_row="one tier",
    ),
    GrowthGoal("flush", "noise: flush / raw, CPU", "<=", 1.2, than="raw", row="noise"),
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
