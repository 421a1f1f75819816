"""The command `advise`, which only computes; `advise_values` checks the values of its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.exit_codes import EXIT_WARNING
from tierd.cli.measuring.advise_show import Advised, account, draw, draw_table, markdown, show, times
from tierd.cli.measuring.advise_values import (
    LOCAL,
    Measured,
    away_of,
    measured_by,
    mtbf_of,
    past_of,
    second_level,
    step_time_of,
    tiers_of,
)
from tierd.cli.options import JsonOption, RunOption, SpoolOption
from tierd.cli.tables import console, print_json, print_lines
from tierd.cli.units import count, rate, time
from tierd.core.advice.notice import Fit, fit
from tierd.core.advice.run_history import Past
from tierd.core.advice.save_interval import Advice, Costs, advise
from tierd.core.advice.table import Job, TableRow, lines
from tierd.core.errors import ConfigError

_STEPS = (100, 500, 1000, 5000)  # rows of the table if the step time is known,
_MINUTES = (1, 5, 15, 60)  # and if it is not

StateOption = Annotated[
    str | None,
    typer.Option("--state-size", metavar="SIZE", help="What one node saves: 96GB, 90GiB.", show_default=False),
]
BlockedOption = Annotated[
    str | None,
    typer.Option("--blocked", metavar="TIME", help="What one save takes from training: 0.9s.", show_default=False),
]
BandwidthOption = Annotated[
    str | None, typer.Option("--bandwidth", metavar="RATE", help="The spool's, of one node: 4GB/s.", show_default=False)
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="FILE", help="Take these three from the JSON of `tierd bench overhead`.", show_default=False
    ),
]
MtbfOption = Annotated[
    str | None,
    typer.Option(
        "--mtbf", metavar="TIME", help="Mean time between failures of a node, or of the job.", show_default=False
    ),
]
NodesOption = Annotated[int, typer.Option("--nodes", metavar="N", help="Nodes of the job: it fails with any of them.")]
RestartOption = Annotated[str, typer.Option("--restart", metavar="TIME", help="To detect, start again and restore.")]
TierOption = Annotated[
    str | None,
    typer.Option("--tier-bandwidth", metavar="RATE", help="To the tier, of one node: 1GB/s.", show_default=False),
]
LossOption = Annotated[
    float | None,
    typer.Option("--node-loss", metavar="SHARE", help="Failures that take the spool along: 0.2.", show_default=False),
]
StepTimeOption = Annotated[
    str | None, typer.Option("--step-time", metavar="TIME", help="One training step: 6s.", show_default=False)
]
EveryOption = Annotated[
    int | None, typer.Option("--every", metavar="STEPS", help="The interval you have, to compare.", show_default=False)
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw goodput over the interval: a .png.", show_default=False),
]


SyncOption = Annotated[
    str | None,
    typer.Option("--sync", metavar="TIME", help="A save that training waits for: 140s.", show_default=False),
]
TableOption = Annotated[bool, typer.Option("--table", help="Intervals by tiers, as Markdown.")]
TiersOption = Annotated[
    list[str] | None,
    typer.Option("--tier", metavar="NAME=RATE", help="A row of the table: network=500MB/s.", show_default=False),
]
PastOption = Annotated[
    tuple[str, str] | None,
    typer.Option("--from-run", metavar="URL RUN", help="Take the rest from a run on a tier.", show_default=False),
]


NoticeOption = Annotated[
    str | None,
    typer.Option(
        "--notice",
        metavar="TIME",
        help="Whether the state fits: how long before its end a node says so: 120s.",
        show_default=False,
    ),
]
DrainOption = Annotated[
    str | None,
    typer.Option(
        "--drain",
        metavar="TIME",
        help="With --notice: the daemon's `drain`, if the notice ends it, too.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The values of the options, in seconds and bytes."""

    measured: Measured
    mtbf_s: float | None
    restart_s: float
    flush_s: float
    node_loss: float
    sync_s: float | None
    step_s: float | None
    every: int | None

    def costs(self, mtbf_s: float) -> Costs:
        one = self.measured  # a save that is durable when it returns: clocks differ
        durable = max(one.blocked_s, one.durable_s)
        return Costs(one.blocked_s, durable, self.restart_s, mtbf_s, self.flush_s, self.node_loss)


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("advise")(advise_command)


