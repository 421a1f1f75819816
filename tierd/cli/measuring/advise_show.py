"""Output of `advise`: an answer, a table of intervals by tiers, a picture."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierd.cli.measuring.advise_values import LOCAL
from tierd.cli.tables import console, print_lines, table
from tierd.cli.units import span
from tierd.core.advice.notice import Fit
from tierd.core.advice.run_history import Past
from tierd.core.advice.save_interval import Advice, Costs, IntervalChoice, goodput
from tierd.core.advice.table import SaveMode, TableRow
from tierd.core.errors import ConfigError

_PLOTTED = 200  # points of the curve


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """The inputs and results of `tierd advise`. A member is None if it was not requested.

    Attributes:
        costs: the model's inputs.
        advice: the model's recommendation.
        sync_s: the duration of a save that training waits for, in seconds.
        sync: the model's recommendation for such saves.
        table: a row for each interval and tier.
        past: the history of a real run, from its checkpoints.
    """

    costs: Costs | None
    advice: Advice | None
    sync_s: float | None = None
    sync: Advice | None = None
    table: tuple[TableRow, ...] | None = None
    past: Past | None = None


def show(answer: AdviceReport) -> None:
    """Print the answer as text for people."""
    advice, costs = answer.advice, answer.costs
    if answer.past and advice and advice.yours:
        print_lines("\n".join(account(answer.past, advice.yours, advice.recommended)))
    if answer.table is not None:
        print_lines("\n".join(_markdown(answer.table, costs.node_loss if costs else 0.0)))
    elif costs and advice:
        _show_advice(costs, advice, answer.sync)


def _markdown(rows: Sequence[TableRow], node_loss: float) -> Iterator[str]:
    fails = rows[0].sync.goodput is not None
    measures = ["a save blocks", "efficiency", *(["goodput"] if fails else [])]
    columns = [f"{mode}: {measure}" for mode in ("sync", "tierd") for measure in measures]
    yield f"| {' | '.join(['interval', 'steps', 'tier', *columns])} |"
    yield f"|{' --- |' * 3}{' ---: |' * len(columns)}"
    for row in rows:
        cells = [span(row.interval_s), str(row.steps or ""), row.tier]
        for mode in (row.sync, row.tierd):
            cells += [span(mode.blocked_s), f"{mode.efficiency:.1%}"]
            cells += [] if mode.goodput is None else [f"{mode.goodput:.1%}"]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "sync: training waits until the tier has the checkpoint. efficiency: the share of time that is training"
    yield "where nothing fails."
    if fails:
        yield (
            f"goodput: the share that is kept where it fails. With tierd {node_loss or 1:.0%} of the failures take the "
            f"spool along, so that the tier's copy counts; in the rows of {LOCAL} none does."
        )


def account(past: Past, now: IntervalChoice, best: IntervalChoice) -> Iterator[str]:
    """Return lines on the cost of a run's saves and failures, and on that of another interval."""
    saving, redoing, restarting = (span(share * past.span_s) for share in (now.saving, now.redoing, now.restarting))
    times = "once" if past.failures == 1 else f"{past.failures} times"
    yield (
        f"in {span(past.span_s)} run {past.run} saved every {past.every_steps} steps and failed {times}: about "
        f"{saving} went into saves, {redoing} into redone work, {restarting} into coming back"
    )
    gain_s = (best.goodput - now.goodput) * past.span_s
    if gain_s > 0:
        yield f"every {best.steps} steps would have lost {span(gain_s)} less"


def times(timing: Fit) -> Iterator[str]:
    """Return lines on the last save after a notice."""
    yield f"a notice of {span(timing.notice_s)}: the last checkpoint is due after at most {span(timing.due_s)},"
    yield f"durable in the spool after {span(timing.durable_s)},"
    if timing.on_tier_s is None:
        yield "and on no tier whose bandwidth is known; say it with --tier-bandwidth if the disk ends with the node"
    else:
        yield f"and verified on the tier after {span(timing.on_tier_s)}"
    yield f"it fits, with {span(timing.left_s)} left" if timing.fits else f"it does not fit: {timing.why}"


