"""Output for people: tables and lines.

Invariant: answers are written to stdout, everything else to stderr. All text passes through `printable`, and none of it
is markup, because anybody may choose names in a bucket. No line of a table is wider than asked for, and no text is left
out.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tierd.core.errors import printable, printable_json
from tierd.core.run_report import Checkpoint, Copy, Report
from tierd.logs import format_exit_error
from tierd.watching.checkpoint_names import is_order_of_time

_GAP, _INDENT = 2, 4  # columns of the terminal
_MIN_WRAP_WIDTH = 30  # columns that wrapped text needs to be readable beside others

_folding = Console(file=io.StringIO(), width=80)  # only for the rules by which rich wraps text


@dataclass(frozen=True, slots=True)
class _Line:
    """One of the lines that each row takes: which columns stand there, and how wide each is."""

    indent: int
    columns: tuple[int, ...]
    widths: tuple[int, ...]

    def of(self, row: Sequence[str]) -> list[str]:
        """Return the cells of a row; several lines if some are wrapped."""
        cells = [wrap_text(row[at], width) for at, width in zip(self.columns, self.widths, strict=True)]
        tall = max(map(len, cells))
        lines = []
        for number in range(tall):
            pieces = [cell[number] if number < len(cell) else "" for cell in cells]
            text = (" " * _GAP).join(map(_padded, pieces, self.widths))
            lines.append((" " * self.indent + text).rstrip())
        return lines


def lay_out_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, key: int = 0) -> list[str]:
    """Lay out a table of printable cells.

    A row that does not fit takes several lines, of which all but the first are indented. Each column stands below its
    head. Columns without any text are left out then, unless no cell has any.

    Args:
        width: of the lines, in columns of the terminal; None: one line a row, however long.
        key: so many columns tell which thing a row is about. If rows take several lines, these have lines of their
            own, which are left out where they repeat those of the row before.
    """
    widths = [max(map(_width, column)) for column in zip(columns, *rows, strict=True)]
    all_columns = range(len(columns))
    if width is None or sum(widths) + _GAP * (len(widths) - 1) <= width:
        line = _Line(0, tuple(all_columns), tuple(widths))
        return [text for row in (columns, *rows) for text in line.of(row)]
    filled_columns = [at for at in all_columns if any(row[at] for row in rows)] or all_columns
    if fitting := _one_line(filled_columns, widths, width):
        return [text for row in (columns, *rows) for text in fitting.of(row)]
    naming = _lines([at for at in filled_columns if at < key], widths, width, first=True)
    informative = _lines([at for at in filled_columns if at >= key], widths, width, first=not naming)
    lines = [text for line in (*naming, *informative) for text in line.of(columns)]
    before: list[str] = []
    for row in rows:
        name = [text for line in naming for text in line.of(row)]
        lines += name if name != before else []
        lines += [text for line in informative for text in line.of(row)]
        before = name
    return lines


def _one_line(columns: Sequence[int], widths: Sequence[int], width: int) -> _Line | None:
    """Return one line of all columns, with the last one wrapped; None if it is too narrow for that."""
    *leading, last = columns
    room = width - sum(widths[at] + _GAP for at in leading)
    if room < min(_MIN_WRAP_WIDTH, widths[last]):
        return None
    return _Line(0, tuple(columns), (*(widths[at] for at in leading), min(widths[last], room)))


def _lines(columns: Sequence[int], widths: Sequence[int], width: int, *, first: bool) -> list[_Line]:
    """Distribute columns over lines, in order. `first`: whether the first one is a row's first, and not indented."""
    lines: list[_Line] = []
    line_columns: list[int] = []
    room = width if first else width - _INDENT
    for at in columns:
        wraps = at == columns[-1] and room >= _MIN_WRAP_WIDTH
        if line_columns and widths[at] > room and not wraps:
            lines.append(_line(line_columns, widths, width, indented=bool(lines) or not first))
            line_columns, room = [], width - _INDENT
        line_columns.append(at)
        room -= widths[at] + _GAP
    return [*lines, _line(line_columns, widths, width, indented=bool(lines) or not first)] if line_columns else lines


