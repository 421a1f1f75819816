"""`tierd bench overhead`: the whole run, and the files that it writes: JSON, a Markdown page and a picture.

Invariant: the printed figures are those in the files, each computed from the result. A run that ends early leaves the
sizes that it had finished. Only this module imports matplotlib, and its absence is one sentence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from tierd.bench import interleaved_run, overhead_result, process_counters, training
from tierd.bench.overhead_result import FORMAT, OverheadResult, SaveMethodResult, SizeResult, advise_input
from tierd.bench.report_page import MET, SIGNS, machine_text, markdown_table, median_or_none, number_text, write_result
from tierd.bench.training import SAVE_METHODS
from tierd.core.errors import ConfigError
from tierd.core.installation import install_command

PNG = "overhead.png"
_PACKAGES = ("tierd", "torch", "torch_checkpointing")


def overhead(
    sizes: Sequence[float],
    rounds: Sequence[int],
    arms: Sequence[str],
    steps_per_save: int | None,
    directory: Path | None,
    out: Path | None,
    say: Callable[[str], None],
    device: str = "cpu",
) -> OverheadResult:
    """Measure, and write the files to `out` after each size.

    Args:
        device: where training runs, `"cpu"` or `"cuda"`.

    Raises:
        ConfigError: an option cannot be used.
        ChildProcessError: an arm failed; the message has the end of its log.
    """
    counts = _check(sizes, rounds, arms)
    name = _check_device(device)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=directory) as scratch:
        place = Path(scratch)
        result = OverheadResult(
            format=FORMAT,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=process_counters.describe_machine(place, training.training_thread_count(), versions()),
            options={
                "sizes": ",".join(f"{size:g}" for size in sizes),
                "rounds": ",".join(map(str, rounds)),
                "arms": ",".join(arms),
                "every": str(steps_per_save or "by the step's time"),
                "device": name,
            },
            sizes=[],
        )
        for size, count in zip(sizes, counts, strict=True):
            say(f"{size:g} GB: start {len(arms)} processes, one for each arm")
            result.sizes.append(interleaved_run.measure_size(size, arms, count, steps_per_save, place, say, device))
            result.advise = advise_input(result.sizes)
            if out is not None:
                write(result, out, say)
    return result


def write(result: OverheadResult, out: Path, say: Callable[[str], None]) -> None:
    """Write the three files."""
    missing = draw_overhead(result, out / PNG)
    if missing:
        say(missing)
    write_result(out, "overhead", result, overhead_page(result, None if missing else PNG))


def _check(sizes: Sequence[float], rounds: Sequence[int], arms: Sequence[str]) -> list[int]:
    """Check the options and return the number of rounds of each size."""
    if not sizes or min(sizes) <= 0:
        raise ConfigError("--sizes: one or more numbers above 0, in GB")
    if not rounds or min(rounds) < 1 or len(rounds) not in (1, len(sizes)):
        raise ConfigError("--rounds: one number of at least 1, or one for each of --sizes")
    unknown = [arm for arm in arms if arm not in SAVE_METHODS]
    if unknown or not arms:
        raise ConfigError(f"--arms: {', '.join(unknown) or 'none given'}; there are {', '.join(SAVE_METHODS)}")
    return list(rounds) * (len(sizes) // len(rounds))


def _check_device(device: str) -> str:
    """Check that the device exists and return its name."""
    if device == "cpu":
        return device
    if device != "cuda":
        raise ConfigError(f"--device {device}: cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; leave it out to measure on the CPU")
    return torch.cuda.get_device_name()


def versions() -> dict[str, str]:
    """The versions of the packages that are compared, if they are installed."""
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


_SEEDED_AT = 1.0  # GB: the size that the post's table is scaled from, or the one closest to it
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


def overhead_page(result: OverheadResult, plot: str | None = None) -> str:
    """Return the whole page. `plot` is the file name of the picture in the page's directory."""
    parts = ["# What saving costs training", _about(result)]
    if plot:
        parts.append(f"![blocked, added and durable time of each arm]({plot})")
    parts += [_targets(result), *(_size(size) for size in result.sizes), _seed(result), _HOW]
    return "\n\n".join(parts) + "\n"


def _about(result: OverheadResult) -> str:
    trained_on = _trained_on(result)
    return (
        f"Written by `tierd bench overhead` on {result.created[:10]}. Believe the ratios: they are taken in one run, "
        f"arms interleaved.\nThe seconds are this machine's, {trained_on}with {result.machine.training_threads} "
        f"threads for training: {machine_text(result.machine)}."
    )


def _trained_on(result: OverheadResult) -> str:
    device = result.options.get("device", "cpu")
    return "" if device == "cpu" else f"trained on one {device}, "


