"""Commands that bring checkpoints out of tiers: `restore`, `export` and `follow`.

Invariant: torch and the reading modules are imported only when `export` or `follow` runs, and those that know other
programs' checkpoints only for `restore --into`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from tierd.cli.command_runtime import EXIT_UNDELIVERED, collector_paused
from tierd.cli.missing_runs import check_run_exists, full_attempt, naming_known_runs, only_run, warn_of_unknown_run
from tierd.cli.options import (
    AttemptOption,
    BestOption,
    ConfigOption,
    DryRunOption,
    JsonOption,
    KeyFileOption,
    ModeOption,
    OnlyRunOption,
    StepOption,
    UrlArgument,
    best_goal,
)
from tierd.cli.output import complain, print_answer, print_json, print_lines
from tierd.cli.places import Places, resolve_places
from tierd.cli.progress import show_progress
from tierd.core.config import Config
from tierd.core.errors import ConfigError, printable_json
from tierd.core.ids import check_run
from tierd.core.installation import install_command
from tierd.core.retention.policy import parse_duration
from tierd.core.save_rules import MetricGoal
from tierd.core.units import format_size
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.local_files import check_restore_target
from tierd.daemon.transfer.restore_forecast import RestoreForecast, forecast_restore
from tierd.daemon.transfer.restore_to_directory import RestoredDirectory, restore_to_directory
from tierd.stores.base import Store
from tierd.stores.open import open_tiers
from tierd.threads import mark_foreground

if TYPE_CHECKING:
    from tierd.daemon.intake.in_place_restore import RestoredUnit

T = TypeVar("T")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(follow)
    app.command("export")(export_command)
    app.command()(restore)


def restore(
    url: UrlArgument = None,
    run: OnlyRunOption = None,
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
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Copy a checkpoint out of the tiers, the newest verified one or the best: one directory a rank, or back in place.
    Needs no daemon."""
    if (to is None) == (into is None):
        raise ConfigError("restore needs either --to DIR or --into DIR")
    goal = best_goal(best, mode, step)
    where = resolve_places(None, url, config, key_file=key_file, tiers=True)
    assert where.config is not None
    moved, run = Progress(), check_run(run or only_run(where))
    with naming_known_runs(where, run):
        attempt = full_attempt(where, run, attempt)
    if dry_run:
        if to is not None:
            check_restore_target(to)
        with naming_known_runs(where, run):
            forecast = asyncio.run(_forecast(where.config, run, step, attempt, goal, into or to or Path()))
        print_json(forecast) if json else _show_forecast(forecast)
        return
    if into is not None:
        from tierd.daemon.intake.series_restore import restore_in_place

        directory = into.absolute()
        with naming_known_runs(where, run):
            put_back = asyncio.run(
                with_tiers(
                    where.config,
                    moved,
                    lambda stores: restore_in_place(stores, run, directory, step, attempt, moved, goal),
                )
            )
        print_json(put_back) if json else _show_put(put_back, into)
        return
    assert to is not None
    target = to
    with naming_known_runs(where, run):
        exported = asyncio.run(
            with_tiers(
                where.config,
                moved,
                lambda stores: restore_to_directory(stores, run, target, step, attempt, moved, best=goal),
            )
        )
    print_json(exported) if json else _show(exported, moved)


async def _forecast(
    config: Config, run: str, step: int | None, attempt: str | None, best: MetricGoal | None, target: Path
) -> RestoreForecast:
    async with AsyncExitStack() as stack:
        return await forecast_restore(await open_tiers(config, stack), run, target, step, attempt, best)


def _show_forecast(forecast: RestoreForecast) -> None:
    print_answer(
        f"would restore {forecast.run} step {forecast.step} (attempt {forecast.attempt}), {forecast.files} files, "
        f"{format_size(forecast.size)}, by {forecast.objects} chunks from {' or '.join(forecast.tiers)}, in:"
    )
    print_answer(f"  {forecast.target}")


async def with_tiers(config: Config, moved: Progress, work: Callable[[Mapping[str, Store]], Awaitable[T]]) -> T:
    """Open the tiers for `work`, and show its progress; a person waits for it."""
    async with AsyncExitStack() as stack:
        stores = await open_tiers(config, stack)
        mark_foreground()
        with show_progress("restoring") as meter:
            moved.on_progress = lambda at: meter.update(at.done, at.total)
            return await work(stores)


def _show(exported: RestoredDirectory, moved: Progress) -> None:
    for text in exported.skipped:
        print_answer(f"skipped {text}")
    source = f"from {', '.join(exported.tiers)}, " if exported.tiers else ""
    print_answer(
        f"restored {exported.run} step {exported.step} (attempt {exported.attempt}), {format_size(exported.size)} "
        "verified, "
        f"{source}in:"
    )
    for directory in exported.directories:
        print_answer(f"  {directory}")
    if moved.kept_bytes:
        print_answer(f"  {format_size(moved.kept_bytes)} of it had been fetched before")


def _show_put(put_back: RestoredUnit, into: Path) -> None:
    for text in put_back.skipped:
        print_answer(f"skipped {text}")
    verb = "already right:" if put_back.was_right else "put back"
    print_answer(
        f"{verb} {into / put_back.path}: {put_back.run} step {put_back.step}, {format_size(put_back.size)} verified"
    )
    for path in put_back.moved:
        print_answer(f"  what was there lies in {into / path}")
    for path in put_back.pointers:
        print_answer(f"  {into / path} names it")
    for sibling in put_back.beside:
        _show_put(sibling, into)


_REFUSES = {"torch": "torch.load refuses them by default", "dcp": "only a restore loads them"}


