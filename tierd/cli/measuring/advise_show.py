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
class Advised:
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
    each = ["a save blocks", "efficiency", *(["goodput"] if fails else [])]
    columns = ["interval", "steps", "tier", *(f"sync: {one}" for one in each), *(f"tierd: {one}" for one in each)]
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * 3}{' ---: |' * (len(columns) - 3)}"
    for one in lines:
        cells = [span(one.interval_s), str(one.steps or ""), one.tier, *_cells(one.sync), *_cells(one.tierd)]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "sync: training waits until the tier has the checkpoint. efficiency: the share of time that is training"
    yield "where nothing fails."
    if fails:
        yield (
            f"goodput: the share that is kept where it fails. With tierd {node_loss:.0%} of the failures take the "
            f"spool along, so that the tier's copy counts; in the rows of {local} none does."
        )


def _cells(way: SaveMode) -> list[str]:
    return [
        span(way.blocked_s),
        f"{way.efficiency:.1%}",
        *([] if way.goodput is None else [f"{way.goodput:.1%}"]),
    ]


def account(past: Past, now: IntervalChoice, best: IntervalChoice) -> Iterator[str]:
    """Return lines on the cost of a run's saves and failures, and on that of another interval."""
    saving, redoing, away = (share * past.span_s for share in (now.saving, now.redoing, now.restarting))
    times = "once" if past.failures == 1 else f"{past.failures} times"
    yield (
        f"in {span(past.span_s)} run {past.run} saved every {past.every_steps} steps and failed {times}: about "
        f"{span(saving)} went into saves, {span(redoing)} into redone work, {span(away)} into coming back"
    )
    less = (best.goodput - now.goodput) * past.span_s
    if less > 0:
        yield f"every {best.steps} steps would have lost {span(less)} less"


def times(found: Fit) -> Iterator[str]:
    """Return lines on the last save after a notice."""
    yield f"a notice of {span(found.notice_s)}: the last checkpoint is due after at most {span(found.due_s)},"
    yield f"durable in the spool after {span(found.durable_s)},"
    if found.on_tier_s is None:
        yield "and on no tier whose bandwidth is known; say it with --tier-bandwidth if the disk ends with the node"
    else:
        yield f"and verified on the tier after {span(found.on_tier_s)}"
    yield f"it fits, with {span(found.left_s)} left" if found.fits else f"it does not fit: {found.why}"


def show(out: Console, costs: Costs, found: Advice, sync: Advice | None) -> None:
    """Return the answer as text for people."""
    best = found.recommended
    every = (
        f"every {best.steps} steps" if best.steps is not None else f"after every {span(best.interval_s)} of training"
    )
    out.print(f"save {every}: goodput {best.goodput:.2%}")
    cost, durable, apart = span(costs.blocked_s), span(costs.durable_s), span(costs.mtbf_s)
    later = f", on the tier {span(costs.flush_s)} later" if costs.node_loss else ""
    out.print(f"a failure every {apart}; a save takes {cost} from training and is durable after {durable}{later}")
    rows = [("yours", found.yours)] if found.yours else []
    rows += [("recommended", best), *((f"x {one.interval_s / best.interval_s:.2g}", one) for one in found.others)]
    if sync is not None:
        rows += [("sync", sync.recommended), *([("sync, yours", sync.yours)] if sync.yours else [])]
    rows.sort(key=lambda row: row[1].interval_s)
    columns = ("", "INTERVAL", "STEPS", "GOODPUT", "SAVING", "REDOING", "RESTARTING", "A SAVE BLOCKS")
    out.print(table(None, columns, [_row(name, one) for name, one in rows]))
    out.print(f"Young 1974: {span(found.young_s)}; Daly 2006: {span(found.daly_s)}")
    if found.bandwidth_bound:
        out.print(
            "bandwidth decides: saves are as close as they can become durable, or each would wait for the one before"
        )
    if sync is not None:
        gain = 100 * (best.goodput - sync.recommended.goodput)
        out.print(f"sync: training waits for each save; at its own best, {gain:.2f} points less goodput")


def _row(name: str, one: IntervalChoice) -> tuple[str, ...]:
    shares = (f"{share:.2%}" for share in (one.goodput, one.saving, one.redoing, one.restarting))
    return (name, span(one.interval_s), "" if one.steps is None else str(one.steps), *shares, span(one.blocked_s))


def draw(file: Path, costs: Costs, found: Advice) -> None:
    """Draw goodput over the interval, as a picture.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    figure, axes = _figure()
    best = found.recommended
    shown = [best, *found.others, *([found.yours] if found.yours else [])]
    low, high = min(one.interval_s for one in shown) / 2, max(one.interval_s for one in shown) * 2
    curve = [low * (high / low) ** (index / (_PLOTTED - 1)) for index in range(_PLOTTED)]
    axes.plot(curve, [100 * goodput(interval, costs) for interval in curve])
    for name, one, mark in (("recommended", best, "o"), ("yours", found.yours, "s")):
        if one is not None:
            label = f"{name}: {span(one.interval_s)}, {one.goodput:.2%}"
            axes.plot([one.interval_s], [100 * one.goodput], mark, label=label)
    bound = costs.durable_s - costs.blocked_s
    if low < bound < high:
        axes.axvline(bound, color="grey", linestyle=":", label=f"closer saves wait: {span(bound)}")
    axes.set(xscale="log", xlabel="training between two saves, s", ylabel="goodput, %")
    _write(file, figure, axes)


def draw_table(file: Path, lines: Sequence[TableRow]) -> None:
    """Draw the table: a line for each tier and kind of save; raises as `draw`."""
    figure, axes = _figure()
    fails = lines[0].sync.goodput is not None
    for index, tier in enumerate(dict.fromkeys(one.tier for one in lines)):
        mine = [one for one in lines if one.tier == tier]
        for name, style in (("sync", "--"), ("tierd", "-")):
            ways: list[SaveMode] = [getattr(one, name) for one in mine]
            shares = [100 * (way.efficiency if way.goodput is None else way.goodput) for way in ways]
            axes.plot(
                [one.interval_s for one in mine], shares, style, color=f"C{index}", marker="o", label=f"{tier}, {name}"
            )
    what = "goodput" if fails else "efficiency without failures"
    axes.set(xscale="log", xlabel="training between two saves, s", ylabel=f"{what}, %")
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
