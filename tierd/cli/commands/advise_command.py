"""The command `advise`, which only computes; `advise_answer` checks the values of its options."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tierd.cli.command_runtime import EXIT_WARNING
from tierd.cli.commands.advise_answer import (
    AdviceReport,
    draw_curve,
    given,
    history_of,
    mtbf_of,
    notice_lines,
    print_advice,
    save_costs_of,
    tiers_of,
)
from tierd.cli.options import JsonOption, RunOption, SpoolOption, parse_bandwidth, parse_count, parse_time
from tierd.cli.output import print_json, print_lines
from tierd.core.advice.run_estimates import RunHistory, SaveFit, fit_save, table_rows
from tierd.core.advice.save_interval import Advice, Costs, advise
from tierd.core.errors import ConfigError

Text = str | None
_STEPS = (100, 500, 1000, 5000)  # rows of the table if the step time is known,
_MINUTES = (1, 5, 15, 60)  # and if it is not


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("advise")(advise_command)


def _option(metavar: str, text: str, *names: str, show_default: bool = False) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=show_default)


def advise_command(
    state_size: Annotated[Text, _option("SIZE", "What one node saves: 96GB, 90GiB.")] = None,
    blocked: Annotated[Text, _option("TIME", "What one save takes from training: 0.9s.")] = None,
    bandwidth: Annotated[Text, _option("RATE", "The spool's, of one node: 4GB/s.")] = None,
    file: Annotated[
        Path | None, _option("FILE", "Take these three from the JSON of `tierd bench overhead`.", "--from")
    ] = None,
    mtbf: Annotated[Text, _option("TIME", "Mean time between failures of a node, or of the job.")] = None,
    nodes: Annotated[int, _option("N", "Nodes of the job: it fails with any of them.", show_default=True)] = 1,
    restart: Annotated[str, _option("TIME", "To detect, start again and restore.", show_default=True)] = "5m",
    tier_bandwidth: Annotated[Text, _option("RATE", "To the tier, of one node: 1GB/s.")] = None,
    node_loss: Annotated[float | None, _option("SHARE", "Failures that take the spool along: 0.2.")] = None,
    step_time: Annotated[Text, _option("TIME", "One training step: 6s.")] = None,
    every: Annotated[int | None, _option("STEPS", "The interval you have, to compare.")] = None,
    sync: Annotated[Text, _option("TIME", "A save that training waits for: 140s.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Intervals by tiers, as Markdown.")] = False,
    tier: Annotated[list[str] | None, _option("NAME=RATE", "A row of the table: network=500MB/s.")] = None,
    from_run: Annotated[tuple[str, str] | None, _option("URL RUN", "Take the rest from a run on a tier.")] = None,
    spool: SpoolOption = None,
    run: RunOption = None,
    notice: Annotated[
        Text, _option("TIME", "Whether the state fits: how long before its end a node says so: 120s.")
    ] = None,
    drain: Annotated[Text, _option("TIME", "With --notice: the daemon's `drain`, if the notice ends it, too.")] = None,
    plot: Annotated[Path | None, _option("FILE", "Draw goodput over the interval: a .png.")] = None,
    json: JsonOption = False,
) -> None:
    """How often to save, and the goodput to expect, from what saving and failing cost. With --notice: whether the last
    save is in time when the node ends.
    """
    history = history_of(from_run, spool, run)
    parse_count("--nodes", nodes)
    sync_s, step_s = given(parse_time, "--sync", sync), given(parse_time, "--step-time", step_time)
    tier_rate = given(parse_bandwidth, "--tier-bandwidth", tier_bandwidth)
    restart_s = parse_time("--restart", restart, zero=True)
    if history is not None:
        state_size = state_size or f"{max(1, history.state_bytes // nodes)}B"
        step_s = step_s or history.step_s
        every = history.every_steps if every is None else every
        restart_s = restart_s if math.isnan(history.away_s) else history.away_s
    measured = save_costs_of(file, state_size, blocked, bandwidth, sync_s, table)
    state_bytes, blocked_s, durable_s = measured.state_bytes, measured.blocked_s, measured.durable_s
    if notice is not None:
        notice_s, drain_s = parse_time("--notice", notice), given(parse_time, "--drain", drain)
        _answer_notice(fit_save(notice_s, state_bytes, blocked_s, durable_s, tier_rate, step_s or 0.0, drain_s), json)
        return
    if drain is not None:
        raise ConfigError("--drain is for --notice: how long the daemon sends after it")
    if (tier_rate is None) != (node_loss is None) and not table:
        raise ConfigError(
            "--tier-bandwidth and --node-loss need each other: how fast to the tier, and how often it counts"
        )
    if node_loss is not None and not 0 < node_loss <= 1:
        raise ConfigError(f"--node-loss {node_loss:g}: a share of all failures, more than 0 and at most 1")
    if every is not None and parse_count("--every", every) and step_s is None:
        raise ConfigError("--every counts steps: say how long one takes with --step-time")
    if tier and not table:
        raise ConfigError("--tier is a row of the table: give --table as well")
    mtbf_s = mtbf_of(mtbf, nodes, history, table)
    flush_s = state_bytes / tier_rate if tier_rate and node_loss else 0.0
    costs = Costs(blocked_s, durable_s, restart_s, mtbf_s, flush_s, node_loss or 0.0)
    tiers = tiers_of(tier, tier_bandwidth) if table else None
    answer = _answer(costs, step_s, every, sync_s, state_bytes, tiers, history)
    if plot is not None:
        draw_curve(plot, answer)
    if json:
        print_json(answer)
    else:
        print_advice(answer)


def _answer(
    costs: Costs,
    step_s: float | None,
    every: int | None,
    sync_s: float | None,
    state_bytes: int,
    tiers: dict[str, float | None] | None,
    history: RunHistory | None,
) -> AdviceReport:
    advice = sync_advice = table = None
    if costs.mtbf_s < math.inf:
        advice = advise(costs, step_s, every)
        if sync_s is not None and sync_s != costs.blocked_s:
            sync_advice = advise(Costs(sync_s, sync_s, costs.restart_s, costs.mtbf_s), step_s, every)
    if tiers is not None:
        costs_of_tiers = replace(costs, node_loss=costs.node_loss or 1.0)
        table = tuple(table_rows(costs_of_tiers, state_bytes, sync_s, _intervals(step_s, every, advice), tiers))
    return AdviceReport(costs if advice else None, advice, sync_s, sync_advice, table, history)


def _intervals(step_s: float | None, every: int | None, advice: Advice | None) -> list[tuple[float, int | None]]:
    """Return the intervals of the table in seconds, each with its steps."""
    intervals: dict[float, int | None] = {60.0 * minutes: None for minutes in _MINUTES}
    if step_s is not None:
        intervals = {step_s * steps: steps for steps in (*_STEPS, every) if steps}
    if advice is not None:
        intervals[advice.recommended.interval_s] = advice.recommended.steps
    return sorted(intervals.items())


def _answer_notice(timing: SaveFit, json: bool) -> None:
    if json:
        print_json(timing)
    else:
        print_lines("\n".join(notice_lines(timing)))
    if not timing.fits:
        raise typer.Exit(EXIT_WARNING)