def _show_advice(costs: Costs, advice: Advice, sync: Advice | None) -> None:
    out, best = console(), advice.recommended
    cadence = f"every {best.steps} steps" if best.steps else f"after every {span(best.interval_s)} of training"
    out.print(f"save {cadence}: goodput {best.goodput:.2%}")
    cost, durable, mtbf = span(costs.blocked_s), span(costs.durable_s), span(costs.mtbf_s)
    later = f", on the tier {span(costs.flush_s)} later" if costs.node_loss else ""
    out.print(f"a failure every {mtbf}; a save takes {cost} from training and is durable after {durable}{later}")
    choices = [("yours", advice.yours), ("recommended", best)]
    choices += [(f"x {other.interval_s / best.interval_s:.2g}", other) for other in advice.others]
    if sync is not None:
        choices += [("sync", sync.recommended), ("sync, yours", sync.yours)]
    rows = sorted(((name, choice) for name, choice in choices if choice), key=lambda row: row[1].interval_s)
    columns = ("", "INTERVAL", "STEPS", "GOODPUT", "SAVING", "REDOING", "RESTARTING", "A SAVE BLOCKS")
    out.print(table(None, columns, [_row(name, choice) for name, choice in rows]))
    out.print(f"Young 1974: {span(advice.young_s)}; Daly 2006: {span(advice.daly_s)}")
    if advice.bandwidth_bound:
        out.print(
            "bandwidth decides: saves are as close as they can become durable, or each would wait for the one before"
        )
    if sync is not None:
        gain = 100 * (best.goodput - sync.recommended.goodput)
        out.print(f"sync: training waits for each save; at its own best, {gain:.2f} points less goodput")


def _row(name: str, choice: IntervalChoice) -> list[str]:
    shares = (f"{share:.2%}" for share in (choice.goodput, choice.saving, choice.redoing, choice.restarting))
    return [name, span(choice.interval_s), str(choice.steps or ""), *shares, span(choice.blocked_s)]


def draw(file: Path, answer: AdviceReport) -> None:
    """Draw goodput over the interval, or the table, as a picture.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: pip install 'tierd[bench]' ({error})") from error
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    if answer.table is not None:
        _draw_table(axes, answer.table)
    elif answer.costs and answer.advice:
        _draw_advice(axes, answer.costs, answer.advice)
    axes.set(xscale="log", xlabel="training between two saves, s")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:  # ValueError: the suffix is no image format
        raise ConfigError(f"--plot {file}: {error}") from error


def _draw_advice(axes: Any, costs: Costs, advice: Advice) -> None:
    marks = [("recommended", advice.recommended, "o"), *([("yours", advice.yours, "s")] if advice.yours else [])]
    intervals = [choice.interval_s for choice in (*advice.others, *(choice for _, choice, _ in marks))]
    low, high = min(intervals) / 2, max(intervals) * 2
    curve = [low * (high / low) ** (index / (_PLOTTED - 1)) for index in range(_PLOTTED)]
    axes.plot(curve, [100 * goodput(interval, costs) for interval in curve])
    for name, choice, mark in marks:
        label = f"{name}: {span(choice.interval_s)}, {choice.goodput:.2%}"
        axes.plot([choice.interval_s], [100 * choice.goodput], mark, label=label)
    bound = costs.durable_s - costs.blocked_s
    if low < bound < high:
        axes.axvline(bound, color="grey", linestyle=":", label=f"closer saves wait: {span(bound)}")
    axes.set(ylabel="goodput, %")


def _draw_table(axes: Any, table_rows: Sequence[TableRow]) -> None:
    """Draw a line for each tier and kind of save."""
    fails = table_rows[0].sync.goodput is not None
    for index, tier in enumerate(dict.fromkeys(row.tier for row in table_rows)):
        rows = [row for row in table_rows if row.tier == tier]
        for name, style in (("sync", "--"), ("tierd", "-")):
            modes: list[SaveMode] = [getattr(row, name) for row in rows]
            shares = [100 * (mode.efficiency if mode.goodput is None else mode.goodput) for mode in modes]
            intervals, label = [row.interval_s for row in rows], f"{tier}, {name}"
            axes.plot(intervals, shares, style, color=f"C{index}", marker="o", label=label)
    axes.set(ylabel="goodput, %" if fails else "efficiency without failures, %")
