"""The pause of the node's daemon: `pause` and `resume`, which also work without a daemon."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli import command_runtime
from tierd.cli.options import ConfigOption, JsonOption, SpoolOption
from tierd.cli.output import print_answer, print_json
from tierd.cli.places import resolve_places
from tierd.core.errors import ConfigError, DaemonUnavailable, RequestUnknown, SpoolHeld, VersionMismatch
from tierd.core.retention.policy import parse_duration
from tierd.core.units import pause_text
from tierd.daemon.tiers.tier_pauses import TierPause
from tierd.ipc import messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (pause, resume):
        app.command()(command)


ForOption = Annotated[
    str | None,
    typer.Option("--for", metavar="TIME", help="Go on by itself after this time: 2h.", show_default="until resumed"),
]


def pause(
    spool: SpoolOption = None, config: ConfigOption = None, for_: ForOption = None, json: JsonOption = False
) -> None:
    """Leave the tiers as they are for a while: no flush, no prune, no scrub. Saves and restores go on."""
    _set_pause(spool, config, messages.Pause(for_s=None if for_ is None else _parse_duration(for_)), json=json)


def resume(spool: SpoolOption = None, config: ConfigOption = None, json: JsonOption = False) -> None:
    """End a pause; what is pending is flushed."""
    _set_pause(spool, config, messages.Resume(), json=json)


def _parse_duration(text: str) -> float:
    try:
        time_s = parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"--for: {error}") from error
    if not 0 < time_s <= messages.MAX_PAUSE:
        raise ConfigError(f"--for {text}: more than nothing and at most a year; without --for, until `tierd resume`")
    return time_s


def _set_pause(
    spool: Path | None, config: Path | None, request: messages.Pause | messages.Resume, *, json: bool
) -> None:
    home = resolve_places(spool, None, config).node_spool
    until = _ask_pause(home, request)
    if json:
        print_json({"spool": str(home.root), "paused": until})
    else:
        print_answer(pause_text(until) if until else "no pause: the daemon flushes, scrubs and prunes")


def _ask_pause(spool: Spool, request: messages.Pause | messages.Resume) -> str | None:
    """Send the request to the daemon that holds the spool. Without one, write the pause for the next daemon."""
    end = time.monotonic() + command_runtime.current_timings().listen_timeout_s
    while True:
        try:
            with DaemonConnection(spool) as link:
                answer: str | None = link.ask(request)["paused"]
                return answer
        except (VersionMismatch, RequestUnknown):  # a daemon runs, so only it may change the pause
            raise
        except DaemonUnavailable as error:
            try:
                with spool_errors(f"spool {spool.root}", spool.root), spool.lock():
                    state = TierPause(spool)
                    change = state.begin(request.for_s) if isinstance(request, messages.Pause) else state.end()
                    asyncio.run(change)
                    return state.until
            except SpoolHeld:  # a daemon is starting or ending, or does not answer
                if time.monotonic() > end:
                    raise error from None
        time.sleep(0.1)
