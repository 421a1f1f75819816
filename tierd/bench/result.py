"""The result of a run of the benchmark, in the form of the JSON file.

Invariant: every raw sample is kept. The numbers of a table or a verdict are computed from the samples on demand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, median

import msgspec

from tierd.bench.procfs import Machine

FORMAT = 1


class ArmResult(msgspec.Struct):
    """One arm at one size.

    Attributes:
        how: the settings with which it runs.
        kind: `none`, `sync` (returns when written), `blocking` (returns when copied) or `overlapped` (returns at
            once).
        durable: the guarantee that holds when the arm reports that a save is done.
        skipped: why it was not measured; None when it was.
        samples: by figure, one value a round; seconds.
        first: by figure, one value a process: its first save, and its memory before that
            (`memory_before_bytes`).
        extra_memory_bytes: the most that its process tree needed over the same training without saves.
    """

    how: str
    kind: str
    durable: str
    skipped: str | None = None
    samples: dict[str, list[float]] = msgspec.field(default_factory=dict)
    first: dict[str, list[float]] = msgspec.field(default_factory=dict)
    extra_memory_bytes: list[int] = msgspec.field(default_factory=list)

    def add(self, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.samples.setdefault(name, []).append(value)

    def median(self, figure: str) -> float | None:
        """Return the median of a figure; None if the arm has no such figure."""
        return median(self.samples[figure]) if self.samples.get(figure) else None

    def cost_s(self, added: str = "added_s") -> float | None:
        """Cost of one save to training, in seconds: the median added time, but at least the median time in the call.

        The time in the call is certain. A difference of windows that is smaller than it is noise."""
        measured, blocked = self.median(added), self.median("blocked_s")
        return None if measured is None or blocked is None else max(measured, blocked)

    def p95(self, figure: str) -> float | None:
        return percentile(self.samples[figure], 95) if self.samples.get(figure) else None


class SizeResult(msgspec.Struct):
    """All arms at one size.

    Attributes:
        steps: of a window, that is, from a save to the next one.
        schedule: how processes and rounds were interleaved.
        ceilings: samples of `memcpy_s`, `raw_fresh_s`, `raw_overwrite_s`.
        restore: samples by kind of restore.
        cache_dropped: whether the system's whole page cache was dropped before each restore, not only its files.
    """

    gigabytes: float
    state_bytes: int
    tensors: int
    model: str
    steps: int
    rounds: int
    schedule: str
    step_s: float
    arms: dict[str, ArmResult]
    ceilings: dict[str, list[float]]
    restore: dict[str, list[float]]
    cache_dropped: bool

    @property
    def measured(self) -> dict[str, ArmResult]:
        """The arms that ran."""
        return {name: arm for name, arm in self.arms.items() if arm.skipped is None}

    def ceiling(self, name: str) -> float | None:
        return median(self.ceilings[name]) if self.ceilings.get(name) else None

    def cpu_per_gb(self, name: str) -> float | None:
        """CPU seconds for each gigabyte of a quiet save; a mean, because the kernel counts in ticks of 10 ms."""
        samples = self.arms[name].samples.get("cpu_s") if name in self.arms else None
        return mean(samples) / (self.state_bytes / 1e9) if samples else None

    def extra_memory(self, name: str) -> float | None:
        """Return the extra memory in units of the state."""
        memory_bytes = self.arms[name].extra_memory_bytes
        return max(memory_bytes) / self.state_bytes if memory_bytes else None


class Measured(msgspec.Struct, frozen=True):
    """The input of `tierd advise --from`: medians of one arm at the largest size."""

    arm: str
    state_bytes: int
    blocked_s: float
    durable_s: float


class Result(msgspec.Struct):
    """The whole file. `advise` is None when no arm of tierd ran."""

    format: int
    created: str
    machine: Machine
    options: dict[str, str]
    sizes: list[SizeResult]
    advise: Measured | None = None


def measured_cost(sizes: Sequence[SizeResult]) -> Measured | None:
    """Return one save's cost: the call's time and the slowdown of later steps; and the time until durable."""
    for size in sorted(sizes, key=lambda size: size.gigabytes, reverse=True):
        for name in ("tierd-overlapped+daemon", "tierd+daemon", "tierd-overlapped", "tierd"):
            arm = size.measured.get(name)
            if arm is not None and arm.samples.get("added_s"):
                cost, durable = arm.cost_s(), arm.median("durable_s")
                assert cost is not None and durable is not None
                return Measured(name, size.state_bytes, cost, durable)
    return None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
