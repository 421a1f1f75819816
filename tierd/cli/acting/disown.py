"""The command `disown`, which deletes the names of a planted launch from tiers.

Invariant: it deletes only the objects that it has shown. Objects that can be read need `--yes`.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated

import typer

from tierd.cli.known import answering
from tierd.cli.options import (
    ConfigOption,
    JsonOption,
    KeyFileOption,
    Places,
    RunArgument,
    SpoolOption,
    UrlArgument,
    places,
)
from tierd.cli.tables import console, print_json, table
from tierd.core.errors import CheckpointNotFound, ConfigError, FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.ids import PartId, check_attempt, check_run
from tierd.daemon.opening import open_tiers
from tierd.daemon.tiers.disown import LaunchObjectCounts, LaunchObjects, claimed, leases_here
from tierd.daemon.tiers.disown import disown as take_away
from tierd.spool.spool import Spool


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(disown)


@dataclass(frozen=True, slots=True)
class DisownResult:
    """The objects of a launch that `disown` found, by tier, and whether it deleted them there."""

    run: str
    attempt: str
    disowned: bool
    places: tuple[LaunchObjectCounts, ...]


def disown(
    run: RunArgument,
    attempt: Annotated[str, typer.Argument(metavar="ATTEMPT", help="The launch, as an error or `ls` names it.")],
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, also where some of it can be read.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what is there, and delete nothing.")] = False,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a launch's names (manifests, quarantined ones, intents, pins, marks) from tiers: they are nobody's."""
    where = places(spool, url, config, key_file=key_file)
    if where.config is None:
        raise ConfigError("disown takes names from tiers: give their URLs, or --config FILE")
    _check_leases(where, check_run(run), check_attempt(attempt))
    claimed_by_tier = asyncio.run(_find_claims(where, run, attempt))
    claims = tuple(claimed.claim(name) for name, claimed in claimed_by_tier.items() if claimed.keys)
    if not claims:
        with answering(where, run):
            raise CheckpointNotFound(f"run {run!r}: no place named holds anything under the name of attempt {attempt}")
    if not json:
        rows = [
            (claim.place, *map(str, (claim.checkpoints, claim.readable, claim.complete, claim.objects)))
            for claim in claims
        ]
        console().print(table(None, ("WHERE", "CHECKPOINTS", "READABLE", "COMPLETE", "OBJECTS"), rows))
    if not dry_run:
        if not yes:
            _confirm(run, attempt, claims)
        asyncio.run(_delete_claims(where, claimed_by_tier))
    if json:
        print_json(DisownResult(run, attempt, not dry_run, claims))
    elif not dry_run:
        console().print(
            f"attempt {attempt} of {run} counts for nothing on {', '.join(claim.place for claim in claims)}"
        )


def _check_leases(where: Places, run: str, attempt: str) -> None:
    """Raise `ConfigError` if this node knows that the launch is real: a trainer of it is alive here, it saved in the
    named spool, or a part of it can be read there."""
    if leases := leases_here(run, attempt):
        processes = ", ".join(f"{pid} (spool {spool})" for pid, spool in sorted(leases.items()))
        raise ConfigError(
            f"disown {run} {attempt}: it lives: process {processes} on this node saves it; nothing was deleted. End it "
            "first, if it really is not to be found any more"
        )
    if where.spool is None:
        return
    spool_parts = [
        part for part in where.spool.parts() if (part.checkpoint.run, part.checkpoint.attempt) == (run, attempt)
    ]
    if where.spool.saved_stamp(run, attempt) or any(_can_be_read(where.spool, part) for part in spool_parts):
        raise ConfigError(
            f"disown {run} {attempt}: this node's spool holds parts of it, so it is a launch of this node's, whose "
            "daemon would send it again; retention retires it, and tierd rm removes the run"
        )


def _can_be_read(spool: Spool, part: PartId) -> bool:
    try:
        spool.manifest(part)
    except (ObjectNotFound, ManifestError):
        return False  # the daemon quarantines it
    except FormatTooNew:
        pass
    return True


def _confirm(run: str, attempt: str, claims: tuple[LaunchObjectCounts, ...]) -> None:
    readable, complete = max(claim.readable for claim in claims), max(claim.complete for claim in claims)
    if readable:
        raise ConfigError(
            f"disown {run} {attempt}: {readable} of its checkpoints can be read (if not here, by a newer tierd or with "
            f"another key), and {complete} of them are complete; it may be a real launch, and no restore would find "
            "them again. Whether it lives on another node cannot be told here. If that is meant, give --yes; nothing "
            "was deleted"
        )
    if not sys.stdin.isatty():
        raise ConfigError(f"disown {run} {attempt}: nobody is there to be asked; give --yes, or --dry-run")
    places = ", ".join(claim.place for claim in claims)
    question = f"Nothing of attempt {attempt} of {run} can be read. Delete its names from {places}, for good?"
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


async def _find_claims(where: Places, run: str, attempt: str) -> dict[str, LaunchObjects]:
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack) if where.config else {}
        return {name: await claimed(store, run, attempt) for name, store in stores.items()}


async def _delete_claims(where: Places, claimed_by_tier: dict[str, LaunchObjects]) -> None:
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack) if where.config else {}
        for name, store in stores.items():
            await take_away(store, claimed_by_tier[name].keys)