def export_command(
    url: UrlArgument = None,
    run: OnlyRunOption = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="An empty or absent directory.")] = None,
    format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="safetensors, hf, torch or dcp.")
    ] = "safetensors",
    only: Annotated[
        str | None, typer.Option("--only", metavar="ENTRY", help="One entry of the state, say model.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="fp32, fp16 or bf16, for floating-point tensors.")
    ] = None,
    strip: Annotated[
        str, typer.Option("--strip", metavar="PREFIX", help="Remove this from names, say module.", show_default=False)
    ] = "",
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, metavar="R", help="Whose value, where those of ranks differ.")
    ] = None,
    step: StepOption = None,
    attempt: AttemptOption = None,
    best: BestOption = None,
    mode: ModeOption = "min",
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Export a checkpoint in another format, the newest verified one or the best, streamed. Needs no daemon."""
    if to is None:
        raise ConfigError("export needs --to DIR")
    best_goal(best, mode, step)
    try:
        with collector_paused():
            from tierd.reading import export_from_tiers as _exports  # noqa: F401  loaded here, because `Reader.export` needs it
            from tierd.reading import open as open_run
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; {install_command('torch,daemon')}") from error

    where = resolve_places(None, url, None, key_file=key_file, tiers=True)
    run = run or only_run(where)
    with (
        naming_known_runs(where, run),
        open_run(*reader_arguments(where, run)) as reader,
        show_progress("exporting") as meter,
    ):
        exported = reader.export(
            to,
            format,
            step,
            attempt=full_attempt(where, run, attempt),
            best=best,
            mode=mode,
            only=only,
            dtype=dtype,
            strip=strip,
            rank=rank,
            on_progress=meter.update,
        )
    if json:
        print_json(exported)
        return
    print_answer(
        f"step {exported.step} (attempt {exported.attempt}): {exported.tensors} tensors in {exported.directory}"
    )
    for file, length in exported.files.items():
        print_answer(f"  {file}  {format_size(length)}")
    for names, reason in (
        (exported.converted, "converted, because torch.load refuses these types by default"),
        (exported.left_out, f"left out, because {_REFUSES.get(format, 'they are not tensors')}"),
    ):
        if names:
            ellipsis = f", … ({len(names)} in all, which --json names)" if len(names) > 5 else ""
            print_answer(f"{reason}: {', '.join(names[:5])}{ellipsis}")
    if strip and not exported.stripped:
        complain(f"--strip {strip}: no name begins with it; --only leaves an entry's name out of the others")
    if exported.overflowed:
        ellipsis = ", …" if len(exported.overflowed) > 5 else ""
        complain(f"--dtype {dtype} made finite values infinite in {', '.join(exported.overflowed[:5])}{ellipsis}")
    for text in exported.skipped:
        print_answer(f"skipped {text}")


def follow(
    url: UrlArgument = None,
    run: OnlyRunOption = None,
    command: Annotated[
        str,
        typer.Option(
            "--exec", metavar="COMMAND", help="{directory}, {step}, {attempt} and {run} are replaced; no shell runs."
        ),
    ] = "",
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="The follower's own directory: its state, and files.")
    ] = None,
    latest: Annotated[bool, typer.Option("--latest", help="Only the newest, not each one in order.")] = False,
    period: Annotated[str, typer.Option("--period", metavar="TIME", help="At most one listing in this time.")] = "30s",
    once: Annotated[bool, typer.Option("--once", help="Deliver what is there now, and end.")] = False,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Run a command for each complete checkpoint, once over restarts; status 0 counts as delivered.

    Its files are fetched and verified if the command names {directory}; otherwise only its manifests are read.
    A run that begins later is waited for, without --once."""
    if not command or to is None:
        raise ConfigError("follow needs --exec COMMAND and --to DIR")
    try:
        period_s = parse_duration(period)
    except ValueError as error:
        raise ConfigError(f"--period: {error}") from error
    try:
        from tierd.reading import open as open_run
        from tierd.reading.command_follower import CommandFollower, Delivery, parse_command
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; {install_command('torch,daemon')}") from error

    def show(delivery: Delivery) -> None:
        if json:
            print(printable_json(msgspec.json.encode(delivery).decode()), flush=True)
        else:
            print_lines(
                f"{delivery.run} step {delivery.step} (attempt {delivery.attempt}): {delivery.reason or 'delivered'}"
            )

    words = parse_command(command)
    where = resolve_places(None, url, None, key_file=key_file, tiers=True)
    _check_apart(to, where)
    run = run or only_run(where)
    # A follower may be started before the run's first save, but what ends at once has nothing to wait for.
    (check_run_exists if once else warn_of_unknown_run)(where, run)
    with open_run(*reader_arguments(where, run)) as reader:
        follower = CommandFollower(reader.tiers, to, words, show)
        if not follower.run(latest=latest, period_s=period_s, once=once):
            raise typer.Exit(EXIT_UNDELIVERED)


def reader_arguments(where: Places, run: str) -> tuple[list[str], str, str | None]:
    """Return the arguments of `tierd.open` for the tiers; raises `ConfigError` if these have several keys."""
    assert where.config is not None
    keys = {tier.key_file for tier in where.config.tier}
    if len(keys) > 1:
        raise ConfigError("the tiers have different keys, so name one of them")
    return [tier.url for tier in where.config.tier], run, keys.pop()


def _check_apart(to: Path, where: Places) -> None:
    """Refuse a state directory in a tier, because everything in a tier belongs to a run; raises `ConfigError`."""
    for url, place in where.config.urls().items() if where.config else ():
        if place.is_directory and to.resolve().is_relative_to(Path(place.path).resolve()):
            raise ConfigError(f"--to {to}: it lies in the tier {url}; name a directory of the follower's own")