def _targets(result: OverheadResult) -> str:
    rows = [
        (
            verdict.target,
            f"{verdict.gigabytes:g} GB",
            f"{SIGNS[verdict.relation]} {number_text(verdict.limit)}",
            number_text(verdict.measured),
            MET[verdict.met],
            verdict.by,
        )
        for verdict in overhead_result.target_verdicts(result)
    ]
    return "## Targets\n\n" + markdown_table(("target", "state", "limit", "measured", "", "from"), rows)


def _size(size: SizeResult) -> str:
    copy, fresh, over = (size.ceiling(name) for name in ("memcpy_s", "raw_fresh_s", "raw_overwrite_s"))
    restores = ", ".join(f"{kind} {_seconds(median_or_none(values))}" for kind, values in size.restore.items())
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
            markdown_table(_ARM_COLUMNS, [_arm(size, name, arm) for name, arm in size.arms.items()]),
        )
    )


def _arm(size: SizeResult, name: str, arm: SaveMethodResult) -> Sequence[str]:
    if arm.skipped is not None:
        return (name, *[""] * (len(_ARM_COLUMNS) - 2), f"skipped: {arm.skipped}")
    blocked, quiet = arm.median("blocked_s"), arm.median("quiet_durable_s")
    reference = size.measured_methods.get("torch.save+fsync")
    memory, cpu = size.extra_memory(name), size.cpu_per_gb(name)
    return (
        name,
        _seconds(blocked),
        _seconds(arm.p95("blocked_s")),
        _seconds(median_or_none(arm.first.get("first_blocked_s", []))) if arm.kind != "none" else "",
        _seconds(arm.median("added_s")),
        _seconds(arm.p95("added_s")),
        _seconds(arm.median("durable_s")),
        _seconds(quiet),
        number_text(cpu, ".2f"),
        "" if memory is None else f"{memory:.2f} x",
        _times(blocked, size.ceiling("memcpy_s")),
        _times(blocked, reference.median("blocked_s") if reference else None),
        _times(size.ceiling("raw_overwrite_s"), quiet),
        arm.durable,
    )


def _seed(result: OverheadResult) -> str:
    size = min(result.sizes, key=lambda size: abs(size.gigabytes - _SEEDED_AT))
    measured = overhead_result.scaled_costs(size)
    rows = [
        (str(row.steps_per_save), row.label, f"{row.overhead_s:,.1f} s", f"{row.efficiency:.2%}")
        for row in overhead_result.overhead_rows(measured)
    ]
    used = "; ".join(
        f"{cost.label} {cost.added_s:.3f} s (busy for {cost.busy_s:.1f} s"
        + (f", on the tier after {cost.flushed_s:.1f} s)" if cost.flushed_s else ")")
        for cost in measured
    )
    text = _SEED.format(
        share=overhead_result.POST_STATE_GB,
        size=f"{size.gigabytes:g}",
        step=_seconds(size.step_s),
        used=used or "nothing was",
    )
    columns = ("save every", "", "overhead", "efficiency")
    return "\n\n".join(("## The overhead table this project started from", text, markdown_table(columns, rows)))


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


_FIGURES = {"blocked_s": "blocked", "added_s": "added to training", "durable_s": "until durable"}
_MIN_DRAWN_S = 1e-4  # seconds; an added time below it, or below zero, is drawn there


def draw_overhead(result: OverheadResult, path: Path) -> str | None:
    """Write a PNG with one panel for each size, medians of each arm. Return the reason if there is none, else None."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"no plot: matplotlib is not installed; {install_command('bench')}"
    sizes = result.sizes
    figure = Figure(figsize=(5 * len(sizes) + 2, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for size, panel in zip(sizes, panels, strict=True):
        names = [name for name in size.measured_methods if name != "none"][::-1]
        for place, (figure_name, label) in enumerate(_FIGURES.items()):
            values = [max(_MIN_DRAWN_S, size.arms[name].median(figure_name) or 0.0) for name in names]
            panel.barh([index + 0.25 * (1 - place) for index in range(len(names))], values, 0.25, label=label)
        for name, style in (("memcpy_s", ":"), ("raw_overwrite_s", "--")):
            ceiling = size.ceiling(name)
            if ceiling is not None:
                panel.axvline(ceiling, color="black", linewidth=0.8, linestyle=style, label=name.removesuffix("_s"))
        panel.set_yticks(range(len(names)), names)
        panel.set_xscale("log")
        panel.set_xlabel("seconds, median")
        panel.set_title(f"{size.gigabytes:g} GB, steps of {size.step_s:.2f} s")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=110)
    return None
