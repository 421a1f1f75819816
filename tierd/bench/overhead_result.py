"""The result of `tierd bench overhead` in the form of its JSON file, its targets, and the post's table from them.

Invariant: every raw sample is kept. The numbers of a table or a verdict are computed from the samples on demand. The
post's rows are as printed there; tierd's rows are computed by one formula, and each names its scaling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

import msgspec

from tierd.bench.process_counters import Machine
from tierd.bench.report_page import is_met, median_or_none

FORMAT = 1


class SaveMethodResult(msgspec.Struct):
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
        return median_or_none(self.samples.get(figure, ()))

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
    arms: dict[str, SaveMethodResult]
    ceilings: dict[str, list[float]]
    restore: dict[str, list[float]]
    cache_dropped: bool

    @property
    def measured_methods(self) -> dict[str, SaveMethodResult]:
        """The arms that ran."""
        return {name: arm for name, arm in self.arms.items() if arm.skipped is None}

    def ceiling(self, name: str) -> float | None:
        return median_or_none(self.ceilings.get(name, ()))

    def cpu_per_gb(self, name: str) -> float | None:
        """CPU seconds for each gigabyte of a quiet save; a mean, because the kernel counts in ticks of 10 ms."""
        samples = self.arms[name].samples.get("cpu_s") if name in self.arms else None
        return mean(samples) / (self.state_bytes / 1e9) if samples else None

    def extra_memory(self, name: str) -> float | None:
        """Return the extra memory in units of the state."""
        memory_bytes = self.arms[name].extra_memory_bytes
        return max(memory_bytes) / self.state_bytes if memory_bytes else None


class AdviseInput(msgspec.Struct, frozen=True):
    """The input of `tierd advise --from`: medians of one arm at the largest size."""

    arm: str
    state_bytes: int
    blocked_s: float
    durable_s: float


class OverheadResult(msgspec.Struct):
    """The whole file. `advise` is None when no arm of tierd ran."""

    format: int
    created: str
    machine: Machine
    options: dict[str, str]
    sizes: list[SizeResult]
    advise: AdviseInput | None = None


def advise_input(sizes: Sequence[SizeResult]) -> AdviseInput | None:
    """Return one save's cost: the call's time and the slowdown of later steps; and the time until durable."""
    for size in sorted(sizes, key=lambda size: size.gigabytes, reverse=True):
        for name in ("tierd-overlapped+daemon", "tierd+daemon", "tierd-overlapped", "tierd"):
            arm = size.measured_methods.get(name)
            if arm is not None and arm.samples.get("added_s"):
                cost, durable = arm.cost_s(), arm.median("durable_s")
                assert cost is not None and durable is not None
                return AdviseInput(name, size.state_bytes, cost, durable)
    return None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


BLOCKING, OVERLAPPED = "tierd", "tierd-overlapped"
_FSYNCED = "torch.save+fsync"
_EFFICIENCY_GB = 0.25  # the size, and the least seconds a step, that efficiency is promised for
_EFFICIENCY_STEP_S = 0.2


class TargetVerdict(msgspec.Struct, frozen=True):
    """One promise at one size.

    Attributes:
        measured, limit: the two numbers that were compared; None if one was not measured.
        relation: `<=`, `<` or `>=`.
        met: None without a measurement.
        by: the figures that it was computed from.
    """

    target: str
    gigabytes: float
    relation: str
    limit: float | None
    measured: float | None
    met: bool | None
    by: str


def target_verdicts(result: OverheadResult) -> list[TargetVerdict]:
    """Judge every promise at every size to which it applies."""
    return [verdict for size in result.sizes for verdict in (*_saving(size), *_efficiency(size), *_restoring(size))]


def training_efficiency(size: SizeResult, arm: str, steps_per_save: int) -> float | None:
    """Training's share of the time, with a save every so many steps: n x step / (n x step + cost of a save)."""
    arm_result = size.measured_methods.get(arm)
    cost = arm_result.cost_s() if arm_result else None
    step = arm_result.median("step_s") if arm_result else None
    if cost is None or step is None:
        return None
    return steps_per_save * step / (steps_per_save * step + cost)


def _saving(size: SizeResult) -> list[TargetVerdict]:
    blocked, floor = _median(size, BLOCKING, "blocked_s"), size.ceiling("memcpy_s")
    peers = {
        name: value
        for name, arm in size.measured_methods.items()
        if not name.startswith("tierd") and arm.kind in ("sync", "blocking") and (value := arm.median("blocked_s"))
    }
    best = min(peers, key=lambda name: peers[name], default=None)
    fsynced = _median(size, _FSYNCED, "blocked_s")
    added_s, peer_s = _median(size, OVERLAPPED, "added_s"), _median(size, "torch_checkpointing", "added_s")
    durable, fsync_durable = _median(size, BLOCKING, "quiet_durable_s"), _median(size, _FSYNCED, "quiet_durable_s")
    raw = size.ceiling("raw_overwrite_s")
    cpu, cpu_process = size.cpu_per_gb(BLOCKING), size.cpu_per_gb("dcp.process")
    return [
        _judge(size, "blocking save / memcpy floor", "<=", 1.15, _ratio(blocked, floor), "median blocked_s"),
        _judge(
            size, "blocking save / fastest blocking peer", "<", 1.0, _ratio(blocked, peers[best] if best else None),
            f"median blocked_s; the peer is {best}",
        ),
        _judge(size, "blocking save / torch.save+fsync", "<=", 1 / 8, _ratio(blocked, fsynced), "median blocked_s"),
        _judge(
            size, "overlapped call, seconds", "<=", 0.001, _median(size, OVERLAPPED, "blocked_s"), "median blocked_s"
        ),
        _judge(
            size, "overlapped: added seconds, against torch_checkpointing's", "<=", peer_s, added_s, "median added_s"
        ),
        _judge(
            size, "torch.save+fsync / tierd, until durable", ">=", 2.5, _ratio(fsync_durable, durable),
            "median quiet_durable_s",
        ),
        _judge(
            size, "durable, of the raw overwrite ceiling", ">=", 0.9, _ratio(raw, durable),
            "median raw_overwrite_s / quiet_durable_s",
        ),
        _judge(size, "CPU-seconds per GB, against dcp.process's", "<=", cpu_process, cpu, "mean cpu_s"),
    ]  # fmt: skip


