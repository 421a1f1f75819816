"""The result as a Markdown page.

Invariant: each number on the page is computed from the given result. The text only names the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from tierd.bench import seed, targets
from tierd.bench.result import ArmResult, Result, SizeResult

_SEEDED_AT = 1.0  # GB: the size that the post's table is scaled from, or the one closest to it
_SIGNS = {"<=": "≤", "<": "<", ">=": "≥"}
_MET = {True: "met", False: "**not met**", None: "not measured"}
_ARM_COLUMNS = (
    "arm",
    "blocked: median",
    "p95",
    "first",
    "added: median",
    "p95",
    "durable beside training",
    "durable, quiet",
    "CPU-s per GB",
    "extra memory",
    "blocked / memcpy",
    "blocked / torch.save+fsync",
    "raw overwrite / durable, quiet",
    "durable means",
)
_SEED = """100,000 steps of 50 ms. The post's rows are the ones that it prints; they follow from 1.4 s a save on local
disk and 14 s on a network, which at its own 1 and 0.1 GB/s is a writer's share of {share} GB (its code, as printed,
would give 146 s a save, and 3.3 % at a save every 100 steps). The other rows: overhead = saves x (added time of one +
the time that it is still busy when the next is due); efficiency = training / (training + overhead). Seconds a save at
{share} GB, scaled by the seconds per GB that were measured at {size} GB with steps of {step}: {used}. "Flushed behind"
counts all that a daemon takes from training until a `file://` tier on the same disk has the checkpoint verified:
compressing, writing, reading back. No save waits for that; where it takes longer than the interval, the tier gets the
newest and retention lets the rest go. A network's own speed takes nothing from training, and is not in it."""
_HOW = """## How it was measured

- *blocked*: the call, building state dictionaries included. *first*: the first save of a process, apart.
- *added*: a window's time, with a save at its beginning and the wait that the next save would require at its end, less
  as many times the median step of the same process right before and after it.
- *durable*: from the call to what the last column says; beside training, and quiet (nothing else at work), which is
  what the raw ceilings are compared with and what CPU-seconds are counted in: of the process and all that it started.
- *extra memory*: the most that the process tree needed (PSS, shared memory once) over its own training without saves,
  in units of the state; taken in a window of its own. The page cache is not in it.
- Between two rounds the file system is synced, and checkpoints but the newest are deleted; neither is timed."""


def page(result: Result, plot: str | None = None) -> str:
    """Return the whole page. `plot` is the file name of the picture in the page's directory."""
    parts = ["# What saving costs training", _about(result)]
    if plot:
        parts.append(f"![blocked, added and durable time of each arm]({plot})")
    parts += [_targets(result), *(_size(size) for size in result.sizes), _seed(result), _HOW]
    return "\n\n".join(parts) + "\n"


def _about(result: Result) -> str:
    machine = result.machine
    packages = ", ".join(f"{name} {version}" for name, version in sorted(machine.packages.items()))
    return (
        f"Written by `tierd bench overhead` on {result.created[:10]}. Believe the ratios: they are taken in one run, "
        f"arms interleaved.\nThe seconds are this machine's: {machine.processor}, {machine.cores} cores "
        f"({machine.training_threads} for training), {machine.memory_bytes / 2**30:.0f} GiB, {machine.filesystem}, "
        f"{_trained_on(result)}Linux {machine.kernel}, Python {machine.python}, {packages}."
    )


def _trained_on(result: Result) -> str:
    device = result.options.get("device", "cpu")
    return "" if device == "cpu" else f"trained on one {device}, "


def _targets(result: Result) -> str:
    rows = [
        (
            verdict.target,
            f"{verdict.gigabytes:g} GB",
            f"{_SIGNS[verdict.relation]} {_number(verdict.limit)}",
            _number(verdict.measured),
            _MET[verdict.met],
            verdict.by,
        )
        for verdict in targets.verdicts(result)
    ]
    return "## Targets\n\n" + _table(("target", "state", "limit", "measured", "", "from"), rows)


def _size(size: SizeResult) -> str:
    copy, fresh, over = (size.ceiling(name) for name in ("memcpy_s", "raw_fresh_s", "raw_overwrite_s"))
    restores = ", ".join(f"{kind} {_seconds(_median(values))}" for kind, values in size.restore.items())
    gigabytes = size.state_bytes / 1e9
    dropped = "the system's page cache dropped" if size.cache_dropped else "its files dropped from the page cache"
    return "\n\n".join(
        (
            f"## {size.gigabytes:g} GB",
            f"{size.state_bytes:,} bytes in {size.tensors} tensors; {size.model}; steps of {_seconds(size.step_s)}; a "
            f"window is {size.steps} steps; {size.rounds} rounds; {size.schedule}.",
            f"In the same run: memcpy floor {_rate(copy, gigabytes)}, raw O_DIRECT into a fresh file "
            f"{_rate(fresh, gigabytes)}, over an existing file {_rate(over, gigabytes)}. Restore in a fresh process, "
            f"{dropped}, median: {restores}.",
            _table(_ARM_COLUMNS, [_arm(size, name, arm) for name, arm in size.arms.items()]),
        )
    )


def _arm(size: SizeResult, name: str, arm: ArmResult) -> Sequence[str]:
    if arm.skipped is not None:
        return (name, *[""] * (len(_ARM_COLUMNS) - 2), f"skipped: {arm.skipped}")
    blocked, quiet = arm.median("blocked_s"), arm.median("quiet_durable_s")
    reference = size.measured.get("torch.save+fsync")
    memory, cpu = size.extra_memory(name), size.cpu_per_gb(name)
    return (
        name,
        _seconds(blocked),
        _seconds(arm.p95("blocked_s")),
        _seconds(_median(arm.first.get("first_blocked_s", []))) if arm.kind != "none" else "",
        _seconds(arm.median("added_s")),
        _seconds(arm.p95("added_s")),
        _seconds(arm.median("durable_s")),
        _seconds(quiet),
        "" if cpu is None else f"{cpu:.2f}",
        "" if memory is None else f"{memory:.2f} x",
        _times(blocked, size.ceiling("memcpy_s")),
        _times(blocked, reference.median("blocked_s") if reference else None),
        _times(size.ceiling("raw_overwrite_s"), quiet),
        arm.durable,
    )


def _seed(result: Result) -> str:
    size = min(result.sizes, key=lambda size: abs(size.gigabytes - _SEEDED_AT))
    measured = seed.costs(size)
    rows = [
        (str(row.every), row.what, f"{row.overhead_s:,.1f} s", f"{row.efficiency:.2%}") for row in seed.rows(measured)
    ]
    used = "; ".join(
        f"{cost.what} {cost.added_s:.3f} s (busy for {cost.busy_s:.1f} s"
        + (f", on the tier after {cost.flushed_s:.1f} s)" if cost.flushed_s else ")")
        for cost in measured
    )
    text = _SEED.format(
        share=seed.STATE_GB, size=f"{size.gigabytes:g}", step=_seconds(size.step_s), used=used or "nothing was"
    )
    columns = ("save every", "", "overhead", "efficiency")
    return "\n\n".join(("## The overhead table this project started from", text, _table(columns, rows)))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.2f} ms" if abs(value) < 0.01 else f"{value * 1000:.0f} ms"


def _rate(seconds: float | None, gigabytes: float) -> str:
    return "not measured" if not seconds else f"{_seconds(seconds)} ({gigabytes / seconds:.1f} GB/s)"


def _times(numerator: float | None, denominator: float | None) -> str:
    return "" if numerator is None or not denominator else f"{numerator / denominator:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
