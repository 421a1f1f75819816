"""`tierd prepare`: a program's directory is right before the program starts."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.acting.watch import CompleteOption, DirectoryArgument, StepOption, UnitOption, default_spool
from tierd.cli.known import note_unknown
from tierd.cli.options import JsonOption, KeyFileOption, Places, SpoolOption, ToOption, check_whose
from tierd.cli.reading.restore import with_tiers
from tierd.cli.tables import complain, console, print_json, table
from tierd.core.config import WatchConfig, check_own_layout, from_urls
from tierd.core.ids import check_run
from tierd.daemon.intake.own import own_layout
from tierd.daemon.intake.prepare import PreparedUnit, PrepareResult
from tierd.daemon.intake.prepare import prepare as prepare_directory
from tierd.daemon.transfer.download import Progress
from tierd.spool.spool import Spool
from tierd.watching.files import Tree
from tierd.watching.own_layout import OwnLayout
from tierd.watching.passed_over import passed_over


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("prepare")(prepare)


def prepare(
    directory: DirectoryArgument,
    name: Annotated[str, typer.Option("--run", metavar="RUN", help="The run as which it is watched.")],
    to: ToOption = None,
    spool: SpoolOption = None,
    unit: UnitOption = None,
    step: StepOption = None,
    complete_when: CompleteOption = None,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Before a launch: verify every checkpoint below DIR, move damaged and unfinished ones to DIR/.tierd-quarantine,
    and fetch replacements."""
    where, run, moved = directory.absolute(), check_run(name), Progress()
    watched = WatchConfig(directory=str(where), run=run, unit=tuple(unit or ()), step=step, complete_when=complete_when)
    check_own_layout(watched, "prepare")
    rules = own_layout(watched)
    home = (spool or default_spool(where)).absolute()
    check_whose(home)
    own_spool = Spool(home, write=False) if (home / ".tierd").is_dir() else None
    config = from_urls(str(home), to or [], None, str(key_file.absolute()) if key_file else None)
    prepared = asyncio.run(
        with_tiers(config, moved, lambda stores: prepare_directory(where, run, own_spool, stores, moved, rules))
    )
    if not any(prepared_unit.verdict in ("verified", "missing") for prepared_unit in prepared.units):
        note_unknown(Places(own_spool, config, policy=False), run)
    if not prepared.units and (text := _no_checkpoint_text(directory, rules)):
        complain(text)
    print_json(prepared) if json else _show(prepared)


def _no_checkpoint_text(directory: Path, rules: OwnLayout | None) -> str:
    """Say that a directory has files and no checkpoint; empty if it has no files, as before a first launch."""
    with Tree(directory, skip=True, own=rules) as tree:
        listing = tree.listing()
    files, groups = passed_over(listing, ())
    names = "; ".join(str(group) for group in groups[:2])
    return (
        f"{directory}: it has no checkpoint that tierd knows, and {files} files were left as they are: {names}; "
        f"`tierd watch --explain {shlex.quote(str(directory))}` says why"
        if files
        else ""
    )


def _show(prepared: PrepareResult) -> None:
    out = console()
    if not prepared.units:
        out.print("no checkpoint is there, and no place has one of this run: nothing was done")
        return
    rows = [
        (prepared_unit.path, str(prepared_unit.step), prepared_unit.verdict, _describe_actions(prepared_unit))
        for prepared_unit in prepared.units
    ]
    out.print(table(None, ("PATH", "STEP", "FOUND", "DONE"), rows))
    for unit in prepared.units:
        if unit.why:
            out.print(f"{unit.path}: {unit.why}", soft_wrap=True)
    for path in prepared.pointers:
        out.print(f"{path}: corrected")


def _describe_actions(unit: PreparedUnit) -> str:
    moved = f"moved to {', '.join(unit.moved[:2])}" if unit.moved else ""
    return "; ".join(text for text in (moved, "a verified copy is in its place" if unit.replaced else "") if text)
