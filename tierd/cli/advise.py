"""The command that only computes: advise.

Law: nothing is guessed. A value without its unit, or half of what the model needs, is refused by its option's name.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Meta
from rich.console import Console

from tierd.cli.options import JsonOption
from tierd.cli.tables import console, print_json, table
from tierd.core.advise import Advice, Choice, Costs, advise, goodput
from tierd.core.errors import ConfigError
from tierd.core.retention import seconds

_UNITS: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_SIZE = re.compile(rf"([0-9]{{1,15}}(?:\.[0-9]{{1,9}})?)({'|'.join(_UNITS)})")
_SHORTEST, _LONGEST = 1e-6, 1e12  # seconds: beyond, counts of steps would not fit JSON's integers
_MOST = 10**9
_PLOTTED = 200  # points of the curve

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


@dataclass(frozen=True, slots=True)
class Advised:
    """What the model was given, and what it says."""

    costs: Costs
    advice: Advice


class _Measured(msgspec.Struct, frozen=True):
    state_bytes: Annotated[int, Meta(gt=0)]
    blocked_s: Annotated[float, Meta(ge=0, le=_LONGEST)]
    durable_s: Annotated[float, Meta(ge=_SHORTEST, le=_LONGEST)]


class _Bench(msgspec.Struct, frozen=True):
    advise: _Measured


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
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """How often to save, and the goodput to expect, from what saving and failing cost."""
    measured = _measured(file, state_size, blocked, bandwidth)
    if mtbf is None:
        raise ConfigError("--mtbf: say how often a failure stops the job, such as --mtbf 50d --nodes 32")
    flush, share = _second_level(measured.state_bytes, tier_bandwidth, node_loss)
    costs = Costs(
        blocked_s=measured.blocked_s,
        durable_s=max(measured.blocked_s, measured.durable_s),  # a save that is durable when it returns; clocks differ
        restart_s=_time("--restart", restart, zero=True),
        mtbf_s=_time("--mtbf", mtbf) / _count("--nodes", nodes),
        flush_s=flush,
        node_loss=share,
    )
    step = None if step_time is None else _time("--step-time", step_time)
    if every is not None:
        _count("--every", every)
        if step is None:
            raise ConfigError("--every counts steps: say how long one takes with --step-time")
    found = advise(costs, step, every)
    if plot is not None:
        _draw(plot, costs, found)
    if json:
        print_json(Advised(costs, found))
    else:
        _show(console(), costs, found)


def _measured(file: Path | None, state_size: str | None, blocked: str | None, bandwidth: str | None) -> _Measured:
    given = {"--state-size": state_size, "--blocked": blocked, "--bandwidth": bandwidth}
    if file is not None:
        if any(value is not None for value in given.values()):
            raise ConfigError(f"--from names what saving costs itself; leave {', '.join(given)} out")
        try:
            return msgspec.json.decode(file.read_bytes(), type=_Bench).advise
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--from {file}: not what `tierd bench overhead` writes: {error}") from error
    if state_size is None or blocked is None or bandwidth is None:
        missing = ", ".join(option for option, value in given.items() if value is None)
        raise ConfigError(f"missing: {missing}; or give --from FILE, the JSON of `tierd bench overhead`")
    size, cost = _size("--state-size", state_size), _time("--blocked", blocked, zero=True)
    return _Measured(round(size), cost, cost + size / _rate("--bandwidth", bandwidth))


def _second_level(size: int, tier_bandwidth: str | None, node_loss: float | None) -> tuple[float, float]:
    """The time to copy a checkpoint to the tier, and the share of failures that need it there."""
    if (tier_bandwidth is None) != (node_loss is None):
        raise ConfigError(
            "--tier-bandwidth and --node-loss need each other: how fast to the tier, and how often it counts"
        )
    if tier_bandwidth is None or node_loss is None:
        return 0.0, 0.0
    if not 0 < node_loss <= 1:
        raise ConfigError(f"--node-loss {node_loss:g}: a share of all failures, more than 0 and at most 1")
    return size / _rate("--tier-bandwidth", tier_bandwidth), node_loss


def _time(option: str, text: str, *, zero: bool = False) -> float:
    try:
        value = seconds(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    if not (_SHORTEST <= value <= _LONGEST or (zero and value == 0)):
        raise ConfigError(
            f"{option} {text}: out of range; at least {'nothing' if zero else '1 µs'}, at most 30000 years"
        )
    return value


def _size(option: str, text: str) -> float:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{option}: {text!r} is no size: write 800MB, 96GB or 90GiB")
    value = float(match[1]) * _UNITS[match[2]]
    if value < 1:
        raise ConfigError(f"{option} {text}: less than a byte")
    return value


def _rate(option: str, text: str) -> float:
    if not text.endswith("/s"):
        raise ConfigError(f"{option}: {text!r} is no bandwidth: write 800MB/s or 4GB/s")
    return _size(option, text.removesuffix("/s"))


def _count(option: str, value: int) -> int:
    if not 1 <= value <= _MOST:
        raise ConfigError(f"{option} {value}: at least 1, at most {_MOST}")
    return value


def _show(out: Console, costs: Costs, found: Advice) -> None:
    best = found.recommended
    every = (
        f"every {best.steps} steps" if best.steps is not None else f"after every {_span(best.interval_s)} of training"
    )
    out.print(f"save {every}: goodput {best.goodput:.2%}")
    cost, durable, apart = _span(costs.blocked_s), _span(costs.durable_s), _span(costs.mtbf_s)
    later = f", on the tier {_span(costs.flush_s)} later" if costs.node_loss else ""
    out.print(f"a failure every {apart}; a save takes {cost} from training and is durable after {durable}{later}")
    rows = [("yours", found.yours)] if found.yours else []
    rows += [("recommended", best), *((f"x {one.interval_s / best.interval_s:.2g}", one) for one in found.others)]
    rows.sort(key=lambda row: row[1].interval_s)
    columns = ("", "INTERVAL", "STEPS", "GOODPUT", "SAVING", "REDOING", "RESTARTING", "A SAVE BLOCKS")
    out.print(table(None, columns, [_row(name, one) for name, one in rows]))
    out.print(f"Young 1974: {_span(found.young_s)}; Daly 2006: {_span(found.daly_s)}")
    if found.bandwidth_bound:
        out.print(
            "bandwidth decides: saves are as close as they can become durable, or each would wait for the one before"
        )
    if costs.node_loss and costs.flush_s > costs.restart_s:
        out.print("optimistic: training is back before the tier has caught up, so two failures in a row can lose more")


def _row(name: str, one: Choice) -> tuple[str, ...]:
    shares = (f"{share:.2%}" for share in (one.goodput, one.saving, one.redoing, one.restarting))
    return (name, _span(one.interval_s), "" if one.steps is None else str(one.steps), *shares, _span(one.blocked_s))


def _span(time: float) -> str:
    """A time for a reader: three digits and the unit that suits it."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if time >= length:
            return f"{time / length:#.3g} {unit}" if time < 1000 * length else f"{time / length:.0f} {unit}"
    return f"{time:.3g} s"


def _draw(file: Path, costs: Costs, found: Advice) -> None:
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: pip install 'tierd[bench]' ({error})") from error
    best = found.recommended
    shown = [best, *found.others, *([found.yours] if found.yours else [])]
    low, high = min(one.interval_s for one in shown) / 2, max(one.interval_s for one in shown) * 2
    curve = [low * (high / low) ** (index / (_PLOTTED - 1)) for index in range(_PLOTTED)]
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(curve, [100 * goodput(interval, costs) for interval in curve])
    for name, one, mark in (("recommended", best, "o"), ("yours", found.yours, "s")):
        if one is not None:
            label = f"{name}: {_span(one.interval_s)}, {one.goodput:.2%}"
            axes.plot([one.interval_s], [100 * one.goodput], mark, label=label)
    bound = costs.durable_s - costs.blocked_s
    if low < bound < high:
        axes.axvline(bound, color="grey", linestyle=":", label=f"closer saves wait: {_span(bound)}")
    axes.set(xscale="log", xlabel="training between two saves, s", ylabel="goodput, %")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:  # ValueError: a suffix that is no image format
        raise ConfigError(f"--plot {file}: {error}") from error
