"""The options that commands share, the values with units that they take, and the places that they name.

Invariant: commands that only read accept a place by its URL and need neither a daemon nor a configuration. A value
without its unit is an error that names its option.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from tierd.core.config import MAX_CONFIG_CHARS, Config, from_toml, from_urls
from tierd.core.errors import ConfigError
from tierd.core.ids import check_run
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.save_rules import MetricGoal, check_goal
from tierd.core.store_schemes import PLACES
from tierd.spool.spool import Spool
from tierd.spool.spool_access import command_as_account, describe_owner

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


def format_duration(time: float) -> str:
    """Format a time for people: three digits and the unit that suits it."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if time >= length:
            digits = f"{time / length:#.3g}" if time < 1000 * length else f"{time / length:.0f}"
            return f"{digits.rstrip('.')} {unit}"
    return f"{1000 * time:.3g} ms" if 0 < time < 0.1 else f"{time:.3g} s"


SpoolOption = Annotated[
    Path | None,
    # typer's own check of a path that cannot be read would end the command before it can say whose the spool is.
    typer.Option("--spool", metavar="DIR", help="The node's spool.", show_default=False, readable=False),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="A tierd.toml: spool, tiers, retention.", show_default=False, readable=False
    ),
]
UrlArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[URL]...", help=f"Tiers: {PLACES}.", show_default=False),
]
RunOption = Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run.", show_default=False)]
StepOption = Annotated[int | None, typer.Option("--step", metavar="N", help="Only this step.", show_default=False)]
AttemptOption = Annotated[
    str | None, typer.Option("--attempt", metavar="ID", help="Only this attempt (launch).", show_default=False)
]
BestOption = Annotated[
    str | None, typer.Option("--best", metavar="METRIC", help="The best by this metric.", show_default=False)
]
ModeOption = Annotated[
    Literal["min", "max"],
    typer.Option("--mode", metavar="min|max", help="Whether a smaller or a larger value is better."),
]
ToOption = Annotated[
    list[str] | None, typer.Option("--to", metavar="URL", help="A tier; again for more, in order.", show_default=False)
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
StepArgument = Annotated[int, typer.Argument(metavar="STEP", help="The checkpoint's step.")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", metavar="FILE", help="The key that the URLs are encrypted with.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclass(frozen=True, slots=True)
class Places:
    """The places that a command was given. `has_policy` says whether retention was configured, not defaulted."""

    spool: Spool | None
    config: Config | None
    has_policy: bool

    @property
    def node_spool(self) -> Spool:
        """The spool; raises `ConfigError` if there is none, as before the first daemon of a configuration."""
        if self.spool is None:
            raise ConfigError("the spool that --config names is not there yet: no daemon has run")
        return self.spool


def best_goal(best: str | None, mode: Literal["min", "max"], step: int | None) -> MetricGoal | None:
    """Return what --best asks for; None without it. Raises `ConfigError` for it beside --step, or an unknown form."""
    if best is not None and step is not None:
        raise ConfigError("--best and --step: one of the two")
    return None if best is None else check_goal(MetricGoal(best, mode))


def resolve_places(
    spool: Path | None,
    urls: list[str] | None,
    config: Path | None,
    keep_last: int | None = None,
    key_file: Path | None = None,
    run_option: bool = False,
) -> Places:
    """Resolve the options. `run_option` says whether the command takes a run by `--run`, for a hint.

    Raises `ConfigError` if no place was named, options exclude each other, or a place cannot be used.
    """
    if config is not None:
        if spool or urls or keep_last or key_file:
            raise ConfigError(
                "--config names the spool, the tiers and their keys itself; "
                "leave --spool, URLs, --keep-last and --key-file out"
            )
        loaded_config = load_config(config)
        home = Path(loaded_config.spool)
        check_account_access(home)
        return Places(_spool(home) if home.exists() else None, loaded_config, has_policy=True)
    if spool is None and not urls:
        raise ConfigError("nothing to look at: give --spool DIR, a tier's URL, or --config FILE")
    retention = RetentionPolicy(keep_last=keep_last) if keep_last else None
    if key_file and not urls:
        raise ConfigError("--key-file is for tiers that are named by their URLs; name one")
    key = str(key_file.absolute()) if key_file else None
    try:
        tiers = from_urls(str(spool.absolute()) if spool else "/", urls, retention, key) if urls else None
    except ConfigError as error:
        raise ConfigError(f"{error}{_run_meant(urls or ()) if run_option else ''}") from None
    return Places(_spool(spool) if spool else None, tiers, has_policy=keep_last is not None)


def _run_meant(urls: Sequence[str]) -> str:
    """Return the hint for a run's name in place of a URL, or nothing."""
    name = next((url for url in urls if _is_run(url)), None)
    return f"; if {name!r} is a run's name, write --run {name}" if name else ""


def _is_run(text: str) -> bool:
    with suppress(ConfigError):
        return bool(check_run(text))
    return False


def check_account_access(path: Path) -> None:
    """Raise `ConfigError`, which says whose it is, if a directory on a spool's path is closed to this account."""
    for directory in (*reversed(path.absolute().parents), path):
        if directory.is_dir() and not os.access(directory, os.X_OK):
            owner = directory.stat().st_uid
            raise ConfigError(
                f"{directory}: {describe_owner(owner)}; run as its owner: {command_as_account(owner)} tierd ..."
            )


def _spool(path: Path) -> Spool:
    check_account_access(path)
    if not (path / ".tierd").is_dir():  # because opening any directory would make it a spool
        raise ConfigError(f"{path}: not a spool; a Checkpointer or `tierd run` makes one")
    return Spool(path, write=False)


def load_config(path: Path) -> Config:
    """Read a configuration file; raises `ConfigError`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return from_toml(file.read(MAX_CONFIG_CHARS + 1), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
