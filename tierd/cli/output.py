"""Output for people: tables and lines, on a terminal or through a pipe.

Invariant: answers are written to stdout, everything else to stderr. All text passes through `printable`, and none of it
is markup, because anybody may choose names in a bucket.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console

from tierd.cli.tables import Table
from tierd.core.errors import printable, printable_json
from tierd.core.run_report import Checkpoint, Copy, Report
from tierd.core.units import format_age, format_size
from tierd.logs import format_exit_error
from tierd.watching.checkpoint_names import is_order_of_time

_PIPE_WIDTH = 1 << 20  # columns without a terminal, because one row is one line there


class _PrintableConsole(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        for value in objects:
            if isinstance(value, Table):
                print_table(value)
            else:
                super().print(printable(value) if isinstance(value, str) else value, **options)


def console() -> Console:
    """Return standard output, at the terminal's width, or without an end for a pipe."""
    return _PrintableConsole(
        width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False, emoji=False
    )


def complain(text: object) -> None:
    """Print a line to stderr: an error, or a note on the answer."""
    print(format_exit_error(str(text)), file=sys.stderr)


def print_lines(text: object, *, error: bool = False) -> None:
    """Print text of several lines unchanged."""
    lines = map(printable, str(text).split("\n"))
    print("\n".join(lines), file=sys.stderr if error else sys.stdout, flush=True)


def print_json(answer: Any) -> None:
    """Print an answer as one JSON object. In names of files, bytes that are not UTF-8 are escaped."""
    try:
        data = msgspec.json.encode(answer)
    except UnicodeEncodeError:
        data = json.dumps(_printable_values(msgspec.to_builtins(answer)), ensure_ascii=False).encode()
    sys.stdout.write(printable_json(msgspec.json.format(data, indent=2).decode()) + "\n")


def _printable_values(value: Any) -> Any:
    """Return an answer with every unpaired surrogate escaped."""
    if isinstance(value, dict):
        return {_printable_values(key): _printable_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_printable_values(inner) for inner in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def age_of(moment: object, now: datetime | None = None) -> str:
    """Format the age of a moment in RFC 3339; `unknown` if it is none."""
    try:
        return format_age(((now or datetime.now(UTC)) - datetime.fromisoformat(str(moment))).total_seconds())
    except (ValueError, TypeError):
        return "unknown"


def policy_conflict_lines(policies: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Return a line with the remedy for each policy that is unreadable or differs from another of its run and tier."""
    conflicts = [policy for policy in policies if policy["disagrees"]]
    for conflict in conflicts:
        rules = {name: value for name, value in (conflict["retention"] or {}).items() if value is not None}
        says = (
            f"keeps {rules}" if conflict["retention"] else f"cannot be read, so nothing is deleted: {conflict['why']}"
        )
        origin = f"{conflict['given']} on {conflict['host'] or '?'}"
        yield f"{conflict['tier']}: run {conflict['run']}: {conflict['key']} ({origin}) {says}"
    if conflicts:
        yield "Whatever any of these keeps is kept. Make them agree, or delete the object of a node that is gone."


_COLUMNS = (
    *("RUN", "STEP", "ATTEMPT", "CREATED", "METRICS"),
    *("WHERE", "STATE", "RANKS", "BYTES", "STORED", "KEPT BECAUSE"),
)
_ID_COLUMNS = 5  # of these columns say which checkpoint it is, and the others are about one copy
_MOST_METRICS = 3
_SHORT_ID = 4  # digits of an attempt's id, or more


def checkpoint_table(report: Report) -> Table:
    """Return one line for each copy of each checkpoint."""
    return Table(_COLUMNS, _rows(report), _ID_COLUMNS)


def print_checkpoints(report: Report) -> None:
    """Print the lines of `checkpoint_table`."""
    print_table(checkpoint_table(report))


def print_table(content: Table) -> None:
    """Print a table of any length. rich takes longer for many lines than it takes to observe what they show."""
    sys.stdout.write("\n".join(content.lines(terminal_width())) + "\n")


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if the output is none."""
    return console().width if sys.stdout.isatty() else None


def attempt_names(attempts: Iterable[str]) -> dict[str, str]:
    """Return how to show each attempt: whole through a pipe, else the first digits of its random part that are unique.

    Options take these digits, too: see `full_attempt`.
    """
    ids = set(attempts)
    if not sys.stdout.isatty():
        return {attempt: attempt for attempt in ids}
    return {attempt: _short_attempt(attempt, ids) for attempt in ids}


def _short_attempt(attempt: str, ids: Collection[str]) -> str:
    digits = attempt.rpartition("-")[2]
    for length in range(_SHORT_ID, len(digits) + 1):
        if sum(other.rpartition("-")[2].startswith(digits[:length]) for other in ids) == 1:
            return digits[:length]
    return attempt


def format_metrics(values: Mapping[str, float | None]) -> str:
    """Format metrics for people, the first few by name: losses first, because frameworks log many others."""
    ordered = sorted(values.items(), key=lambda metric: ("loss" not in metric[0], metric[0]))
    texts = [f"{name} {'none' if value is None else f'{value:.4g}'}" for name, value in ordered]
    remainder = f", {len(texts) - _MOST_METRICS} more" if len(texts) > _MOST_METRICS else ""
    return ", ".join(texts[:_MOST_METRICS]) + remainder


def step_text(number: int, created: str | None) -> str:
    """Format a checkpoint's step; of a watched file that has none, say that its number is an order."""
    return f"order {number}" if created and is_order_of_time(number, datetime.fromisoformat(created)) else str(number)


def _rows(report: Report) -> list[list[str]]:
    names = attempt_names(checkpoint.attempt for checkpoint in report.checkpoints)
    return [_row(checkpoint, copy, names) for checkpoint in report.checkpoints for copy in checkpoint.copies]


def _row(checkpoint: Checkpoint, copy: Copy, names: Mapping[str, str]) -> list[str]:
    marks = ("→" if checkpoint.resumes else "") + ("*" if checkpoint.pinned else "")
    verdict = "; ".join(copy.reasons) if copy.keep else f"to be pruned: {'; '.join(copy.reasons)}"
    bound_mark = "≥ " if copy.read < len(copy.ranks) - len(copy.defects) else ""  # not every rank's manifest was read
    return [
        checkpoint.run,
        f"{step_text(checkpoint.step, checkpoint.created)}{marks}",
        names[checkpoint.attempt],
        (checkpoint.created or "")[:19].replace("T", " "),
        format_metrics(checkpoint.metrics),
        copy.place,
        copy.state,
        f"{len(copy.ranks)}/{checkpoint.world_size}",
        bound_mark + format_size(copy.size),
        bound_mark + format_size(copy.stored_size) if copy.stored_size else "",
        verdict,
    ]
