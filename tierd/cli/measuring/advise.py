"""The command `advise`, which only computes.

Invariant: nothing is guessed. A value without its unit, or an incomplete set of the model's inputs, is an error that
names the option.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Meta

from tierd.cli.known import answering
from tierd.cli.measuring.advise_show import Advised, account, draw, draw_table, markdown, show, times
from tierd.cli.options import JsonOption, RunOption, SpoolOption, places
from tierd.cli.reading.read import look
from tierd.cli.reading.status import EXIT_WARNING
from tierd.cli.tables import console, print_json, print_lines
from tierd.cli.units import LONGEST, SHORTEST, count, rate, size, time
from tierd.core.advice.notice import Fit, fit
from tierd.core.advice.run_history import Past, past
from tierd.core.advice.save_interval import Advice, Costs, advise
from tierd.core.advice.table import Job, TableRow, lines
from tierd.core.errors import ConfigError
from tierd.core.planning.inventory import Inventory, runs

_STEPS = (100, 500, 1000, 5000)  # rows of the table if the step time is known,
_MINUTES = (1, 5, 15, 60)  # and if it is not
_LOCAL = "spool"

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


class _Measured(msgspec.Struct, frozen=True):
    state_bytes: Annotated[int, Meta(ge=0)]
    blocked_s: Annotated[float, Meta(ge=0, le=LONGEST)]
    durable_s: Annotated[float, Meta(ge=SHORTEST, le=LONGEST)]


class _Benched(_Measured, frozen=True):
    state_bytes: Annotated[int, Meta(gt=0)]


class _Bench(msgspec.Struct, frozen=True):
    advise: _Benched


@dataclass(frozen=True, slots=True)
class _Asked:
    """The values of the options, in seconds and bytes."""

    measured: _Measured
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
    went = _went(from_run, spool, run)
    sync_s = None if sync is None else time("--sync", sync)
    node_count = count("--nodes", nodes)
    if went is not None:
        state_size = state_size or f"{max(1, went.state_bytes // node_count)}B"
    measured = _measured(file, state_size, blocked, bandwidth, None if table else sync_s)
    if notice is not None:
        _answer_notice(_fit(measured, notice, drain, tier_bandwidth, _step_time(step_time, went)), json)
        return
    if drain is not None:
        raise ConfigError("--drain is for --notice: how long the daemon sends after it")
    asked = _Asked(
        measured,
        _mtbf(mtbf, node_count, went),
        _away(went, time("--restart", restart, zero=True)),
        *_second_level(measured.state_bytes, tier_bandwidth, node_loss, table),
        sync_s,
        _step_time(step_time, went),
        went.every_steps if every is None and went is not None else every,
    )
    if asked.every is not None:
        count("--every", asked.every)
        if asked.step_s is None:
            raise ConfigError("--every counts steps: say how long one takes with --step-time")
    if tier and not table:
        raise ConfigError("--tier is a row of the table: give --table as well")
    found = _answer(asked, went, _tiers(tier, tier_bandwidth) if table else None)
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
        print_lines("\n".join(markdown(found.table, _LOCAL, asked.node_loss or 1.0)))
    elif found.costs is not None and found.advice is not None:
        show(console(), found.costs, found.advice, found.sync)


def _fit(measured: _Measured, notice: str, drain: str | None, tier_bandwidth: str | None, step_s: float | None) -> Fit:
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


# -- values of the options -------------------------------------------------------------------------------------------


def _went(from_run: tuple[str, str] | None, spool: Path | None, run: str | None) -> Past | None:
    """Read the history of a real run."""
    if from_run is None and spool is None:
        if run is not None:
            raise ConfigError("--run is for --spool: which of its runs")
        return None
    if from_run is not None and (spool is not None or run is not None):
        raise ConfigError("--from-run names a tier and the run itself; leave --spool and --run out")
    urls, name = ([from_run[0]], from_run[1]) if from_run else (None, run)
    where = places(spool, urls, None)
    world: Inventory = asyncio.run(look(where, name))
    if name is None:
        there = runs(world)
        if len(there) != 1:
            raise ConfigError(f"--spool {spool}: it has {len(there)} runs; say which with --run")
        [name] = there
    with answering(where, name):
        return past(world, name)


def _mtbf(mtbf: str | None, nodes: int, went: Past | None) -> float | None:
    if mtbf is not None:
        return time("--mtbf", mtbf) / nodes
    if went is None:
        return None
    if not went.failures:
        raise ConfigError(f"run {went.run}: no launch resumed, so no failure is known; say how often with --mtbf")
    return went.span_s / went.failures


def _away(went: Past | None, given: float) -> float:
    return given if went is None or math.isnan(went.away_s) else went.away_s


def _step_time(step_time: str | None, went: Past | None) -> float | None:
    if step_time is not None:
        return time("--step-time", step_time)
    return None if went is None else went.step_s


def _tiers(tiers: list[str] | None, bandwidth: str | None) -> dict[str, float | None]:
    found: dict[str, float | None] = {_LOCAL: None}
    for one in tiers or ([f"tier={bandwidth}"] if bandwidth else []):
        name, equals, text = one.partition("=")
        if not (name and equals) or name in found or "|" in name:
            raise ConfigError(f"--tier {one!r}: a name of its own and a bandwidth, as network=500MB/s")
        found[name] = rate("--tier", text)
    return found


def _measured(
    file: Path | None, state_size: str | None, blocked: str | None, bandwidth: str | None, sync_s: float | None
) -> _Measured:
    given = {"--state-size": state_size, "--blocked": blocked, "--bandwidth": bandwidth}
    if file is not None:
        if any(value is not None for value in given.values()):
            raise ConfigError(f"--from names what saving costs itself; leave {', '.join(given)} out")
        try:
            return msgspec.json.decode(file.read_bytes(), type=_Bench).advise
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--from {file}: not what `tierd bench overhead` writes: {error}") from error
    if sync_s is not None and blocked is None and bandwidth is None:  # only a save that training waits for
        return _Measured(0 if state_size is None else round(size("--state-size", state_size)), sync_s, sync_s)
    if state_size is None or blocked is None or bandwidth is None:
        missing = ", ".join(option for option, value in given.items() if value is None)
        raise ConfigError(
            f"missing: {missing}; or give --from FILE, the JSON of `tierd bench overhead`, or --sync TIME"
        )
    amount, cost = size("--state-size", state_size), time("--blocked", blocked, zero=True)
    return _Measured(round(amount), cost, cost + amount / rate("--bandwidth", bandwidth))


def _second_level(
    size_bytes: int, tier_bandwidth: str | None, node_loss: float | None, table: bool
) -> tuple[float, float]:
    """Return the time to copy a checkpoint to the tier, and the share of failures that need the tier's copy."""
    if (tier_bandwidth is None) != (node_loss is None) and not table:
        raise ConfigError(
            "--tier-bandwidth and --node-loss need each other: how fast to the tier, and how often it counts"
        )
    if node_loss is not None and not 0 < node_loss <= 1:
        raise ConfigError(f"--node-loss {node_loss:g}: a share of all failures, more than 0 and at most 1")
    if tier_bandwidth is None:
        return 0.0, node_loss or 0.0
    if node_loss is None:
        rate("--tier-bandwidth", tier_bandwidth)
        return 0.0, 0.0
    return size_bytes / rate("--tier-bandwidth", tier_bandwidth), node_loss
