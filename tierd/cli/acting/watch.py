"""`tierd watch`: a daemon that takes the checkpoints of an unmodified program."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.acting.act import print_event, run_daemon
from tierd.cli.options import JsonOption, KeyFileOption, SpoolOption, ToOption
from tierd.cli.tables import console, print_json, size, table
from tierd.core.config import WatchConfig, check_own_layout, from_urls
from tierd.core.errors import ConfigError
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.intake.own import own_layout
from tierd.daemon.service import serve
from tierd.watching.explain import ExplainedUnit, WatchExplanation
from tierd.watching.explain import explain as explain_listing
from tierd.watching.files import Tree
from tierd.watching.own_layout import OwnLayout

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The directory below which the program writes.")]


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
    """Add this module's command."""
    app.command("watch")(watch)


def watch(
    directory: DirectoryArgument,
    name: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="The run that the checkpoints become; needed to take any."),
    ] = None,
    to: ToOption = None,
    spool: SpoolOption = None,
    keep_last: Annotated[
        int | None,
        typer.Option("--keep-last", min=1, help="Checkpoints to keep in each place; not given: the run's own policy."),
    ] = None,
    unit: UnitOption = None,
    step: StepOption = None,
    complete_when: CompleteOption = None,
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
        directory=str(where), run=name or "", unit=tuple(unit or ()), step=step, complete_when=complete_when
    )
    check_own_layout(watched, "watch")
    if explain:
        _explain(directory, own_layout(watched), json=json)
        return
    if name is None:
        raise typer.BadParameter("name the run that the checkpoints become", param_hint="--run")
    key = str(key_file.absolute()) if key_file else None
    config = from_urls(
        str((spool or default_spool(where)).absolute()),
        to or [],
        RetentionPolicy(keep_last=keep_last) if keep_last else None,
        key,
        watch=[watched],
    )
    run_daemon(serve(config, until_idle=until_idle, on_event=print_event if json else None))


def _explain(directory: Path, layout: OwnLayout | None, *, json: bool) -> None:
    """Print what a watch of a directory sees."""
    try:
        tree = Tree(directory, skip=True, own=layout)
    except FileNotFoundError:
        raise ConfigError(f"{directory}: it does not exist, so there is nothing to explain") from None
    with tree:
        listing = tree.listing()
        explained = explain_listing(str(directory), listing, tree.opened, tuple(tree.unreadable), tuple(tree.unnamed))
    print_json(explained) if json else _show(explained)


_COLUMNS = ("PATH", "PROGRAM", "STEP", "FROM", "FILES", "BYTES", "WHY")


def _show(explained: WatchExplanation) -> None:
    out = console()
    untaken = sum(bool(unit.not_taken) for unit in explained.units)
    out.print(
        f"{explained.directory}: {len(explained.units)} checkpoints, {untaken} of them would not be taken; "
        f"{explained.files} files belong to none",
        soft_wrap=True,
    )
    rows = [
        (unit.path, unit.program, _step_text(unit), unit.order, str(unit.files), size(unit.bytes), unit.why)
        for unit in explained.units
    ]
    if rows:
        out.print(table(None, _COLUMNS, rows))
    lines = [f"{unit.path} would not be taken: {unit.not_taken}" for unit in explained.units if unit.not_taken]
    lines += [f"passed over: {group}" for group in explained.passed_over]
    lines += [f"{path} cannot be listed, and is skipped" for path in explained.unreadable]
    lines += [f"{path} is skipped, because its name is not UTF-8" for path in explained.unnamed]
    for line in lines:
        out.print(line, soft_wrap=True)


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
