"""Values of the options of `advise`, in seconds and bytes.

Invariant: nothing is guessed. A value without its unit, or an incomplete set of the model's inputs, is an error that
names the option.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from tierd.core.planning.inventory import runs

LOCAL = "spool"


class SaveCosts(msgspec.Struct, frozen=True):
    state_bytes: Annotated[int, Meta(gt=0)]
    blocked_s: Annotated[float, Meta(ge=0, le=LONGEST)]
    durable_s: Annotated[float, Meta(ge=SHORTEST, le=LONGEST)]


class _BenchResult(msgspec.Struct, frozen=True):
    advise: SaveCosts


def given(parse: Callable[[str, str], float], option: str, text: str | None) -> float | None:
    return None if text is None else parse(option, text)


def past_of(from_run: tuple[str, str] | None, spool: Path | None, run: str | None) -> Past | None:
    """Read the history of a real run."""
    if from_run is not None:
        if spool is not None or run is not None:
            raise ConfigError("--from-run names a tier and the run itself; leave --spool and --run out")
        url, run = from_run
        where = places(None, [url], None)
    elif spool is not None:
        where = places(spool, None, None)
    elif run is not None:
        raise ConfigError("--run is for --spool: which of its runs")
    else:
        return None
    inventory = observed(where, run)
    if run is None:
        names = runs(inventory)
        if len(names) != 1:
            raise ConfigError(f"--spool {spool}: it has {len(names)} runs; say which with --run")
        [run] = names
    with answering(where, run):
        return past(inventory, run)


def mtbf_of(mtbf: str | None, nodes: int, history: Past | None, table: bool) -> float:
    """Return the time between failures of the job; infinite for a table without failures."""
    if mtbf is not None:
        return time("--mtbf", mtbf) / nodes
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
        return SaveCosts(round(given(size, "--state-size", state_size) or 0), sync_s, sync_s)
    if state_size is None or blocked is None or bandwidth is None:
        missing = ", ".join(option for option, value in options.items() if value is None)
        way_out = "" if table else ", or --sync TIME"
        raise ConfigError(f"missing: {missing}; or give --from FILE, the JSON of `tierd bench overhead`{way_out}")
    amount, cost = size("--state-size", state_size), time("--blocked", blocked, zero=True)
    return SaveCosts(round(amount), cost, cost + amount / rate("--bandwidth", bandwidth))