def advise_command(
    state_size: StateOption = None,
    blocked: BlockedOption = None,
    bandwidth: BandwidthOption = None,
    file: FromOption = None,
    mtbf: MtbfOption = None,
    nodes: NodesOption = 1,
    restart: RestartOption = "5m",
    tier_bandwidth: TierOption = None,
    node_loss: LossOption = None,
    step_time: StepTimeOption = None,
    every: EveryOption = None,
    sync: SyncOption = None,
    table: TableOption = False,
    tier: TiersOption = None,
    from_run: PastOption = None,
    spool: SpoolOption = None,
    run: RunOption = None,
    notice: NoticeOption = None,
    drain: DrainOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """How often to save, and the goodput to expect, from what saving and failing cost. With --notice: whether the last
    save is in time when the node ends.
    """
    went = past_of(from_run, spool, run)
    sync_s = None if sync is None else time("--sync", sync)
    node_count = count("--nodes", nodes)
    if went is not None:
        state_size = state_size or f"{max(1, went.state_bytes // node_count)}B"
    measured = measured_by(file, state_size, blocked, bandwidth, sync_s, table)
    if notice is not None:
        _answer_notice(_fit(measured, notice, drain, tier_bandwidth, step_time_of(step_time, went)), json)
        return
    if drain is not None:
        raise ConfigError("--drain is for --notice: how long the daemon sends after it")
    asked = _Asked(
        measured,
        mtbf_of(mtbf, node_count, went),
        away_of(went, time("--restart", restart, zero=True)),
        *second_level(measured.state_bytes, tier_bandwidth, node_loss, table),
        sync_s,
        step_time_of(step_time, went),
        went.every_steps if every is None and went is not None else every,
    )
    if asked.every is not None:
        count("--every", asked.every)
        if asked.step_s is None:
            raise ConfigError("--every counts steps: say how long one takes with --step-time")
    if tier and not table:
        raise ConfigError("--tier is a row of the table: give --table as well")
    found = _answer(asked, went, tiers_of(tier, tier_bandwidth) if table else None)
    _draw(plot, found)
    if json:
        print_json(found)
    else:
        _print(found, asked)


def _answer(asked: _Asked, went: Past | None, tiers: dict[str, float | None] | None) -> Advised:
    if asked.mtbf_s is None:
        if tiers is None:
            raise ConfigError(
                "--mtbf: say how often a failure stops the job, such as --mtbf 50d --nodes 32; what saving takes where "
                "nothing fails, --table shows without it"
            )
        return Advised(None, None, asked.sync_s, table=tuple(_table(asked, tiers, None)))
    costs = asked.costs(asked.mtbf_s)
    found = advise(costs, asked.step_s, asked.every)
    beside = None
    if asked.sync_s is not None and asked.sync_s != asked.measured.blocked_s:
        waits = Costs(asked.sync_s, asked.sync_s, asked.restart_s, asked.mtbf_s)
        beside = advise(waits, asked.step_s, asked.every)
    rows = None if tiers is None else tuple(_table(asked, tiers, found))
    return Advised(costs, found, asked.sync_s, beside, rows, went)


def _table(asked: _Asked, tiers: dict[str, float | None], found: Advice | None) -> list[TableRow]:
    if asked.step_s is None:
        intervals: dict[float, int | None] = {60.0 * one: None for one in _MINUTES}
    else:
        intervals = {asked.step_s * one: one for one in {*_STEPS, *([asked.every] if asked.every else [])}}
    if found is not None:
        intervals[found.recommended.interval_s] = found.recommended.steps
    one = asked.measured
    job = Job(
        one.state_bytes,
        one.blocked_s,
        max(one.blocked_s, one.durable_s),
        asked.sync_s,
        asked.restart_s,
        asked.mtbf_s,
        asked.node_loss or 1.0,
    )
    return lines(job, sorted(intervals.items()), tiers)


def _draw(file: Path | None, found: Advised) -> None:
    if file is None:
        return
    if found.table is not None:
        draw_table(file, found.table)
    elif found.costs is not None and found.advice is not None:
        draw(file, found.costs, found.advice)


def _print(found: Advised, asked: _Asked) -> None:
    if found.past is not None and found.advice is not None and found.advice.yours is not None:
        for line in account(found.past, found.advice.yours, found.advice.recommended):
            print_lines(line)
    if found.table is not None:
        print_lines("\n".join(markdown(found.table, LOCAL, asked.node_loss or 1.0)))
    elif found.costs is not None and found.advice is not None:
        show(console(), found.costs, found.advice, found.sync)


def _fit(measured: Measured, notice: str, drain: str | None, tier_bandwidth: str | None, step_s: float | None) -> Fit:
    return fit(
        time("--notice", notice),
        measured.state_bytes,
        measured.blocked_s,
        measured.durable_s,
        None if tier_bandwidth is None else rate("--tier-bandwidth", tier_bandwidth),
        step_s or 0.0,
        None if drain is None else time("--drain", drain),
    )


def _answer_notice(found: Fit, json: bool) -> None:
    if json:
        print_json(found)
    else:
        print_lines("\n".join(times(found)))
    if not found.fits:
        raise typer.Exit(EXIT_WARNING)
