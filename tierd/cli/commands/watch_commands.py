"""`tierd watch`: a daemon that takes an unmodified program's checkpoints. `tierd prepare`: its directory is right."""

from __future__ import annotations

import asyncio
import errno
import shlex
import stat
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.commands.daemon_commands import print_event, run_daemon
from tierd.cli.commands.retrieval_commands import with_tiers
from tierd.cli.missing_runs import warn_of_unknown_run
from tierd.cli.options import DryRunOption, JsonOption, KeyFileOption, ToOption
from tierd.cli.output import complain, print_answer, print_json
from tierd.cli.places import Places, check_account_access, make_config
from tierd.cli.tables import Table
from tierd.core.config import WatchConfig, check_user_layout
from tierd.core.errors import ConfigError
from tierd.core.ids import check_run
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.units import format_size
from tierd.daemon.daemon_service import serve
from tierd.daemon.intake.directory_preparation import PreparedUnit, PrepareResult
from tierd.daemon.intake.directory_preparation import prepare as prepare_directory
from tierd.daemon.intake.series_restore import own_layout
from tierd.daemon.transfer.download import Progress
from tierd.spool.spool import Spool
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.loose_units import UserLayout
from tierd.watching.unit_description import ExplainedUnit, WatchExplanation, group_unmatched_files
from tierd.watching.unit_description import explain_listing as explain_listing

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The directory below which the program writes.")]


