"""Output for people: tables, lines, progress.

Invariant: answers are written to stdout, everything else to stderr; progress only to a terminal. All text passes
through `printable`, and none of it is markup, because anybody may choose names in a bucket.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from tierd.core.printable import printable, printable_json
from tierd.core.report import Checkpoint, Copy, Report
from tierd.logs import last_word

_MANY = 500  # lines
_WIDE = 200  # columns without a terminal, because a pipe must not lose text


class _Plain(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*[printable(one) if isinstance(one, str) else one for one in objects], **options)


def console() -> Console:
    """Return standard output, at the terminal's width or wide enough for a pipe."""
    return _Plain(width=None if sys.stdout.isatty() else _WIDE, highlight=False, markup=False, emoji=False)


def complain(text: object) -> None:
    """Print a line to stderr: an error, or a note on the answer."""
    print(last_word(str(text)), file=sys.stderr)


def print_lines(text: object, *, error: bool = False) -> None:
    """Print text of several lines unchanged."""
    lines = map(printable, str(text).split("\n"))
    print("\n".join(lines), file=sys.stderr if error else sys.stdout, flush=True)


def print_json(answer: Any) -> None:
    """Print an answer as one JSON object."""
    sys.stdout.write(printable_json(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()) + "\n")


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
    found = [one for one in policies if one["disagrees"]]
    for one in found:
        rules = {name: value for name, value in (one["retention"] or {}).items() if value is not None}
        says = f"keeps {rules}" if one["retention"] else f"cannot be read, so nothing is deleted: {one['why']}"
        yield f"{one['tier']}: run {one['run']}: {one['key']} ({one['given']} on {one['host'] or '?'}) {says}"
    if found:
        yield "Whatever any of these keeps is kept. Make them agree, or delete the object of a node that is gone."


def table(title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a table without borders."""
    made = Table(
        *columns, title=title and printable(title), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for row in rows:
        made.add_row(*map(printable, row))
    return made


_COLUMNS = ("RUN", "STEP", "ATTEMPT", "WHERE", "STATE", "RANKS", "BYTES", "STORED", "CREATED", "KEPT BECAUSE")


def checkpoints(report: Report) -> Table:
    """Return one line for each copy of each checkpoint."""
    return table(None, _COLUMNS, _rows(report))


def print_checkpoints(report: Report) -> None:
    """Print the lines of `checkpoints`."""
    print_rows(_COLUMNS, _rows(report))


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Many lines are not laid out for the terminal, because that takes longer than to observe what they
    show."""
    if len(rows) <= _MANY:
        console().print(table(None, columns, rows))
        return
    cells = [columns, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    sys.stdout.write("\n".join(lines) + "\n")


def _rows(report: Report) -> list[list[str]]:
    return [_row(checkpoint, copy) for checkpoint in report.checkpoints for copy in checkpoint.copies]


def _row(checkpoint: Checkpoint, copy: Copy) -> list[str]:
    marks = ("→" if checkpoint.resumes else "") + ("*" if checkpoint.pinned else "")
    verdict = "; ".join(copy.reasons) if copy.keep else f"to be pruned: {'; '.join(copy.reasons)}"
    more = "≥ " if copy.read < len(copy.ranks) - len(copy.defects) else ""  # not every rank's manifest was read
    return [
        checkpoint.run,
        f"{checkpoint.step}{marks}",
        checkpoint.attempt,
        copy.place,
        copy.state,
        f"{len(copy.ranks)}/{checkpoint.world_size}",
        more + size(copy.size),
        more + size(copy.stored_size) if copy.stored_size else "",
        (checkpoint.created or "")[:19].replace("T", " "),
        verdict,
    ]


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Return a progress bar on stderr for long work; it shows nothing if stderr is not a terminal."""
    with Progress(
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as bar:
        yield bar
