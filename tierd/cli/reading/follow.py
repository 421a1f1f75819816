"""The command `follow`, the command line of `tierd.reading.commands`.

Invariant: torch and the reading modules are imported only when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.cli.exit_codes import EXIT_UNDELIVERED
from tierd.cli.known import check_known, note_unknown
from tierd.cli.options import JsonOption, KeyFileOption, UrlArgument, places
from tierd.cli.tables import print_lines
from tierd.core.errors import ConfigError
from tierd.core.printable import printable_json
from tierd.core.retention.policy import seconds
from tierd.core.urls import parse_url


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(follow)


def follow(
    url: UrlArgument = None,
    name: Annotated[str, typer.Option("--run", metavar="RUN", help="The run.")] = "",
    command: Annotated[
        str,
        typer.Option(
            "--exec", metavar="COMMAND", help="{directory}, {step}, {attempt} and {run} are replaced; no shell runs."
        ),
    ] = "",
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="The follower's own directory: its state, and files.")
    ] = None,
    latest: Annotated[bool, typer.Option("--latest", help="Only the newest, not each one in order.")] = False,
    period: Annotated[str, typer.Option("--period", metavar="TIME", help="At most one listing in this time.")] = "30s",
    once: Annotated[bool, typer.Option("--once", help="Deliver what is there now, and end.")] = False,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Run a command for each complete checkpoint, once over restarts; status 0 counts as delivered.

    Its files are fetched and verified if the command names {directory}; otherwise only its manifests are read.
    A run that begins later is waited for, without --once."""
    if not url or not name or not command or to is None:
        raise ConfigError("follow needs a tier's URL, --run RUN, --exec COMMAND and --to DIR")
    try:
        period_s = seconds(period)
    except ValueError as error:
        raise ConfigError(f"--period: {error}") from error
    try:
        from tierd.reading import open as open_run
        from tierd.reading.commands import CommandFollower, Delivery, parse_command
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install 'tierd[torch,daemon]'") from error

    def show(delivery: Delivery) -> None:
        if json:
            print(printable_json(msgspec.json.encode(delivery).decode()), flush=True)
        else:
            print_lines(
                f"{delivery.run} step {delivery.step} (attempt {delivery.attempt}): {delivery.reason or 'delivered'}"
            )

    words = parse_command(command)
    _check_apart(to, url)
    # A follower may be started before the run's first save, but what ends at once has nothing to wait for.
    (check_known if once else note_unknown)(places(None, list(url), None, key_file=key_file), name)
    with open_run(list(url), name, key_file) as reader:
        follower = CommandFollower(reader.tiers, to, words, show)
        if not follower.run(latest=latest, period_s=period_s, once=once):
            raise typer.Exit(EXIT_UNDELIVERED)


def _check_apart(to: Path, urls: list[str]) -> None:
    """Refuse a state directory in a tier, because everything in a tier belongs to a run; raises `ConfigError`."""
    for url in urls:
        place = parse_url(url)
        if place.is_directory and to.resolve().is_relative_to(Path(place.path).resolve()):
            raise ConfigError(f"--to {to}: it lies in the tier {url}; name a directory of the follower's own")
