"""`tierd bench growth`: the whole run, and the files that it writes: JSON and a Markdown page.

Invariant: a run that ends early leaves the parts that it had finished. Parts that are not asked for keep the samples
that lie in `growth.json`. Each number on the page is computed from the given result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec

from tierd.bench import process_counters, training
from tierd.bench.growth import checkpoint_counts, cold_restores, flush_costs, save_costs
from tierd.bench.growth.growth_result import FORMAT, Figures, GrowthResult, Rows, goal_verdicts
from tierd.bench.overhead import versions
from tierd.bench.report_page import MET, SIGNS, machine_text, markdown_table, number_text, write_result
from tierd.core.errors import ConfigError

TITLES = {
    "values": "Values that are no tensors",
    "tensors": "One more tensor at each save",
    "restore": "A restore from a spool of so many checkpoints",
    "steady": "The daemon, for each save and its flush, with so many checkpoints in the spool and on the tier",
    "backlog": "The daemon, for each flush of a backlog of so many, by tenths of it; all were sent",
    "flush": "The daemon, for a GB that it flushes",
    "rows": "An embedding, some of whose rows changed",
    "training": "Training beside saves",
    "attached": "Overlapped saves of 0.25 GB",
    "cold": "A cold restore of 0.5 GB",
    "decode": "Decoding, one thread",
    "ls": "`tierd ls` over runs x checkpoints x ranks on a file tier",
    "status": "The daemon's answer to `status` with runs x checkpoints in its spool",
}
_COLUMNS = ("cpu_s", "wall_s", "blocked_s", "added_s", "quiet_durable_s", "raw_overwrite_s", "lost_share", "sent_share",
            "read_bytes", "daemon_cpu_s", "decode_gb_per_cpu_s", "encode_gb_per_cpu_s", "stored_share")  # fmt: skip


def growth_page(result: GrowthResult) -> str:
    """The whole page."""
    return "\n".join(
        (
            "# Costs that must not grow",
            "",
            f"`tierd bench growth`, {result.created[:10]}: {machine_text(result.machine)}. "
            "Each figure is the median of its samples, all of which are in `growth.json`. Arms of one row take turns, "
            "so that a busy machine affects all of them; trust ratios and CPU seconds more than wall times.",
            "",
            *_goals(result),
            *(line for part in TITLES if part in result.parts for line in _part(part, result)),
            "",
        )
    )


def _goals(result: GrowthResult) -> Iterator[str]:
    rows = []
    for verdict in goal_verdicts(result):
        ceiling = ""
        if verdict.ceiling and verdict.measured:
            reached = (
                verdict.measured / verdict.ceiling if verdict.relation == ">=" else verdict.ceiling / verdict.measured
            )
            ceiling = f"{verdict.ceiling:.3g} ({reached:.0%} of it)"
        limit = f"{SIGNS[verdict.relation]} {verdict.limit:g}"
        rows.append((verdict.goal, verdict.row, limit, number_text(verdict.measured, ".3g"), ceiling, MET[verdict.met]))
    yield from ("## Goals", "", markdown_table(("goal", "row", "limit", "measured", "ceiling", ""), rows))


def _part(name: str, result: GrowthResult) -> Iterator[str]:
    rows = result.parts[name]
    all_figures = [figures for samples in rows.values() for arm in samples.values() for figures in arm]
    shown_figures = [figure for figure in _COLUMNS if any(figure in figures for figures in all_figures)]
    yield from ("", f"## {TITLES[name]}", "", f"Measured on {result.measured.get(name, result.created[:10])}.", "")
    yield markdown_table(
        ("", "arm", *(figure.replace("_", " ") for figure in shown_figures)),
        [
            (row, arm, *(_figure(arm_samples, figure) for figure in shown_figures))
            for row, samples in rows.items()
            for arm, arm_samples in samples.items()
        ],
    )


def _figure(samples: list[Figures], figure: str) -> str:
    values = [figures[figure] for figures in samples if figure in figures]
    if not values:
        return ""
    low, middle, high = (_number(figure, value) for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low}-{high})"


def _number(figure: str, value: float) -> str:
    if figure.endswith("_share"):
        return f"{value:.1%}"
    if figure.endswith("_bytes"):
        return f"{value / 1e6:,.0f} MB"
    if "_gb_" in figure:
        return f"{value:.2f}"
    return f"{value:.2f} s" if abs(value) >= 10 else f"{1000 * value:,.1f} ms"


def growth(
    only: Sequence[str], scale: float, s3: str, directory: Path | None, out: Path | None, say: Callable[[str], None]
) -> GrowthResult:
    """Measure these parts, and write the files to `out` after each row.

    `only` names parts, as in `TITLES`; `scale` is so many times as many checkpoints and runs; `s3` is the URL of a
    place in a bucket, for cold restores, or empty. Raises `ConfigError` if an option cannot be used.
    """
    if unknown := set(only) - set(TITLES):
        raise ConfigError(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    if not 0 < scale <= 1:
        raise ConfigError("--scale: a number above 0 and at most 1")
    rows_by_part: dict[str, Rows] = (
        checkpoint_counts.parts(scale)
        | save_costs.value_parts()
        | flush_costs.flush_parts()
        | flush_costs.codec_parts()
        | save_costs.overlapped_parts()
        | save_costs.library_parts(say)
        | cold_restores.parts(s3)
    )
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=directory) as scratch:
        result = GrowthResult(
            format=FORMAT,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=process_counters.describe_machine(Path(scratch), training.training_thread_count(), versions()),
        )
        _take_over(result, out)
        for part in (part for part in TITLES if part in only):
            result.parts[part], result.measured[part] = {}, result.created[:10]
            for row, measure in rows_by_part[part]:
                say(f"{part}: {row}")
                with tempfile.TemporaryDirectory(dir=scratch) as home:
                    result.parts[part][row] = measure(Path(home))
                if out is not None:
                    write_result(out, "growth", result, growth_page(result))
    return result


def _take_over(result: GrowthResult, out: Path | None) -> None:
    """Take over what an earlier run left in `out`."""
    path = out / "growth.json" if out else None
    if path is not None and path.exists():
        before = msgspec.json.decode(path.read_bytes(), type=GrowthResult)
        result.parts, result.measured = before.parts, before.measured
