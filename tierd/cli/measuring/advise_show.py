"""Output of `advise`: an answer, a table of intervals by tiers, a picture."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tierd.cli.tables import table
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


def markdown(lines: Sequence[TableRow], local: str, node_loss: float) -> Iterator[str]:
    """Return the table as Markdown."""
    fails = lines[0].sync.goodput is not None
    measures = ["a save blocks", "efficiency", *(["goodput"] if fails else [])]
    columns = [
        "interval",
        "steps",
        "tier",
        *(f"sync: {measure}" for measure in measures),
        *(f"tierd: {measure}" for measure in measures),
    ]
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * 3}{' ---: |' * (len(columns) - 3)}"
    for row in lines:
        cells = [span(row.interval_s), str(row.steps or ""), row.tier, *_cells(row.sync), *_cells(row.tierd)]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "sync: training waits until the tier has the checkpoint. efficiency: the share of time that is training"
    yield "where nothing fails."
    if fails:
        yield (
            f"goodput: the share that is kept where it fails. With tierd {node_loss:.0%} of the failures take the "
            f"spool along, so that the tier's copy counts; in the rows of {local} none does."
        )


def _cells(mode: SaveMode) -> list[str]:
    return [
        span(mode.blocked_s),
        f"{mode.efficiency:.1%}",
        *([] if mode.goodput is None else [f"{mode.goodput:.1%}"]),
    ]


def account(past: Past, now: IntervalChoice, best: IntervalChoice) -> Iterator[str]:
    """Return lines on the cost of a run's saves and failures, and on that of another interval."""
    saving, redoing, restarting = (share * past.span_s for share in (now.saving, now.redoing, now.restarting))
    times = "once" if past.failures == 1 else f"{past.failures} times"
    yield (
        f"in {span(past.span_s)} run {past.run} saved every {past.every_steps} steps and failed {times}: about "
        f"{span(saving)} went into saves, {span(redoing)} into redone work, {span(restarting)} into coming back"
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


def show(out: Console, costs: Costs, advice: Advice, sync: Advice | None) -> None:
    """Return the answer as text for people."""
    best = advice.recommended
    cadence = (
        f"every {best.steps} steps" if best.steps is not None else f"after every {span(best.interval_s)} of training"
    )
    out.print(f"save {cadence}: goodput {best.goodput:.2%}")
    cost, durable, mtbf = span(costs.blocked_s), span(costs.durable_s), span(costs.mtbf_s)
    later = f", on the tier {span(costs.flush_s)} later" if costs.node_loss else ""
    out.print(f"a failure every {mtbf}; a save takes {cost} from training and is durable after {durable}{later}")
    rows = [("yours", advice.yours)] if advice.yours else []
    rows += [
        ("recommended", best),
        *((f"x {choice.interval_s / best.interval_s:.2g}", choice) for choice in advice.others),
    ]
    if sync is not None:
        rows += [("sync", sync.recommended), *([("sync, yours", sync.yours)] if sync.yours else [])]
    rows.sort(key=lambda row: row[1].interval_s)
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


def _row(name: str, choice: IntervalChoice) -> tuple[str, ...]:
    shares = (f"{share:.2%}" for share in (choice.goodput, choice.saving, choice.redoing, choice.restarting))
    return (
        name,
        span(choice.interval_s),
        "" if choice.steps is None else str(choice.steps),
        *shares,
        span(choice.blocked_s),
    )


def draw(file: Path, costs: Costs, advice: Advice) -> None:
    """Draw goodput over the interval, as a picture.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    figure, axes = _figure()
    best = advice.recommended
    choices = [best, *advice.others, *([advice.yours] if advice.yours else [])]
    low, high = min(option.interval_s for option in choices) / 2, max(option.interval_s for option in choices) * 2
    curve = [low * (high / low) ** (index / (_PLOTTED - 1)) for index in range(_PLOTTED)]
    axes.plot(curve, [100 * goodput(interval, costs) for interval in curve])
    for name, choice, mark in (("recommended", best, "o"), ("yours", advice.yours, "s")):
        if choice is not None:
            label = f"{name}: {span(choice.interval_s)}, {choice.goodput:.2%}"
            axes.plot([choice.interval_s], [100 * choice.goodput], mark, label=label)
    bound = costs.durable_s - costs.blocked_s
    if low < bound < high:
        axes.axvline(bound, color="grey", linestyle=":", label=f"closer saves wait: {span(bound)}")
    axes.set(xscale="log", xlabel="training between two saves, s", ylabel="goodput, %")
    _write(file, figure, axes)


def draw_table(file: Path, lines: Sequence[TableRow]) -> None:
    """Draw the table: a line for each tier and kind of save; raises as `draw`."""
    figure, axes = _figure()
    fails = lines[0].sync.goodput is not None
    for index, tier in enumerate(dict.fromkeys(row.tier for row in lines)):
        rows = [row for row in lines if row.tier == tier]
        for name, style in (("sync", "--"), ("tierd", "-")):
            ways: list[SaveMode] = [getattr(row, name) for row in rows]
            shares = [100 * (mode.efficiency if mode.goodput is None else mode.goodput) for mode in ways]
            axes.plot(
                [row.interval_s for row in rows], shares, style, color=f"C{index}", marker="o", label=f"{tier}, {name}"
            )
    quantity = "goodput" if fails else "efficiency without failures"
    axes.set(xscale="log", xlabel="training between two saves, s", ylabel=f"{quantity}, %")
    _write(file, figure, axes)


def _figure() -> tuple[Any, Any]:
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: pip install 'tierd[bench]' ({error})") from error
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.subplots()


def _write(file: Path, figure: Any, axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:  # ValueError: the suffix is no image format
        raise ConfigError(f"--plot {file}: {error}") from error
