"""The options that commands share, and the places that they name: a spool, tiers, a configuration.

Invariant: commands that only read accept a place by its URL and need neither a daemon nor a configuration.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from tierd.core.config import LONGEST, Config, from_toml, from_urls
from tierd.core.errors import ConfigError
from tierd.core.ids import check_run
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.save_policy import Goal, check_goal
from tierd.core.store_schemes import PLACES
from tierd.spool.permissions import as_account, whose
from tierd.spool.spool import Spool

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
    """The places that a command was given. `policy` says whether retention was configured, not defaulted."""

    spool: Spool | None
    config: Config | None
    policy: bool


def best_goal(best: str | None, mode: Literal["min", "max"], step: int | None) -> Goal | None:
    """Return what --best asks for; None without it. Raises `ConfigError` for it beside --step, or an unknown form."""
    if best is not None and step is not None:
        raise ConfigError("--best and --step: one of the two")
    return None if best is None else check_goal(Goal(best, mode))


def places(
    spool: Path | None,
    urls: list[str] | None,
    config: Path | None,
    keep_last: int | None = None,
    key_file: Path | None = None,
    run_option: bool = False,
) -> Places:
    """Resolve the options. `run_option` says whether the command takes a run by `--run`, for a hint.

    Raises:
        ConfigError: no place was named, options exclude each other, or a place cannot be used.
    """
    if config is not None:
        if spool or urls or keep_last or key_file:
            raise ConfigError(
                "--config names the spool, the tiers and their keys itself; "
                "leave --spool, URLs, --keep-last and --key-file out"
            )
        loaded_config = load_config(config)
        home = Path(loaded_config.spool)
        check_whose(home)
        return Places(_spool(home) if home.exists() else None, loaded_config, policy=True)
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
    return Places(_spool(spool) if spool else None, tiers, policy=keep_last is not None)


def _run_meant(urls: Sequence[str]) -> str:
    """Return the hint for a run's name in place of a URL, or nothing."""
    name = next((url for url in urls if _is_run(url)), None)
    return f"; if {name!r} is a run's name, write --run {name}" if name else ""


def _is_run(text: str) -> bool:
    with suppress(ConfigError):
        return bool(check_run(text))
    return False


def check_whose(path: Path) -> None:
    """Raise `ConfigError`, which says whose it is, if a directory on a spool's path is closed to this account."""
    for directory in (*reversed(path.absolute().parents), path):
        if directory.is_dir() and not os.access(directory, os.X_OK):
            owner = directory.stat().st_uid
            raise ConfigError(f"{directory}: {whose(owner)}; run as its owner: {as_account(owner)} tierd ...")


def _spool(path: Path) -> Spool:
    check_whose(path)
    if not (path / ".tierd").is_dir():  # because opening any directory would make it a spool
        raise ConfigError(f"{path}: not a spool; a Checkpointer or `tierd run` makes one")
    return Spool(path, write=False)


def load_config(path: Path) -> Config:
    """Read a configuration file; raises `ConfigError`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return from_toml(file.read(LONGEST + 1), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
