"""`tierd restore`: a checkpoint out of the tiers, into an empty directory or back into its program's directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tierd.cli.known import answering
from tierd.cli.options import (
    AttemptOption,
    BestOption,
    ConfigOption,
    JsonOption,
    KeyFileOption,
    ModeOption,
    StepOption,
    UrlArgument,
    best_goal,
    places,
)
from tierd.cli.progress import progress
from tierd.cli.tables import console, print_json, size
from tierd.core.config import Config
from tierd.core.errors import ConfigError
from tierd.core.ids import check_run
from tierd.daemon.intake.chosen import put_back_chosen
from tierd.daemon.intake.in_place import PutBack
from tierd.daemon.opening import open_tiers
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.export import RestoredDirectory, export
from tierd.priority import hasten
from tierd.stores.base import Store

T = TypeVar("T")


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("restore")(restore)


def restore(
    url: UrlArgument = None,
    name: Annotated[str, typer.Option("--run", metavar="RUN", help="The run.")] = "",
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="An empty or absent directory.")] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="DIR", help="Of a watched run: the directory in which its program looks."),
    ] = None,
    config: ConfigOption = None,
    step: StepOption = None,
    attempt: AttemptOption = None,
    best: BestOption = None,
    mode: ModeOption = "min",
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Copy the newest verified checkpoint, or the best, out of the tiers: one directory a rank, or back in place. Needs
    no daemon."""
    if not name or (to is None) == (into is None):
        raise ConfigError("restore needs --run RUN, and either --to DIR or --into DIR")
    goal = best_goal(best, mode, step)
    where = places(None, url, config, key_file=key_file)
    assert where.config is not None
    moved, run = Progress(), check_run(name)
    if into is not None:
        directory = into.absolute()
        with answering(where, run):
            put_back = asyncio.run(
                with_tiers(
                    where.config,
                    moved,
                    lambda stores: put_back_chosen(stores, run, directory, step, attempt, moved, goal),
                )
            )
        print_json(put_back) if json else _show_put(put_back, into)
        return
    assert to is not None
    target = to
    with answering(where, run):
        exported = asyncio.run(
            with_tiers(where.config, moved, lambda stores: export(stores, run, target, step, attempt, moved, best=goal))
        )
    print_json(exported) if json else _show(exported, moved)


async def with_tiers(config: Config, moved: Progress, work: Callable[[Mapping[str, Store]], Awaitable[T]]) -> T:
    """Open the tiers for `work`, and show its progress; a person waits for it."""
    async with AsyncExitStack() as stack:
        stores = await open_tiers(config, stack)
        hasten()
        with progress("restoring") as meter:
            moved.on_progress = lambda at: meter.update(at.done, at.total)
            return await work(stores)


def _show(exported: RestoredDirectory, moved: Progress) -> None:
    for text in exported.skipped:
        console().print(f"skipped {text}")
    source = f"from {', '.join(exported.tiers)}, " if exported.tiers else ""
    console().print(
        f"restored {exported.run} step {exported.step} (attempt {exported.attempt}), {size(exported.size)} verified, "
        f"{source}in:"
    )
    for directory in exported.directories:
        console().print(f"  {directory}")
    if moved.kept:
        console().print(f"  {size(moved.kept)} of it had been fetched before")


def _show_put(put_back: PutBack, into: Path) -> None:
    out = console()
    for text in put_back.skipped:
        out.print(f"skipped {text}")
    out.print(f"put back {into / put_back.path}: {put_back.run} step {put_back.step}, {size(put_back.size)} verified")
    for path in put_back.moved:
        out.print(f"  what was there lies in {into / path}")
    for path in put_back.pointers:
        out.print(f"  {into / path} names it")
    for sibling in put_back.beside:
        _show_put(sibling, into)
