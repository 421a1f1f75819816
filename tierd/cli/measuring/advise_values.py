"""Values of the options of `advise`, in seconds and bytes.

Invariant: nothing is guessed. A value without its unit, or an incomplete set of the model's inputs, is an error that
names the option.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tierd.cli.known import answering
from tierd.cli.options import places
from tierd.cli.reading.read import observed
from tierd.cli.units import LONGEST, SHORTEST, rate, size, time
from tierd.core.advice.run_history import Past, past
from tierd.core.errors import ConfigError
from tierd.core.planning.inventory import Inventory, runs

LOCAL = "spool"


class SaveCosts(msgspec.Struct, frozen=True):
    state_bytes: Annotated[int, Meta(ge=0)]
    blocked_s: Annotated[float, Meta(ge=0, le=LONGEST)]
    durable_s: Annotated[float, Meta(ge=SHORTEST, le=LONGEST)]


class _BenchCosts(SaveCosts, frozen=True):
    state_bytes: Annotated[int, Meta(gt=0)]


class _BenchResult(msgspec.Struct, frozen=True):
    advise: _BenchCosts


def past_of(from_run: tuple[str, str] | None, spool: Path | None, run: str | None) -> Past | None:
    """Read the history of a real run."""
    if from_run is None and spool is None:
        if run is not None:
            raise ConfigError("--run is for --spool: which of its runs")
        return None
    if from_run is not None and (spool is not None or run is not None):
        raise ConfigError("--from-run names a tier and the run itself; leave --spool and --run out")
    urls, name = ([from_run[0]], from_run[1]) if from_run else (None, run)
    where = places(spool, urls, None)
    world: Inventory = observed(where, name)
    if name is None:
        names = runs(world)
        if len(names) != 1:
            raise ConfigError(f"--spool {spool}: it has {len(names)} runs; say which with --run")
        [name] = names
    with answering(where, name):
        return past(world, name)


def mtbf_of(mtbf: str | None, nodes: int, history: Past | None) -> float | None:
    if mtbf is not None:
        return time("--mtbf", mtbf) / nodes
    if history is None:
        return None
    if not history.failures:
        raise ConfigError(f"run {history.run}: no launch resumed, so no failure is known; say how often with --mtbf")
    return history.span_s / history.failures


def away_of(history: Past | None, default_s: float) -> float:
    return default_s if history is None or math.isnan(history.away_s) else history.away_s


def step_time_of(step_time: str | None, history: Past | None) -> float | None:
    if step_time is not None:
        return time("--step-time", step_time)
    return None if history is None else history.step_s


def tiers_of(tiers: list[str] | None, bandwidth: str | None) -> dict[str, float | None]:
    bandwidths: dict[str, float | None] = {LOCAL: None}
    for entry in tiers or ([f"tier={bandwidth}"] if bandwidth else []):
        name, equals, text = entry.partition("=")
        if not (name and equals) or name in bandwidths or "|" in name:
            raise ConfigError(f"--tier {entry!r}: a name of its own and a bandwidth, as network=500MB/s")
        bandwidths[name] = rate("--tier", text)
    return bandwidths


def measured_by(
    file: Path | None,
    state_size: str | None,
    blocked: str | None,
    bandwidth: str | None,
    sync_s: float | None,
    table: bool,
) -> SaveCosts:
    options = {"--state-size": state_size, "--blocked": blocked, "--bandwidth": bandwidth}
    if file is not None:
        if any(value is not None for value in options.values()):
            raise ConfigError(f"--from names what saving costs itself; leave {', '.join(options)} out")
        try:
            return msgspec.json.decode(file.read_bytes(), type=_BenchResult).advise
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--from {file}: not what `tierd bench overhead` writes: {error}") from error
    if sync_s is not None and blocked is None and bandwidth is None and not table:  # a table compares it with tierd
        return SaveCosts(0 if state_size is None else round(size("--state-size", state_size)), sync_s, sync_s)
    if state_size is None or blocked is None or bandwidth is None:
        missing = ", ".join(option for option, value in options.items() if value is None)
        way_out = "" if table else ", or --sync TIME"
        raise ConfigError(f"missing: {missing}; or give --from FILE, the JSON of `tierd bench overhead`{way_out}")
    amount, cost = size("--state-size", state_size), time("--blocked", blocked, zero=True)
    return SaveCosts(round(amount), cost, cost + amount / rate("--bandwidth", bandwidth))


def second_level(
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
