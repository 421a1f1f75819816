"""The options that commands share, and the values with units that they take.

Invariant: a value without its unit is an error that names its option.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from tierd.core.errors import ConfigError
from tierd.core.save_rules import MetricGoal, check_goal
from tierd.core.store_schemes import PLACES

_BYTES: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_SIZE = re.compile(rf"([0-9]{{1,15}}(?:\.[0-9]{{1,9}})?)({'|'.join(_BYTES)})")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(rf"([0-9]{{1,15}}(?:\.[0-9]{{1,9}})?)({'|'.join(_SECONDS)})")
SHORTEST_S, LONGEST_S = 1e-6, 1e12  # seconds; beyond these, counts of steps would not fit JSON's integers
_MAX_COUNT = 10**9


def parse_time(option: str, text: str, *, zero: bool = False) -> float:
    """Parse a time, in seconds; raises `ConfigError`."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(f"{option}: {text!r} is no duration: write 50ms, 90s, 10m, 12h or 7d")
    value = float(match[1]) * _SECONDS[match[2]]
    if not (SHORTEST_S <= value <= LONGEST_S or (zero and value == 0)):
        raise ConfigError(
            f"{option} {text}: out of range; at least {'nothing' if zero else '1 µs'}, at most 30000 years"
        )
    return value


def parse_size(option: str, text: str) -> float:
    """Parse a size, in bytes; raises `ConfigError`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{option}: {text!r} is no size: write 800MB, 96GB or 90GiB")
    value = float(match[1]) * _BYTES[match[2]]
    if value < 1:
        raise ConfigError(f"{option} {text}: less than a byte")
    return value


def parse_bandwidth(option: str, text: str) -> float:
    """Parse a bandwidth, in bytes a second; raises `ConfigError`."""
    if not text.endswith("/s"):
        raise ConfigError(f"{option}: {text!r} is no bandwidth: write 800MB/s or 4GB/s")
    return parse_size(option, text.removesuffix("/s"))


def parse_count(option: str, value: int) -> int:
    """Parse a count; raises `ConfigError`."""
    if not 1 <= value <= _MAX_COUNT:
        raise ConfigError(f"{option} {value}: at least 1, at most {_MAX_COUNT}")
    return value


SpoolOption = Annotated[
    Path | None,
    # typer's own check of a path that cannot be read would end the command before it can say whose the spool is.
    typer.Option(
        "--spool", metavar="DIR", help="The node's spool; not given: $TIERD_SPOOL.", show_default=False, readable=False
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A tierd.toml: spool, tiers, retention; not given: $TIERD_CONFIG, ~/.config/tierd/tierd.toml or "
        "/etc/tierd/tierd.toml.",
        show_default=False,
        readable=False,
    ),
]
UrlArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[URL]...", help=f"Tiers: {PLACES}; or a tier's name in the configuration.", show_default=False
    ),
]
RunOption = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run.", show_default=False)]
OnlyRunOption = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="The run; needed if the places hold several.", show_default=False),
]
StepOption = Annotated[int | None, typer.Option("--step", metavar="N", help="Only this step.", show_default=False)]
AttemptOption = Annotated[
    str | None,
    typer.Option("--attempt", metavar="ID", help="Only this attempt (launch), as `ls` shows it.", show_default=False),
]
BestOption = Annotated[
    str | None, typer.Option("--best", metavar="METRIC", help="The best by this metric.", show_default=False)
]
ModeOption = Annotated[
    Literal["min", "max"],
    typer.Option("--mode", metavar="min|max", help="Whether a smaller or a larger value is better."),
]
ToOption = Annotated[
    list[str] | None,
    typer.Option(
        "--to",
        metavar="URL",
        help="A tier, by its URL or its name in the configuration; again for more, in order.",
        show_default=False,
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
StepArgument = Annotated[int, typer.Argument(metavar="STEP", help="The checkpoint's step.")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="The key that the URLs are encrypted with; not given: $TIERD_KEY_FILE.",
        show_default=False,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, with totals, and do nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def best_goal(best: str | None, mode: Literal["min", "max"], step: int | None) -> MetricGoal | None:
    """Return what --best asks for; None without it. Raises `ConfigError` for it beside --step, or an unknown form."""
    if best is not None and step is not None:
        raise ConfigError("--best and --step: one of the two")
    return None if best is None else check_goal(MetricGoal(best, mode))
