"""The tables of checkpoints, of their copies and of their files that `ls`, `show` and `verify` print.

A pipe has one whole line for each copy. On a terminal each copy is one line, too: a run's name is a title, an attempt
is named only if the run has several, and a checkpoint is named once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from tierd.cli.output import age_of, attempt_names, format_metrics, print_answer, terminal_width
from tierd.cli.tables import Table
from tierd.core.errors import TierdError
from tierd.core.ids import CheckpointId
from tierd.core.manifest import Manifest
from tierd.core.run_report import Checkpoint, Copy
from tierd.core.units import format_ranges, format_size
from tierd.daemon.tiers.intents import read_pin
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.checkpoint_names import is_order_of_time

_COLUMNS = (
    *("RUN", "STEP", "ATTEMPT", "CREATED", "METRICS"),
    *("WHERE", "STATE", "RANKS", "BYTES", "STORED", "KEPT BECAUSE"),
)
_COPY_COLUMNS = ("WHERE", "STATE", "SIZE", "KEPT BECAUSE")
_ByRun = TypeVar("_ByRun")


def print_checkpoints(checkpoints: Sequence[Checkpoint]) -> None:
    """Print one line for each copy of each checkpoint, run by run."""
    if terminal_width() is None or not checkpoints:
        names = attempt_names(checkpoint.attempt for checkpoint in checkpoints)
        rows = [_row(checkpoint, copy, names) for checkpoint in checkpoints for copy in checkpoint.copies]
        print_answer(Table(_COLUMNS, rows))
        return
    for run, of_run in runs_in(checkpoints, lambda checkpoint: checkpoint.run):
        names = shown_attempts(checkpoint.attempt for checkpoint in of_run)
        columns = ("STEP", "ATTEMPT", "AGE", *_COPY_COLUMNS, "METRICS")
        lines = [line for checkpoint in of_run for line in _lines(checkpoint, names[checkpoint.attempt])]
        print_answer(Table(columns, lines, title=run))


async def with_notes(
    spool: Spool | None, stores: Iterable[Store], checkpoints: Iterable[Checkpoint]
) -> list[Checkpoint]:
    """Return the checkpoints, each pinned one with the text of its pin in the first place that has one."""
    noted = []
    for checkpoint in checkpoints:
        note = b""
        if checkpoint.pinned:
            identity = CheckpointId(checkpoint.run, checkpoint.attempt, checkpoint.step)
            note = spool.pin_text(identity) if spool else b""
            for store in stores if not note else ():
                with suppress(TierdError):  # the tier was listed, and its pins are all that is missing
                    note = note or await read_pin(store, identity) or b""
        text = note.decode(errors="backslashreplace").strip()
        noted.append(replace(checkpoint, note=text) if text else checkpoint)
    return noted


def copy_table(checkpoint: Checkpoint) -> Table:
    """Return one line for each copy of a checkpoint."""
    return Table(_COPY_COLUMNS, [_copy_cells(checkpoint, copy) for copy in checkpoint.copies])


def file_table(manifests: Collection[Manifest]) -> Table:
    """Return one line for each path, with the ranks that have such a file, and the sums over these."""
    files = defaultdict(list)
    for manifest in manifests:
        for file in manifest.files:
            files[file.path].append((manifest.rank, file))
    rows = [
        (
            path,
            format_ranges(sorted(rank for rank, _ in of_ranks)),
            format_size(sum(file.size for _, file in of_ranks)),
            str(sum(len(file.chunks) for _, file in of_ranks)),
        )
        for path, of_ranks in files.items()
    ]
    return Table(("FILE", "RANKS", "BYTES", "CHUNKS"), rows)


def runs_in(items: Iterable[_ByRun], run_of: Callable[[_ByRun], str]) -> Iterator[tuple[str, list[_ByRun]]]:
    """Yield each run with its items, which are in the order of runs; after the first, print an empty line before."""
    for number, (run, of_run) in enumerate(itertools.groupby(items, key=run_of)):
        if number:
            print_answer("")
        yield run, list(of_run)


def shown_attempts(attempts: Iterable[str]) -> dict[str, str]:
    """Return how to show each attempt of a run on a terminal: not at all if there is one."""
    names = attempt_names(attempts)
    return names if len(names) > 1 else dict.fromkeys(names, "")


def step_text(number: int, created: str | None) -> str:
    """Format a checkpoint's step; of a watched file that has none, say that its number is an order."""
    return f"order {number}" if created and is_order_of_time(number, datetime.fromisoformat(created)) else str(number)


def _lines(checkpoint: Checkpoint, attempt: str) -> Iterator[tuple[str, ...]]:
    """Yield a line for each copy on a terminal, of which the first names the checkpoint."""
    step, age = _marked_step(checkpoint), age_of(checkpoint.created) if checkpoint.created else ""
    metrics = format_metrics(checkpoint.metrics)
    for copy in checkpoint.copies:
        yield (step, attempt, age, *_copy_cells(checkpoint, copy), metrics)
        step = attempt = age = metrics = ""


def _marked_step(checkpoint: Checkpoint) -> str:
    marks = ("→" if checkpoint.resumes else "") + ("*" if checkpoint.pinned else "")
    return f"{step_text(checkpoint.step, checkpoint.created)}{marks}"


def _copy_cells(checkpoint: Checkpoint, copy: Copy) -> tuple[str, ...]:
    is_whole = len(copy.ranks) == checkpoint.world_size
    state = copy.state if is_whole else f"{copy.state} {len(copy.ranks)}/{checkpoint.world_size}"
    return copy.place, state, _size_text(copy, copy.stored_size or copy.size), _verdict(copy, checkpoint.note)


def _verdict(copy: Copy, note: str) -> str:
    reasons = "; ".join((*filter(None, (note,)), *copy.reasons))
    return reasons if copy.keep else f"to be pruned: {reasons}"


def _size_text(copy: Copy, size: int) -> str:
    bound_mark = "≥ " if copy.read < len(copy.ranks) - len(copy.defects) else ""  # not every rank's manifest was read
    return bound_mark + format_size(size) if size or not bound_mark else "-"


def _row(checkpoint: Checkpoint, copy: Copy, names: Mapping[str, str]) -> list[str]:
    return [
        checkpoint.run,
        _marked_step(checkpoint),
        names[checkpoint.attempt],
        (checkpoint.created or "")[:19].replace("T", " "),
        format_metrics(checkpoint.metrics),
        copy.place,
        copy.state,
        f"{len(copy.ranks)}/{checkpoint.world_size}",
        _size_text(copy, copy.size),
        _size_text(copy, copy.stored_size) if copy.stored_size else "",
        _verdict(copy, checkpoint.note),
    ]
