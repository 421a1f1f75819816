"""`tierd copy`: a run, or one checkpoint, from one tier to another. `tierd import`: others' checkpoints into tiers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.cli.acting.import_spool import import_spool
from tierd.cli.known import answering
from tierd.cli.options import AttemptOption, JsonOption, KeyFileOption, Places, ToOption
from tierd.cli.progress import progress
from tierd.cli.reading.read import observed
from tierd.cli.tables import complain, console, print_json, print_table, size, table
from tierd.core.config import Config, from_urls
from tierd.core.errors import CheckpointNotFound, ConfigError
from tierd.core.ids import check_run
from tierd.core.report import report
from tierd.core.urls import StoreUrl, parse_url
from tierd.daemon.intake.bucket import BucketOrigin, split_url
from tierd.daemon.intake.importing import ImportedRun, import_units
from tierd.daemon.intake.origin import Origin, directory_origin
from tierd.daemon.opening import open_tiers
from tierd.daemon.tiers.identity import is_one_place
from tierd.daemon.transfer.copy import CopiedRun, copy_run
from tierd.daemon.transfer.download import Progress
from tierd.priority import hasten
from tierd.stores.open import open_foreign
from tierd.watching.links import repository

_EXIT_REFUSED, _EXIT_CORRUPT = 4, 5


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("copy")(copy)
    app.command("import")(import_)


class Copied(msgspec.Struct, frozen=True):
    """What `copy` did, and what retention will make of it.

    Attributes:
        copy: what is on the target now.
        unkept: the copied steps that the target's policies would prune once a daemon saves the run there.
    """

    copy: CopiedRun
    unkept: tuple[int, ...]


class Imported(msgspec.Struct, frozen=True):
    """What `import` did, and what retention will make of it.

    Attributes:
        imported: what is on every tier now.
        unkept: the imported steps that a tier's policies would prune once a daemon saves the run.
    """

    imported: ImportedRun
    unkept: tuple[int, ...]


def copy(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="The tier to read: file:///path, or a bucket: s3://, gs:// or az://.")
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
    answer = Copied(done, _unkept(there, to_run, {(one.step, one.attempt) for one in done.checkpoints}))
    print_json(answer) if json else _show(answer)
    if done.failed:
        raise typer.Exit(_EXIT_CORRUPT)


def _tier(url: str, key_file: Path | None) -> Config:
    return from_urls("/", [url], key_file=str(key_file.absolute()) if key_file else None)


async def _copy(here: Config, there: Config, run: str, to_run: str, step: int | None, attempt: str | None) -> CopiedRun:
    async with AsyncExitStack() as stack:
        (source,) = (await open_tiers(here, stack)).values()
        (target,) = (await open_tiers(there, stack)).values()
        if run == to_run and await is_one_place(source, target):
            raise ConfigError("FROM and TO are one place under two names; --as gives the copy another name there")
        hasten()  # a person waits
        moved = Progress()
        with progress("copying") as bar:
            moved.on_progress = lambda at: bar.update(at.done, at.total)
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
    json: JsonOption = False,
) -> None:
    """Turn existing checkpoints of other programs into verified ones of a run: each is checked and taken as its files,
    in the order of steps. PATH is not written to. What lies in a bucket is brought below $TMPDIR, one checkpoint at a
    time. Needs no daemon."""
    run, where = check_run(name), _place(path)
    config = from_urls("/", to or [], key_file=str(key_file.absolute()) if key_file else None)
    done = asyncio.run(_import(config, path, where, run, step))
    answer = Imported(done, _unkept(config, run, {(one.step, one.attempt) for one in done.units}))
    print_json(answer) if json else _show_imported(answer)
    if done.refused:
        corrupt = any(one.status == "damaged" for one in done.refused)
        raise typer.Exit(_EXIT_CORRUPT if corrupt else _EXIT_REFUSED)


def _place(text: str) -> Path | StoreUrl:
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


async def _import(config: Config, shown: str, place: Path | StoreUrl, run: str, step: int | None) -> ImportedRun:
    async with AsyncExitStack() as stack:
        stores = await open_tiers(config, stack)
        moved = Progress()
        origin: Origin
        if isinstance(place, Path):
            real = place.resolve()
            # Not in a repository of the Hub's cache, because its own tools read each directory there.
            spool = stack.enter_context(import_spool(Path(repository(str(real)) or real)))
            origin = stack.enter_context(directory_origin(place))
        else:
            spool = stack.enter_context(import_spool(None))
            listed, name = split_url(place)
            store = open_foreign(listed)
            stack.push_async_callback(store.aclose)
            origin = await BucketOrigin.at(shown, store, name, spool.root.with_name("objects"))
        with progress("importing") as bar:
            moved.on_progress = lambda at: bar.update(at.done, at.total)
            return await import_units(origin, stores, spool, run, step, moved)


def _show_imported(answer: Imported) -> None:
    done = answer.imported
    rows = [
        (one.path, one.program, str(one.step), size(one.size), "was there" if one.was_there else "imported")
        for one in done.units
    ]
    rows += [(one.path, "", "", "", f"not imported, {one.status}: {one.reason}") for one in done.refused]
    print_table(table(None, ("PATH", "PROGRAM", "STEP", "BYTES", f"AS RUN {done.run}"), rows))
    _warn(answer.unkept)


def _unkept(config: Config, run: str, ids: set[tuple[int, str]]) -> tuple[int, ...]:
    """Return the steps among these checkpoints that retention would prune from a tier."""
    found = report(observed(Places(None, config, policy=False), run), config, run).checkpoints
    mine = (one for one in found if (one.step, one.attempt) in ids)
    return tuple(sorted(one.step for one in mine if not all(copy.keep for copy in one.copies)))


def _warn(unkept: tuple[int, ...]) -> None:
    if unkept:
        console().print(
            f"  the policy there keeps not all: a daemon that saves the run there would prune {len(unkept)} of them; "
            "`tierd pin` keeps one, and the daemon's configuration more"
        )
