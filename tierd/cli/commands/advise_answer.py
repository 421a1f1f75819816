"""The values of the options of `advise`, in seconds and bytes, and its answer: text, a table, a picture.

Invariant: nothing is guessed. A value without its unit, or an incomplete set of the model's inputs, is an error that
names the option.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tierd.cli.commands.checkpoint_commands import observe_inventory
from tierd.cli.missing_runs import naming_known_runs
from tierd.cli.options import LONGEST_S, SHORTEST_S, parse_bandwidth, parse_size, parse_time
from tierd.cli.output import print_answer, print_lines
from tierd.cli.places import resolve_places
from tierd.cli.tables import Table
from tierd.core.advice.run_estimates import RunHistory, SaveFit, SaveMode, TableRow, run_history
from tierd.core.advice.save_interval import Advice, Costs, IntervalChoice, goodput
from tierd.core.errors import ConfigError
from tierd.core.installation import install_command
from tierd.core.planning.inventory import observed_runs
from tierd.core.units import format_duration

LOCAL = "spool"


class SaveCosts(msgspec.Struct, frozen=True):
    state_bytes: Annotated[int, Meta(gt=0)]
    blocked_s: Annotated[float, Meta(ge=0, le=LONGEST_S)]
    durable_s: Annotated[float, Meta(ge=SHORTEST_S, le=LONGEST_S)]


class _BenchResult(msgspec.Struct, frozen=True):
    advise: SaveCosts


def given(parse: Callable[[str, str], float], option: str, text: str | None) -> float | None:
    return None if text is None else parse(option, text)


def history_of(from_run: tuple[str, str] | None, spool: Path | None, run: str | None) -> RunHistory | None:
    """Read the history of a real run."""
    if from_run is not None:
        if spool is not None or run is not None:
            raise ConfigError("--from-run names a tier and the run itself; leave --spool and --run out")
        url, run = from_run
        where = resolve_places(None, [url], None)
    elif spool is not None:
        where = resolve_places(spool, None, None)
    elif run is not None:
        raise ConfigError("--run is for --spool: which of its runs")
    else:
        return None
    inventory = observe_inventory(where, run)
    if run is None:
        names = observed_runs(inventory)
        if len(names) != 1:
            raise ConfigError(f"--spool {spool}: it has {len(names)} runs; say which with --run")
        [run] = names
    with naming_known_runs(where, run):
        return run_history(inventory, run)


def mtbf_of(mtbf: str | None, nodes: int, history: RunHistory | None, table: bool) -> float:
    """Return the time between failures of the job; infinite for a table without failures."""
    if mtbf is not None:
        return parse_time("--mtbf", mtbf) / nodes
    if history is not None:
        if history.failures:
            return history.span_s / history.failures
        raise ConfigError(f"run {history.run}: no launch resumed, so no failure is known; say how often with --mtbf")
    if table:
        return math.inf
    raise ConfigError(
        "--mtbf: say how often a failure stops the job, such as --mtbf 50d --nodes 32; what saving takes where "
        "nothing fails, --table shows without it"
    )


def tiers_of(tiers: list[str] | None, bandwidth: str | None) -> dict[str, float | None]:
    bandwidths: dict[str, float | None] = {LOCAL: None}
    for entry in tiers or ([f"tier={bandwidth}"] if bandwidth else []):
        name, equals, text = entry.partition("=")
        if not (name and equals) or name in bandwidths or "|" in name:
            raise ConfigError(f"--tier {entry!r}: a name of its own and a bandwidth, as network=500MB/s")
        bandwidths[name] = parse_bandwidth("--tier", text)
    return bandwidths


def save_costs_of(
    file: Path | None,
    state_size: str | None,
    blocked: str | None,
    bandwidth: str | None,
    sync_s: float | None,
    table: bool,
) -> SaveCosts:
    """Return what a save costs, from a file of `bench overhead` or from options."""
    options = {"--state-size": state_size, "--blocked": blocked, "--bandwidth": bandwidth}
    if file is not None:
        if any(value is not None for value in options.values()):
            raise ConfigError(f"--from names what saving costs itself; leave {', '.join(options)} out")
        try:
            measured = msgspec.json.decode(file.read_bytes(), type=_BenchResult).advise
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--from {file}: not what `tierd bench overhead` writes: {error}") from error
        # A save that is durable when it returns may be measured as durable before, because clocks differ.
        return SaveCosts(measured.state_bytes, measured.blocked_s, max(measured.blocked_s, measured.durable_s))
    if sync_s is not None and blocked is None and bandwidth is None and not table:  # a table compares it with tierd
        return SaveCosts(round(given(parse_size, "--state-size", state_size) or 0), sync_s, sync_s)
    if state_size is None or blocked is None or bandwidth is None:
        missing = ", ".join(option for option, value in options.items() if value is None)
        way_out = "" if table else ", or --sync TIME"
        raise ConfigError(f"missing: {missing}; or give --from FILE, the JSON of `tierd bench overhead`{way_out}")
    amount, cost = parse_size("--state-size", state_size), parse_time("--blocked", blocked, zero=True)
    return SaveCosts(round(amount), cost, cost + amount / parse_bandwidth("--bandwidth", bandwidth))


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
    past: RunHistory | None = None


def print_advice(answer: AdviceReport) -> None:
    """Print the answer as text for people."""
    advice, costs = answer.advice, answer.costs
    if answer.past and advice and advice.yours:
        print_lines("\n".join(cost_lines(answer.past, advice.yours, advice.recommended)))
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
        cells = [format_duration(row.interval_s), str(row.steps or ""), row.tier]
        for mode in (row.sync, row.tierd):
            cells += [format_duration(mode.blocked_s), f"{mode.efficiency:.1%}"]
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


def cost_lines(past: RunHistory, now: IntervalChoice, best: IntervalChoice) -> Iterator[str]:
    """Return lines on the cost of a run's saves and failures, and on that of another interval."""
    saving, redoing, restarting = (
        format_duration(share * past.span_s) for share in (now.saving, now.redoing, now.restarting)
    )
    times = "once" if past.failures == 1 else f"{past.failures} times"
    yield (
        f"in {format_duration(past.span_s)} run {past.run} saved every {past.every_steps} steps and failed {times}: "
        "about "
        f"{saving} went into saves, {redoing} into redone work, {restarting} into coming back"
    )
    gain_s = (best.goodput - now.goodput) * past.span_s
    if gain_s > 0:
        yield f"every {best.steps} steps would have lost {format_duration(gain_s)} less"


