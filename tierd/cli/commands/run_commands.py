"""Commands on whole runs: `runs`, one line for each run on tiers; `du`, their disk space; `rm`, which deletes one.

Invariant: `rm` deletes only objects that it has shown, only in the named places, and only after a yes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer

from tierd.cli import command_runtime
from tierd.cli.missing_runs import checkpoint_not_found, naming_known_runs
from tierd.cli.options import ConfigOption, JsonOption, KeyFileOption, RunArgument, RunOption, SpoolOption, UrlArgument
from tierd.cli.output import complain, print_answer, print_json, print_table
from tierd.cli.places import Places, resolve_places
from tierd.cli.tables import Table
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    DaemonUnavailable,
    SpoolHeld,
    StoreRefused,
    StoreUnavailable,
)
from tierd.core.ids import CheckpointId, check_run
from tierd.core.planning.place import SPOOL
from tierd.core.units import format_age, format_ranges, format_size
from tierd.daemon.tiers.run_overview import (
    RunOnTier,
    RunOverview,
    Usage,
    compare_runs,
    observe_runs,
    usage_in_spool,
    usage_on_tier,
)
from tierd.daemon.tiers.run_removal import (
    RunSize,
    measure_in_spool,
    measure_on_tier,
    remove_from_spool,
    remove_from_tier,
)
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.ipc import messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors
from tierd.stores.base import Store
from tierd.stores.open import open_tiers
from tierd.threads import mark_foreground

_COLUMNS = ("RUN", "TIER", "STEP", "AGE", "LAG", "MISSING RANKS", "SIZE")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (runs, rm, du):
        app.command()(command)


@dataclass(frozen=True, slots=True)
class RunOverviews:
    """What `runs` found, by run and tier.

    Attributes:
        runs: one for each run and tier.
        unreached: tiers that did not answer.
    """

    runs: tuple[RunOverview, ...]
    unreached: tuple[str, ...]


def runs(
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """List every run of whole tiers: its newest verified step, how old it is, how far newer ones are ahead, and its
    size."""
    where = resolve_places(spool, url, config, key_file=key_file, tiers=True)
    if where.config is None:
        raise ConfigError("runs lists tiers: name their URLs, or give --config FILE; --spool DIR only adds its steps")
    overviews = asyncio.run(_observe(where))
    if json:
        print_json(overviews)
    else:
        print_table(Table(_COLUMNS, [_row(run) for run in overviews.runs]))
        if not (overviews.runs or overviews.unreached):
            complain("no run is there")
    for name in overviews.unreached:
        complain(f"{name} did not answer")
    if overviews.unreached:
        raise typer.Exit(6)


async def _observe(where: Places) -> RunOverviews:
    assert where.config is not None
    mark_foreground()  # a person waits
    tiers: dict[str, dict[str, RunOnTier]] = {}
    unreached: list[str] = []
    async with AsyncExitStack() as stack:
        for name, store in (await open_tiers(where.config, stack)).items():
            try:
                tiers[name] = await observe_runs(store)
            except (StoreUnavailable, StoreRefused) as error:
                complain(f"{name}: {error}")
                unreached.append(name)
    local = [checkpoint for run in _newest_local(where.spool) for checkpoint in run]
    return RunOverviews(compare_runs(tiers, local, datetime.now(UTC)), tuple(unreached))


def _newest_local(spool: Spool | None) -> Iterator[list[CheckpointId]]:
    if spool is not None:
        with spool_errors(f"spool {spool.root}", spool.root):
            yield from (spool.newest(run, 1) for run in spool.runs())


def _row(run: RunOverview) -> list[str]:
    bound_mark = ">= " if run.read < run.world_size else ""  # not every rank's manifest was read
    return [
        run.run,
        run.tier,
        "none" if run.step is None else str(run.step),
        "" if run.age_s is None else format_age(run.age_s),
        f"newest {run.newest_step}" if run.lag_steps is None else str(run.lag_steps),
        f"{len(run.missing_ranks)} of {run.world_size}: {format_ranges(run.missing_ranks)}"
        if run.missing_ranks
        else "",
        f"{bound_mark}{format_size(run.size)}" if run.read else "",
    ]


@dataclass(frozen=True, slots=True)
class Removal:
    """The objects of a run that `rm` found, by place, and whether it deleted them there."""

    run: str
    removed: bool
    places: tuple[RunSize, ...]


@dataclass(frozen=True, slots=True)
class UsageReport:
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
    where = resolve_places(spool, url, config, key_file=key_file)
    holdings = asyncio.run(_find_holdings(where, check_run(run)))
    if not holdings:
        with naming_known_runs(where, run):
            raise CheckpointNotFound(f"run {run!r}: nothing of it lies in the places named")
    if not json:
        print_answer(_holdings_table(run, holdings))
    if not dry_run:
        if not yes:
            _confirm(run, holdings)
        if where.spool:
            _remove_locally(where.spool, run)
        asyncio.run(_remove(where, run))
    if json:
        print_json(Removal(run, not dry_run, holdings))
    elif not dry_run:
        print_answer(f"deleted {run} from {', '.join(holding.place for holding in holdings)}")


def _holdings_table(run: str, holdings: tuple[RunSize, ...]) -> Table:
    rows = [
        (run, holding.place, str(holding.checkpoints), str(holding.objects), format_size(holding.stored_bytes))
        for holding in holdings
    ]
    return Table(("RUN", "WHERE", "CHECKPOINTS", "OBJECTS", "STORED"), rows)


def _confirm(run: str, holdings: tuple[RunSize, ...]) -> None:
    if not sys.stdin.isatty():
        raise ConfigError(
            f"rm {run}: nobody is there to be asked; give --yes, or --dry-run to see what would be deleted"
        )
    count = max(holding.checkpoints for holding in holdings)
    question = (
        f"Delete run {run}, {count} checkpoints, from {', '.join(holding.place for holding in holdings)}, for good?"
    )
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


async def _find_holdings(where: Places, run: str) -> tuple[RunSize, ...]:
    holdings: list[RunSize] = []
    if where.spool:
        with spool_errors(f"spool {where.spool.root}", where.spool.root):
            holdings.append(measure_in_spool(where.spool, SPOOL, run))
    async with AsyncExitStack() as stack:
        for name, store in (await _stores(where, stack)).items():
            holdings.append(await measure_on_tier(store, name, run))
    return tuple(holding for holding in holdings if holding.objects)


async def _remove(where: Places, run: str) -> None:
    async with AsyncExitStack() as stack:
        for store in (await _stores(where, stack)).values():
            await remove_from_tier(store, run)


def _remove_locally(spool: Spool, run: str) -> None:
    """Delete the run in the spool: through the daemon that holds it; without a daemon, under the spool's lock."""
    end = time.monotonic() + command_runtime.current_timings().listen_timeout_s
    while True:
        try:
            with DaemonConnection(spool) as link:
                link.ask(messages.RemoveRun(run=run))
                return
        except DaemonUnavailable as error:
            try:
                with spool_errors(f"spool {spool.root}", spool.root), spool.lock():
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
    """Show the room that each run takes in each place, and how much of it several checkpoints share."""
    where = resolve_places(spool, url, config, key_file=key_file, run_option=True)
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
                format_size(usage.stored_bytes),
                format_size(usage.shared_bytes) if usage.place != SPOOL else "-",
                f"{usage.unreadable} manifests cannot be used" if usage.unreadable else "",
            )
            for usage in usages.usage
        ]
        print_answer(Table(("RUN", "WHERE", "CHECKPOINTS", "STORED", "SHARED", ""), rows))
        if not (rows or usages.unreached):
            complain("no run is there")
        for name in usages.unreached:
            print_answer(f"{name} did not answer")
    if usages.unreached:
        raise typer.Exit(6)
    if missing:
        with naming_known_runs(where, run):
            raise checkpoint_not_found(run, None, ())


async def _measure_usage(where: Places, run: str | None) -> UsageReport:
    usage: list[Usage] = []
    unreached: list[str] = []
    if where.spool:
        with spool_errors(f"spool {where.spool.root}", where.spool.root):
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
    return UsageReport(tuple(sorted(nonempty, key=lambda run_usage: run_usage.run)), tuple(unreached))


async def _stores(where: Places, stack: AsyncExitStack) -> dict[str, Store]:
    return await open_tiers(where.config, stack) if where.config else {}
