"""Verdicts on the promises of the save path: ratios of figures from one run.

Invariant: a verdict is computed from samples in the result. A promise without a measurement has no verdict.
"""

from __future__ import annotations

from statistics import median

import msgspec

from tierd.bench.result import Result, SizeResult

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


def verdicts(result: Result) -> list[TargetVerdict]:
    """Judge every promise at every size to which it applies."""
    return [verdict for size in result.sizes for verdict in (*_saving(size), *_efficiency(size), *_restoring(size))]


def efficiency(size: SizeResult, arm: str, steps_per_save: int) -> float | None:
    """Training's share of the time, with a save every so many steps: n x step / (n x step + cost of a save)."""
    arm_result = size.measured.get(arm)
    cost = arm_result.cost_s() if arm_result else None
    step = arm_result.median("step_s") if arm_result else None
    if cost is None or step is None:
        return None
    return steps_per_save * step / (steps_per_save * step + cost)


def _saving(size: SizeResult) -> list[TargetVerdict]:
    blocked, floor = _median(size, BLOCKING, "blocked_s"), size.ceiling("memcpy_s")
    peers = {
        name: value
        for name, arm in size.measured.items()
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
    arm = OVERLAPPED if OVERLAPPED in size.measured else BLOCKING
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
            efficiency(size, arm, steps_per_save) if slow_enough else None,
            by,
        )
        for steps_per_save, limit in ((100, 0.997), (10, 0.97))
    ]


def _restoring(size: SizeResult) -> list[TargetVerdict]:
    ratio = _ratio(_restore_median(size, "torch.load"), _restore_median(size, "tierd"))
    return [_judge(size, "torch.load / verified restore, cold cache", ">=", 1.5, ratio, "median seconds")]


def _judge(
    size: SizeResult, target: str, relation: str, limit: float | None, measured: float | None, by: str
) -> TargetVerdict:
    met = None
    if limit is not None and measured is not None:
        met = {"<=": measured <= limit, "<": measured < limit, ">=": measured >= limit}[relation]
    return TargetVerdict(target, size.gigabytes, relation, limit, measured, met, by)


def _median(size: SizeResult, arm: str, figure: str) -> float | None:
    return size.measured[arm].median(figure) if arm in size.measured else None


def _restore_median(size: SizeResult, kind: str) -> float | None:
    return median(size.restore[kind]) if size.restore.get(kind) else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