def notice_lines(timing: SaveFit) -> Iterator[str]:
    """Return lines on the last save after a notice."""
    notice, due = format_duration(timing.notice_s), format_duration(timing.due_s)
    yield f"a notice of {notice}: the last checkpoint is due after at most {due},"
    yield f"durable in the spool after {format_duration(timing.durable_s)},"
    if timing.on_tier_s is None:
        yield "and on no tier whose bandwidth is known; say it with --tier-bandwidth if the disk ends with the node"
    else:
        yield f"and verified on the tier after {format_duration(timing.on_tier_s)}"
    yield f"it fits, with {format_duration(timing.left_s)} left" if timing.fits else f"it does not fit: {timing.why}"


def _show_advice(costs: Costs, advice: Advice, sync: Advice | None) -> None:
    best = advice.recommended
    cadence = (
        f"every {best.steps} steps" if best.steps else f"after every {format_duration(best.interval_s)} of training"
    )
    print_answer(f"save {cadence}: goodput {best.goodput:.2%}")
    cost, durable, mtbf = (
        format_duration(costs.blocked_s),
        format_duration(costs.durable_s),
        format_duration(costs.mtbf_s),
    )
    later = f", on the tier {format_duration(costs.flush_s)} later" if costs.node_loss else ""
    print_answer(f"a failure every {mtbf}; a save takes {cost} from training and is durable after {durable}{later}")
    choices = [("yours", advice.yours), ("recommended", best)]
    choices += [(f"x {other.interval_s / best.interval_s:.2g}", other) for other in advice.others]
    if sync is not None:
        choices += [("sync", sync.recommended), ("sync, yours", sync.yours)]
    rows = sorted(((name, choice) for name, choice in choices if choice), key=lambda row: row[1].interval_s)
    columns = ("", "INTERVAL", "STEPS", "GOODPUT", "SAVING", "REDOING", "RESTARTING", "BLOCKED")
    print_answer(Table(columns, [_row(name, choice) for name, choice in rows]))
    print_answer(f"Young 1974: {format_duration(advice.young_s)}; Daly 2006: {format_duration(advice.daly_s)}")
    if advice.bandwidth_bound:
        print_answer(
            "bandwidth decides: saves are as close as they can become durable, or each would wait for the one before"
        )
    if sync is not None:
        gain = 100 * (best.goodput - sync.recommended.goodput)
        print_answer(f"sync: training waits for each save; at its own best, {gain:.2f} points less goodput")


def _row(name: str, choice: IntervalChoice) -> list[str]:
    shares = (f"{share:.2%}" for share in (choice.goodput, choice.saving, choice.redoing, choice.restarting))
    return [
        name,
        format_duration(choice.interval_s),
        str(choice.steps or ""),
        *shares,
        format_duration(choice.blocked_s),
    ]


def draw_curve(file: Path, answer: AdviceReport) -> None:
    """Draw goodput over the interval, or the table, as a picture.

    Raises `ConfigError` if matplotlib is missing, or the file cannot be written.
    """
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: {install_command('bench')} ({error})") from error
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
        label = f"{name}: {format_duration(choice.interval_s)}, {choice.goodput:.2%}"
        axes.plot([choice.interval_s], [100 * choice.goodput], mark, label=label)
    bound = costs.durable_s - costs.blocked_s
    if low < bound < high:
        axes.axvline(bound, color="grey", linestyle=":", label=f"closer saves wait: {format_duration(bound)}")
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
