"""Output for people: tables and lines.

Invariant: answers are written to stdout, everything else to stderr. All text passes through `printable`, and none of it
is markup, because anybody may choose names in a bucket.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tierd.cli.layout import lay_out
from tierd.core.printable import printable, printable_json
from tierd.core.report import Checkpoint, Copy, Report
from tierd.logs import last_word
from tierd.watching.naming import is_order

_PIPE_WIDTH = 1 << 20  # columns without a terminal, because one row is one line there


class _PrintableConsole(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*[printable(value) if isinstance(value, str) else value for value in objects], **options)


def console() -> Console:
    """Return standard output, at the terminal's width, or without an end for a pipe."""
    return _PrintableConsole(
        width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False, emoji=False
    )


def complain(text: object) -> None:
    """Print a line to stderr: an error, or a note on the answer."""
    print(last_word(str(text)), file=sys.stderr)


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


def size(count: float) -> str:
    """Format bytes for people: 1.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def paused(until: str | None) -> str:
    """Format a pause for people; empty without one."""
    return f"paused {'' if until == 'until resumed' else 'until '}{until}" if until else ""


def disagreements(policies: Iterable[Mapping[str, Any]]) -> Iterator[str]:
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


class Table:
    """A table without borders, as wide as what it is printed on. Its cells are shown as `printable` has them.

    Args:
        title: a line above; None: none.
        columns: the heads.
        rows: the cells.
        key: so many columns tell which thing a row is about, as in `lay_out`.
    """

    def __init__(self, title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]], key: int) -> None:
        self._title, self._columns, self._key = title, [*columns], key
        self._rows = [[*map(printable, row)] for row in rows]

    def lines(self, width: int | None) -> list[str]:
        """Return the lines for a terminal of this width; None: one for each row."""
        title = [printable(self._title)] if self._title else []
        return [*title, *lay_out(self._columns, self._rows, width, self._key)]

    def __rich_console__(self, on: Console, options: ConsoleOptions) -> RenderResult:
        width = None if options.max_width == _PIPE_WIDTH else options.max_width
        yield Text("\n".join(self.lines(width)), no_wrap=True, overflow="ignore")


def table(title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]], key: int = 0) -> Table:
    """Return a table to print."""
    return Table(title, columns, rows, key)


_COLUMNS = (
    *("RUN", "STEP", "ATTEMPT", "CREATED", "METRICS"),
    *("WHERE", "STATE", "RANKS", "BYTES", "STORED", "KEPT BECAUSE"),
)
_ID_COLUMNS = 5  # of these columns say which checkpoint it is, and the others are about one copy
_MOST_METRICS = 3


def checkpoints(report: Report) -> Table:
    """Return one line for each copy of each checkpoint."""
    return table(None, _COLUMNS, _rows(report), _ID_COLUMNS)


def print_checkpoints(report: Report) -> None:
    """Print the lines of `checkpoints`."""
    print_table(checkpoints(report))


def print_table(content: Table) -> None:
    """Print a table of any length. rich takes longer for many lines than it takes to observe what they show."""
    out = console()
    sys.stdout.write("\n".join(content.lines(None if out.width == _PIPE_WIDTH else out.width)) + "\n")


def metrics(values: Mapping[str, float | None]) -> str:
    """Format metrics for people, the first few by name: losses first, because frameworks log many others."""
    ordered = sorted(values.items(), key=lambda metric: ("loss" not in metric[0], metric[0]))
    texts = [f"{name} {'none' if value is None else f'{value:.4g}'}" for name, value in ordered]
    remainder = f", {len(texts) - _MOST_METRICS} more" if len(texts) > _MOST_METRICS else ""
    return ", ".join(texts[:_MOST_METRICS]) + remainder


def step(number: int, created: str | None) -> str:
    """Format a checkpoint's step; of a watched file that has none, say that its number is an order."""
    return f"order {number}" if created and is_order(number, datetime.fromisoformat(created)) else str(number)


def _rows(report: Report) -> list[list[str]]:
    return [_row(checkpoint, copy) for checkpoint in report.checkpoints for copy in checkpoint.copies]


def _row(checkpoint: Checkpoint, copy: Copy) -> list[str]:
    marks = ("→" if checkpoint.resumes else "") + ("*" if checkpoint.pinned else "")
    verdict = "; ".join(copy.reasons) if copy.keep else f"to be pruned: {'; '.join(copy.reasons)}"
    bound_mark = "≥ " if copy.read < len(copy.ranks) - len(copy.defects) else ""  # not every rank's manifest was read
    return [
        checkpoint.run,
        f"{step(checkpoint.step, checkpoint.created)}{marks}",
        checkpoint.attempt,
        (checkpoint.created or "")[:19].replace("T", " "),
        metrics(checkpoint.metrics),
        copy.place,
        copy.state,
        f"{len(copy.ranks)}/{checkpoint.world_size}",
        bound_mark + size(copy.size),
        bound_mark + size(copy.stored_size) if copy.stored_size else "",
        verdict,
    ]
