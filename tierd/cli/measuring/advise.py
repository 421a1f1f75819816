"""The command `advise`, which only computes; `advise_values` checks the values of its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.exit_codes import EXIT_WARNING
from tierd.cli.measuring.advise_show import AdviceReport, account, draw, draw_table, markdown, show, times
from tierd.cli.measuring.advise_values import (
    LOCAL,
    SaveCosts,
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
class _Question:
    """The values of the options, in seconds and bytes."""

    measured: SaveCosts
    mtbf_s: float | None
    restart_s: float
    flush_s: float
    node_loss: float
    sync_s: float | None
    step_s: float | None
    every_steps: int | None

    def costs(self, mtbf_s: float) -> Costs:
        measured = self.measured  # a save that is durable when it returns: clocks differ
        durable = max(measured.blocked_s, measured.durable_s)
        return Costs(measured.blocked_s, durable, self.restart_s, mtbf_s, self.flush_s, self.node_loss)


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
    history = past_of(from_run, spool, run)
    sync_s = None if sync is None else time("--sync", sync)
    node_count = count("--nodes", nodes)
    if history is not None:
        state_size = state_size or f"{max(1, history.state_bytes // node_count)}B"
    measured = measured_by(file, state_size, blocked, bandwidth, sync_s, table)
    if notice is not None:
        _answer_notice(_notice_timing(measured, notice, drain, tier_bandwidth, step_time_of(step_time, history)), json)
        return
    if drain is not None:
        raise ConfigError("--drain is for --notice: how long the daemon sends after it")
    question = _Question(
        measured,
        mtbf_of(mtbf, node_count, history),
        away_of(history, time("--restart", restart, zero=True)),
        *second_level(measured.state_bytes, tier_bandwidth, node_loss, table),
        sync_s,
        step_time_of(step_time, history),
        history.every_steps if every is None and history is not None else every,
    )
    if question.every_steps is not None:
        count("--every", question.every_steps)
        if question.step_s is None:
            raise ConfigError("--every counts steps: say how long one takes with --step-time")
    if tier and not table:
        raise ConfigError("--tier is a row of the table: give --table as well")
    answer = _answer(question, history, tiers_of(tier, tier_bandwidth) if table else None)
    _draw(plot, answer)
    if json:
        print_json(answer)
    else:
        _print(answer, question)


def _answer(question: _Question, history: Past | None, tiers: dict[str, float | None] | None) -> AdviceReport:
    if question.mtbf_s is None:
        if tiers is None:
            raise ConfigError(
                "--mtbf: say how often a failure stops the job, such as --mtbf 50d --nodes 32; what saving takes where "
                "nothing fails, --table shows without it"
            )
        return AdviceReport(None, None, question.sync_s, table=tuple(_table_rows(question, tiers, None)))
    costs = question.costs(question.mtbf_s)
    advice = advise(costs, question.step_s, question.every_steps)
    sync_advice = None
    if question.sync_s is not None and question.sync_s != question.measured.blocked_s:
        waits = Costs(question.sync_s, question.sync_s, question.restart_s, question.mtbf_s)
        sync_advice = advise(waits, question.step_s, question.every_steps)
    rows = None if tiers is None else tuple(_table_rows(question, tiers, advice))
    return AdviceReport(costs, advice, question.sync_s, sync_advice, rows, history)


def _table_rows(question: _Question, tiers: dict[str, float | None], advice: Advice | None) -> list[TableRow]:
    if question.step_s is None:
        intervals: dict[float, int | None] = {60.0 * minutes: None for minutes in _MINUTES}
    else:
        intervals = {
            question.step_s * steps: steps
            for steps in {*_STEPS, *([question.every_steps] if question.every_steps else [])}
        }
    if advice is not None:
        intervals[advice.recommended.interval_s] = advice.recommended.steps
    measured = question.measured
    job = Job(
        measured.state_bytes,
        measured.blocked_s,
        max(measured.blocked_s, measured.durable_s),
        question.sync_s,
        question.restart_s,
        question.mtbf_s,
        question.node_loss or 1.0,
    )
    return lines(job, sorted(intervals.items()), tiers)


def _draw(file: Path | None, answer: AdviceReport) -> None:
    if file is None:
        return
    if answer.table is not None:
        draw_table(file, answer.table)
    elif answer.costs is not None and answer.advice is not None:
        draw(file, answer.costs, answer.advice)


def _print(answer: AdviceReport, question: _Question) -> None:
    if answer.past is not None and answer.advice is not None and answer.advice.yours is not None:
        for line in account(answer.past, answer.advice.yours, answer.advice.recommended):
            print_lines(line)
    if answer.table is not None:
        print_lines("\n".join(markdown(answer.table, LOCAL, question.node_loss or 1.0)))
    elif answer.costs is not None and answer.advice is not None:
        show(console(), answer.costs, answer.advice, answer.sync)


def _notice_timing(
    measured: SaveCosts, notice: str, drain: str | None, tier_bandwidth: str | None, step_s: float | None
) -> Fit:
    return fit(
        time("--notice", notice),
        measured.state_bytes,
        measured.blocked_s,
        measured.durable_s,
        None if tier_bandwidth is None else rate("--tier-bandwidth", tier_bandwidth),
        step_s or 0.0,
        None if drain is None else time("--drain", drain),
    )


def _answer_notice(timing: Fit, json: bool) -> None:
    if json:
        print_json(timing)
    else:
        print_lines("\n".join(times(timing)))
    if not timing.fits:
        raise typer.Exit(EXIT_WARNING)