BesideSpoolOption = Annotated[
    Path | None,
    typer.Option("--spool", metavar="DIR", help="The spool; not given: `.NAME.tierd` beside DIR.", readable=False),
]
UnitOption = Annotated[
    list[str] | None,
    typer.Option("--unit", metavar="GLOB", help="Paths below DIR that are one checkpoint each; nothing else is one."),
]
StepOption = Annotated[
    str | None,
    typer.Option("--step", metavar="REGEX", help="With --unit: finds the step in the path, by its one group."),
]
CompleteOption = Annotated[
    str | None,
    typer.Option(
        "--complete-when",
        metavar="NAME",
        help="With --unit: a file without which a checkpoint is not complete; `{name}` is the checkpoint's name.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (watch, prepare):
        app.command()(command)


def watch(
    directory: DirectoryArgument,
    name: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="The run that the checkpoints become; needed to take any."),
    ] = None,
    to: ToOption = None,
    spool: BesideSpoolOption = None,
    keep_last: Annotated[
        int | None,
        typer.Option(
            "--keep-last",
            metavar="N",
            min=1,
            help="Checkpoints to keep in each place; not given: the run's own policy.",
        ),
    ] = None,
    unit: UnitOption = None,
    step: StepOption = None,
    complete_when: CompleteOption = None,
    series: Annotated[
        int | None,
        typer.Option(
            "--series", metavar="N", min=1, help="Pin the newest of the N series that were saved last; not given: 100."
        ),
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when every complete checkpoint there is taken and flushed.")
    ] = False,
    key_file: KeyFileOption = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print which checkpoints lie there, why, and what would not be taken."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Take the checkpoints that another program writes below DIR, until SIGTERM. A DIR that does not exist is waited
    for. DIR is never written to. The spool is `.NAME.tierd` beside DIR unless you name another. With --json, each event
    is a line on stdout. With --explain, nothing is taken, and neither --run nor --to is needed."""
    where = directory.absolute()
    _check_directory(directory)
    watched = WatchConfig(
        directory=str(where),
        run=name or "",
        unit=tuple(unit or ()),
        step=step,
        complete_when=complete_when,
        series=series,
    )
    check_user_layout(watched, "watch")
    if explain:
        _explain(directory, own_layout(watched), json=json)
        return
    if name is None:
        raise typer.BadParameter("name the run that the checkpoints become", param_hint="--run")
    config = make_config(
        str((spool or default_spool(where)).absolute()),
        to or [],
        RetentionPolicy(keep_last=keep_last) if keep_last else None,
        key_file,
        watch=[watched],
    )
    run_daemon(serve(config, until_idle=until_idle, on_event=print_event if json else None))


def _explain(directory: Path, layout: UserLayout | None, *, json: bool) -> None:
    """Print what a watch of a directory sees."""
    try:
        tree = DirectoryTree(directory, skip=True, user_layout=layout)
    except FileNotFoundError:
        raise ConfigError(f"{directory}: it does not exist, so there is nothing to explain") from None
    with tree:
        listing = tree.listing()
        explained = explain_listing(str(directory), listing, tree.opened, tuple(tree.unreadable), tuple(tree.unnamed))
    print_json(explained) if json else _show_explanation(explained)


_COLUMNS = ("PATH", "PROGRAM", "STEP", "FROM", "WHY", "FILES", "BYTES")


def _show_explanation(explained: WatchExplanation) -> None:
    taken = sum(not unit.not_taken for unit in explained.units)
    print_answer(
        f"{explained.directory}: {taken} of {len(explained.units)} checkpoints would be taken; "
        f"{explained.files} files belong to none",
        wrap=False,
    )
    rows = [
        (unit.path, unit.program, _step_text(unit), unit.order, unit.why, str(unit.files), format_size(unit.bytes))
        for unit in explained.units
    ]
    if rows:
        print_answer(Table(_COLUMNS, rows))
    lines = [f"{unit.path} would not be taken: {unit.not_taken}" for unit in explained.units if unit.not_taken]
    lines += [f"passed over: {group}" for group in explained.passed_over]
    lines += [f"{path} cannot be listed, and is skipped" for path in explained.unreadable]
    lines += [f"{path} is skipped, because its name is not UTF-8" for path in explained.unnamed]
    for line in lines:
        print_answer(line, wrap=False)


def _step_text(unit: ExplainedUnit) -> str:
    return "-" if unit.step is None else str(unit.step)


def _check_directory(directory: Path) -> None:
    """Refuse a path that is no directory. One where nothing is yet is waited for, because a job may start its program
    and this command at once.
    """
    try:
        mode = directory.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise ConfigError(f"{directory}: {error.strerror}; name the directory that the program writes to") from error
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"{directory}: not a directory; name the directory that the program writes to")


def default_spool(directory: Path) -> Path:
    """Return the spool of a watched directory: beside it, because links need the same file system."""
    real = directory.resolve()
    return real.parent / f".{real.name or 'root'}.tierd"


def prepare(
    directory: DirectoryArgument,
    name: Annotated[str, typer.Option("--run", metavar="RUN", help="The run as which it is watched.")],
    to: ToOption = None,
    spool: BesideSpoolOption = None,
    unit: UnitOption = None,
    step: StepOption = None,
    complete_when: CompleteOption = None,
    key_file: KeyFileOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Before a launch: verify every checkpoint below DIR, move damaged and unfinished ones to DIR/.tierd-quarantine,
    and fetch replacements."""
    where, run, moved = directory.absolute(), check_run(name), Progress()
    watched = WatchConfig(directory=str(where), run=run, unit=tuple(unit or ()), step=step, complete_when=complete_when)
    check_user_layout(watched, "prepare")
    rules = own_layout(watched)
    home = (spool or default_spool(where)).absolute()
    check_account_access(home)
    own_spool = Spool(home, write=False) if (home / ".tierd").is_dir() else None
    config = make_config(str(home), to or [], None, key_file)
    prepared = asyncio.run(
        with_tiers(
            config,
            moved,
            lambda stores: prepare_directory(where, run, own_spool, stores, moved, rules, dry_run=dry_run),
        )
    )
    if not any(prepared_unit.verdict in ("verified", "missing") for prepared_unit in prepared.units):
        warn_of_unknown_run(Places(own_spool, config, has_policy=False), run)
    if not prepared.units and (text := _no_checkpoint_text(directory, rules)):
        complain(text)
    print_json(prepared) if json else _show_prepared(prepared, dry_run=dry_run)


def _no_checkpoint_text(directory: Path, rules: UserLayout | None) -> str:
    """Say that a directory has files and no checkpoint; empty if it has no files, as before a first launch."""
    with DirectoryTree(directory, skip=True, user_layout=rules) as tree:
        listing = tree.listing()
    files, groups = group_unmatched_files(listing, ())
    names = "; ".join(str(group) for group in groups[:2])
    return (
        f"{directory}: it has no checkpoint that tierd knows, and {files} files were left as they are: {names}; "
        f"`tierd watch --explain {shlex.quote(str(directory))}` says why"
        if files
        else ""
    )


def _show_prepared(prepared: PrepareResult, *, dry_run: bool) -> None:
    if not prepared.units:
        print_answer("no checkpoint is there, and no place has one of this run: nothing was done")
        return
    rows = [
        (
            prepared_unit.path,
            str(prepared_unit.step),
            prepared_unit.verdict,
            _describe_actions(prepared_unit, dry_run=dry_run),
        )
        for prepared_unit in prepared.units
    ]
    print_answer(Table(("PATH", "STEP", "FOUND", "WOULD BE" if dry_run else "DONE"), rows))
    for unit in prepared.units:
        if unit.why:
            print_answer(unit.why if unit.why.startswith(unit.path) else f"{unit.path}: {unit.why}", wrap=False)
    for path in prepared.pointers:
        print_answer(f"{path}: corrected")


def _describe_actions(unit: PreparedUnit, *, dry_run: bool) -> str:
    if dry_run:
        return "; ".join(
            filter(None, ("replaced by a verified copy" * unit.replaced, "quarantined" * bool(unit.moved)))
        )
    moved = f"moved to {', '.join(unit.moved[:2])}" if unit.moved else ""
    return "; ".join(text for text in ("a verified copy is in its place" if unit.replaced else "", moved) if text)