def _line(columns: Sequence[int], widths: Sequence[int], width: int, *, indented: bool) -> _Line:
    indent = _INDENT if indented else 0
    *leading, last = columns
    room = width - indent - sum(widths[at] + _GAP for at in leading)
    return _Line(indent, tuple(columns), (*(widths[at] for at in leading), max(1, min(widths[last], room))))


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - _width(cell))


def _width(cell: str) -> int:
    return len(cell) if cell.isascii() else cell_len(cell)  # rich looks at each character


def wrap_text(cell: str, width: int) -> list[str]:
    """Break text into lines of at most `width`, between words where that is possible."""
    if _width(cell) <= width:
        return [cell]
    return [line.plain.rstrip() for line in Text(cell).wrap(_folding, width, overflow="fold")]


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


def format_size(count: float) -> str:
    """Format bytes for people: 1.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def pause_text(until: str | None) -> str:
    """Format a pause for people; empty without one."""
    return f"paused {'' if until == 'until resumed' else 'until '}{until}" if until else ""


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


class Table:
    """A table without borders, as wide as what it is printed on. Its cells are shown as `printable` has them.

    Args:
        title: a line above; None: none.
        columns: the heads.
        rows: the cells.
        key: so many columns tell which thing a row is about, as in `lay_out_table`.
    """

    def __init__(self, title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]], key: int) -> None:
        self._title, self._columns, self._key = title, [*columns], key
        self._rows = [[*map(printable, row)] for row in rows]

    def lines(self, width: int | None) -> list[str]:
        """Return the lines for a terminal of this width; None: one for each row."""
        title = [printable(self._title)] if self._title else []
        return [*title, *lay_out_table(self._columns, self._rows, width, self._key)]

    def __rich_console__(self, on: Console, options: ConsoleOptions) -> RenderResult:
        width = None if options.max_width == _PIPE_WIDTH else options.max_width
        yield Text("\n".join(self.lines(width)), no_wrap=True, overflow="ignore")


def make_table(title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]], key: int = 0) -> Table:
    """Return a table to print."""
    return Table(title, columns, rows, key)


_COLUMNS = (
    *("RUN", "STEP", "ATTEMPT", "CREATED", "METRICS"),
    *("WHERE", "STATE", "RANKS", "BYTES", "STORED", "KEPT BECAUSE"),
)
_ID_COLUMNS = 5  # of these columns say which checkpoint it is, and the others are about one copy
_MOST_METRICS = 3


def checkpoint_table(report: Report) -> Table:
    """Return one line for each copy of each checkpoint."""
    return make_table(None, _COLUMNS, _rows(report), _ID_COLUMNS)


def print_checkpoints(report: Report) -> None:
    """Print the lines of `checkpoint_table`."""
    print_table(checkpoint_table(report))


def print_table(content: Table) -> None:
    """Print a table of any length. rich takes longer for many lines than it takes to observe what they show."""
    out = console()
    sys.stdout.write("\n".join(content.lines(None if out.width == _PIPE_WIDTH else out.width)) + "\n")


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
    return [_row(checkpoint, copy) for checkpoint in report.checkpoints for copy in checkpoint.copies]


def _row(checkpoint: Checkpoint, copy: Copy) -> list[str]:
    marks = ("→" if checkpoint.resumes else "") + ("*" if checkpoint.pinned else "")
    verdict = "; ".join(copy.reasons) if copy.keep else f"to be pruned: {'; '.join(copy.reasons)}"
    bound_mark = "≥ " if copy.read < len(copy.ranks) - len(copy.defects) else ""  # not every rank's manifest was read
    return [
        checkpoint.run,
        f"{step_text(checkpoint.step, checkpoint.created)}{marks}",
        checkpoint.attempt,
        (checkpoint.created or "")[:19].replace("T", " "),
        format_metrics(checkpoint.metrics),
        copy.place,
        copy.state,
        f"{len(copy.ranks)}/{checkpoint.world_size}",
        bound_mark + format_size(copy.size),
        bound_mark + format_size(copy.stored_size) if copy.stored_size else "",
        verdict,
    ]
