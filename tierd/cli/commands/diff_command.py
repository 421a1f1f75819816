"""The comparison of two checkpoints: `diff`, which only reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tierd.cli.command_runtime import EXIT_NOT_EXACT, collector_paused
from tierd.cli.commands.checkpoint_commands import choose_checkpoint, observe_inventory
from tierd.cli.commands.retrieval_commands import reader_arguments
from tierd.cli.missing_runs import full_attempt, naming_known_runs, only_run
from tierd.cli.options import ConfigOption, JsonOption, KeyFileOption, OnlyRunOption, SpoolOption, UrlArgument
from tierd.cli.output import print_answer, print_json
from tierd.cli.places import Places, resolve_places
from tierd.cli.progress import show_progress
from tierd.cli.tables import Table
from tierd.core.errors import ConfigError, ObjectNotFound
from tierd.core.ids import CheckpointId, check_run
from tierd.core.installation import install_command
from tierd.core.planning.copies import complete_world_sizes
from tierd.core.planning.place import SPOOL
from tierd.core.units import format_ranges

if TYPE_CHECKING:
    from tierd.reading.checkpoint_differences import CheckpointDifferences, ComparedCheckpoint

_NAMED = re.compile(r"(?:(?P<run>[^:@]+):)?(?P<step>[0-9]{1,12})(?:@(?P<attempt>[0-9a-f-]+))?")
_DESCRIBED = "A checkpoint: its step, or RUN:STEP, or STEP@ATTEMPT."


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(diff)


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=_DESCRIBED)],
    second: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare it with.")],
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    run: OnlyRunOption = None,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints: which tensors and other entries differ, and how far. Exit code 8 when some do.

    Chunks with equal digests are known to be equal, and a tensor of them is not read. Other tensors are streamed."""
    try:
        with collector_paused():
            from tierd.reading.checkpoint_differences import compare_checkpoints
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; {install_command('torch,daemon')}") from error

    where = resolve_places(spool, url, config, key_file=key_file, run_option=True)
    names = [_parse(text) for text in (first, second)]
    usual_run = run or (only_run(where) if any(named["run"] is None for named in names) else None)
    with ExitStack() as stack, show_progress("comparing") as meter:
        sides = [stack.enter_context(_opened(where, named, usual_run)) for named in names]
        result = compare_checkpoints(sides[0], sides[1], meter.advance)
    if json:
        print_json(result)
    else:
        print_answer(f"{_titles(*(side.part.checkpoint for side in sides))}: {_counts(result)}")
        rows = [
            (
                difference.entry,
                difference.change,
                "" if difference.max_abs is None else f"{difference.max_abs:.3g}",
                "" if difference.relative_norm is None else f"{difference.relative_norm:.3g}",
                format_ranges(difference.ranks) if len(difference.ranks) > 1 else "",
                difference.form,
            )
            for difference in result.differences
        ]
        if rows:
            print_answer(Table(("ENTRY", "CHANGE", "MAX ABS", "RELATIVE", "RANKS", "FORM OR VALUE"), rows))
    if result.differences:
        raise typer.Exit(EXIT_NOT_EXACT)


def _titles(first: CheckpointId, second: CheckpointId) -> str:
    """Name both checkpoints, with the run and the attempts only if these differ."""
    if first.run != second.run:
        return f"{first} → {second}"
    titles = [f"step {checkpoint.step}" for checkpoint in (first, second)]
    if first.attempt != second.attempt:
        titles = [f"{titles[at]} ({name})" for at, name in enumerate((first.attempt, second.attempt))]
    return f"run {first.run}: {' → '.join(titles)}"


def _counts(result: CheckpointDifferences) -> str:
    count = len(result.differences)
    return f"{count} entr{'y differs' if count == 1 else 'ies differ'}, {result.equal} equal"


def _parse(text: str) -> dict[str, str | None]:
    match = _NAMED.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} names no checkpoint: write STEP, RUN:STEP or STEP@ATTEMPT")
    return match.groupdict()


@contextmanager
def _opened(where: Places, named: dict[str, str | None], usual_run: str | None) -> Iterator[ComparedCheckpoint]:
    """Open a checkpoint's files in the spool if it is whole there, else on the tiers."""
    run = check_run(named["run"] or usual_run or "")
    with naming_known_runs(where, run):
        attempt = full_attempt(where, run, named["attempt"])
        inventory = observe_inventory(where, run)
        checkpoint = choose_checkpoint(inventory, run, int(named["step"] or 0), attempt)
    from tierd.reading import open as open_run
    from tierd.reading.checkpoint_differences import ComparedCheckpoint

    copies = inventory.copies(run).get(checkpoint, {})
    local = copies.get(SPOOL)
    if where.spool and local and (local_worlds := complete_world_sizes(local.ranks)):
        yield ComparedCheckpoint.in_spool(where.spool, checkpoint, max(local_worlds))
        return
    worlds = {world for copy in copies.values() for world in complete_world_sizes(copy.ranks)}
    if not worlds or where.config is None:
        raise ObjectNotFound(f"{checkpoint}: no place that was named has the parts of all ranks")
    with open_run(*reader_arguments(where, run)) as reader:
        yield ComparedCheckpoint.on_tiers(reader, checkpoint, max(worlds))
