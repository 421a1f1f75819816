"""`tierd copy`: a run, or one checkpoint, from one tier to another. `tierd import`: others' checkpoints into tiers.

Invariant: of the spools that killed imports left, only a directory of this account is removed, and only one whose lock
nobody holds: the kernel releases the lock of a process that ends, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.cli.commands.checkpoint_commands import observe_inventory
from tierd.cli.missing_runs import full_attempt, naming_known_runs, only_run
from tierd.cli.options import AttemptOption, DryRunOption, JsonOption, KeyFileOption, OnlyRunOption, ToOption
from tierd.cli.output import complain, print_answer, print_json, print_table
from tierd.cli.places import Places, make_config
from tierd.cli.progress import show_progress
from tierd.cli.tables import Table
from tierd.core.config import Config
from tierd.core.errors import CheckpointNotFound, ConfigError, SpoolUnusable, TierdError
from tierd.core.ids import check_run
from tierd.core.run_report import make_report
from tierd.core.store_schemes import PLACES
from tierd.core.units import format_size
from tierd.core.urls import StoreUrl, parse_url
from tierd.daemon.intake.import_bucket import BucketImportSource, split_url
from tierd.daemon.intake.unit_files import ImportSource, open_directory_source
from tierd.daemon.intake.unit_import import ImportedRun, import_units
from tierd.daemon.tiers.tier_identity import is_one_place
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.run_copy import CopiedRun, copy_run
from tierd.spool.spool import Spool
from tierd.stores.open import open_foreign, open_tiers
from tierd.threads import mark_foreground
from tierd.watching.named_directory import hub_repository

_SIBLING_PREFIX, _TEMP_PREFIX = ".tierd-import-", "tierd-import-"
_YOUNG_S = 60.0  # a directory so young may belong to an import that has not taken its lock yet


@contextmanager
def import_spool(path: Path | None) -> Iterator[Spool]:
    """Make a spool for one command: beside the path, where files can be linked, or else where temporary files go.

    What killed imports left in the same directory is removed first. Raises `SpoolHeld` if another import of the path is
    at work.
    """
    with ExitStack() as stack:
        spool = _sibling_spool(path) if path else None
        if spool is None:
            above = Path(tempfile.gettempdir())
            _sweep(above, _TEMP_PREFIX, "spool")
            directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=_TEMP_PREFIX, ignore_cleanup_errors=True)
            )
            spool = Spool(Path(directory) / "spool")
        stack.enter_context(spool.lock())
        stack.callback(shutil.rmtree, spool.root, ignore_errors=True)
        spool.remove(spool.parts())  # of an import that was killed
        if path and spool.root.parent == path.parent:
            _sweep(path.parent, _SIBLING_PREFIX, "", spool.root)
        yield spool


def _sibling_spool(path: Path) -> Spool | None:
    try:
        return Spool(path.with_name(f"{_SIBLING_PREFIX}{path.name or 'root'}"))
    except (SpoolUnusable, OSError):  # a read-only file system, or somebody else's directory
        return None


def _sweep(above: Path, prefix: str, inside: str, own_spool: Path | None = None) -> None:
    """Remove the directories of imports in `above` that ended without removing them; what cannot be removed is left.

    `inside` is the spool's name in them; it is empty if they are spools themselves.
    """
    for leftover in above.glob(f"{prefix}*"):
        with suppress(OSError, TierdError):
            status = leftover.lstat()
            # Others may write to /tmp.
            is_own_directory = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if leftover == own_spool or not is_own_directory or time.time() - status.st_mtime < _YOUNG_S:
                continue
            spool = Spool(leftover / inside, write=False)
            if not spool.lock_path.exists():
                continue  # not a spool of an import
            with spool.lock():  # refuses one that is in use
                shutil.rmtree(leftover)


_EXIT_REFUSED, _EXIT_CORRUPT = 4, 5


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("copy")(copy)
    app.command("import")(import_)


class CopyResult(msgspec.Struct, frozen=True):
    """What `copy` did, and what retention will make of it.

    Attributes:
        copy: what is on the target now; of a dry run what would be.
        unkept: the copied steps that the target's policies would prune once a daemon saves the run there.
        dry_run: whether nothing was done.
    """

    copy: CopiedRun
    unkept: tuple[int, ...]
    dry_run: bool = False


class ImportResult(msgspec.Struct, frozen=True):
    """What `import` did, and what retention will make of it.

    Attributes:
        imported: what is on every tier now; of a dry run what would be, if its content is sound.
        unkept: the imported steps that a tier's policies would prune once a daemon saves the run.
        dry_run: whether nothing was done.
    """

    imported: ImportedRun
    unkept: tuple[int, ...]
    dry_run: bool = False


def copy(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help=f"The tier to read: {PLACES}; or its name in the configuration.")
    ],
    target: Annotated[str, typer.Argument(metavar="TO", help="The tier to write.")],
    run: OnlyRunOption = None,
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
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Copy a run from one tier to another, verified, and only what TO lacks. Killed, the same command continues.
    --key-file is FROM's key. Needs no daemon."""
    source_config = make_config("/", [source], None, key_file)
    target_config = make_config("/", [target], None, to_key_file, default_key=False)
    source_places = Places(None, source_config, has_policy=False)
    run = check_run(run or only_run(source_places))
    to_run = check_run(new_name) if new_name else run
    if [*source_config.urls().values()] == [*target_config.urls().values()] and run == to_run:
        raise ConfigError(f"{target}: FROM and TO are one place; --as gives the copy another name there")
    with naming_known_runs(source_places, run):
        attempt = full_attempt(source_places, run, attempt)
        copied = asyncio.run(_copy(source_config, target_config, run, to_run, step, attempt, dry_run=dry_run))
    ids = {(checkpoint.step, checkpoint.attempt) for checkpoint in copied.checkpoints}
    answer = CopyResult(copied, () if dry_run else _steps_to_prune(target_config, to_run, ids), dry_run)
    print_json(answer) if json else _show(answer)
    if copied.failed:
        raise typer.Exit(_EXIT_CORRUPT)


