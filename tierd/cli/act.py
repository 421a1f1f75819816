"""Commands that change something: run, restore, prune, pin, unpin; and `config check`, which might."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.options import load_config
from tierd.core.config import Config, from_urls
from tierd.core.errors import ConfigError
from tierd.core.retention import RetentionPolicy


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("run")(run)


def run(
    spool: Annotated[Path | None, typer.Option("--spool", metavar="DIR", help="The node's spool.")] = None,
    to: Annotated[
        list[str] | None, typer.Option("--to", metavar="URL", help="A tier; repeat for more, in order.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A tierd.toml instead.")] = None,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="Checkpoints to keep, per place.")] = 3,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when no trainer is attached and everything is flushed.")
    ] = False,
) -> None:
    """Run the daemon: flush, verify, retain; until SIGTERM."""
    from tierd.daemon.service import serve

    asyncio.run(serve(_daemon_config(spool, to, config, keep_last), until_idle=until_idle))


def _daemon_config(spool: Path | None, to: list[str] | None, config: Path | None, keep_last: int) -> Config:
    if config is not None:
        if spool or to:
            raise ConfigError("--config names the spool and the tiers itself; leave --spool and --to out")
        return load_config(config)
    if spool is None:
        raise ConfigError("no spool: give --spool DIR, or --config FILE")
    return from_urls(str(spool.absolute()), to or [], RetentionPolicy(keep_last=keep_last))
