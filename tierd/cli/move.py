"""`tierd copy`: a run, or one checkpoint, from one tier to another."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.cli.known import answering
from tierd.cli.options import AttemptOption, JsonOption, KeyFileOption, Places
from tierd.cli.read import look
from tierd.cli.tables import complain, console, print_json, progress, size
from tierd.core.config import Config, from_urls
from tierd.core.errors import ConfigError
from tierd.core.ids import check_run
from tierd.core.report import report
from tierd.core.urls import parse_url
from tierd.daemon.service import open_tiers
from tierd.daemon.transfer.copy import CopiedRun, copy_run
from tierd.daemon.transfer.download import Progress
from tierd.priority import hasten

_EXIT_CORRUPT = 5


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("copy")(copy)


class Copied(msgspec.Struct, frozen=True):
    """What `copy` did, and what retention will make of it.

    Attributes:
        copy: what is on the target now.
        unkept: the copied steps that the target's policies would prune once a daemon saves the run there.
    """

    copy: CopiedRun
    unkept: tuple[int, ...]


def copy(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="The tier to read: file:///path or s3://bucket/prefix.")
    ],
    target: Annotated[str, typer.Argument(metavar="TO", help="The tier to write.")],
    name: Annotated[str, typer.Option("--run", metavar="RUN", help="The run.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Only this step, pinned there.", show_default=False)
    ] = None,
    new_name: Annotated[
        str | None, typer.Option("--as", metavar="NEWRUN", help="The run's name there.", show_default=False)
    ] = None,
    attempt: AttemptOption = None,
    key_file: KeyFileOption = None,
    to_key_file: Annotated[
        Path | None, typer.Option("--to-key-file", metavar="FILE", help="The key that TO gets.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Copy a run from one tier to another, verified, and only what TO lacks. Killed, the same command continues.
    --key-file is FROM's key. Needs no daemon."""
    run = check_run(name)
    to_run = check_run(new_name) if new_name else run
    if parse_url(source) == parse_url(target) and run == to_run:
        raise ConfigError(f"{target}: FROM and TO are one place; --as gives the copy another name there")
    here, there = _tier(source, key_file), _tier(target, to_key_file)
    with answering(Places(None, here, policy=False), run):
        done = asyncio.run(_copy(here, there, run, to_run, step, attempt))
    found = report(asyncio.run(look(Places(None, there, policy=False), to_run)), there, to_run)
    copied = {(one.step, one.attempt) for one in done.checkpoints}
    unkept = [one.step for one in found.checkpoints if (one.step, one.attempt) in copied and not one.copies[0].keep]
    answer = Copied(done, tuple(sorted(unkept)))
    print_json(answer) if json else _show(answer)
    if done.failed:
        raise typer.Exit(_EXIT_CORRUPT)


def _tier(url: str, key_file: Path | None) -> Config:
    return from_urls("/", [url], key_file=str(key_file.absolute()) if key_file else None)


async def _copy(here: Config, there: Config, run: str, to_run: str, step: int | None, attempt: str | None) -> CopiedRun:
    async with AsyncExitStack() as stack:
        (source,) = (await open_tiers(here, stack)).values()
        (target,) = (await open_tiers(there, stack)).values()
        hasten()  # a person waits
        moved = Progress()
        with progress("copying") as bar:
            task = bar.add_task("", total=None)
            moved.told = lambda at: bar.update(task, completed=at.done, total=at.total)
            return await copy_run(source, target, run, to_run, step, attempt, moved)


def _show(answer: Copied) -> None:
    out, done = console(), answer.copy
    for text in done.failed:
        complain(f"not copied, because it is corrupt: {text}")
    fresh = [one for one in done.checkpoints if not one.was_there]
    named = done.to_run if done.to_run == done.run else f"{done.run} as {done.to_run}"
    sent = sum(one.sent for one in fresh)
    total = sum(one.size for one in done.checkpoints)
    out.print(
        f"copied {named}: {len(done.checkpoints)} checkpoints, {size(total)}, verified; "
        f"{len(done.checkpoints) - len(fresh)} were there, and {size(sent)} were sent"
    )
    if done.pinned:
        out.print(f"  pinned there: step {', '.join(map(str, done.pinned))}")
    if done.policies:
        out.print("  the run's policies came along")
    if done.incomplete:
        out.print(f"  incomplete, and not copied: {done.incomplete}")
    if done.vanished:
        out.print(f"  pruned meanwhile: step {', '.join(map(str, done.vanished))}")
    if answer.unkept:
        out.print(
            f"  the policy there keeps not all: a daemon that saves the run there would prune {len(answer.unkept)} of "
            "them; `tierd pin` keeps one, and the daemon's configuration more"
        )