async def _copy(
    source_config: Config,
    target_config: Config,
    run: str,
    to_run: str,
    step: int | None,
    attempt: str | None,
    *,
    dry_run: bool,
) -> CopiedRun:
    async with AsyncExitStack() as stack:
        (source,) = (await open_tiers(source_config, stack)).values()
        (target,) = (await open_tiers(target_config, stack)).values()
        if run == to_run and not dry_run and await is_one_place(source, target):
            raise ConfigError("FROM and TO are one place under two names; --as gives the copy another name there")
        mark_foreground()  # a person waits
        moved = Progress()
        with show_progress("copying") as bar:
            moved.on_progress = lambda at: bar.update(at.done, at.total)
            return await copy_run(source, target, run, to_run, step, attempt, moved, dry_run=dry_run)


def _show(answer: CopyResult) -> None:
    copied = answer.copy
    for text in copied.failed:
        complain(f"not copied, because it is corrupt: {text}")
    fresh = [checkpoint for checkpoint in copied.checkpoints if not checkpoint.was_there]
    run_text = copied.to_run if copied.to_run == copied.run else f"{copied.run} as {copied.to_run}"
    sent = sum(checkpoint.sent for checkpoint in fresh)
    total = sum(checkpoint.size for checkpoint in copied.checkpoints)
    already = len(copied.checkpoints) - len(fresh)
    count = f"{len(copied.checkpoints)} checkpoints, {format_size(total)}"
    if answer.dry_run:
        lacking = f"{already} are there, and at most {format_size(sent)} would be sent" if fresh else "all are there"
        print_answer(f"would copy {run_text}: {count}; {lacking}")
        for checkpoint in fresh:
            print_answer(f"  step {checkpoint.step}, {format_size(checkpoint.size)}")
        return
    print_answer(f"copied {run_text}: {count}, verified; {already} were there, and {format_size(sent)} were sent")
    if copied.pinned:
        print_answer(f"  pinned there: step {', '.join(map(str, copied.pinned))}")
    if copied.policies:
        print_answer("  the run's policies came along")
    if copied.incomplete:
        print_answer(f"  incomplete, and not copied: {copied.incomplete}")
    if copied.vanished:
        print_answer(f"  pruned meanwhile: step {', '.join(map(str, copied.vanished))}")
    _warn(answer.unkept)