def _efficiency(size: SizeResult) -> list[TargetVerdict]:
    if size.gigabytes != _EFFICIENCY_GB:
        return []
    arm = OVERLAPPED if OVERLAPPED in size.measured_methods else BLOCKING
    step = _median(size, arm, "step_s")
    slow_enough = step is not None and step >= _EFFICIENCY_STEP_S
    by = f"{arm}: n x step / (n x step + median added_s, at least blocked_s)"
    if not slow_enough:
        by += f"; no verdict: steps of {step or 0:.3f} s are shorter than {_EFFICIENCY_STEP_S} s"
    return [
        _judge(
            size,
            f"training efficiency, a save every {steps_per_save} steps",
            ">=",
            limit,
            training_efficiency(size, arm, steps_per_save) if slow_enough else None,
            by,
        )
        for steps_per_save, limit in ((100, 0.997), (10, 0.97))
    ]


def _restoring(size: SizeResult) -> list[TargetVerdict]:
    ratio = _ratio(*(median_or_none(size.restore.get(kind, ())) for kind in ("torch.load", "tierd")))
    return [_judge(size, "torch.load / verified restore, cold cache", ">=", 1.5, ratio, "median seconds")]


def _judge(
    size: SizeResult, target: str, relation: str, limit: float | None, measured: float | None, by: str
) -> TargetVerdict:
    met = is_met(relation, measured, limit)
    return TargetVerdict(target, size.gigabytes, relation, limit, measured, met, by)


def _median(size: SizeResult, arm: str, figure: str) -> float | None:
    return size.measured_methods[arm].median(figure) if arm in size.measured_methods else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


POST_STEP_S, POST_STEPS = 0.05, 100_000
# A writer's share that makes the post's printed rows: 1.4 s a save at its 1 GB/s, 14 s at its 0.1 GB/s.
POST_STATE_GB = 1.4
POST_ROWS = {  # save every -> local and network: overhead in seconds, efficiency
    100: ((1406.4, 0.780), (14064.0, 0.262)),
    500: ((284.8, 0.946), (2812.8, 0.640)),
    1000: ((145.6, 0.972), (1406.4, 0.780)),
    5000: ((30.7, 0.994), (281.3, 0.947)),
}


class OverheadRow(msgspec.Struct, frozen=True):
    """One line: seconds that all saves add to 100,000 steps of 50 ms, and training's share."""

    steps_per_save: int
    label: str
    overhead_s: float
    efficiency: float


class ScaledCost(msgspec.Struct, frozen=True):
    """The cost of one save at the post's size."""

    label: str
    added_s: float  # seconds taken from training
    busy_s: float  # seconds until the next save may begin
    flushed_s: float | None = None  # seconds until a tier has it verified, which no save waits for; None without a tier


def scaled_costs(size: SizeResult) -> list[ScaledCost]:
    """Scale the measured figures of one size by its seconds per gigabyte."""
    scale = POST_STATE_GB / (size.state_bytes / 1e9)
    measured_costs = []
    for label, name, added, busy in (
        ("torch.save+fsync, local", "torch.save+fsync", "added_s", "blocked_s"),
        ("tierd, local", BLOCKING, "added_s", "durable_s"),
        ("tierd overlapped, local", OVERLAPPED, "added_s", "durable_s"),
        ("tierd, flushed to a tier behind", f"{BLOCKING}+daemon", "flush_added_s", "durable_s"),
        ("tierd overlapped, flushed to a tier behind", f"{OVERLAPPED}+daemon", "flush_added_s", "durable_s"),
    ):
        arm = size.measured_methods.get(name)
        if arm is None or (seconds := arm.cost_s(added)) is None or (until := arm.median(busy)) is None:
            continue
        flushed = arm.median("flush_s") if added == "flush_added_s" else None
        measured_costs.append(ScaledCost(label, seconds * scale, until * scale, flushed and flushed * scale))
    return measured_costs


def overhead_rows(measured: list[ScaledCost]) -> list[OverheadRow]:
    """Return the post's rows, each followed by the measured ones.

    If a save is still busy when the next one is due, the next one waits, and the wait is added. Overhead and efficiency
    are computed as in the post: saves x cost, and training's time divided by the whole time.
    """
    table_rows = []
    for steps_per_save, (local, network) in POST_ROWS.items():
        table_rows.append(OverheadRow(steps_per_save, "the post, local", *local))
        table_rows.append(OverheadRow(steps_per_save, "the post, network", *network))
        interval = steps_per_save * POST_STEP_S
        for cost in measured:
            overhead = (cost.added_s + max(0.0, cost.busy_s - interval - cost.added_s)) * (POST_STEPS // steps_per_save)
            table_rows.append(
                OverheadRow(
                    steps_per_save,
                    cost.label,
                    overhead,
                    POST_STEPS * POST_STEP_S / (POST_STEPS * POST_STEP_S + overhead),
                )
            )
    return table_rows
