"""Commands on the disk space of runs: du, rm.

Invariant: `rm` deletes only objects that it has shown, only in the named places, and only after a yes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated

import typer

from tierd.cli import timings
from tierd.cli.known import answering, no_such
from tierd.cli.options import (
    ConfigOption,
    JsonOption,
    KeyFileOption,
    Places,
    RunArgument,
    RunOption,
    SpoolOption,
    UrlArgument,
    places,
)
from tierd.cli.tables import console, print_json, size, table
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    DaemonUnavailable,
    SpoolHeld,
    StoreRefused,
    StoreUnavailable,
)
from tierd.core.ids import check_run
from tierd.core.planning.place import SPOOL
from tierd.daemon.opening import open_tiers
from tierd.daemon.remove import Held, held_in_spool, held_on_tier, remove_from_spool, remove_from_tier
from tierd.daemon.tiers.observe import TierObserver
from tierd.daemon.usage import Usage, usage_in_spool, usage_on_tier
from tierd.ipc import messages
from tierd.ipc.client import Link
from tierd.spool.conditions import translated
from tierd.spool.spool import Spool
from tierd.stores.base import Store


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (rm, du):
        app.command()(command)


@dataclass(frozen=True, slots=True)
class Removal:
    """The objects of a run that `rm` found, by place, and whether it deleted them there."""

    run: str
    removed: bool
    places: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class Usages:
    """The sizes that `du` found, and the tiers that did not answer."""

    usage: tuple[Usage, ...]
    unreached: tuple[str, ...]


def rm(
    run: RunArgument,
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")] = False,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a whole run from the places named, pins and all. Name the spool, too, or its daemon sends it again."""
    where = places(spool, url, config, key_file=key_file)
    holdings = asyncio.run(_find_holdings(where, check_run(run)))
    if not holdings:
        with answering(where, run):
            raise CheckpointNotFound(f"run {run!r}: nothing of it lies in the places named")
    if not json:
        console().print(_holdings_table(run, holdings))
    if not dry_run:
        if not yes:
            _confirm(run, holdings)
        if where.spool:
            _remove_locally(where.spool, run)
        asyncio.run(_remove(where, run))
    if json:
        print_json(Removal(run, not dry_run, holdings))
    elif not dry_run:
        console().print(f"deleted {run} from {', '.join(holding.place for holding in holdings)}")


def _holdings_table(run: str, holdings: tuple[Held, ...]) -> object:
    rows = [
        (run, holding.place, str(holding.checkpoints), str(holding.objects), size(holding.stored_bytes))
        for holding in holdings
    ]
    return table(None, ("RUN", "WHERE", "CHECKPOINTS", "OBJECTS", "STORED"), rows)


def _confirm(run: str, holdings: tuple[Held, ...]) -> None:
    if not sys.stdin.isatty():
        raise ConfigError(f"rm {run}: nobody is there to be asked; give --yes, or --dry-run to see what would go")
    count = max(holding.checkpoints for holding in holdings)
    question = (
        f"Delete run {run}, {count} checkpoints, from {', '.join(holding.place for holding in holdings)}, for good?"
    )
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


async def _find_holdings(where: Places, run: str) -> tuple[Held, ...]:
    holdings: list[Held] = []
    if where.spool:
        with translated(f"spool {where.spool.root}", where.spool.root):
            holdings.append(held_in_spool(where.spool, SPOOL, run))
    async with AsyncExitStack() as stack:
        for name, store in (await _stores(where, stack)).items():
            holdings.append(await held_on_tier(store, name, run))
    return tuple(holding for holding in holdings if holding.objects)


async def _remove(where: Places, run: str) -> None:
    async with AsyncExitStack() as stack:
        for store in (await _stores(where, stack)).values():
            await remove_from_tier(store, run)


def _remove_locally(spool: Spool, run: str) -> None:
    """Delete the run in the spool: through the daemon that holds it; without a daemon, under the spool's lock."""
    end = time.monotonic() + timings.given().listens_s
    while True:
        try:
            with Link(spool) as link:
                link.ask(messages.Remove(run=run))
                return
        except DaemonUnavailable as error:
            try:
                with translated(f"spool {spool.root}", spool.root), spool.lock():
                    remove_from_spool(spool, run)
                    return
            except SpoolHeld:  # a daemon is starting or ending, or does not answer
                if time.monotonic() > end:
                    raise error from None
        time.sleep(0.1)


def du(
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    run: RunOption = None,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """The room that each run takes in each place, and how much of it several checkpoints share."""
    where = places(spool, url, config, key_file=key_file, run_option=True)
    usages = asyncio.run(_measure_usage(where, run and check_run(run)))
    missing = run is not None and not usages.usage and not usages.unreached
    if json:
        print_json(usages)
    elif not missing:
        rows = [
            (
                usage.run,
                usage.place,
                str(usage.checkpoints),
                size(usage.stored_bytes),
                size(usage.shared_bytes) if usage.place != SPOOL else "",
                f"{usage.unreadable} manifests cannot be used" if usage.unreadable else "",
            )
            for usage in usages.usage
        ]
        console().print(table(None, ("RUN", "WHERE", "CHECKPOINTS", "STORED", "SHARED", ""), rows))
        for name in usages.unreached:
            console().print(f"{name} did not answer")
    if usages.unreached:
        raise typer.Exit(6)
    if missing:
        with answering(where, run):
            raise no_such(run, None, ())


async def _measure_usage(where: Places, run: str | None) -> Usages:
    usage: list[Usage] = []
    unreached: list[str] = []
    if where.spool:
        with translated(f"spool {where.spool.root}", where.spool.root):
            runs = {part.checkpoint.run for part in where.spool.parts()}
            usage += [usage_in_spool(where.spool, run_name) for run_name in runs if run in (None, run_name)]
    async with AsyncExitStack() as stack:
        for name, store in (await _stores(where, stack)).items():
            try:
                names = {run} if run else await TierObserver(store).runs()
                usage += [await usage_on_tier(store, name, run_name) for run_name in sorted(names)]
            except (StoreUnavailable, StoreRefused):
                unreached.append(name)
    nonempty = [run_usage for run_usage in usage if run_usage.stored_bytes or run_usage.checkpoints]
    return Usages(tuple(sorted(nonempty, key=lambda run_usage: run_usage.run)), tuple(unreached))


async def _stores(where: Places, stack: AsyncExitStack) -> dict[str, Store]:
    return await open_tiers(where.config, stack) if where.config else {}