def import_(
    path: Annotated[
        str, typer.Argument(metavar="PATH|URL", help="A checkpoint, or a directory of checkpoints; also in a bucket.")
    ],
    name: Annotated[str, typer.Option("--run", metavar="RUN", help="The run that they become.")],
    to: ToOption = None,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="Only this step; or of one file, its step.", show_default=False),
    ] = None,
    key_file: KeyFileOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Import other programs' checkpoints into a run: each is checked and taken as its files, in the order of steps.
    PATH is not written to. What lies in a bucket is brought below $TMPDIR, one checkpoint at a time. Needs no
    daemon."""
    run, where = check_run(name), _parse_place(path)
    config = make_config("/", to or [], None, key_file)
    imported = asyncio.run(_import(config, path, where, run, step, dry_run=dry_run))
    ids = {(unit.step, unit.attempt) for unit in imported.units}
    answer = ImportResult(imported, () if dry_run else _steps_to_prune(config, run, ids), dry_run)
    print_json(answer) if json else _show_imported(answer)
    if imported.refused:
        corrupt = any(refusal.status == "damaged" for refusal in imported.refused)
        raise typer.Exit(_EXIT_CORRUPT if corrupt else _EXIT_REFUSED)


def _parse_place(text: str) -> Path | StoreUrl:
    """Return the path that an argument names, as a path or as a file: URL; or the URL of a bucket."""
    if "://" not in text:
        path = Path(text)
    elif (url := parse_url(text)).is_directory:
        path = Path(url.path)
    else:
        return url
    if not path.exists():
        raise CheckpointNotFound(f"{path}: no such file or directory")
    if not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path}: neither a file nor a directory")
    return path


async def _import(
    config: Config, path_text: str, place: Path | StoreUrl, run: str, step: int | None, *, dry_run: bool
) -> ImportedRun:
    async with AsyncExitStack() as stack:
        stores = await open_tiers(config, stack)
        moved = Progress()
        origin: ImportSource
        if isinstance(place, Path):
            real = None if dry_run else place.resolve()
            # Not in a repository of the Hub's cache, because its own tools read each directory there.
            spool = stack.enter_context(import_spool(Path(hub_repository(str(real)) or real) if real else None))
            origin = stack.enter_context(open_directory_source(place))
        else:
            spool = stack.enter_context(import_spool(None))
            listed, name = split_url(place)
            store = open_foreign(listed)
            stack.push_async_callback(store.aclose)
            origin = await BucketImportSource.at(path_text, store, name, spool.root.with_name("objects"))
        with show_progress("importing") as bar:
            moved.on_progress = lambda at: bar.update(at.done, at.total)
            return await import_units(origin, stores, spool, run, step, moved, dry_run=dry_run)


def _show_imported(answer: ImportResult) -> None:
    imported, done = answer.imported, "would be imported" if answer.dry_run else "imported"
    rows = [
        (unit.path, unit.program, str(unit.step), format_size(unit.size), "was there" if unit.was_there else done)
        for unit in imported.units
    ]
    rows += [(refusal.path, "", "", "", f"no: {refusal.status}") for refusal in imported.refused]
    print_table(Table(("PATH", "PROGRAM", "STEP", "BYTES", f"AS RUN {imported.run}"), rows))
    for refusal in imported.refused:
        reason = refusal.reason.removeprefix(f"{refusal.path}: ")
        print_answer(f"{refusal.path}: not imported, {refusal.status}: {reason}", wrap=False)
    if answer.dry_run:
        fresh = [unit.size for unit in imported.units if not unit.was_there]
        print_answer(
            f"would import {len(fresh)} checkpoints, {format_size(sum(fresh))}, whose content is not checked yet"
        )
    _warn(answer.unkept)


def _steps_to_prune(config: Config, run: str, ids: set[tuple[int, str]]) -> tuple[int, ...]:
    """Return the steps among these checkpoints that retention would prune from a tier."""
    checkpoints = make_report(observe_inventory(Places(None, config, has_policy=False), run), config, run).checkpoints
    matching = (checkpoint for checkpoint in checkpoints if (checkpoint.step, checkpoint.attempt) in ids)
    return tuple(sorted(checkpoint.step for checkpoint in matching if not all(copy.keep for copy in checkpoint.copies)))


def _warn(unkept: tuple[int, ...]) -> None:
    if unkept:
        print_answer(
            f"  the policy there keeps not all: a daemon that saves the run there would prune {len(unkept)} of them; "
            "`tierd pin` keeps one, and the daemon's configuration more"
        )
